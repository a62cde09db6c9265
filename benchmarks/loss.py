"""Time and extra memory of the loss layer: statistics, forward and backward of one batch.

The forms are "ce" (torch's cross entropy), "library" (:class:`isda.ISDALoss`), "direct" (the
equations of the paper written down one by one, with tensors of shape (N, C, A) and (N, A, A)) and,
on request, "peer" (your local copy of the authors' ``ISDA.py`` or ``ISDA_imagenet.py``). Every case
runs in a process of its own.

    python benchmarks/loss.py --out results/benchmarks/loss_cpu.csv
    python benchmarks/loss.py --table results/benchmarks/loss_cpu.csv
"""

import argparse
import csv
import importlib.util
import inspect
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from direct import DirectLoss
from torch import Tensor, nn
from torch.nn import functional as F

import isda

__all__ = ["Case", "Row", "draw", "main", "markdown", "measure", "read"]

STRUCTURES = ("full", "diagonal", "shared", "identity")
SHAPES = ((128, 10, 64), (128, 100, 640), (64, 100, 2190), (256, 1000, 2048))
LARGEST_STATE = 2**31  # elements of Σ; beyond it (ImageNet's C = 1000) only diagonals are timed
PATIENCE = 30.0  # seconds after which a slow case is not repeated further than three times
FORMS = {  # title and colour
    "ce": ("cross entropy", "#9aa5b1"),
    "library": ("torch-isda", "#2a6f97"),
    "direct": ("direct form", "#e07a5f"),
    "peer": ("authors' file", "#6d597a"),
}


@dataclass(frozen=True)
class Case:
    """What is timed."""

    device: str
    form: str  # "ce", "library", "direct" or "peer"
    structure: str  # of the covariance; "none" for cross entropy
    shape: tuple[int, int, int]  # N, C, A
    threads: int
    repeat: int
    peer: Path | None = None


@dataclass
class Row:
    """One line of the CSV."""

    device: str
    form: str
    structure: str
    N: int
    C: int
    A: int
    milliseconds: float | None  # median of the repeats
    extra_mebibytes: float | None  # peak of one step above what is held before it
    torch: str
    threads: int
    note: str  # why there is no number


def measure(case: Case) -> Row:
    """Time and extra memory of a case; to be called in a fresh process."""
    torch.set_num_threads(case.threads)
    cuda = torch.device(case.device).type == "cuda"
    milliseconds = extra = None
    note = ""
    _create_step(case, (4, 3, 5))()  # loads the libraries and starts the threads
    if not cuda:
        _limit_memory()
    try:
        step = _create_step(case, case.shape)
        extra = (_extra_device_memory if cuda else _extra_host_memory)(step) / 2**20
        milliseconds = 1e3 * statistics.median(_times(step, case.repeat, cuda))
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        milliseconds, note = None, "does not fit in memory"
    return _row(case, milliseconds, extra, note)


def read(path: Path) -> list[Row]:
    """Rows of a CSV that this script has written."""

    def parse(name: str, text: str) -> Any:
        if name in ("N", "C", "A", "threads"):
            return int(text)
        if name in ("milliseconds", "extra_mebibytes"):
            return float(text) if text else None
        return text

    with path.open(newline="") as file:
        return [
            Row(**{name: parse(name, text) for name, text in line.items()})
            for line in csv.DictReader(file)
        ]


def markdown(rows: list[Row]) -> str:
    """Table for a page: a line for each shape and structure, a column for each form."""
    forms = [form for form in FORMS if _only(rows, form=form)]
    lines = [
        f"| N, C, A | covariance | {' | '.join(FORMS[form][0] for form in forms)} | "
        "direct ÷ torch-isda |",
        "|---|---|" + "---|" * (len(forms) + 1),
    ]
    for (*shape, structure), group in _groups(rows):
        cells = []
        for form in forms:
            found = _only(group, form=form)
            cells.append(_cell(found[0]) if found else "")
        ratio = _ratio(_only(group, form="direct"), _only(group, form="library"))
        shown = ", ".join(map(str, shape))
        lines.append(f"| {shown} | {structure} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Bar chart of times and extra memory, on logarithmic axes."""
    from matplotlib.figure import Figure

    groups = _groups(rows)
    figure = Figure(figsize=(2.5 + 0.75 * len(groups), 6.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, quantity, heading in zip(
        panels,
        ("milliseconds", "extra_mebibytes"),
        ("milliseconds a step", "extra mebibytes at the peak"),
        strict=True,
    ):
        for position, (form, (title, colour)) in enumerate(FORMS.items()):
            values = [
                (place, value)
                for place, (_, group) in enumerate(groups)
                for row in _only(group, form=form)
                if (value := getattr(row, quantity)) is not None
            ]
            if values:
                places, heights = zip(*values, strict=True)
                panel.bar(
                    [place + 0.2 * (position - 1.5) for place in places],
                    heights,
                    0.2,
                    color=colour,
                    label=title,
                )
        panel.set_yscale("log")
        panel.set_title(heading, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    panels[1].set_xticks(
        range(len(groups)),
        [f"{structure}\n{n}, {c}, {a}" for (n, c, a, structure), _ in groups],
        rotation=60,
        fontsize=8,
    )
    panels[0].legend(frameon=False, fontsize=8, ncols=4)
    figure.supxlabel("covariance and N, C, A", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = _parse(arguments)
    if options.table:
        rows = read(options.table)
        print(markdown(rows))
        if options.plot:
            draw(rows, options.plot)
        return
    rows = []
    for case in _cases(options):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
            try:
                row = executor.submit(measure, case).result()
            except BrokenProcessPool:
                row = _row(case, None, None, "killed: does not fit in memory")
        if not rows:
            print(f"{'form':<8} {'covariance':<10} {'N, C, A':<16} {'ms':>10} {'extra MiB':>10}")
        shown = ", ".join(map(str, case.shape))
        time_text, memory_text = _number(row.milliseconds), _number(row.extra_mebibytes)
        print(
            f"{row.form:<8} {row.structure:<10} {shown:<16} {time_text:>10} {memory_text:>10}"
            f"{'  ' + row.note if row.note else ''}",
            flush=True,
        )
        rows.append(row)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        draw(rows, options.plot or options.out.with_suffix(".png"))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    def shape(text: str) -> tuple[int, ...]:
        sizes = tuple(int(part) for part in text.split(","))
        if len(sizes) != 3 or min(sizes) < 1:
            raise ValueError(text)
        return sizes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--repeat", type=int, default=20, help="steps timed per case (default: 20)")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on a CPU")
    add("--shapes", type=shape, nargs="+", default=SHAPES, metavar="N,C,A", help="sizes to time")
    add("--structures", nargs="+", choices=STRUCTURES, default=STRUCTURES, help="of the covariance")
    add("--peer", type=Path, help="local copy of the authors' ISDA.py or ISDA_imagenet.py to time")
    add("--out", type=Path, help="CSV to write; a plot is drawn beside it")
    add("--plot", type=Path, help="PNG to draw, if not beside --out")
    add("--table", type=Path, metavar="CSV", help="time nothing: print this CSV as markdown")
    options = parser.parse_args(arguments)
    if options.repeat < 1 or options.threads < 1:
        parser.error("--repeat and --threads must be >= 1")
    if options.peer and torch.device(options.device).type != "cuda":
        parser.error("--peer needs --device cuda: the authors' file puts its state on a GPU")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch finds none")
    for path in filter(None, (options.peer, options.table)):
        if not path.is_file():
            parser.error(f"no such file: {path}")
    return options


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    peer_structure = _peer_structure(options.peer) if options.peer else None
    for n, c, a in options.shapes:
        wanted = [("ce", "none")]
        for structure in options.structures:
            if structure == "diagonal" or c * a * a <= LARGEST_STATE:
                wanted += [("library", structure), ("direct", structure)]
                wanted += [("peer", structure)] * (structure == peer_structure)
        for form, structure in wanted:
            yield Case(
                options.device,
                form,
                structure,
                (n, c, a),
                options.threads,
                options.repeat,
                options.peer,
            )


def _create_step(case: Case, shape: tuple[int, int, int]) -> Callable[[], None]:
    """One training step of the loss layer on a fixed random batch."""
    n, c, a = shape
    torch.manual_seed(0)
    features = torch.randn(n, a).to(case.device).requires_grad_()
    target = torch.randint(c, (n,)).to(case.device)
    head = nn.Linear(a, c).to(case.device)
    if case.form == "peer":
        assert case.peer is not None
        compute = _peer_loss(case.peer, features, target, head)
    else:
        compute = _loss(case, features, target, head)

    def step() -> None:
        features.grad = None
        head.zero_grad(set_to_none=True)
        compute().backward()

    return step


def _loss(case: Case, features: Tensor, target: Tensor, head: nn.Linear) -> Callable[[], Tensor]:
    if case.form == "ce":
        return lambda: F.cross_entropy(F.linear(features, head.weight, head.bias), target)
    create: Callable[..., nn.Module] = {"library": isda.ISDALoss, "direct": DirectLoss}[case.form]
    criterion = create(
        head.in_features, head.out_features, lambda_0=0.5, covariance=case.structure
    ).to(case.device)
    for buffer in criterion.buffers():
        buffer.add_(0)  # zeros take up no memory before they are written to
    return lambda: criterion(features, head.weight, target, bias=head.bias, progress=0.5)


def _peer_loss(
    path: Path, features: Tensor, target: Tensor, head: nn.Linear
) -> Callable[[], Tensor]:
    criterion = _load(path).ISDALoss(head.in_features, head.out_features)
    if "fc" in inspect.signature(criterion.forward).parameters:  # ISDA.py
        return lambda: criterion(nn.Identity(), head, features, target, 0.25)[0]

    class Network(nn.Module):  # ISDA_imagenet.py takes a wrapped model that returns both
        module = SimpleNamespace(fc=head)

        def forward(self, x: Tensor, isda: bool) -> tuple[Tensor, Tensor]:
            return head(x), x

    return lambda: criterion(Network(), features, target, 0.25)[0]


def _peer_structure(path: Path) -> str:
    return "full" if _load(path).ISDALoss(2, 3).estimator.CoVariance.dim() == 3 else "diagonal"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _times(step: Callable[[], None], repeat: int, cuda: bool) -> list[float]:
    """Seconds of each step, after two that do not count."""
    for _ in range(2):
        step()
    times: list[float] = []
    while len(times) < repeat and (len(times) < 3 or sum(times) < PATIENCE):
        if cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
    return times


def _extra_device_memory(step: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def _extra_host_memory(step: Callable[[], None]) -> int:
    held = _process_memory("VmRSS")
    step()
    return max(_process_memory("VmHWM") - held, 0)


def _process_memory(name: str) -> int:
    """Bytes of this process, from the kernel's account of it: VmRSS now, VmHWM at the peak.

    ``ru_maxrss`` would do but for this: on Linux a process inherits it from its parent.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _kibibytes(Path("/proc/self/status"), name) * 1024


def _limit_memory() -> None:
    """Let an allocation fail, with an error, before the machine runs out of memory."""
    if sys.platform == "linux":
        available = _kibibytes(Path("/proc/meminfo"), "MemAvailable") * 1024
        limit = _process_memory("VmSize") + int(0.9 * available)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _kibibytes(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def _row(case: Case, milliseconds: float | None, extra: float | None, note: str) -> Row:
    cuda = torch.device(case.device).type == "cuda"
    return Row(
        torch.cuda.get_device_name() if cuda else case.device,
        case.form,
        case.structure,
        *case.shape,
        None if milliseconds is None else round(milliseconds, 3),
        None if extra is None else round(extra, 2),
        torch.__version__,
        case.threads,
        note,
    )


def _groups(rows: list[Row]) -> list[tuple[tuple[int, int, int, str], list[Row]]]:
    """Rows of each shape and structure; cross entropy belongs to every structure."""
    keys = dict.fromkeys((r.N, r.C, r.A, r.structure) for r in rows if r.form != "ce")
    return [
        (key, [r for r in rows if key[:3] == (r.N, r.C, r.A) and r.structure in ("none", key[3])])
        for key in keys
    ]


def _only(rows: list[Row], *, form: str) -> list[Row]:
    return [row for row in rows if row.form == form]


def _cell(row: Row) -> str:
    if row.milliseconds is None:
        return row.note
    return f"{_number(row.milliseconds)} ms, {_number(row.extra_mebibytes)} MiB"


def _ratio(slow: list[Row], fast: list[Row]) -> str:
    if not (slow and fast) or slow[0].milliseconds is None or fast[0].milliseconds is None:
        return ""
    assert slow[0].extra_mebibytes is not None
    assert fast[0].extra_mebibytes is not None
    time_ratio = slow[0].milliseconds / fast[0].milliseconds
    memory_ratio = slow[0].extra_mebibytes / max(fast[0].extra_mebibytes, 0.01)
    return f"{time_ratio:.1f}× time, {memory_ratio:.1f}× memory"


def _number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
