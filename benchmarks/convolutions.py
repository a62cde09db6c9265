"""Time of 3×3 convolutions with few channels: cuDNN against the Triton kernels.

    python benchmarks/convolutions.py --out convolutions.csv
    python benchmarks/convolutions.py --table convolutions.csv

measures the three stages of the CIFAR ResNets in bfloat16: output, gradient of the images and
gradient of the weight, in µs. Calls are captured in a CUDA graph, as in training, and use several
sets of tensors in turn.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import read_lines, write_rows
from timing import seconds_per_call, side_stream
from torch import Tensor
from torch.nn import functional as F

from isda.experiments.errors import InputError
from isda.experiments.report.text import markdown_rows
from isda.experiments.training.environment import environment

STAGES = ((16, 32), (32, 16), (64, 8))  # channels, height and width
ROUNDS = 6  # over all sets of tensors, in a graph
REPEATS = 20


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--table", type=Path, help="print a CSV file as a Markdown table and exit")
    arguments = parser.parse_args(words)
    if arguments.table:
        try:
            print(markdown(read_lines(arguments.table, "cudnn", "triton")))
        except InputError as error:
            parser.error(str(error))
        return
    if arguments.batch_size < 1:
        parser.error(f"--batch-size must be >= 1, got {arguments.batch_size}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    torch.backends.cudnn.benchmark = True
    rows = [row for stage in STAGES for row in measure(arguments.batch_size, *stage)]
    print(markdown(rows))
    if arguments.out:
        write_rows(arguments.out, rows)


def measure(batch_size: int, channels: int, size: int) -> list[dict[str, Any]]:
    """A row for each result of a convolution."""
    from isda.experiments.networks.narrow_convolution_kernels import convolve, weight_gradient

    inputs = [draw(batch_size, channels, size) for _ in range(4)]
    # in training, the rounding of all weights is one kernel
    rounded = [(images, weight.bfloat16(), grad) for images, weight, grad in inputs]
    functions: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "output": (
            lambda images, weight, grad: F.conv2d(images, weight, padding=1),
            lambda images, weight, grad: convolve(images, weight, transposed=False),
        ),
        "gradient of the images": (
            lambda images, weight, grad: backward(images, weight, grad, 0),
            lambda images, weight, grad: convolve(grad, weight, transposed=True),
        ),
        "gradient of the weight": (
            lambda images, weight, grad: backward(images, weight, grad, 1),
            lambda images, weight, grad: weight_gradient(grad, images),
        ),
    }
    return [
        {
            "batch_size": batch_size,
            "channels": channels,
            "size": size,
            "result": result,
            "cudnn": microseconds(cudnn, rounded),
            "triton": microseconds(triton, inputs),
            **environment(torch.device("cuda")),
        }
        for result, (cudnn, triton) in functions.items()
    ]


def draw(batch_size: int, channels: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, weight, and the gradient of the output."""
    shape = (batch_size, channels, size, size)
    images, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(channels, channels, 3, 3, device="cuda")
    layout = torch.channels_last
    return tuple(tensor.contiguous(memory_format=layout) for tensor in (images, weight, grad))  # type: ignore[return-value]


def backward(images: Tensor, weight: Tensor, grad: Tensor, which: int) -> Tensor:
    """Gradient of the images (0) or of the weight (1) by cuDNN."""
    wanted = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward(
        grad, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
    )[which]


def microseconds(
    function: Callable[..., Tensor], inputs: list[tuple[Tensor, Tensor, Tensor]]
) -> float:
    """Time of a call, with each of the inputs in turn."""
    calls: list[Callable[[], object]] = [partial(function, *each) for each in inputs]
    with side_stream("cuda"):
        for call in calls:  # compile, and select kernels
            call()
        return round(1e6 * seconds_per_call(calls * ROUNDS, "cuda", repeat=REPEATS), 2)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, in µs."""
    header = ["channels", "pixels", "result", "cuDNN", "Triton"]
    cells = [
        [str(row["channels"]), f"{row['size']}×{row['size']}", row["result"]]
        + [f"{float(row[name]):.1f}" for name in ("cudnn", "triton")]
        for row in rows
    ]
    return markdown_rows(header, cells, left=(2,), pad=False)


if __name__ == "__main__":
    main()
