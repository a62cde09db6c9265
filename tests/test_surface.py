"""Options of ISDALoss beyond the paper, against naive loops."""

import inspect
import sys
from pathlib import Path

import pytest
import reference
import torch
from reference import draw
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda import FullCovariance, ISDALoss, functional

STRUCTURES = ["full", "diagonal", "shared", "identity"]
structures = pytest.mark.parametrize("structure", STRUCTURES)
N, C, A = 7, 5, 4
STRENGTH = 0.7


def make(device: torch.device, **options) -> ISDALoss:
    return ISDALoss(A, C, **{"lambda_0": STRENGTH, "ramp": "constant", **options}).to(device)


def inputs(device: torch.device, *, seed: int = 0) -> reference.Inputs:
    x = draw(N, C, A, seed=seed, dtype=torch.float32, device=device)
    return reference.Inputs(0.5 * x.features, 0.5 * x.weight, *x[2:])


def close(found: Tensor, expected: Tensor) -> None:
    # float32 statistics and products: some dozen roundings of 2⁻²⁴, exponents up to about 10
    torch.testing.assert_close(found.detach().double().cpu(), expected, rtol=2e-5, atol=2e-5)


def naive_bounds(criterion: ISDALoss, x: reference.Inputs, chosen: Tensor | None = None) -> Tensor:
    """log Σ_j exp(z_j + (λ/2) (w_j − w_r)ᵀ Σ_c (w_j − w_r)) − z_k for each sample and label k.

    The reference class r is the target, and c is the target or the chosen class.
    """
    features, weight, bias = (t.double().cpu() for t in (x.features, x.weight, x.bias))
    target = x.target.cpu()
    index = target if chosen is None else chosen.cpu()
    rows = []
    for i in range(len(target)):
        covariance = criterion.estimator.class_covariance(int(index[i])).double().cpu()
        shifted, logits = [], []
        for j in range(C):
            z = weight[j] @ features[i] + bias[j]
            margin = weight[j] - weight[target[i]]
            logits.append(z)
            shifted.append(z + STRENGTH / 2 * (margin @ covariance @ margin))
        rows.append(torch.stack(shifted).logsumexp(0) - torch.stack(logits))
    return torch.stack(rows)  # (N, C)


@structures
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weight_and_label_smoothing(structure, weighted, smoothing, reduction, device):
    x = inputs(device)
    weight = torch.linspace(0.5, 2, C, device=device) if weighted else None
    criterion = make(
        device, covariance=structure, weight=weight, label_smoothing=smoothing, reduction=reduction
    )
    target = x.target.clone()
    target[3] = -100
    loss = criterion(x.features, x.weight, target, bias=x.bias)
    scale = torch.ones(C).double() if weight is None else weight.double().cpu()
    bounds = naive_bounds(criterion, x)
    losses, total = [], 0.0
    for i, y in enumerate(target.tolist()):
        if y < 0:
            losses.append(torch.zeros(()).double())
            continue
        value = (1 - smoothing) * scale[y] * bounds[i, y]
        value = value + smoothing / C * sum(scale[k] * bounds[i, k] for k in range(C))
        losses.append(value)
        total += scale[y]
    each = torch.stack(losses)
    close(loss, {"none": each, "sum": each.sum(), "mean": each.sum() / total}[reduction])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("train", [False, True])
def test_without_strength_it_is_torch_cross_entropy(train, reduction, soft, device):
    x = inputs(device)
    target = torch.randn(N, C, device=device).softmax(1) if soft else x.target.clone()
    if not soft:
        target[2] = -100
    weight = torch.rand(C, device=device)
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": reduction}
    criterion = make(device, lambda_0=0.0, **options).train(train)
    found = criterion(x.features, x.weight, target, bias=x.bias)
    expected = nn.CrossEntropyLoss(**options)(F.linear(x.features, x.weight, x.bias), target)
    torch.testing.assert_close(found, expected)


def test_gradient_of_a_weighted_smoothed_loss(device):
    x = inputs(device)
    criterion = make(device, weight=torch.linspace(0.5, 2, C).to(device), label_smoothing=0.2)
    leaves = [t.clone().requires_grad_() for t in (x.features, x.weight)]
    criterion(leaves[0], leaves[1], x.target, bias=x.bias).backward()
    covariance = criterion.estimator.covariance.double().cpu()
    doubles = [t.detach().double().cpu().requires_grad_() for t in leaves]
    functional.isda_loss(
        doubles[0],
        doubles[1],
        x.target.cpu(),
        lambda weight, target: functional.full_quadratic(weight, target, covariance),
        strength=STRENGTH,
        bias=x.bias.double().cpu(),
        class_weight=criterion.weight.double().cpu(),
        label_smoothing=0.2,
    ).backward()
    for leaf, expected in zip(leaves, doubles, strict=True):
        close(leaf.grad, expected.grad)


@structures
def test_covariance_index(structure, device):
    """The covariance of another class, the margins of the target."""
    x = inputs(device)
    criterion = make(device, covariance=structure, reduction="none")
    chosen = torch.tensor([4, 3, 0, 0, 3, 4, 3], device=device)
    found = criterion(x.features, x.weight, x.target, bias=x.bias, covariance_index=chosen)
    bounds = naive_bounds(criterion, x, chosen)
    close(found, bounds[torch.arange(N), x.target.cpu()])


@structures
def test_gradient_with_a_covariance_index(structure, device):
    x = inputs(device)
    criterion = make(device, covariance=structure)
    chosen = torch.tensor([4, 3, 2, 2, 3, 4, 1], device=device)
    weight = x.weight.clone().requires_grad_()
    criterion(x.features, weight, x.target, bias=x.bias, covariance_index=chosen).backward()
    wide = x.weight.double().cpu().requires_grad_()
    bounds = naive_bounds(criterion, x._replace(weight=wide), chosen)
    bounds[torch.arange(N), x.target.cpu()].mean().backward()
    close(weight.grad, wide.grad)


@structures
def test_two_losses_with_a_covariance_index(structure, device):
    """The second one updates the statistics before the first one's backward pass."""
    x = inputs(device)
    criterion = ISDALoss(1, C, covariance=structure, ramp="constant").to(device)
    weight = x.weight[:, :1].clone().requires_grad_()
    loss = sum(
        criterion(x.features[:, :1], weight, x.target, covariance_index=x.target) for _ in range(2)
    )
    loss.backward()
    assert weight.grad.isfinite().all()


def test_covariance_index_of_ignored_and_dense_samples(device):
    x = inputs(device)
    target, chosen = x.target.clone(), torch.tensor([-5, 3, 2, 2, 3, 4, 1], device=device)
    target[0] = -100
    flat, dense = make(device, reduction="none"), make(device, reduction="none")
    expected = flat(x.features, x.weight, target, covariance_index=chosen)
    features = x.features.T[None]  # (1, A, N): seven positions
    found = dense(features, x.weight, target[None], covariance_index=chosen[None])
    torch.testing.assert_close(found[0], expected)
    assert found[0, 0] == 0


def test_an_estimator_without_covariance_index_changes_nothing(device):
    x = inputs(device)
    criterion = ISDALoss(A, C, ramp="constant", covariance=LearnedVariance()).to(device)
    with pytest.raises(ValueError, match="need an estimator whose quadratic takes"):
        criterion(x.features, x.weight, x.target, covariance_index=x.target)
    assert criterion.step == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("train", [False, True])
def test_class_weights_of_another_dtype(dtype, train, device):
    """Summed in float64: 70,000 weights do not fit into float16."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(70_000, A, generator=generator).to(device)
    target = torch.randint(C, (70_000,), generator=generator).to(device)
    weight, scale = inputs(device).weight, torch.linspace(0.5, 2, C, device=device)
    criterion = make(device, lambda_0=0.0, weight=scale.to(dtype)).train(train)
    expected = F.cross_entropy(features @ weight.T, target, weight=scale)
    # weights rounded to 8 bits
    torch.testing.assert_close(criterion(features, weight, target), expected, rtol=1e-2, atol=0)


@structures
def test_covariance_index_with_class_probabilities(structure, device):
    """Σ_k p_k times the bound of label k, with margins relative to k and one Σ for all k."""
    x = inputs(device)
    criterion = make(device, covariance=structure, reduction="none")
    chosen = torch.tensor([4, 3, 2, 2, 3, 4, 1], device=device)
    target = torch.randn(N, C, device=device).softmax(1)
    found = criterion(x.features, x.weight, target, bias=x.bias, covariance_index=chosen)
    expected = sum(
        target[:, k].double().cpu()
        * naive_bounds(criterion, x._replace(target=torch.full((N,), k)), chosen)[:, k]
        for k in range(C)
    )
    close(found, expected)


def test_covariance_index_out_of_range(device):
    x = inputs(device)
    criterion = make(device)
    for wrong in (C, -1):
        chosen = x.target.clone()
        chosen[3] = wrong
        with pytest.raises(ValueError, match="found a class out of range"):  # noqa: PT012
            criterion(x.features, x.weight, x.target, covariance_index=chosen)
            criterion.check()  # a GPU reports it later
    for index, message in (
        (chosen[1:], r"covariance_index must have shape \(7,\), got \(6,\)"),
        (chosen.int(), "covariance_index must be int64 class indices"),
    ):
        with pytest.raises(ValueError, match=message):
            criterion(x.features, x.weight, x.target, covariance_index=index)


@structures
def test_a_call_without_update_changes_nothing(structure, device):
    criterion = make(device, covariance=structure, ramp="linear", total_steps=10)
    x, other = inputs(device), inputs(device, seed=1)
    loss = criterion(x.features, x.weight, x.target, update=False)  # before the first step
    torch.testing.assert_close(loss, F.cross_entropy(x.features @ x.weight.T, x.target))
    criterion(x.features, x.weight, x.target)
    before = {name: tensor.clone() for name, tensor in criterion.named_buffers()}
    first = criterion(other.features, other.weight, other.target, update=False)
    for name, tensor in criterion.named_buffers():
        assert torch.equal(tensor, before[name]), name
    again = criterion(other.features, other.weight, other.target, update=False)
    torch.testing.assert_close(first, again)
    criterion(other.features, other.weight, other.target)
    assert criterion.step == 2


def test_frozen_statistics_are_used_while_the_ramp_goes_on(device):
    criterion = make(device, ramp="linear", total_steps=2)
    x, other = inputs(device), inputs(device, seed=1)
    criterion(x.features, x.weight, x.target)
    criterion.frozen = True
    covariance = criterion.estimator.covariance.clone()
    losses = [criterion(other.features, other.weight, other.target) for _ in range(2)]
    assert torch.equal(criterion.estimator.covariance, covariance)
    assert criterion.step == 3
    quadratic = functional.full_quadratic(other.weight, other.target, covariance)
    logits = F.linear(other.features, other.weight)
    for loss, progress in zip(losses, (0.5, 1.0), strict=True):
        expected = functional.isda_cross_entropy(
            logits, other.target, quadratic, strength=STRENGTH * progress
        )
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_statistics_fed_on_their_own(device):
    x = inputs(device)
    fed, called = make(device), make(device)
    fed.estimator.update(x.features, x.target)
    called(x.features, x.weight, x.target)
    torch.testing.assert_close(fed.estimator.covariance, called.estimator.covariance)
    assert fed.step == 0


def test_statistics_fed_through_the_criterion(device):
    """Checked, gathered and flattened as in a call; no step is counted."""
    fed, called = make(device, ignore_index=1), make(device, ignore_index=1)
    x = inputs(device)
    fed.update(x.features.T[None], x.target[None])  # (1, A, N): seven positions
    called(x.features, x.weight, x.target)
    torch.testing.assert_close(fed.estimator.covariance, called.estimator.covariance)
    assert fed.step == 0
    assert fed.estimator.count[1] == 0
    with pytest.raises(ValueError, match="target must be in"):  # noqa: PT012
        fed.update(x.features, torch.full_like(x.target, C))
        fed.check()  # a GPU reports it later
    assert fed.estimator.count.sum() == called.estimator.count.sum()


def test_a_second_loss_of_a_step_has_the_same_strength(device):
    criterion = make(device, covariance="identity", ramp="linear", total_steps=4)
    x = inputs(device)
    for _ in range(3):
        first, second = (
            criterion(x.features, x.weight, x.target, update=update) for update in (True, False)
        )
        torch.testing.assert_close(first, second)
    assert criterion.step == 3


def test_the_statistics_of_an_attached_criterion(device):
    model = nn.Linear(A, C).to(device)
    criterion = isda.attach(model, ramp="constant")
    x = inputs(device)
    criterion(model(x.features), x.target)
    assert criterion.estimator is criterion.criterion.estimator
    assert criterion.estimator.count.sum() == N


@structures
def test_grow_keeps_the_statistics(structure, device):
    criterion = make(device, covariance=structure)
    x = inputs(device)
    criterion(x.features, x.weight, x.target)
    before = [criterion.estimator.class_covariance(c) for c in range(C)]
    buffers = {name: tensor.clone() for name, tensor in criterion.estimator.named_buffers()}
    criterion.grow(C + 2)
    for name, tensor in criterion.estimator.named_buffers():
        if structure in ("full", "diagonal"):
            assert torch.equal(tensor[:C], buffers[name]), name
            assert not tensor[C:].any(), name
        else:
            assert torch.equal(tensor, buffers[name]), name
    for index, covariance in enumerate(before):
        assert torch.equal(criterion.estimator.class_covariance(index), covariance)
    wide = draw(N, C + 2, A, dtype=torch.float32, device=device)
    loss = criterion(wide.features, wide.weight, wide.target)
    assert loss.isfinite()
    assert criterion.estimator.num_classes == criterion.num_classes == C + 2
    for number in (6, 7.0):
        message = f"num_classes must be >= 7, the present number, got {number}"
        with pytest.raises(ValueError, match=message):
            criterion.grow(number)
    criterion.weight = torch.ones(C + 2, device=device)
    criterion.grow(C + 2)  # nothing changes
    with pytest.raises(ValueError, match="grow needs a criterion without class weights"):
        criterion.grow(C + 3)
    assert criterion.estimator.num_classes == criterion.num_classes == C + 2
    again = ISDALoss(A, C + 2, covariance=structure)
    again.load_state_dict(criterion.state_dict())


def test_statistics_of_a_class_in_every_structure(device):
    x = inputs(device)
    count, mean, covariance = reference.class_moments(x.features, x.target, C)
    pooled = reference.pooled_moments(x.features, x.target)[2]
    expected = {
        "full": covariance[3],
        "diagonal": torch.diag(covariance[3].diagonal()),
        "shared": pooled,
        "identity": torch.eye(A, dtype=torch.float64),
    }
    for structure, matrix in expected.items():
        estimator = make(device, covariance=structure).estimator
        estimator.update(x.features, x.target)
        found = estimator.class_covariance(3)
        if structure in ("full", "diagonal"):
            close(estimator.class_mean(3), mean[3])
            assert estimator.class_mean(3).dtype == torch.float32
            assert estimator.moments.count.tolist() == count.tolist()
        else:
            with pytest.raises(TypeError, match="keeps no mean of each class"):
                estimator.class_mean(3)
        estimator.update(1 + x.features, x.target)
        close(found, matrix)  # no view of the statistics


class LearnedVariance(nn.Module):
    """A variance for each class that is learned with the network."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(C, A))

    def update(self, features: Tensor, target: Tensor) -> None:
        pass

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        return functional.diagonal_quadratic(weight, target, self.log_variance.exp())


def test_an_estimator_of_ones_own_is_learned(device):
    """It gets its gradient, and second derivatives are right, too."""
    x = draw(N, C, A, device=device)
    estimator = LearnedVariance().double()
    criterion = ISDALoss(A, C, lambda_0=STRENGTH, ramp="constant", covariance=estimator).to(device)
    assert isinstance(estimator, isda.Estimator)
    weight = (0.5 * x.weight).requires_grad_()

    def loss(log_variance: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            estimator.log_variance.copy_(log_variance)
        del estimator._parameters["log_variance"]
        estimator.log_variance = log_variance
        try:
            return criterion(0.5 * x.features, weight, x.target)
        finally:
            del estimator.log_variance
            estimator.register_parameter("log_variance", nn.Parameter(log_variance.detach()))

    learned = torch.zeros(C, A, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (learned, weight))
    assert torch.autograd.gradgradcheck(loss, (learned, weight))


def test_attach_and_isdaloss_have_the_same_options():
    """An editor shows them, and none is forgotten."""
    ours, theirs = (inspect.signature(f).parameters for f in (isda.attach, ISDALoss))
    options = [name for name in theirs if name not in ("num_features", "num_classes")]
    assert [name for name in ours if name not in ("model", "criterion", "head")] == options
    for name in options:
        assert ours[name].default == theirs[name].default
        assert ours[name].annotation == theirs[name].annotation


def test_repr_shows_every_option():
    for kind in (ISDALoss, isda.ISDABCEWithLogitsLoss):
        text = repr(kind(A, C, weight=torch.ones(C)))
        for name in inspect.signature(kind).parameters:
            if name in ("num_features", "num_classes", "covariance"):
                continue
            assert f"{name}=" in text, name
        assert "FullCovariance" in text
        assert "tensor of shape (5,)" in text

    class Constant:  # no module, which would be shown as a child
        def update(self, features: Tensor, target: Tensor) -> None: ...

        def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
            return torch.ones(len(target), len(weight))

    criterion = ISDALoss(A, C, covariance=Constant())
    assert "covariance=<" in repr(criterion)
    with pytest.raises(ValueError, match=r"grow needs an isda\.Covariance, got <"):
        criterion.grow(C + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": torch.ones(C + 1)}, r"weight must be a tensor of shape \(5,\), got \(6,\)"),
        ({"weight": [1.0] * C}, r"weight must be a tensor of shape \(5,\), got list"),
        ({"weight": torch.ones(C).long()}, "weight must be floating point, got torch.int64"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"label_smoothing": float("nan")}, r"label_smoothing must be in \[0, 1\], got nan"),
        ({"label_smoothing": "0.1"}, r"label_smoothing must be in \[0, 1\], got '0.1'"),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ISDALoss(A, C, **options)


@pytest.mark.parametrize("name", ["weight", "target", "bias", "logits", "covariance_index"])
def test_wrong_device_of_any_argument(name):
    x = inputs(torch.device("cpu"))
    arguments = {
        "features": x.features,
        "weight": x.weight,
        "target": x.target,
        "bias": x.bias,
        "logits": torch.zeros(N, C),
        "covariance_index": x.target,
    }
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must be on the device of the features, cpu, got"):
        make(torch.device("cpu"))(**arguments)


@pytest.mark.parametrize("name", ["weight", "bias", "logits"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_numbers_that_are_not_floating_point(name, dtype, device):
    x, criterion = inputs(device), make(device)
    arguments = {"weight": x.weight, "bias": x.bias, "logits": torch.zeros(N, C, device=device)}
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(ValueError, match=f"{name} must be floating point, got {dtype}"):
        criterion(x.features, target=x.target, **arguments)
    assert not criterion.estimator.count.any()


def test_bad_values_of_ignored_samples_do_not_matter(device):
    x, criterion = inputs(device), make(device)
    x.features[0] = torch.nan
    target = x.target.clone()
    target[0] = -100
    logits = torch.zeros(N, C, device=device)
    assert criterion(x.features, x.weight, target, logits=logits).isfinite()
    criterion.check()
    assert criterion.estimator.count.sum() == N - 1


def test_probabilities_that_sum_to_zero_are_refused(device):
    x, criterion = inputs(device), make(device)
    target = F.one_hot(x.target, C).float()
    target[1] = 0
    with pytest.raises(ValueError, match="probabilities that are not finite or sum to 0"):  # noqa: PT012
        criterion(x.features, x.weight, target)
        criterion.check()  # a GPU reports it later
    assert not criterion.estimator.count.any()


def test_a_step_makes_few_calls(device):
    """A reader can follow a step: at most 30 calls of our functions."""
    if device.type != "cpu":
        pytest.skip("counts the calls of the plain implementation")
    model = nn.Linear(A, C)
    criterion = isda.attach(model, total_steps=10)
    x = inputs(device)
    criterion(model(x.features), x.target)
    logits, calls = model(x.features), []
    ours = str(Path(isda.__file__).parent)

    def count(frame, event, _argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        criterion(logits, x.target)
    finally:
        sys.setprofile(None)
    assert 10 < len(calls) <= 30, calls


def test_sharing_an_estimator(device):
    """Two criteria, one set of statistics, as for two views of a batch."""
    estimator = FullCovariance(A, C).to(device)
    first = ISDALoss(A, C, ramp="constant", covariance=estimator).to(device)
    second = ISDALoss(A, C, ramp="constant", covariance=estimator, frozen=True).to(device)
    x = inputs(device)
    losses = [criterion(x.features, x.weight, x.target) for criterion in (first, second)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_options_of_an_attached_criterion_can_be_changed(device):
    model = nn.Linear(A, C).to(device)
    criterion = isda.attach(model, lambda_0=0.5, total_steps=10)
    criterion.lambda_0, criterion.frozen, criterion.total_steps = 2.0, True, 4.0
    x = inputs(device)
    criterion(model(x.features), x.target)
    assert (criterion.criterion.lambda_0, criterion.criterion.frozen) == (2.0, True)
    assert not criterion.estimator.count.any()
    assert criterion.strength == 0.5  # one of four steps
    assert criterion.criterion.total_steps == 4
    for name, value in (("lambda_0", -1.0), ("total_steps", 0), ("total_steps", "10")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            setattr(criterion, name, value)


@pytest.mark.parametrize(
    "options",
    [{"lambda_0": "0.5"}, {"lambda_0": None}, {"total_steps": "9"}, {"label_smoothing": "a"},
     {"max_shift": "1"}],
)  # fmt: skip
def test_options_of_a_wrong_type(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        ISDALoss(A, C, **options)


def test_attach_with_a_criterion_and_default_options():
    model = nn.Linear(A, C)
    isda.attach(model, ISDALoss(A, C), ignore_index=int("-100"), lambda_0=float("0.5"))
    with pytest.raises(ValueError, match="ignore_index must be set on the criterion"):
        isda.attach(model, ISDALoss(A, C), ignore_index=-1)
