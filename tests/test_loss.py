"""ISDALoss: Algorithm 1 against naive loops; state, ramp, precision, errors and bad batches."""

import copy
import io
import itertools
import re

import pytest
import reference
import torch
from reference import Inputs, draw
from torch import Tensor, nn
from torch.nn import functional as F

from isda import FullCovariance, ISDALoss, functional

STRUCTURES = ["full", "diagonal", "shared", "identity"]
structures = pytest.mark.parametrize("structure", STRUCTURES)
TOLERANCE = 1e-5  # statistics and quadratic are float32: 2⁻²⁴ for each of some hundred terms

N, C, A = 7, 13, 5


def batch(device: torch.device, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    x = draw(N, C, A, seed=seed, dtype=dtype, device=device)
    return Inputs(0.3 * x.features, 0.3 * x.weight, *x[2:])


def make(device: torch.device, **options) -> ISDALoss:
    return ISDALoss(A, C, **{"lambda_0": 0.5, "total_steps": 10, **options}).to(device)


def call(criterion: ISDALoss, x: Inputs, target: Tensor | None = None, **options) -> Tensor:
    target = x.target if target is None else target
    return criterion(x.features, x.weight, target, bias=x.bias, **options)


def matrices(structure: str, stream: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Σ_c of all batches so far, class indices only."""
    features, target = (torch.cat(part) for part in zip(*stream, strict=True))
    if structure == "shared":
        return [reference.pooled_moments(features, target)[2]] * C
    if structure == "identity":
        return reference.identity_matrices(features.new_empty(C, A))
    covariance = reference.class_moments(features, target, C)[2]
    if structure == "diagonal":
        return reference.variance_matrices(covariance.diagonal(dim1=1, dim2=2))
    return list(covariance)


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


def assert_bits(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(module.named_buffers())
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def close(found: Tensor, expected: Tensor, *, tolerance: float = TOLERANCE) -> None:
    found, expected = (tensor.detach().double().cpu() for tensor in (found, expected))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """The same buffers, bit for bit on a CPU; a GPU adds in any order."""
    if next(found.buffers()).device.type == "cpu":
        assert_bits(found, bits(expected))
    for left, right in zip(found.buffers(), expected.buffers(), strict=True):
        close(left, right)


# Algorithm 1


@structures
def test_training_steps_against_the_reference(structure, device, dtype):
    """Update with the current batch, then the loss, with λ = λ₀ t / T; gradients, too."""
    criterion = make(device, covariance=structure, lambda_0=2.0, total_steps=4)
    stream = []
    for step in range(6):  # beyond total_steps, too
        x = batch(device, seed=step, dtype=dtype)
        stream.append((x.features, x.target))
        leaves = [t.clone().requires_grad_() for t in (x.features, x.weight, x.bias)]
        logits = F.linear(*leaves)
        loss = criterion(leaves[0], leaves[1], x.target, bias=leaves[2], logits=logits)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        doubles = [t.detach().double().cpu().requires_grad_() for t in leaves]
        losses = reference.isda_losses(
            *doubles[:2],
            x.target,
            matrices(structure, stream),
            strength=2.0 * min(step / 4, 1),
            bias=doubles[2],
        )
        expected = reference.mean_loss(losses)
        tolerance = max(TOLERANCE, 8 * torch.finfo(dtype).eps)  # logits and gradients in dtype
        close(loss, expected, tolerance=tolerance)
        loss.backward()
        gradients = torch.autograd.grad(expected, doubles)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            close(leaf.grad, gradient, tolerance=tolerance)
    assert criterion.step == 6


@structures
def test_logits_are_computed_if_not_given(structure, device):
    x = batch(device)
    given, computed = make(device, covariance=structure), make(device, covariance=structure)
    logits = F.linear(x.features, x.weight, x.bias)
    close(call(given, x, logits=logits, progress=0.7), call(computed, x, progress=0.7))


@structures
@pytest.mark.parametrize("kind", ["soft", "ignore"])
def test_other_targets(structure, kind, device):
    x = batch(device)
    criterion = make(device, covariance=structure, ramp="constant", ignore_index=255)
    if kind == "soft":
        target = torch.randn(N, C).softmax(1).to(device)
        index = target.argmax(1)  # the statistics take the most probable class
    else:
        target = x.target.clone()
        target[[0, 4]] = 255
        index = torch.where(target == 255, -1, target)
    loss = call(criterion, x, target)
    stream = [(x.features, index)]
    losses = reference.isda_losses(
        x.features,
        x.weight,
        target,
        matrices(structure, stream),
        strength=0.5,
        bias=x.bias,
        ignore_index=255,
    )
    close(loss, reference.mean_loss(losses))
    if structure == "full":
        assert criterion.estimator.count.tolist() == [int((index == c).sum()) for c in range(C)]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@structures
def test_dense(structure, reduction, soft, device):
    """(N, A, H, W): every position is a sample."""
    x = draw(2 * 3 * 2, C, A, dtype=torch.float32, device=device)
    dense = x.features.view(2, 3, 2, A).permute(0, 3, 1, 2)
    options = {"covariance": structure, "ramp": "constant", "reduction": reduction}
    rows, image = make(device, **options), make(device, **options)
    target = torch.randn(12, C).softmax(1).to(device) if soft else x.target
    dense_target = target.view(2, 3, 2, C).permute(0, 3, 1, 2) if soft else target.view(2, 3, 2)
    expected = call(rows, x, target)
    found = image(dense, x.weight, dense_target, bias=x.bias)
    assert found.shape == ((2, 3, 2) if reduction == "none" else ())
    torch.testing.assert_close(found.flatten(), expected.flatten())
    for left, right in zip(rows.buffers(), image.buffers(), strict=True):
        torch.testing.assert_close(left, right)


def test_reductions(device):
    x = batch(device)
    target = x.target.clone()
    target[0] = -100
    mean, total, each = (
        call(make(device, ramp="constant", reduction=reduction), x, target)
        for reduction in ("mean", "sum", "none")
    )
    assert each.shape == (N,)
    assert each[0] == 0
    torch.testing.assert_close(total, each.sum())
    torch.testing.assert_close(mean, each.sum() / (N - 1))


def test_scaled_loss_scales_the_gradient(device):
    x = batch(device)
    gradients = []
    for scale in (1, 2):
        weight = x.weight.clone().requires_grad_()
        criterion = make(device, ramp="constant")
        (scale * criterion(x.features, weight, x.target, bias=x.bias)).backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], 2 * gradients[0], rtol=1e-6, atol=1e-7)


@structures
@pytest.mark.parametrize("samples", [0, 1])
def test_small_batches(structure, samples, device):
    criterion = make(device, covariance=structure, ramp="constant")
    call(criterion, batch(device))
    before = bits(criterion)
    x = draw(samples, C, A, dtype=torch.float32, device=device)
    weight = x.weight.requires_grad_()
    loss = criterion(x.features, weight, x.target, bias=x.bias)
    loss.backward()
    assert weight.grad.isfinite().all()
    assert criterion.step == 2
    if samples == 0:
        assert loss == 0
        assert not weight.grad.any()
        del before["step"]
        for name, tensor in before.items():
            assert torch.equal(dict(criterion.named_buffers())[name], tensor)
    else:
        assert loss > 0


@pytest.mark.parametrize("class_weight", [None, torch.ones(C)])
def test_batch_of_ignored_samples_alone(class_weight, device):
    criterion = make(device, ramp="constant", weight=class_weight)
    x = batch(device)
    weight = x.weight.requires_grad_()
    loss = criterion(x.features, weight, torch.full_like(x.target, -100), bias=x.bias)
    loss.backward()
    assert loss == 0
    assert not weight.grad.any()
    assert not criterion.estimator.count.any()
    assert not criterion.evaluate(F.linear(x.features, x.weight), torch.full_like(x.target, -100))


# Ramp


def test_ramp_per_step(device):
    """The strength of a step is λ₀ t/T, 0 at first and λ₀ from T on."""
    criterion = make(device, covariance="identity", lambda_0=3.0, total_steps=4)
    x = batch(device)
    for step in range(7):
        losses = reference.isda_losses(
            x.features,
            x.weight,
            x.target,
            reference.identity_matrices(x.weight),
            strength=3.0 * [0, 0.25, 0.5, 0.75, 1, 1, 1][step],
            bias=x.bias,
        )
        close(call(criterion, x), reference.mean_loss(losses))


@pytest.mark.parametrize("progress", [0, 0.3, 1.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_progress_in_place_of_the_count(progress, as_tensor, device):
    criterion = make(device, covariance="identity", lambda_0=3.0, total_steps=None)
    x = batch(device)
    value = torch.tensor(progress, dtype=torch.float32, device=device) if as_tensor else progress
    losses = reference.isda_losses(
        x.features,
        x.weight,
        x.target,
        reference.identity_matrices(x.weight),
        strength=3.0 * progress,
        bias=x.bias,
    )
    close(call(criterion, x, progress=value), reference.mean_loss(losses))


def test_progress_may_have_a_gradient(device):
    """As for one who learns the strength."""
    criterion = make(device, covariance="identity", lambda_0=3.0, total_steps=None)
    x, step = batch(device), 0.01
    progress = torch.tensor(0.4, dtype=x.features.dtype, device=device, requires_grad=True)
    call(criterion, x, progress=progress).backward()
    above, below = (call(criterion, x, progress=0.4 + h) for h in (step, -step))
    expected = (above - below) / (2 * step)
    torch.testing.assert_close(progress.grad, expected, rtol=1e-2, atol=0, check_dtype=False)


def test_constant_ramp_needs_no_total_steps(device):
    x = batch(device)
    constant = make(device, total_steps=None, ramp="constant")
    full = make(device)
    close(call(constant, x), call(full, x, progress=1.0))
    close(call(constant, x, progress=0.0), call(full, x, progress=1.0))


# Evaluation


@structures
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_eval_is_cross_entropy_and_changes_nothing(structure, reduction, device):
    criterion = make(device, covariance=structure, reduction=reduction, ignore_index=255)
    call(criterion, batch(device, seed=1))
    criterion.eval()
    before = bits(criterion)
    x = batch(device)
    logits = F.linear(x.features, x.weight, x.bias)
    target = x.target.clone()
    target[2] = 255
    expected = F.cross_entropy(logits, target, ignore_index=255, reduction=reduction)
    torch.testing.assert_close(call(criterion, x, target), expected)
    soft = torch.randn(N, C).softmax(1).to(device)
    expected = F.cross_entropy(logits, soft, reduction=reduction)
    torch.testing.assert_close(call(criterion, x, soft), expected)
    assert_bits(criterion, before)


def test_eval_needs_no_total_steps(device):
    x = batch(device)
    loss = call(make(device, total_steps=None).eval(), x)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(*x[:3]), x.target))


# State


@structures
def test_checkpoint_in_the_middle(structure, device):
    """Saved, loaded with weights_only and gone on with: the same bits as without the break."""
    options = {"covariance": structure, "decay": 0.9}
    whole, first, second = (make(device, **options) for _ in range(3))
    losses = [call(whole, batch(device, seed=seed)) for seed in range(4)]
    for seed in (0, 1):
        call(first, batch(device, seed=seed))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_bits(second, bits(first))
    resumed = [call(second, batch(device, seed=seed)) for seed in (2, 3)]
    assert_same(second, whole)
    if device.type == "cpu":
        assert torch.equal(torch.stack(resumed), torch.stack(losses[2:]))
    close(torch.stack(resumed), torch.stack(losses[2:]))


def test_state_is_buffers(device):
    criterion = make(device, weight=torch.ones(C))
    assert not list(criterion.parameters())
    state = criterion.state_dict()
    assert set(state) == {"step", "estimator.count", "estimator.mean", "estimator.covariance"}
    kinds = {name: tensor.dtype for name, tensor in state.items()}
    assert kinds["step"] == kinds["estimator.count"] == torch.int64
    assert kinds["estimator.mean"] == torch.float64
    assert kinds["estimator.covariance"] == torch.float32


@structures
def test_conversions_lose_no_bits(structure, device):
    criterion = make(device, covariance=structure)
    call(criterion, batch(device))
    before = bits(criterion)
    del before["overflow"]  # a number for a message
    for convert in (
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: nn.Sequential(m).half()[0],
        copy.deepcopy,
    ):
        criterion = convert(criterion)
        assert_bits(criterion, before)


@pytest.mark.parametrize("structure", ["full", "diagonal", "shared"])
def test_checkpoint_of_another_shape(structure, device):
    criterion = make(device, covariance=structure)
    call(criterion, batch(device))
    before = bits(criterion)
    other = ISDALoss(A + 1, C, covariance=structure, total_steps=10).state_dict()
    with pytest.raises(ValueError, match=r"estimator\.mean must have shape .* got "):
        criterion.load_state_dict(other)
    assert_bits(criterion, before)
    with pytest.raises(ValueError, match=r"estimator\.mean must have shape .* got "):
        nn.Sequential(nn.ReLU(), criterion).load_state_dict({f"1.{k}": other[k] for k in other})
    assert_bits(criterion, before)


@pytest.mark.parametrize(("structure", "other"), list(itertools.permutations(STRUCTURES, 2)))
def test_checkpoint_of_another_structure(structure, other, device):
    criterion, source = make(device, covariance=structure), make(device, covariance=other)
    for each in (criterion, source):
        call(each, batch(device))
    call(source, batch(device))  # another step
    before = bits(criterion)
    with pytest.raises(ValueError, match=r"must h(old|ave shape)"):
        criterion.load_state_dict(source.state_dict())
    assert_bits(criterion, before)
    # a checkpoint of something else can still be loaded into a model that holds the criterion
    nn.Sequential(nn.Linear(2, 2), criterion).load_state_dict(
        {"0.weight": torch.zeros(2, 2)}, strict=False
    )
    assert_bits(criterion, before)


# Estimators of one's own


class Isotropic:
    """Neither a module nor a Covariance: two methods are enough."""

    def __init__(self) -> None:
        self.batches = []

    def update(self, features: Tensor, target: Tensor) -> None:
        self.batches.append((features, target))

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        return 2 * (weight - weight[target][:, None]).square().sum(-1)


def test_estimator_of_ones_own(device):
    x = batch(device)
    estimator = Isotropic()
    criterion = make(device, covariance=estimator, ramp="constant")
    target = x.target.clone()
    target[0] = -100
    losses = reference.isda_losses(
        x.features,
        x.weight,
        target,
        [2 * matrix for matrix in reference.identity_matrices(x.weight)],
        strength=0.5,
        bias=x.bias,
    )
    close(call(criterion, x, target), reference.mean_loss(losses))
    features, index = estimator.batches[0]
    assert torch.equal(features[1:], x.features[1:])
    assert not features[0].any()  # it is skipped
    assert index.tolist() == [-1, *x.target[1:].tolist()]
    assert set(criterion.state_dict()) == {"step"}
    criterion.load_state_dict(criterion.state_dict())


@pytest.mark.parametrize("method", ["__call__", "update"])
def test_a_bad_batch_does_not_reach_an_estimator_of_ones_own(method: str, device) -> None:
    """It may multiply the features of skipped samples by 0, which leaves NaN."""
    x = batch(device)
    estimator = Isotropic()
    criterion = make(device, covariance=estimator, ramp="constant")
    features = x.features.clone()
    features[2, 1] = torch.nan
    weight = (x.weight,) if method == "__call__" else ()

    def step() -> None:
        getattr(criterion, method)(features, *weight, x.target)
        if device.type != "cpu":
            criterion.check()

    with pytest.raises(ValueError, match="features must be finite"):
        step()
    ((seen, index),) = estimator.batches
    assert not seen.any()
    assert (index == -1).all()


def test_estimator_object_is_used_as_it_is(device):
    estimator = FullCovariance(A, C, decay=0.5)
    criterion = make(device, covariance=estimator)
    assert criterion.estimator is estimator
    call(criterion, batch(device))
    assert estimator.count.sum() == N


# Precision


class Product:
    """An estimator that autocast would change."""

    def update(self, features: Tensor, target: Tensor) -> None: ...

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        return (weight @ weight.T).diagonal().expand(len(target), -1)


@structures
def test_autocast(structure, device):
    """Statistics and loss are float32 inside autocast, of bfloat16 features and logits."""
    x = batch(device)
    features = x.features.bfloat16()
    inside, outside = (make(device, covariance=structure, ramp="constant") for _ in range(2))
    weight = x.weight.requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = F.linear(features, weight, x.bias)
        assert logits.dtype == torch.bfloat16
        loss = inside(features, weight, x.target, bias=x.bias, logits=logits)
    expected = outside(features.float(), weight, x.target, logits=logits.float())
    assert loss.dtype == torch.float32
    close(loss, expected, tolerance=1e-6)
    assert_same(inside, outside)
    assert not {b.dtype for b in inside.buffers()} & {torch.float16, torch.bfloat16}
    loss.backward()
    assert weight.grad.dtype == torch.float32
    own = make(device, covariance=Product(), ramp="constant")
    quadratic = Product().quadratic(weight, x.target)
    expected = functional.isda_cross_entropy(logits, x.target, quadratic, strength=0.5)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = own(features, weight, x.target, logits=logits)
        close(found, expected, tolerance=1e-6)
        assert inside.eval()(features, weight, x.target, logits=logits).dtype == torch.float32


# Errors: argument, value, expectation; nothing changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 0}, "num_features must be >= 1, got 0"),
        ({"num_classes": 1}, "num_classes must be >= 2, got 1"),
        ({"lambda_0": -1.0}, "lambda_0 must be >= 0 and finite, got -1.0"),
        ({"lambda_0": float("nan")}, "lambda_0 must be >= 0 and finite, got nan"),
        ({"lambda_0": float("inf")}, "lambda_0 must be >= 0 and finite, got inf"),
        ({"total_steps": 0}, "total_steps must be a whole number >= 1, got 0"),
        ({"lambda_0": "0.5"}, "lambda_0 must be >= 0 and finite, got '0.5'"),
        ({"total_steps": "9"}, "total_steps must be a whole number >= 1, got '9'"),
        ({"max_shift": "9"}, "max_shift must be > 0 or None, got '9'"),
        ({"total_steps": 2.5}, "total_steps must be a whole number >= 1, got 2.5"),
        ({"total_steps": float("nan")}, "total_steps must be a whole number >= 1, got nan"),
        ({"total_steps": float("inf")}, "total_steps must be a whole number >= 1, got inf"),
        ({"covariance": FullCovariance}, "or an estimator with update and quadratic, got <class"),
        ({"covariance": None}, "or an estimator with update and quadratic, got None"),
        ({"ramp": "cosine"}, "ramp must be 'linear' or 'constant', got 'cosine'"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'none', got 'max'"),
        ({"decay": 0.0}, "decay must be in (0, 1], got 0.0"),
        (
            {"covariance": "low_rank"},
            "covariance must be one of full, diagonal, shared, identity, or an estimator with "
            "update and quadratic, got 'low_rank'",
        ),
        (
            {"covariance": FullCovariance(A, C), "decay": 0.9},
            "decay=0.9 must be set on the estimator that is passed",
        ),
        (
            {"covariance": FullCovariance(A, C + 1)},
            f"covariance must be for num_features={A} and num_classes={C}, "
            f"got FullCovariance({A}, {C + 1}",
        ),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ISDALoss(**{"num_features": A, "num_classes": C, **options})


def bad_arguments(x: Inputs) -> list[tuple[dict, str]]:
    return [
        ({"features": x.features[:, 1:]}, f"features must have shape (N, {A}), got ({N}, {A - 1})"),
        ({"features": x.features[0]}, f"features must have shape (N, {A}), got ({A},)"),
        ({"features": x.features.long()}, "features must be floating point, got torch.int64"),
        ({"weight": x.weight.T}, f"weight must have shape ({C}, {A}), got ({A}, {C})"),
        ({"bias": x.bias[1:]}, f"bias must have shape ({C},), got ({C - 1},)"),
        (
            {"logits": x.weight},
            f"logits for features of shape ({N}, {A}) must have shape ({N}, {C}), got ({C}, {A})",
        ),
        ({"target": x.target[1:]}, f"class indices must have shape ({N},), got ({N - 1},)"),
        ({"target": x.target[:, None]}, f"class indices must have shape ({N},), got ({N}, 1)"),
        ({"target": x.target.int()}, "target must be int64 class indices or"),
        ({"target": x.features}, f"probabilities must have shape ({N}, {C}), got ({N}, {A})"),
        ({"progress": 1.5}, "progress must be in [0, 1], got 1.5"),
        ({"progress": float("nan")}, "progress must be in [0, 1], got nan"),
        ({"progress": torch.tensor(1.5)}, "progress must be in [0, 1], got 1.5"),
        ({"progress": torch.rand(N)}, f"progress must be one number, got shape ({N},)"),
        ({"progress": "half"}, "progress must be a number or a tensor, got 'half'"),
    ]


@pytest.mark.parametrize("case", range(15))
def test_call_errors_change_nothing(case, device):
    criterion = make(device)
    call(criterion, batch(device, seed=1))
    before = bits(criterion)
    x = batch(device)
    arguments, message = bad_arguments(x)[case]
    good = {"features": x.features, "weight": x.weight, "target": x.target, "bias": x.bias}
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion(**{**good, **arguments})
    assert_bits(criterion, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, [1.0]) for name in ("features", "weight", "target", "bias", "logits")),
        *((name, None) for name in ("features", "weight", "target")),
    ],
)
def test_arguments_that_are_not_tensors(name, value, device):
    x = batch(device)
    good = {"features": x.features, "weight": x.weight, "target": x.target}
    message = f"{name} must be a tensor, got {type(value).__name__}"
    with pytest.raises(TypeError, match=message):
        make(device)(**{**good, name: value})


def test_missing_total_steps_changes_nothing(device):
    criterion = make(device, total_steps=None)
    before = bits(criterion)
    with pytest.raises(ValueError, match="total_steps must be given to the criterion, or progress"):
        call(criterion, batch(device))
    assert_bits(criterion, before)


# Bad batches


def spoil(x: Inputs, fault: str) -> tuple[Inputs, str]:
    """The batch with a fault, and the error that tells of it."""
    features, target = x.features.clone(), x.target.clone()
    if fault in ("nan", "inf", "-1e16"):  # the square of the last does not fit, summed up
        features[3, 2] = float(fault)
        return x._replace(features=features), "features must be finite: found NaN, or values of 1e"
    if fault == "soft":
        soft = F.one_hot(target, C).float()
        soft[1, 2] = torch.nan
        return x._replace(target=soft), "target must be in"
    target[4] = {"above": C, "below": -1}[fault]
    return x._replace(target=target), f"target must be in [0, {C}) or ignore_index=-100: found a"


faults = pytest.mark.parametrize("fault", ["nan", "inf", "-1e16", "above", "below", "soft"])


@faults
@structures
def test_bad_batch_on_a_cpu_raises_at_once(fault, structure):
    device = torch.device("cpu")
    criterion = make(device, covariance=structure)
    call(criterion, batch(device, seed=1))
    before = bits(criterion)
    bad, message = spoil(batch(device), fault)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(criterion, bad)
    assert_bits(criterion, before)
    call(criterion, batch(device))  # goes on


def test_overflow_on_a_cpu_raises_at_once():
    x = batch(torch.device("cpu"))
    with pytest.raises(FloatingPointError, match=r"no longer finite at λ = 0\.5,"):
        make(torch.device("cpu"), ramp="constant")(x.features, 1e20 * x.weight, x.target)


@faults
@structures
def test_bad_batch_is_masked_where_the_host_does_not_look(fault, structure, device, monkeypatch):
    """On a GPU for real; on a CPU the code is told that it is being compiled."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    class_weight = torch.ones(C) if structure == "shared" else None
    criterion, clean = (
        make(device, covariance=structure, decay=0.9, weight=class_weight) for _ in range(2)
    )
    for each in (criterion, clean):
        call(each, batch(device, seed=1))
    before = bits(criterion)
    bad, message = spoil(batch(device), fault)
    weight = bad.weight.clone().requires_grad_()
    loss = criterion(bad.features, weight, bad.target, bias=bad.bias)
    assert loss.isnan()
    assert criterion.problem > 0
    before["problem"] = criterion.problem.clone()
    assert_bits(criterion, before)
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion.state_dict()
    assert set(criterion.state_dict()) == set(clean.state_dict())  # told once, then goes on
    criterion.check()
    close(*(call(each, batch(device, seed=2)) for each in (criterion, clean)))
    assert_same(criterion, clean)


@structures
def test_large_features_do_not_spoil_the_statistics(structure, device):
    """The largest that are taken, in every sample."""
    criterion = make(device, covariance=structure, ramp="constant")
    x = batch(device)
    huge = torch.full_like(x.features, 0.99e15)
    huge[::2] *= -1
    assert call(criterion, x._replace(features=huge)).isfinite()
    assert all(buffer.isfinite().all() for buffer in criterion.buffers())


@structures
@pytest.mark.parametrize("soft", [False, True])
def test_two_losses_and_one_backward(structure, soft, device):
    """Two views, or two parts of a batch: the gradient is the sum of both."""
    batches = [batch(device, seed=seed) for seed in range(2)]
    weight = batches[0].weight.clone().requires_grad_()
    gradients = []
    for together in (True, False):
        criterion = make(device, covariance=structure, ramp="constant")
        total, weight.grad = 0.0, None
        for x in batches:
            target = F.one_hot(x.target, C).float() if soft else x.target
            loss = criterion(x.features, weight, target)
            total = total + loss
            if not together:
                loss.backward()
        if together:
            total.backward()
        gradients.append(weight.grad.clone())
    close(*gradients)


def test_problem_stays_until_someone_looks(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    criterion = make(device)
    call(criterion, spoil(batch(device), "nan")[0])
    call(criterion, batch(device))  # a good batch does not hide it
    with pytest.raises(ValueError, match="features must be finite"):
        criterion.check()
    criterion.check()


def test_values_of_ignored_samples_do_not_matter_to_statistics(device):
    """The statistics leave ignored samples out, whatever their features are."""
    x = batch(device)
    target = x.target.clone()
    target[0] = -100
    one, other = make(device), make(device)
    call(one, x, target)
    x.features[0] += 100
    call(other, x, target)
    assert_same(one, other)


@pytest.mark.gpu
@structures
@pytest.mark.parametrize("soft", [False, True])
def test_no_step_waits_for_the_host(structure, soft):
    device = torch.device("cuda")
    criterion = make(device, covariance=structure, decay=0.9)
    x = batch(device)
    target = torch.randn(N, C).softmax(1).to(device) if soft else x.target
    weight = x.weight.requires_grad_()
    bad = spoil(batch(device), "nan")[0]
    criterion(x.features, weight, target, bias=x.bias).backward()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        criterion(x.features, weight, target, bias=x.bias).backward()
        call(criterion, bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match="features must be finite"):
        criterion.check()


@pytest.mark.parametrize("method", ["update", "quadratic"])
def test_subclass_of_an_estimator_with_a_method_of_its_own(method: str) -> None:
    """The two methods are what an estimator is: doing both at once must not pass them by."""
    called = []

    def own(self, *arguments):
        called.append(method)
        return getattr(FullCovariance, method)(self, *arguments)

    kind = type("Own", (FullCovariance,), {method: own})
    x = reference.draw(7, 13, 5, dtype=torch.float32)
    criterion = ISDALoss(5, 13, total_steps=9, covariance=kind(5, 13))
    expected = ISDALoss(5, 13, total_steps=9)
    for _ in range(2):
        losses = [each(x.features, x.weight, x.target) for each in (criterion, expected)]
        torch.testing.assert_close(*losses)
    assert called == [method] * 2


def test_everything_on_one_device() -> None:
    x = reference.draw(7, 13, 5, dtype=torch.float32)
    criterion = ISDALoss(5, 13, total_steps=9)
    message = "target must be on the device of the features, cpu, got meta"
    with pytest.raises(ValueError, match=message):
        criterion(x.features, x.weight, x.target.to("meta"))
    with pytest.raises(ValueError, match="criterion must be on the device of the features, cpu"):
        criterion.to("meta")(x.features, x.weight, x.target)


# λ = 0, and states that would make it negative


@structures
@pytest.mark.parametrize("options", [{"lambda_0": 0.0}, {"progress": 0.0}])
def test_no_strength_is_cross_entropy_although_the_quadratic_term_overflows(
    structure, options, device
):
    x = batch(device)
    weight = (1e20 * x.weight).requires_grad_()
    criterion = make(device, covariance=structure, lambda_0=options.get("lambda_0", 0.5))
    loss = criterion(x.features, weight, x.target, progress=options.get("progress"))
    expected = F.cross_entropy(x.features @ weight.T, x.target)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(one, weight)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("step", [-1, -9, 3.5])
def test_a_step_that_cannot_be_is_not_loaded(step):
    criterion = ISDALoss(A, C, lambda_0=1.0, total_steps=10)
    state = criterion.state_dict() | {"step": torch.tensor(step)}
    with pytest.raises(ValueError, match=r"step must be a whole number >= 0, got "):
        criterion.load_state_dict(state)
    assert criterion.step == 0
