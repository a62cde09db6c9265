"""The operators against ``isda.functional``: values, gradients, fakes, memory."""

import subprocess
import sys

import pytest
import torch
from reference import draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isda import ISDALoss, functional, ops
from isda.functional import Moments

SHAPES = [(7, 13, 5), (1, 3, 4), (0, 3, 4), (23, 3, 6), (5, 2, 1)]  # (N, C, A)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def inputs(
    shape: tuple[int, int, int], device: torch.device, *, diagonal: bool = False
) -> tuple[Moments, Tensor, Tensor, Tensor]:
    """Statistics of earlier batches, and a batch with some skipped samples."""
    samples, classes, width = shape
    x = draw(*shape, device=device)
    target = x.target.clone()
    target[::5] = -1
    count = torch.arange(classes, device=device)
    if classes > 2:
        count[2] = 0  # has no sample in the batch either
    seen = count > 0
    covariance = x.covariance * seen[:, None, None]
    if diagonal:
        covariance = covariance.diagonal(dim1=1, dim2=2).contiguous()
    weight = draw(samples, classes, width, seed=9, device=device).weight
    return Moments(count, x.weight * seen[:, None], covariance), x.features, target, weight


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)  # float64


@shapes
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_update(shape, decay, diagonal, device):
    moments, features, target, _ = inputs(shape, device, diagonal=diagonal)
    expected = functional.update_moments(moments, features, target, decay=decay)
    found = [tensor.clone() for tensor in moments]
    ops.update_(found, features, target, decay)
    for left, right in zip(found, expected, strict=True):
        close(left, right)


@shapes
@pytest.mark.parametrize("fused", [False, True])
def test_quadratic_and_its_gradient(shape, fused, device):
    moments, features, target, weight = inputs(shape, device)
    moments = Moments(*(tensor.clone() for tensor in moments))
    updated = moments
    if fused:
        updated = functional.update_moments(moments, features, target, decay=0.9)
    leaves = [weight.clone().requires_grad_() for _ in range(2)]
    if fused:
        found = ops.update_and_quadratic(moments, features, target, leaves[0], 0.9, "high")
        close(moments.covariance, updated.covariance)
    else:
        found = ops.full_quadratic(leaves[0], target, moments.covariance, "high")
    expected = functional.full_quadratic(leaves[1], target.clamp(min=0), updated.covariance)
    expected = torch.where((target < 0)[:, None], 0.0, expected)
    close(found, expected)
    upstream = torch.randn_like(expected)
    for value in (found, expected):
        (value * upstream).sum().backward()
    close(leaves[0].grad, leaves[1].grad)


def test_fewer_covariances_than_classes(device):
    """Statistics of only the first classes, as on one of several ranks."""
    moments, _, target, weight = inputs((23, 5, 4), device)
    found = ops.full_quadratic(
        weight, torch.where(target < 3, target, -1), moments.covariance[:3], "high"
    )
    expected = functional.full_quadratic(weight, target.clamp(min=0), moments.covariance)
    here = (target >= 0) & (target < 3)
    close(found[here], expected[here])
    assert not found[~here].any()


def test_absent_classes_cost_nothing(device):
    """Covariances of absent classes are not read: NaN in them has no effect and remains."""
    x = draw(7, 13, 5, dtype=torch.float32, device=device)
    present = torch.zeros(13, dtype=torch.bool)
    present[x.target.cpu()] = True
    absent = (~present).to(device)
    covariance = x.covariance.clone()
    covariance[absent] = torch.nan
    count = torch.full((13,), 3, device=device)
    updated = covariance.clone()
    ops.update_([count, torch.zeros(13, 5, device=device), updated], x.features, x.target, 1.0)
    assert updated[~absent].isfinite().all()
    assert torch.equal(*(tensor[absent].view(torch.int32) for tensor in (updated, covariance)))
    assert not torch.equal(updated[~absent], covariance[~absent])
    for target in (x.target, x.target.repeat(3)):  # N < C and N > C
        weight = x.weight.clone().requires_grad_()
        value = ops.full_quadratic(weight, target, covariance, "high")
        value.sum().backward()
        assert value.isfinite().all()
        assert weight.grad.isfinite().all()


class Shapes(TorchDispatchMode):
    """Shapes of all tensors that are created, also inside the library's own operators."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()
        key = torch._C.DispatchKey.CUDA if device.type == "cuda" else torch._C.DispatchKey.CPU
        self.keys = torch._C.DispatchKeySet(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "isda":
            with self:
                output = func.redispatch(self.keys, *args, **(kwargs or {}))
        else:
            output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor):
                self.seen.add(tuple(sorted(tensor.shape)))
        return output


@pytest.mark.parametrize("structure", ["full", "diagonal", "shared", "identity"])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("shape", [(37, 19, 11), (19, 37, 11)], ids=["N>C", "N<C"])
def test_no_large_intermediate(structure, soft, shape, device):
    """A training step builds no tensor (N, C, A), (N, A, A) or (N, C, C)."""
    samples, classes, width = shape
    x = draw(*shape, dtype=torch.float32, device=device)
    target = torch.randn(samples, classes, device=device).softmax(1) if soft else x.target
    features, weight = (tensor.clone().requires_grad_() for tensor in (x.features, x.weight))
    criterion = ISDALoss(width, classes, covariance=structure, ramp="constant").to(device)
    with Shapes(device) as shapes:
        criterion(features, weight, target, bias=x.bias).backward()
    forbidden = {(samples, classes, width), (samples, width, width), (samples, classes, classes)}
    if structure == "full" and samples < classes and not soft:
        forbidden.remove((samples, classes, width))  # here it is (P, C, A), P = min(N, C) classes
        if device.type == "cuda":
            forbidden.remove((samples, width, width))
    assert tuple(sorted((samples, classes))) in shapes.seen  # the logits: the recorder works
    assert not {tuple(sorted(shape)) for shape in forbidden} & shapes.seen


def test_backward_keeps_one_product(device):
    """The backward pass allocates nothing of size (P, C, A)."""
    if device.type != "cpu":
        pytest.skip("the kernels hold two tables (P, C), which here is more than (N, C)")
    x = draw(37, 19, 11, dtype=torch.float32, device=device)
    weight = x.weight.clone().requires_grad_()
    value = ops.full_quadratic(weight, x.target, x.covariance, "high")
    with Shapes(device) as shapes:
        value.sum().backward()
    assert shapes.seen
    assert max(torch.Size(shape).numel() for shape in shapes.seen) <= 37 * 19


def test_second_derivatives_raise(device):
    """Second derivatives would be wrong, because the products are saved without a graph."""
    x = draw(7, 5, 4, dtype=torch.float32, device=device)
    weight = x.weight.clone().requires_grad_()
    value = ops.full_quadratic(weight, x.target, x.covariance, "high")
    for total in (value.square().sum(), value.sum() + weight.pow(3).sum()):
        (gradient,) = torch.autograd.grad(total, weight, create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match=r"backward through isda\.weight_gradient"):
            torch.autograd.grad(gradient.square().sum(), weight, retain_graph=True)


@pytest.mark.parametrize("diagonal", [False, True])
def test_operators_are_registered_correctly(diagonal, device):
    """Schema, fake and autograd of each operator, by torch.library.opcheck."""
    moments, features, target, weight = inputs((7, 13, 5), device, diagonal=diagonal)
    single = [t.float() if t.is_floating_point() else t.clone() for t in moments]
    features, weight = features.float(), weight.float()
    step = torch.zeros((), dtype=torch.int64, device=device)
    calls = [
        (torch.ops.isda.screen.default, (features, target, 13, -100)),
        (torch.ops.isda.count_step.default, (step, step.clone(), target, 0.5, 10, 1, True)),
        (torch.ops.isda.update_.default, (single, features, target, 0.9)),
    ]
    if not diagonal:
        weight = weight.T.contiguous().T  # a weight may have any strides
        products = ops._multiply(single[2], weight, target, "high")
        learned = weight.clone().requires_grad_()
        calls += [
            (torch.ops.isda.multiply.default, (single[2], weight, target, "high")),
            (
                torch.ops.isda.update_and_multiply_.default,
                (single, features, target, weight, 0.9, "high"),
            ),
            (torch.ops.isda.quadratic_rows.default, (learned, target, *products)),
            (
                torch.ops.isda.weight_gradient.default,
                (torch.ones(7, 13, device=device), weight, target, *products[1:]),
            ),
        ]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.compiled  # versions.run_eagerly imports Dynamo
def test_import_of_the_library_imports_neither_triton_nor_dynamo():
    code = "import isda, sys; print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    before = (
        "import torch, sys; print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    )
    found, bare = (
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (code, before)
    )
    assert found == bare
