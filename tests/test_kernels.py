"""The Triton kernels against the plain forms in float64: on a GPU, and interpreted on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor
from torch.nn import functional as F

from isda import FullCovariance, ISDALoss, batch, functional, kernels, per_class
from isda.bound import bound, is_number
from isda.functional import Moments

# (N, C, A): below, at and above the kernels' blocks of 64 features, 16 samples and slots of
# classes; few and many samples of a class
SHAPES = [
    (7, 13, 5), (23, 3, 70), (40, 4, 130), (1, 3, 64), (0, 3, 5), (20, 40, 17), (5, 2, 1),
    (24, 12, 70),
]  # fmt: skip
WIDE = [(12, 6, 390), (6, 3, 514), (6, 3, 1030)]  # which the fused kernel cuts in other tiles
ids = [str(shape) for shape in SHAPES]
gpu = pytest.mark.gpu


def draw(
    shape: tuple[int, int, int], device: str, *, seed: int = 0
) -> tuple[Moments, Tensor, Tensor, Tensor]:
    """Statistics as if of earlier batches, and a batch: features far from 0, some left out."""
    samples, classes, width = shape
    x = reference.draw(samples, classes, width, seed=seed, dtype=torch.float32, device=device)
    target = x.target.clone()
    target[::5] = -1
    count = torch.arange(classes, device=device)  # class 0 has none yet
    mean = x.weight * (count > 0)[:, None]
    covariance = x.covariance * (count > 0)[:, None, None]
    weight = reference.draw(samples, classes, width, seed=seed + 9, dtype=torch.float32).weight
    return Moments(count, mean, covariance), x.features * 3 + 5, target, weight.to(device) + 2


def padded(covariance: Tensor) -> Tensor:
    """The same matrices with rows that begin at multiples of 64 bytes, as on a GPU."""
    classes, width, _ = covariance.shape
    room = covariance.new_zeros(classes, width, -(-width // 16) * 16)
    room[..., :width] = covariance
    return room[..., :width]


def doubles(moments: Moments) -> Moments:
    return Moments(*(tensor.cpu().double() for tensor in moments))._replace(
        count=moments.count.cpu().clone()
    )


def check_update(shape: tuple[int, int, int], decay: float, device: str) -> None:
    """``kernels.update`` against the pure function in float64 on a CPU, which is a loop."""
    moments, features, target, _ = draw(shape, device)
    count, mean, covariance = (tensor.clone() for tensor in moments)
    kernels.update(count, mean, covariance, features, target, decay)
    expected = functional.update_moments(
        doubles(moments), features.double().cpu(), target.cpu(), decay=decay
    )
    check_moments(moments, Moments(count, mean, covariance), expected)
    torch.testing.assert_close(covariance, covariance.mT, rtol=0, atol=2e-4)
    # what lies far above the diagonal is never read
    count, mean, spoilt = (tensor.clone() for tensor in moments)
    present = expected.count.to(device) != moments.count
    spoilt[present] += torch.full_like(spoilt[0], torch.nan).triu(64)
    kernels.update(count, mean, spoilt, features, target, decay)
    assert torch.equal(spoilt, covariance)


def check_moments(before: Moments, found: Moments, expected: Moments) -> None:
    absent = expected.count.to(before.count.device) == before.count
    assert torch.equal(found.covariance[absent], before.covariance[absent])
    assert torch.equal(found.mean[absent], before.mean[absent])
    assert torch.equal(found.count.cpu(), expected.count)
    # float32 of squares of values below 20, averaged: a few times 400 · 2⁻²⁴
    torch.testing.assert_close(found.mean.double().cpu(), expected.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        found.covariance.double().cpu(), expected.covariance, rtol=0, atol=2e-4
    )
    if (~absent).any():
        assert (found.covariance - before.covariance).abs().max() > 0.1


def check_variances(shape: tuple[int, int, int], decay: float, device: str) -> None:
    moments, features, target, _ = draw(shape, device)
    moments = moments._replace(covariance=moments.covariance.diagonal(dim1=1, dim2=2).contiguous())
    count, mean, variance = (tensor.clone() for tensor in moments)
    kernels.update_variances(count, mean, variance, features, target, decay)
    expected = functional.update_moments(
        doubles(moments), features.double().cpu(), target.cpu(), decay=decay
    )
    check_moments(moments, Moments(count, mean, variance), expected)


def check_quadratic(
    shape: tuple[int, int, int], precision: str, device: str, *, first: int = 0, part: int = 0
) -> None:
    """Update, quadratic term and its gradient in one pass, against the loops in float64.

    ``first`` is the first class whose statistics are here; the ``part`` first samples are those of
    another rank.
    """
    moments, features, index, weight = draw(shape, device)
    moments = Moments(*(tensor[first:].clone() for tensor in moments))
    target = index if not part else index[part:]
    expected = doubles(moments)
    wide = weight.double().cpu().requires_grad_()
    value = per_class.update_and_quadratic(
        *expected,
        features.double().cpu(),
        index.cpu(),
        wide,
        target.cpu(),
        decay=0.9,
        precision=precision,
        first_class=first,
    )
    found = Moments(*(tensor.clone() for tensor in moments))
    found = found._replace(covariance=padded(found.covariance))
    products = kernels.update_and_multiply(
        *found, features, index, weight, target, 0.9, precision, first
    )
    check_moments(moments, found, expected)
    stride = found.covariance.stride(1)
    room = found.covariance.as_strided(
        (len(found.mean), shape[2], stride), (shape[2] * stride, stride, 1)
    )
    assert not room[..., shape[2] :].any()
    rows = kernels.gather_rows(products.partial, products.slot, target, first)
    # errors of 2⁻¹⁶ or 2⁻⁸ of both factors and of what is left out or kept of a product; a sum with
    # both signs is smaller than its terms; the interpreter cuts off where a GPU rounds
    error = {"high": 2**-13, "medium": 2**-5}[precision]
    size = value.abs().max().item() if value.numel() else 0.0
    torch.testing.assert_close(rows.double().cpu(), value.detach(), rtol=0, atol=error * size)
    inside = (target >= first).nonzero().flatten()
    assert not rows[inside, target[inside]].any()  # exactly 0 at the target
    assert not rows[target < first].any()  # of no class here

    random = torch.Generator().manual_seed(0)
    upstream = torch.randn(value.shape, dtype=torch.float64, generator=random)
    (gradient,) = torch.autograd.grad(value, wide, upstream)
    result = kernels.weight_gradient(upstream.float().to(device), target, *products[1:], first)
    largest = gradient.abs().max().item()
    torch.testing.assert_close(result.double().cpu(), gradient, rtol=0, atol=error * largest)

    # the quadratic term of covariances that stay as they are
    products = kernels.multiply(weight, target, found.covariance, precision, first)
    again = kernels.gather_rows(products.partial, products.slot, target, first)
    torch.testing.assert_close(again, rows, rtol=1e-5, atol=1e-5 * size)


def check_strides(device: str) -> None:
    """Covariances of any layout."""
    moments, _, target, weight = draw((20, 6, 17), device)
    target = target.clamp(min=0)
    room = torch.randn(12, 40, 40, device=device)
    room[::2, :17, :17] = moments.covariance
    layouts = [room[::2, :17, :17], moments.covariance.mT, moments.covariance[:1].expand(6, -1, -1)]
    for covariance in layouts:
        expected = functional.full_quadratic(
            weight.double().cpu(), target.cpu(), covariance.double().cpu().contiguous()
        )
        products = kernels.multiply(weight, target, covariance, "high")
        rows = kernels.gather_rows(products.partial, products.slot, target)
        error = 2**-13 * expected.max().item()  # see check_quadratic
        torch.testing.assert_close(rows.double().cpu(), expected, rtol=0, atol=error)


def check_masked_classes(device: str) -> None:
    """Logits of −inf where a block of classes begins."""
    logits, target = torch.randn(3, 70), torch.tensor([69, 40, 50])
    logits[:, :32] = -torch.inf
    loss, *_ = kernels.bound(
        logits.to(device), None, target.to(device), None, None, ignore_index=-1, reduce=True
    )
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(logits, target))


def check_screen(shape: tuple[int, int, int], device: str) -> None:
    samples, classes, width = shape
    x = reference.draw(*shape, dtype=torch.float32, device=device)
    features, target = x.features.clone(), x.target.clone()
    for ignore_index in (-100, 2):
        assert torch.equal(
            kernels.screen(features, target, classes, ignore_index, 1e15),
            torch.where(target == ignore_index, -1, target),
        )
    if samples < 7:
        return
    features[0, 0], features[1, -1], features[2, width // 2] = torch.inf, torch.nan, -1e15
    features[6, 0] = 0.99e15
    target[3], target[4], target[5] = classes, -1, -100
    features[5, 0] = torch.nan
    index = kernels.screen(features, target, classes, -100, batch.LARGEST)
    expected = [-2, -2, -2, -3, -3, -2]
    assert index[:6].tolist() == expected
    assert torch.equal(index[6:], target[6:])
    assert torch.equal(batch.screen(features.cpu(), target.cpu(), classes, -100), index.cpu())


def check_tally(device: str) -> None:
    sound = torch.tensor([3, -1, 0, 2] * 300 + [7], device=device)
    for bad in (0, -2, -3):
        index = sound.clone()
        if bad:
            index[1100] = bad
        results = []
        for function, where in ((kernels.tally, device), (batch.tally, "cpu")):
            for world, mean, progress in (
                (1, True, None),
                (3, True, None),
                (1, False, torch.tensor([0.75], dtype=torch.float64)),
            ):
                step, problem = torch.tensor(5, device=where), torch.tensor(0, device=where)
                given = progress if progress is None else progress.to(where)
                values = function(step, problem, index.to(where), 0.5, 20, world, mean, given)
                results.append([step, problem, *values])
        for left, right in zip(results[:3], results[3:], strict=True):
            for one, other in zip(left, right, strict=True):
                torch.testing.assert_close(one.cpu(), other, check_dtype=False)
        step, problem, index, scale, strength = results[1]
        assert (step, problem) == (5 + (not bad), max(-1 - bad, 0))
        assert strength == 0.125
        assert scale.item() == pytest.approx(0 if bad else 3 / 901)
        assert bool((index == -1).all()) == bool(bad)
        assert results[2][-1] == 0.375


def check_differs(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    _, classes, width = shape
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias = (
        torch.randn(size, generator=generator) for size in ((2, width), (classes, width), classes)
    )
    bias *= width**0.5  # else too small to be told from rounding
    right, biased = F.linear(inputs, weight), F.linear(inputs, weight, bias)
    for offset, logits, expected in (
        (None, right[:1], False),
        (bias, biased[:1], False),
        (bias, right[:1], True),
        (None, right[1:], True),
        (None, 1.2 * right[:1], True),
        (None, right[:1] * torch.nan, False),
    ):
        given = [x if x is None else x.to(dtype) for x in (inputs[:1], weight, offset, logits)]
        there = [x if x is None else x.to(device) for x in given]
        assert kernels.differs(*there, batch.TOLERANCE).item() == expected
        assert batch.differs(*given).item() == expected


def check_bound(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Loss and gradients against torch's cross entropy in float64."""
    samples, classes, _ = shape
    if not samples:
        return
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(samples, classes, generator=generator)).to(dtype)
    quadratic = torch.rand(samples, classes, generator=generator) * 5
    target = torch.randint(classes, (samples,), generator=generator)
    target[: samples // 3] = -100
    scale, strength = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.7)
    arguments = [tensor.to(device) for tensor in (logits, quadratic, target)]
    for shifted in (True, False):
        z, q = logits.double().requires_grad_(), quadratic.double().requires_grad_()
        value = z + 0.35 * q if shifted else z
        losses = F.cross_entropy(value, target, ignore_index=-100, reduction="none")
        counted = max(int((target >= 0).sum()), 1)
        extra = arguments[1] if shifted else None
        factor = strength.to(device) if shifted else None
        for given, expected in ((None, losses.sum() / counted), (scale, 0.3 * losses.sum())):
            loss, total, used = kernels.bound(
                arguments[0],
                extra,
                arguments[2],
                factor,
                None if given is None else given.to(device),
                ignore_index=-100,
                reduce=True,
            )
            torch.testing.assert_close(loss.cpu(), expected.detach().float())
            found = kernels.bound_backward(
                torch.tensor(2.0, device=device),
                arguments[0],
                extra,
                arguments[2],
                factor,
                total,
                used,
                ignore_index=-100,
            )
            wanted = torch.autograd.grad(
                2 * expected, [z, q] if shifted else [z], retain_graph=True
            )
            assert found[0].dtype == dtype
            # float32 of exp(x) − 1 with x up to 20: 20 · 2⁻²⁴; bfloat16 rounds the result
            tolerance = 1e-5 if dtype == torch.float32 else 2**-7
            for one, other in zip(found, wanted, strict=False):
                torch.testing.assert_close(
                    one.double().cpu(), other, rtol=tolerance, atol=tolerance / 10
                )
        rows, total, used = kernels.bound(
            arguments[0], extra, arguments[2], factor, None, ignore_index=-100, reduce=False
        )
        torch.testing.assert_close(rows.cpu(), losses.detach().float())
        upstream = torch.randn(samples, generator=generator)
        gradient, _ = kernels.bound_backward(
            upstream.to(device),
            arguments[0],
            extra,
            arguments[2],
            factor,
            total,
            used,
            ignore_index=-100,
        )
        (wanted,) = torch.autograd.grad(losses, z, upstream.double())
        torch.testing.assert_close(gradient.double().cpu(), wanted, rtol=tolerance, atol=1e-6)
    # a bad batch: no number, and no gradient; a class out of range: no number
    none = torch.zeros((), dtype=torch.float64, device=device)
    loss, total, used = kernels.bound(
        arguments[0], None, arguments[2], None, none, ignore_index=-100, reduce=True
    )
    assert loss.isnan()
    gradient, _ = kernels.bound_backward(
        torch.ones((), device=device),
        arguments[0],
        None,
        arguments[2],
        None,
        total,
        used,
        ignore_index=-100,
    )
    assert not gradient.any()
    arguments[2][-1] = classes
    loss, *_ = kernels.bound(
        arguments[0], None, arguments[2], None, None, ignore_index=-100, reduce=True
    )
    assert loss.isnan()


def check_padding(device: str) -> None:
    """What lies between the rows of a covariance does not matter, be it NaN."""
    moments, _, target, weight = draw((12, 7, 20), device)
    room = torch.full((7, 20, 32), torch.nan, device=device)
    room[..., :20] = moments.covariance
    for precision in ("high", "medium"):
        products = (
            kernels.multiply(weight, target, covariance, precision)
            for covariance in (moments.covariance, room[..., :20])
        )
        expected, found = (kernels.gather_rows(x.partial, x.slot, target) for x in products)
        torch.testing.assert_close(found, expected)


def check_default_dtype(device: str) -> None:
    """Statistics and losses are float32, whatever new tensors are by default."""
    moments, features, target, weight = draw((12, 7, 20), device)
    logits = features @ weight.T
    results = []
    for dtype in (torch.float32, torch.float16):
        found = Moments(*(tensor.clone() for tensor in moments))
        torch.set_default_dtype(dtype)
        try:
            products = kernels.update_and_multiply(
                *found, features, target, weight, target, 0.9, "high"
            )
            rows = kernels.gather_rows(products.partial, products.slot, target)
            loss, *_ = kernels.bound(logits, None, target, None, None, ignore_index=-1, reduce=True)
        finally:
            torch.set_default_dtype(torch.float32)
        results.append((*found, rows, loss))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one)


def interpret() -> None:
    """What the subprocess of the next test runs."""
    for shape in SHAPES:
        for decay in (1.0, 0.8):
            check_update(shape, decay, "cpu")
            check_variances(shape, decay, "cpu")
        for precision in ("high", "medium"):
            check_quadratic(shape, precision, "cpu")
        check_screen(shape, "cpu")
        check_bound(shape, torch.float32, "cpu")
    for shape in WIDE:
        check_quadratic(shape, "medium" if shape[-1] > 1024 else "high", "cpu")
    check_bound((6, 70, 1), torch.bfloat16, "cpu")
    check_quadratic((23, 13, 5), "high", "cpu", first=4, part=7)
    check_quadratic((12, 40, 17), "high", "cpu", first=4, part=7)
    check_padding("cpu")
    check_default_dtype("cpu")
    sys.modules["isda.kernels.products"]._CLASSES = 16  # too many for one pass
    sys.modules["isda.kernels.products"]._COPIED = 5 * 70**2  # five of these at a time
    for precision in ("high", "medium"):
        check_quadratic((12, 40, 70), precision, "cpu")
    sys.modules["isda.kernels.products"]._COPIED = 4000
    check_quadratic((23, 40, 17), "high", "cpu", first=4, part=7)
    check_strides("cpu")
    sys.modules["isda.kernels.products"]._CLASSES = 256
    sys.modules["isda.kernels.statistics"]._MANY = 16  # samples that are sorted
    for shape in ((150, 3, 17), (40, 60, 5)):
        check_update(shape, 0.8, "cpu")
        check_variances(shape, 1.0, "cpu")
        check_quadratic(shape, "high", "cpu", first=1, part=9)
    sys.modules["isda.kernels.bound"]._CLASSES = 32
    check_masked_classes("cpu")
    check_bound((6, 70, 1), torch.float32, "cpu")
    check_tally("cpu")
    check_differs((1, 10, 300), torch.float32, "cpu")


def test_interpreted_on_a_cpu():
    """Triton decides when it is imported whether to interpret: a process of its own."""
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", "import test_kernels; test_kernels.interpret()"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert result.returncode == 0, result.stderr


@pytest.fixture(params=[(90, 227 * 1024)], ids=["H100"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled, for a GPU that need not be here, and not run."""
    capability, shared_memory = request.param
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    names = []
    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64"}
    types |= {torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}

    def compile_call(kernel, *args, grid, warmup, **options) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            name, value = parameter.name, values[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):  # as at a launch
                signature[name] = "constexpr"
                here = {"interpreted": False, "early": capability >= 90}
                constants[place,] = here.get(name, value)
                continue
            kind = types[value.dtype] if isinstance(value, Tensor) else type(value).__name__
            signature[name] = {"int": "i32", "float": "fp32"}.get(kind, kind)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[place,] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
        settings = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
        target = GPUTarget("cuda", capability, 32)
        result = triton.compile(source, target=target, options=settings)
        assert result.metadata.shared <= shared_memory
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_call)
    products = sys.modules["isda.kernels.products"]
    monkeypatch.setattr(products, "_shared_memory", lambda _: shared_memory - 32 * 1024)
    return names


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize(
    "shape",
    [(5, 2, 1), (2, 3, 64), (64, 100, 342), (128, 200, 640), (9, 3, 1030), (5000, 3, 40)],
    ids=str,
)
def test_compiles_without_a_gpu(shape, precision, compiled):
    """The interpreter does not see what the compiler refuses, such as a type that changes."""
    moments, features, target, weight = draw(shape, "cpu")
    kernels.update(*moments, features, target, 0.9)
    padded_moments = moments._replace(covariance=padded(moments.covariance))
    products = kernels.update_and_multiply(
        *padded_moments, features, target, weight, target[1:], 0.9, precision
    )
    kernels.gather_rows(products.partial, products.slot, target)
    kernels.weight_gradient(torch.zeros(shape[:2]), target, *products[1:])
    variance = moments.mean.clone()
    kernels.update_variances(moments.count, moments.mean, variance, features, target, 1.0)
    many = shape[0] > 2 * shape[1]  # samples of a class, which are merged by a kernel of their own
    assert compiled == [
        "_class_statistics", "_update", "_class_statistics", *["_update"] * many, "_split",
        "_update_and_multiply", "_gather_rows", "_sum_rows", "_weight_gradient",
        "_class_statistics",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("compiled", [(86, 99 * 1024)], ids=["RTX 3090"], indirect=True)
@pytest.mark.parametrize(
    ("num_classes", "precision", "tiles"),
    [(100, "high", 2), (100, "medium", 2), (200, "high", 1), (200, "medium", 3)],
)
def test_little_shared_memory(num_classes, precision, tiles, compiled, monkeypatch):
    """The fused kernel fits, and reads ahead where it can."""
    products = sys.modules["isda.kernels.products"]
    kind, stages = type(products._update_and_multiply), []
    compile_call = kind.run

    def spy(kernel, *args, **options) -> None:
        stages.append(options.get("num_stages"))
        compile_call(kernel, *args, **options)

    monkeypatch.setattr(kind, "run", spy)
    covariance = torch.zeros(num_classes, 520, 528)[..., :520]
    kernels.multiply(torch.zeros(num_classes, 520), torch.arange(8), covariance, precision)
    assert compiled[-1] == "_update_and_multiply"
    assert stages[-1] == tiles


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_others_compile_without_a_gpu(compiled):
    moments, features, target, weight = draw((20, 300, 130), "cpu")
    index = kernels.screen(features.bfloat16(), target, 300, -100, 1e15)
    step = torch.zeros((), dtype=torch.int64)
    index, scale, strength = kernels.tally(step, step.clone(), index, 0.5, 100, 1, True)
    for precision in ("high", "medium"):
        covariances = sys.modules["isda.kernels.covariances"]
        products = sys.modules["isda.kernels.products"]
        found = products.class_statistics(target, target, 300)
        copies = torch.zeros(20, (3 if precision == "high" else 1) * 130, 130, dtype=torch.bfloat16)
        covariances.launch_update(moments.covariance, found, found.classes, None, copies=copies)
        covariances.launch_update(
            moments.covariance, found, found.classes, moments.count, others=True
        )
        partial, product, own = kernels.empty_products(weight, 20, precision)
        products._launch_squares(product, weight, found.own_classes, own, partial, 0)
        kernels.weight_gradient(
            torch.zeros(20, 300), target, product, own, found.slot, found.classes
        )
    for logits in (torch.zeros(20, 300), torch.zeros(20, 5000, dtype=torch.bfloat16)):
        quadratic = torch.zeros(logits.shape)
        for rows, factor in ((quadratic, strength), (None, None)):
            for reduce in (True, False):
                loss, total, used = kernels.bound(
                    logits, rows, index, factor, scale, ignore_index=-1, reduce=reduce
                )
                kernels.bound_backward(
                    loss, logits, rows, index, factor, total, used, ignore_index=-1
                )
    for bias in (None, weight[:64, 0]):
        kernels.differs(features[:1].bfloat16(), weight[:64], bias, features[:1, :64], 0.02)
    wanted = {"_screen", "_tally", "_update", "_squares", "_sum_rows", "_both_sums", "_differs"}
    wanted |= {"_own_rows", "_bound", "_reduce", "_bound_backward", "_class_statistics"}
    assert wanted == set(compiled)


def test_not_used_on_a_cpu():
    assert not kernels.usable(torch.zeros(1))


@gpu
def test_can_be_turned_off(monkeypatch):
    tensor = torch.zeros(1, device="cuda")
    assert kernels.usable(tensor)
    assert not kernels.usable(tensor.double())
    monkeypatch.setenv("ISDA_TRITON", "0")
    assert not kernels.usable(tensor)


@gpu
@pytest.mark.parametrize("decay", [1.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_update(shape, decay):
    check_update(shape, decay, "cuda")
    check_variances(shape, decay, "cuda")


@gpu
@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize(
    "shape", [*SHAPES, *WIDE, (64, 100, 342), (30, 200, 530), (150, 300, 129)], ids=str
)
def test_update_and_quadratic(shape, precision, monkeypatch):
    check_quadratic(shape, precision, "cuda")
    monkeypatch.setattr(sys.modules["isda.kernels.products"], "_COPIED", 10**6)  # some at a time
    check_quadratic(shape, precision, "cuda")


@gpu
@pytest.mark.parametrize("shape", [(23, 13, 5), (12, 40, 17), (30, 300, 70)], ids=str)
def test_some_classes_and_some_samples(shape, monkeypatch):
    check_quadratic(shape, "high", "cuda", first=4, part=7)
    monkeypatch.setattr(sys.modules["isda.kernels.products"], "_COPIED", 10**5)
    check_quadratic(shape, "high", "cuda", first=4, part=7)


@gpu
def test_many_samples():
    """As of dense predictions: sorted, and merged sixteen at a time."""
    for shape in ((5000, 7, 33), (3000, 4000, 5)):
        check_update(shape, 0.999, "cuda")
        check_variances(shape, 1.0, "cuda")
        check_quadratic(shape, "high", "cuda", first=1, part=9)


@gpu
def test_strides():
    check_strides("cuda")


@gpu
def test_padding():
    check_padding("cuda")


@gpu
def test_default_dtype():
    check_default_dtype("cuda")


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_screen(shape):
    check_screen(shape, "cuda")


@gpu
def test_tally():
    check_tally("cuda")


@gpu
@pytest.mark.parametrize("shape", [(1, 2, 1000), (1, 64, 3), (1, 10, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_differs(shape, dtype):
    check_differs(shape, dtype, "cuda")


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (9, 5000, 1)], ids=str)
def test_bound(shape, dtype):
    check_bound(shape, dtype, "cuda")


@gpu
@pytest.mark.parametrize("triton", ["1", "0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimator_on_a_gpu_and_on_a_cpu(dtype, triton, monkeypatch):
    monkeypatch.setenv("ISDA_TRITON", triton)
    estimators = [FullCovariance(70, 5, decay=0.9).to(device) for device in ("cpu", "cuda")]
    for seed in range(3):
        _, features, target, _ = draw((23, 5, 70), "cpu", seed=seed)
        for estimator, device in zip(estimators, ("cpu", "cuda"), strict=True):
            estimator.update(features.to(device, dtype), target.to(device))
    for left, right in zip(*(estimator.buffers() for estimator in estimators), strict=True):
        # float32 of squares of values below 20, averaged: a few times 400 · 2⁻²⁴
        torch.testing.assert_close(left, right.cpu(), rtol=0, atol=2e-4)


@gpu
def test_update_in_a_cuda_graph():
    """Captured once and replayed with other batches: other classes, other numbers of them."""
    shape = (23, 5, 70)
    eager, captured = (FullCovariance(70, 5, decay=0.9).cuda() for _ in range(2))
    _, features, target, _ = draw(shape, "cuda")
    captured.update(features, target)  # compiles the kernel
    for buffer in captured.buffers():
        buffer.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update(features, target)
    for seed in range(4):
        _, new_features, new_target, _ = draw(shape, "cuda", seed=seed)
        if seed == 2:
            new_target[:] = 3  # one class alone
        features.copy_(new_features)
        target.copy_(new_target)
        graph.replay()
        eager.update(new_features, new_target)
    for left, right in zip(captured.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-5)


def test_padding_that_is_not_there_is_not_written():
    """The last row of a copy may end with its last number."""
    pytest.importorskip("triton")
    whole = torch.zeros(3 * 5 * 16)
    layout = sys.modules["isda.kernels.covariances"].layout
    assert layout(whole.as_strided((3, 5, 5), (80, 16, 1))) == (16, 16)
    assert layout(whole[: 2 * 80 + 4 * 16 + 5].clone().as_strided((3, 5, 5), (80, 16, 1))) == (
        16,
        5,
    )
    assert layout(whole.as_strided((3, 5, 5), (80, 16, 1), 1)) == (16, 5)
    assert layout(torch.zeros(3, 5, 5)) == (5, 5)
    assert layout(torch.zeros(3, 7, 16)[..., :5]) == (16, 16)  # of products
    assert layout(torch.empty_strided((3, 7, 5), (112, 16, 1))) == (16, 5)
    with pytest.raises(ValueError, match="covariance must have rows that follow one another"):
        kernels.update(
            torch.zeros(3, dtype=torch.int64),
            torch.zeros(3, 5),
            torch.zeros(3, 16, 16)[:, :5, :5],  # between them, numbers of somebody else
            torch.zeros(2, 5),
            torch.zeros(2, dtype=torch.int64),
            1.0,
        )


@pytest.mark.parametrize("strength", [torch.ones(3), torch.ones((), requires_grad=True)])
def test_strengths_that_the_kernels_do_not_take(strength):
    assert not is_number(strength)
    assert is_number(0.5)
    assert is_number(torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize("target", [torch.zeros(4, dtype=torch.int64), torch.zeros(6).int()])
def test_targets_that_do_not_fit_the_logits(target):
    with pytest.raises(ValueError, match="target must be int64 class indices"):
        bound(torch.zeros(6, 5), None, target)


@gpu
@pytest.mark.parametrize("structure", ["full", "diagonal", "shared", "identity"])
@pytest.mark.parametrize("shape", [(7, 13, 5), (23, 5, 70)], ids=str)
def test_step_in_a_cuda_graph(structure, shape):
    """Update, loss and gradient, captured whole; the step count and λ grow with the replays."""
    _, classes, width = shape

    def make() -> tuple[ISDALoss, Tensor]:
        criterion = ISDALoss(width, classes, lambda_0=0.1, total_steps=3, covariance=structure)
        weight = reference.draw(*shape, dtype=torch.float32).weight.cuda() / width
        return criterion.cuda(), weight.requires_grad_()

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        x = reference.draw(*shape, seed=seed, dtype=torch.float32, device="cuda")
        return x.features, x.target

    def step(criterion: ISDALoss, weight: Tensor, features: Tensor, target: Tensor) -> Tensor:
        loss = criterion(features, weight, target)
        (gradient,) = torch.autograd.grad(loss, weight)
        return torch.cat([loss.detach().view(1), gradient.flatten()])

    criterion, weight = make()
    features, target = (tensor.clone() for tensor in batch(0))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(criterion, weight, features, target)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(criterion, weight, features, target)
    for buffer in criterion.buffers():
        buffer.zero_()
    eager, eager_weight = make()
    for seed in range(4):
        new_features, new_target = batch(seed)
        features.copy_(new_features)
        target.copy_(new_target)
        graph.replay()
        expected = step(eager, eager_weight, new_features, new_target)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert criterion.step == 4
    criterion.check()


@gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    """Offsets into the covariances must not overflow 32 bits."""
    classes, width = 40, 8192
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of GPU memory")
    estimator = FullCovariance(width, classes).cuda()
    features = torch.randn(16, width, device="cuda")
    target = torch.full((16,), classes - 1, device="cuda")
    estimator.update(features, target)
    expected = features.T.cov(correction=0)
    # float32: a mean of 16 products of values below 5
    torch.testing.assert_close(estimator.covariance[-1], expected, rtol=0, atol=1e-5)
    assert not estimator.covariance[:-1].any()
