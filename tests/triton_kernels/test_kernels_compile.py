"""The Triton kernels compile for GPUs that need not be here.

The interpreter does not see what the compiler refuses, such as a variable whose type changes.
"""

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from isda.functional import Moments

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the kernels run here", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from isda.experiments.networks import narrow_convolution_kernels
from isda.kernels import class_statistics, covariance_update, cuda, many_classes, products

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip


class Launch:
    """A kernel that was compiled, and its options."""

    def __init__(self, name: str, options: dict) -> None:
        self.name = name
        self.options = options


@pytest.fixture(params=[(90, 227 * 1024)], ids=["H100"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches that were compiled for a GPU, but not run."""
    capability, shared_memory = request.param
    found = []

    def compile_call(kernel, *args, grid, warmup, **options) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            name, value = parameter.name, values[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):  # as at a launch
                signature[name] = "constexpr"
                constants[place,] = False if name == "interpreted" else value
                continue
            kind = TYPES[value.dtype] if isinstance(value, Tensor) else type(value).__name__
            signature[name] = {"int": "i32", "float": "fp32"}.get(kind, kind)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[place,] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
        settings = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
        target = GPUTarget("cuda", capability, 32)
        result = triton.compile(source, target=target, options=settings)
        assert result.metadata.shared <= shared_memory
        found.append(Launch(kernel.fn.__name__, options))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_call)
    monkeypatch.setattr(products, "_shared_memory", lambda _: shared_memory - 32 * 1024)
    return found


def draw(samples: int, classes: int, width: int) -> tuple[Moments, Tensor, Tensor, Tensor]:
    covariance = torch.zeros(classes, width, -(-width // 16) * 16)[..., :width]
    count = torch.zeros(classes, dtype=torch.int64)
    moments = Moments(count, torch.zeros(classes, width), covariance)
    target = torch.arange(samples) % classes
    return moments, torch.zeros(samples, width), target, torch.zeros(classes, width)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize(
    "shape",
    [(5, 2, 1), (2, 3, 64), (64, 100, 342), (128, 200, 640), (9, 3, 1030), (5000, 3, 40)],
    ids=str,
)
def test_update_and_quadratic(shape, precision, launches):
    moments, features, target, weight = draw(*shape)
    cuda.update_(moments, features, target, 0.9)
    result = cuda.update_and_multiply_(moments, features, target, weight, 0.9, precision)
    cuda.quadratic_rows(weight, target, *result)
    cuda.weight_gradient(torch.zeros(shape[:2]), weight, target, *result[1:])
    cuda.update_(moments._replace(covariance=weight.clone()), features, target, 1.0)
    many = shape[0] > 2 * shape[1]  # samples of a class, which are merged by a kernel of their own
    assert [launch.name for launch in launches] == [
        "_class_statistics", "_update", "_class_statistics", *["_update"] * many, "_split",
        "_update_and_multiply", "_quadratic_rows", "_sum_gradients", "_weight_gradient",
        "_class_statistics",
    ]  # fmt: skip


@pytest.mark.parametrize("launches", [(86, 99 * 1024)], ids=["RTX 3090"], indirect=True)
@pytest.mark.parametrize(
    ("num_classes", "precision", "stages"),
    [(100, "high", 2), (100, "medium", 2), (200, "high", 1), (200, "medium", 3)],
)
def test_little_shared_memory(num_classes, precision, stages, launches):
    """The fused kernel fits, and is pipelined where it can be."""
    moments, _, target, weight = draw(8, num_classes, 520)
    cuda.multiply(moments.covariance, weight, target, precision)
    assert launches[-1].name == "_update_and_multiply"
    assert launches[-1].options["num_stages"] == stages


def test_the_other_kernels(launches):
    moments, features, target, weight = draw(20, 300, 130)
    index = cuda.screen(features.bfloat16(), target, 300, -100)
    step = torch.zeros((), dtype=torch.int64)
    index, scale, strength = cuda.count_step(step, step.clone(), index, 0.5, 100, 1, True)
    for precision in ("high", "medium"):
        found = class_statistics.class_statistics(target, 300)
        copies = torch.zeros(20, (3 if precision == "high" else 1) * 130, 130, dtype=torch.bfloat16)
        for count in (None, moments.count):
            covariance_update.launch_update(
                moments.covariance, found, found.classes, count, copies=copies
            )
        partial, product, own = cuda.empty_products(weight, 20, precision)
        many_classes._launch_squares(product, weight, found.classes, own, partial)
        many_classes.gradient_of_copies(torch.zeros(20, 300), product, own, found.classes)
    for logits in (torch.zeros(20, 300), torch.zeros(20, 5000, dtype=torch.bfloat16)):
        for quadratic, factor in ((torch.zeros(logits.shape), strength), (None, None)):
            for reduce in (True, False):
                inputs = (logits, quadratic, index, factor)
                loss, *saved = cuda.cross_entropy(*inputs, scale, -1, reduce)
                cuda.cross_entropy_backward(loss, *inputs, *saved, -1)
    assert {launch.name for launch in launches} == {
        "_screen", "_count_step", "_update", "_squares", "_both_sums", "_own_rows",
        "_cross_entropy", "_reduce",
        "_cross_entropy_backward", "_class_statistics",
    }  # fmt: skip


@pytest.mark.parametrize(
    "launches", [(90, 227 * 1024), (86, 99 * 1024)], ids=["H100", "RTX 3090"], indirect=True
)
@pytest.mark.parametrize("channels", [(16, 32), (32, 16), (64, 64)], ids=str)
def test_narrow_convolutions(channels, launches):
    inputs, outputs = channels
    images, grad = (
        torch.zeros(2, number, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        for number in channels
    )
    weight = torch.zeros(outputs, inputs, 3, 3)
    narrow_convolution_kernels.convolve(images, weight, transposed=False)
    narrow_convolution_kernels.convolve(grad, weight, transposed=True)
    narrow_convolution_kernels.weight_gradient(grad, images)
    names = [launch.name for launch in launches]
    assert names == ["_convolve", "_convolve", "_weight_gradient", "_sum_parts"]


def test_missing_padding_is_not_written():
    """The last row of a copy may end with its last element."""
    whole = torch.zeros(3 * 5 * 16)
    layout = covariance_update.row_layout
    assert layout(whole.as_strided((3, 5, 5), (80, 16, 1))) == (16, 16)
    short = whole[: 2 * 80 + 4 * 16 + 5].clone()
    assert layout(short.as_strided((3, 5, 5), (80, 16, 1))) == (16, 5)
    assert layout(whole.as_strided((3, 5, 5), (80, 16, 1), 1)) == (16, 5)
    assert layout(torch.zeros(3, 5, 5)) == (5, 5)
    assert layout(torch.zeros(3, 7, 16)[..., :5]) == (16, 16)  # of products
    assert layout(torch.empty_strided((3, 7, 5), (112, 16, 1))) == (16, 5)
    moments, features, target, _ = draw(2, 3, 5)
    strided = moments._replace(covariance=torch.zeros(3, 16, 16)[:, :5, :5])
    with pytest.raises(ValueError, match="covariance must be contiguous, or padded along its last"):
        cuda.update_(strided, features, target, 1.0)
