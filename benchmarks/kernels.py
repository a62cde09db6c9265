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
import csv
import dataclasses
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loss import (
    extra_device_memory,
    out_of_memory,
    peer_loss,
    peer_structure,
    read_rows,
    require_device,
    three_digits,
)
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda import ops
from isda.experiments.training.environment import environment

__all__ = ["Row", "copy_bandwidth", "draw", "floor_bytes", "main", "markdown", "measure"]

Shape = tuple[int, int, int, str]  # N, C, A and the structure of the covariance
Batch = tuple[Tensor, Tensor]  # features (N, A), target (N,)
Call = Callable[[], object]
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
FLOORED = ("update", "quadratic", "update and quadratic")  # pieces that have a floor
COMPILED = "loss, compiled"
EAGER = ("loss, eager", COMPILED, "cross entropy, eager")
PIECES = (*FLOORED, "quadratic backward", "loss", "cross entropy", *EAGER)
COLOURS = {"kernels": "#2a6f97", "functional form": "#e07a5f"}
BATCHES = 8  # different ones, taken in turn
EAGER_STEPS = 50  # in a row, without waiting for the device in between
LONG_ENOUGH = 0.02  # seconds of replays in a row
PATIENCE = 1.0  # seconds after which a slow case is not repeated further than three times
COPIED = {"cuda": 2**28, "cpu": 2**22}  # float32 numbers of the copy that gives the bandwidth


@dataclasses.dataclass
class Row:
    """One line of the CSV: a case and, once measured, its numbers."""

    device: str
    torch: str
    piece: str  # one of PIECES
    form: str  # "kernels", "functional form" or "authors' file"
    N: int
    C: int
    A: int
    structure: str  # of the covariance
    precision: str  # of the products of full covariances
    copy_gigabytes_per_second: float | None = None
    microseconds: float | None = None  # of one call
    floor_bytes: float | None = None  # mean over the batches
    bandwidth_share: float | None = None  # of the copy's: floor_bytes in this time
    floor_multiple: float | None = None  # this time, where the floor's is 1
    extra_mebibytes: float | None = None  # peak of one call above what is held before it
    note: str = ""  # what is amiss
    commit: str = ""  # of torch-isda

    @property
    def shape(self) -> Shape:
        return self.N, self.C, self.A, self.structure


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
            print(_line(row), flush=True)
            if options.out:
                _append(options.out, row)
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
    if _on_gpu(device):
        torch.cuda.empty_cache()


def markdown(rows: list[Row]) -> str:
    """Markdown tables of the pieces and of the losses; the last of several equal rows counts."""
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        shape, structure = f"{row.N}, {row.C}, {row.A}", f"{row.structure} {row.precision}".strip()
        found.setdefault((shape, structure), {})[row.piece, row.form] = row
    tables = [_pieces_table(found), _losses_table(found)]
    return "\n\n".join("\n".join(table) for table in tables if len(table) > 2)


def _pieces_table(found: dict[tuple[str, str], dict[tuple[str, str], Row]]) -> list[str]:
    """Lines of the table of pieces that have a floor."""
    head = ["N, C, A", "covariance", "piece", "read and written once", "kernels"]
    head += ["of copy bandwidth", "× floor", "functional form", "÷ kernels"]
    table = [f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * (len(head) - 3)]
    for key, cells in found.items():
        for piece in FLOORED:
            fast, plain = cells.get((piece, "kernels")), cells.get((piece, "functional form"))
            either = fast or plain
            if either is None:
                continue
            moved = f"{three_digits(either.floor_bytes / 1e6)} MB" if either.floor_bytes else ""
            share = f"{100 * fast.bandwidth_share:.0f} %" if fast and fast.bandwidth_share else ""
            ratio = ""
            if fast and plain and fast.microseconds and plain.microseconds:
                ratio = f"{plain.microseconds / fast.microseconds:.1f}×"
            line = [*key, piece, moved, _cell(fast), share, _multiple(fast), _cell(plain), ratio]
            table.append(f"| {' | '.join(line)} |")
    return table


def _losses_table(found: dict[tuple[str, str], dict[tuple[str, str], Row]]) -> list[str]:
    """Lines of the table of losses, one for each shape."""
    columns = {
        "backward of the quadratic term": ("quadratic backward", "kernels"),
        "loss": ("loss", "kernels"),
        "cross entropy": ("cross entropy", "functional form"),
        "loss, eager": ("loss, eager", "kernels"),
        "loss, compiled": (COMPILED, "kernels"),
        "cross entropy, eager": ("cross entropy, eager", "functional form"),
        "functional form, eager": ("loss, eager", "functional form"),
        "authors' file, eager": ("loss, eager", "authors' file"),
    }
    used = [
        title for title, case in columns.items() if any(case in cells for cells in found.values())
    ]
    table = [
        f"| {' | '.join(['N, C, A', 'covariance', *used])} |",
        "|---|---|" + "---:|" * len(used),
    ]
    for key, cells in found.items():
        line = [_cell(cells.get(columns[title])) for title in used]
        if any(line):
            table.append(f"| {' | '.join([*key, *line])} |")
    return table


def draw(rows: list[Row], path: Path) -> None:
    """Plot multiples of the floor on logarithmic axes, with a panel for each piece.

    The plot is 7 inches wide, a column of text. ``NAME-dark`` beside it is for dark backgrounds.
    """
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    for ink, file in {"#24292f": path, "#d7dde3": path.with_stem(f"{path.stem}-dark")}.items():
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style: Any = dict.fromkeys(names, ink) | {"font.size": 8, "svg.hashsalt": "isda"}
        with matplotlib.rc_context(style):
            figure = _figure([row for row in rows if row.floor_multiple], ink)
            metadata = {"Date": None} if file.suffix == ".svg" else None
            figure.savefig(file, dpi=150, transparent=True, metadata=metadata)


def _figure(rows: list[Row], ink: str) -> Any:
    from matplotlib.figure import Figure

    pieces = [piece for piece in FLOORED if any(row.piece == piece for row in rows)]
    shapes = list(dict.fromkeys((*row.shape, row.precision) for row in rows))
    figure = Figure(figsize=(7, 1.2 + 0.24 * len(shapes)), layout="constrained")
    panels = figure.subplots(1, len(pieces), sharex=True, sharey=True, squeeze=False)[0]
    for panel, piece in zip(panels, pieces, strict=True):
        for form, colour in COLOURS.items():
            found = {  # multiple of the floor, by its line
                shapes.index((*row.shape, row.precision)): row.floor_multiple
                for row in rows
                if (row.piece, row.form) == (piece, form)
            }
            panel.plot(found.values(), found.keys(), "o", markersize=4, color=colour, label=form)
            for place, multiple in found.items():
                if form == "kernels":
                    text, offset = three_digits(multiple), (5, 0)
                    panel.annotate(
                        text, (multiple, place), offset, textcoords="offset points", va="center"
                    )
        panel.axvline(1, color=ink, linewidth=0.8, zorder=0)
        panel.set_xscale("log")
        panel.margins(x=0.1)
        panel.set_title(piece, loc="left", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    ticks = [" ".join((f"{n}, {c}, {a}", *rest)).strip() for n, c, a, *rest in shapes]
    panels[0].set_yticks(range(len(shapes)), ticks)
    panels[0].invert_yaxis()
    handles, titles = panels[0].get_legend_handles_labels()
    figure.legend(handles, titles, frameon=False, ncols=2, loc="outside upper right")
    figure.supxlabel("multiple of the floor (the line), all read once and written once", fontsize=9)
    return figure


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
    gpu = _on_gpu(options.device)
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
        extra = extra_device_memory(calls[0]) if _on_gpu(device) else None
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


def seconds_per_call(calls: list[Call], device: str, *, repeat: int, capture: bool = True) -> float:
    """Median seconds per call over several series; on a GPU, each series replays a CUDA graph."""
    series = partial(_run, calls, device)
    if _on_gpu(device) and capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in calls:
                call()
        _replay(graph, 3)
        number = min(max(math.ceil(LONG_ENOUGH / _replay(graph, 1)), 1), 200)
        series = partial(_replay, graph, number)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < repeat and (len(times) < 3 or time.perf_counter() - began < PATIENCE):
        times.append(series())
    return statistics.median(times) / len(calls)


def _replay(graph: torch.cuda.CUDAGraph, number: int) -> float:
    """Mean seconds per replay of a number of consecutive replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(number):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / number


def _run(calls: list[Call], device: str) -> float:
    """Seconds until the device has finished all calls."""
    wait = torch.cuda.synchronize if _on_gpu(device) else lambda: None
    wait()
    began = time.perf_counter()
    for call in calls:
        call()
    wait()
    return time.perf_counter() - began


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def side_stream(device: str) -> AbstractContextManager[object]:
    """A side stream, which can be captured; the backward pass runs on the same stream."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if _on_gpu(device) else nullcontext()


@contextmanager
def _kernels(on: bool) -> Iterator[None]:
    """Enable or disable the Triton kernels temporarily."""
    before = ops._ENABLED
    ops._ENABLED = on and before
    try:
        yield
    finally:
        ops._ENABLED = before


def _append(path: Path, row: Row) -> None:
    """Append a row to a CSV file at once, so that it is kept if a later row fails."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        values = dataclasses.asdict(row)
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(values)


def _line(row: Row) -> str:
    shape = f"{row.N}, {row.C}, {row.A} {row.structure} {row.precision}"
    floor = f"{_multiple(row)} x floor" if row.floor_multiple else ""
    return f"{shape:<28} {row.piece:<21} {row.form:<16} {_cell(row):<24} {floor}".rstrip()


def _cell(row: Row | None) -> str:
    if row is None or row.microseconds is None:
        return row.note if row else ""
    # what a graph holds is not seen
    known = row.extra_mebibytes is not None and row.piece != COMPILED
    memory = f", {three_digits(row.extra_mebibytes)} MiB" if known else ""
    return f"{three_digits(row.microseconds)} µs{memory}{row.note and f' ({row.note})'}"


def _multiple(row: Row | None) -> str:
    return three_digits(row.floor_multiple) if row and row.floor_multiple else ""


if __name__ == "__main__":
    main()
