"""Time and memory of each piece of the loss layer on a GPU, compared with a memory-bandwidth floor.

The floor of a piece is the time to read its inputs once and write its outputs once at the bandwidth
of a copy, which is measured first. Statistics that fit into the GPU's cache can be faster, and so
can an update that reads one half of a symmetric covariance. Each piece is measured with the kernels
of :mod:`isda.kernels` and with plain torch (``ISDA_TRITON=0``), captured in a CUDA graph of several
batches. torch's cross entropy is the reference for the loss; both take bfloat16 logits.

The "eager" rows measure the line of a training script, in float32 and including the last layer: an
attached criterion, the same with ``torch.compile(mode="reduce-overhead")`` ("compiled"), cross
entropy and, with ``--peer``, your local copies of the authors' files. On a CPU there are no
kernels, and calls are timed without a graph.

    python benchmarks/kernels.py --out kernels.csv --plot kernels.png
    python benchmarks/kernels.py --table kernels.csv
"""

import argparse
import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from authors import peer_loss, peer_structure
from device import extra_device_memory, out_of_memory, require_device
from kernels_table import COMPILED, FLOORED, Row, Shape, draw, line, markdown
from rows import read_rows, write_rows
from timing import Call, is_gpu, seconds_per_call, side_stream
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda import ops
from isda.experiments.training.environment import environment

__all__ = ["copy_bandwidth", "floor_bytes", "main", "measure"]

Batch = tuple[Tensor, Tensor]  # features (N, A), target (N,)
Loss = Callable[[Tensor, Tensor], Tensor]

SHAPES: tuple[Shape, ...] = (
    (128, 100, 64, "full"),
    (64, 100, 128, "full"),
    (64, 100, 342, "full"),
    (64, 100, 448, "full"),
    (128, 100, 512, "full"),
    (128, 100, 640, "full"),
    (128, 10, 640, "full"),
    (128, 100, 1024, "full"),
    (64, 100, 2190, "full"),
    (256, 1000, 1024, "diagonal"),
    (256, 1000, 2048, "diagonal"),
    (256, 1000, 2048, "full"),
)
EAGER = ("loss, eager", COMPILED, "cross entropy, eager")
PIECES = (*FLOORED, "quadratic backward", "loss", "cross entropy", *EAGER)
BATCHES = 8  # different ones, taken in turn
EAGER_STEPS = 50  # in a row, without waiting for the device in between
COPIED = {"cuda": 2**28, "cpu": 2**22}  # float32 numbers of the copy that gives the bandwidth


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = _parse(arguments)
    if options.table:
        rows = read_rows(options.table, Row)
        print(markdown(rows))
    else:
        rows = []
        peers = {peer_structure(path): path for path in options.peer}
        for row in _cases(options, peers):
            measure(row, options.device, repeat=options.repeat, peer=peers.get(row.structure))
            rows.append(row)
            print(line(row), flush=True)
            if options.out:
                write_rows(options.out, [dataclasses.asdict(row)], append=True)
    if options.plot:
        if not any(row.floor_multiple for row in rows):
            sys.exit(f"nothing to draw: no numbers for {', '.join(FLOORED)}")
        draw(rows, options.plot)


def copy_bandwidth(device: str, *, repeat: int) -> float:
    """Bandwidth of a copy on the device in GB/s, reads plus writes.

    Uses a kernel, because the copy that CUDA provides is slower on some GPUs.
    """
    with side_stream(device):
        source = torch.zeros(COPIED[torch.device(device).type], device=device)
        copy = partial(torch.add, source, 0, out=torch.empty_like(source))
        copy()
        return 2 * source.nbytes / seconds_per_call([copy], device, repeat=repeat) / 1e9


def floor_bytes(piece: str, shape: Shape, touched: float) -> float | None:
    """Bytes that a piece must read and write at least, for ``touched`` classes in the batch."""
    n, c, a, structure = shape
    state = a * a if structure == "full" else a  # numbers of Σ of a class
    merge = 2 * touched * (state + 2 * a) + n * a  # Σ and float64 mean, both ways; features
    result = c * a + n * c  # weight; quadratic term
    numbers = {
        "update": merge,
        "quadratic": touched * state + result,
        "update and quadratic": merge + result,
    }
    return 4 * numbers[piece] if piece in numbers else None


def measure(row: Row, device: str, *, repeat: int, peer: Path | None = None) -> None:
    """Measure a row and fill in its numbers."""
    try:
        seconds, touched, extra = _measured(row, device, repeat, peer)
        row.microseconds = round(1e6 * seconds, 2)
        row.extra_mebibytes = None if extra is None else round(extra / 2**20, 2)
        row.floor_bytes = floor_bytes(row.piece, row.shape, touched)
        if row.floor_bytes is not None and row.copy_gigabytes_per_second is not None:
            at_floor = row.floor_bytes / row.copy_gigabytes_per_second / 1e9
            row.bandwidth_share = round(at_floor / seconds, 4)
            row.floor_multiple = round(seconds / at_floor, 3)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        row.note = "does not fit in memory"
    gc.collect()
    if is_gpu(device):
        torch.cuda.empty_cache()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    def shape(text: str) -> Shape:
        n, c, a, structure = text.split(",")
        if min(int(n), int(c) - 1, int(a)) < 1 or structure not in ("full", "diagonal"):
            raise ValueError(text)
        return int(n), int(c), int(a), structure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", help="cuda or cpu (default: cuda)")
    add("--shapes", type=shape, nargs="+", default=SHAPES, metavar="N,C,A,STRUCTURE")
    add("--pieces", nargs="+", choices=PIECES, default=PIECES, help="default: all")
    add(
        "--precision",
        choices=("high", "medium"),
        default="high",
        help="of the products with full covariances (default: high)",
    )
    add("--repeat", type=int, default=10, help="timed series per case (default: 10)")
    add(
        "--peer",
        type=Path,
        nargs="+",
        default=[],
        help="also measure local copies of the authors' files",
    )
    add("--out", type=Path, help="CSV file to append to")
    add("--plot", type=Path, help="image to write, and its dark form")
    add("--table", type=Path, metavar="CSV", help="do not measure; print this CSV file as Markdown")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat must be >= 1, got {options.repeat}")
    for path in filter(None, (*options.peer, options.table)):
        if not path.is_file():
            parser.error(f"no such file: {path}")
    cuda = not options.table and require_device(parser, options.device)
    if options.peer and not cuda:
        parser.error("--peer needs --device cuda: the authors' files put their state on a GPU")
    return options


def _cases(options: argparse.Namespace, peers: Collection[str]) -> Iterator[Row]:
    """Rows to be measured; measures the bandwidth of a copy first."""
    gigabytes = round(copy_bandwidth(options.device, repeat=options.repeat), 1)
    print(f"a copy moves {gigabytes} GB/s", flush=True)
    gpu = is_gpu(options.device)
    device = torch.cuda.get_device_name(options.device) if gpu else options.device
    commit = environment(options.device)["commit"] or ""
    with _kernels(True):
        usable = ops.uses_triton(torch.empty(0, device=options.device))
    for n, c, a, structure in options.shapes:
        precision = options.precision if structure == "full" else ""
        for piece in options.pieces:
            forms = ["kernels"] * (not piece.startswith("cross entropy"))
            forms += ["functional form"] * (piece != COMPILED)
            forms += ["authors' file"] * (piece == "loss, eager" and structure in peers)
            for form in forms:
                row = Row(device, torch.__version__, piece, form, n, c, a, structure, precision)
                row.copy_gigabytes_per_second, row.commit = gigabytes, commit
                row.note = "none here" if form == "kernels" and not usable else ""
                yield row


def _measured(
    row: Row, device: str, repeat: int, peer: Path | None
) -> tuple[float, float, int | None]:
    """Seconds per call, mean number of classes in a batch, and extra bytes on a GPU."""
    torch.manual_seed(0)
    with _kernels(row.form == "kernels"), side_stream(device):
        with torch.device(device):
            batches = [
                (torch.randn(row.N, row.A), torch.randint(row.C, (row.N,))) for _ in range(BATCHES)
            ]
            calls = _create_calls(row, batches, peer)
        for call in calls:  # compiles kernels
            call()
        extra = extra_device_memory(calls[0]) if is_gpu(device) else None
        if row.piece in EAGER:
            calls = [calls[step % BATCHES] for step in range(EAGER_STEPS)]
        # the plain form of full covariances asks the host for the classes of the batch
        plain = (row.form, row.structure) == ("functional form", "full")
        capture = not (row.piece in EAGER or (plain and row.piece != "cross entropy"))
        seconds = seconds_per_call(calls, device, repeat=repeat, capture=capture)
    return seconds, statistics.mean(len(target.unique()) for _, target in batches), extra


def _create_calls(row: Row, batches: list[Batch], peer: Path | None) -> list[Call]:
    """One call of the piece for each batch; the statistics already include all batches."""
    head = nn.Linear(row.A, row.C)
    if row.piece == "cross entropy":
        return [partial(_cross_entropy, _leaf(head(x).bfloat16()), y) for x, y in batches]
    if row.piece == "cross entropy, eager":
        return [partial(_line_of_script, F.cross_entropy, head, _leaf(x), y) for x, y in batches]
    if row.form == "authors' file":
        assert peer is not None
        theirs = peer_loss(peer, head)
        return [partial(_gradients, theirs, head, _leaf(x), y) for x, y in batches]
    estimator: isda.Covariance = (
        isda.FullCovariance(
            row.A, row.C, precision="medium" if row.precision == "medium" else "high"
        )
        if row.structure == "full"
        else isda.DiagonalCovariance(row.A, row.C)
    )
    for x, y in batches:
        estimator.update(x, y)
    if row.piece.startswith("loss"):
        ours = isda.ISDALoss(row.A, row.C, total_steps=10_000, covariance=estimator)
        if row.piece in EAGER:
            attached: Loss = isda.attach(head, ours)
            if row.piece == COMPILED:
                attached = torch.compile(attached, mode="reduce-overhead")
            return [partial(_line_of_script, attached, head, _leaf(x), y) for x, y in batches]
        return [
            partial(_loss, ours, x, head.weight, y, _leaf(head(x).bfloat16())) for x, y in batches
        ]
    weight, gradient = head.weight.detach(), torch.randn(row.N, row.C)
    if row.piece == "update":
        return [partial(estimator.update, x, y) for x, y in batches]
    if row.piece == "quadratic":
        return [partial(estimator.quadratic, weight, y) for _, y in batches]
    if row.piece == "update and quadratic":
        return [partial(_update_and_quadratic, estimator, x, y, weight) for x, y in batches]
    results = [estimator.quadratic(head.weight, y) for _, y in batches]
    backward = partial(torch.autograd.grad, grad_outputs=gradient, retain_graph=True)
    return [partial(backward, result, head.weight) for result in results]


def _update_and_quadratic(
    estimator: isda.Covariance, features: Tensor, target: Tensor, weight: Tensor
) -> Tensor:
    """As in a call of the loss: with full covariances in one pass."""
    if isinstance(estimator, isda.FullCovariance):
        return ops.update_and_quadratic(
            estimator.moments, features, target, weight, estimator.decay, estimator.precision
        )
    estimator.update(features, target)
    return estimator.quadratic(weight, target)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _cross_entropy(logits: Tensor, target: Tensor) -> None:
    torch.autograd.grad(F.cross_entropy(logits.float(), target), logits)


def _loss(
    criterion: isda.ISDALoss, features: Tensor, weight: Tensor, target: Tensor, logits: Tensor
) -> None:
    value = criterion(features, weight, target, logits=logits)
    torch.autograd.grad(value, (logits, weight))


def _line_of_script(criterion: Loss, head: nn.Linear, features: Tensor, target: Tensor) -> None:
    _gradients(lambda x, y: criterion(head(x), y), head, features, target)


def _gradients(loss: Loss, head: nn.Linear, features: Tensor, target: Tensor) -> None:
    torch.autograd.grad(loss(features, target), (features, head.weight, head.bias))


@contextmanager
def _kernels(on: bool) -> Iterator[None]:
    """Enable or disable the Triton kernels temporarily."""
    before = ops._ENABLED
    ops._ENABLED = on and before
    try:
        yield
    finally:
        ops._ENABLED = before


if __name__ == "__main__":
    main()
