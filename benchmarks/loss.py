"""Time and extra memory of the loss layer: statistics, forward and backward pass of one batch.

Of the forms compared, "ce" is torch's cross entropy, "library" is :class:`isda.ISDALoss`, and
"direct" is a literal implementation of the paper's equations with (N, C, A) and (N, A, A) tensors.
Optional forms are "peer", your local copy of the authors' ``ISDA.py`` or ``ISDA_imagenet.py``, and
the baseline losses of Table 4, which have no covariance. Each case runs in its own process.

    python benchmarks/loss.py --out results/benchmarks/loss_cpu.csv
    python benchmarks/loss.py --table results/benchmarks/loss_cpu.csv
    python benchmarks/loss.py --forms ce focal lq disturb_label center large_margin
"""

import argparse
import csv
import importlib.util
import inspect
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar, get_type_hints

import torch
from direct import DirectLoss
from torch import Tensor, nn
from torch.nn import functional as F

import isda

__all__ = [
    "Case",
    "Row",
    "draw",
    "extra_device_memory",
    "main",
    "markdown",
    "measure",
    "out_of_memory",
    "peer_loss",
    "peer_structure",
    "read",
    "read_rows",
    "require_device",
    "three_digits",
]

STRUCTURES = ("full", "diagonal", "shared", "identity")
SHAPES = ((128, 10, 64), (128, 100, 640), (64, 100, 2190), (256, 1000, 2048))
LARGEST_STATE = 2**31  # elements of Σ; beyond it (ImageNet's C = 1000) only diagonals are timed
PATIENCE = 30.0  # seconds after which a slow case is not repeated further than three times
FORMS = {  # title and colour
    "ce": ("cross entropy", "#9aa5b1"),
    "library": ("torch-isda", "#2a6f97"),
    "direct": ("direct form", "#e07a5f"),
    "peer": ("authors' file", "#6d597a"),
    "focal": ("focal", "#81b29a"),
    "lq": ("L_q", "#f2cc8f"),
    "disturb_label": ("disturb label", "#b56576"),
    "center": ("center", "#457b9d"),
    "large_margin": ("large margin", "#3d405b"),
}
BASELINES = ("focal", "lq", "disturb_label", "center", "large_margin")  # of Table 4
TIMED = ("ce", "library", "direct", *BASELINES)  # forms that need no file of the authors'

T = TypeVar("T")
Group = tuple[tuple[int, int, int, str], list["Row"]]  # N, C, A, structure; its rows


@dataclass(frozen=True)
class Case:
    """A case to be timed."""

    device: str
    form: str  # one of FORMS
    structure: str  # of the covariance; "none" for cross entropy and the baselines
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
    """Measure time and extra memory of a case. Call it in a fresh process."""
    torch.set_num_threads(case.threads)
    cuda = _use_device(case.device)
    milliseconds = extra = None
    note = ""
    _create_step(case, (4, 3, 5))()  # loads the libraries and starts the threads
    if not cuda:
        _limit_memory()
    try:
        step = _create_step(case, case.shape)
        extra = (extra_device_memory if cuda else _extra_host_memory)(step) / 2**20
        milliseconds = 1e3 * statistics.median(_times(step, case.repeat, cuda))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        milliseconds, note = None, "does not fit in memory"
    return _row(case, milliseconds, extra, note)


def read(path: Path) -> list[Row]:
    """Read a CSV file written by this script."""
    return read_rows(path, Row)


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """Read a CSV file as instances of a dataclass with fields of type str, int or float | None."""
    types = get_type_hints(kind)

    def parse(name: str, text: str) -> Any:
        if types[name] in (str, int):
            return types[name](text)
        return float(text) if text else None

    try:
        with path.open(newline="") as file:
            return [
                kind(**{name: parse(name, text) for name, text in line.items()})
                for line in csv.DictReader(file)
            ]
    except (KeyError, TypeError, ValueError):
        sys.exit(f"{path} is not a table of this script")


def markdown(rows: list[Row]) -> str:
    """Markdown tables: the covariance structures, then the baselines, if there are any."""
    groups = _groups(rows)
    structured = [group for group in groups if group[0][3] != "none"]
    baselines = [group for group in groups if group[0][3] == "none"]
    return "\n\n".join(_table(part) for part in (structured, baselines) if part)


def draw(rows: list[Row], path: Path) -> None:
    """Draw a bar chart of times and extra memory on logarithmic axes."""
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
        for form, (title, colour) in FORMS.items():
            bars = []  # left edge, height, width
            for place, (_, group) in enumerate(groups):
                present = _present(group)
                width = 0.8 / len(present)
                bars += [
                    (place - 0.4 + width * present.index(form), value, width)
                    for row in _only(group, form=form)
                    if (value := getattr(row, quantity)) is not None
                ]
            if bars:
                panel.bar(*zip(*bars, strict=True), align="edge", color=colour, label=title)
        panel.set_yscale("log")
        panel.set_title(heading, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    panels[1].set_xticks(
        range(len(groups)),
        [
            f"{'baselines' if structure == 'none' else structure}\n{n}, {c}, {a}"
            for (n, c, a, structure), _ in groups
        ],
        rotation=60,
        fontsize=8,
    )
    handles, titles = panels[0].get_legend_handles_labels()
    figure.legend(handles, titles, frameon=False, fontsize=8, ncols=4, loc="outside upper left")
    figure.supxlabel("covariance and N, C, A", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def peer_loss(path: Path, head: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """Loss of the authors' ``ISDA.py`` or ``ISDA_imagenet.py``, given features and target."""
    criterion = _load(path).ISDALoss(head.in_features, head.out_features)
    if "fc" in inspect.signature(criterion.forward).parameters:  # ISDA.py
        return lambda features, target: criterion(nn.Identity(), head, features, target, 0.25)[0]

    class Network(nn.Module):  # ISDA_imagenet.py takes a wrapped model that returns both
        module = SimpleNamespace(fc=head)

        def forward(self, x: Tensor, isda: bool) -> tuple[Tensor, Tensor]:
            return head(x), x

    return lambda features, target: criterion(Network(), features, target, 0.25)[0]


def peer_structure(path: Path) -> str:
    """Covariance structure used by one of the authors' files."""
    return "full" if _load(path).ISDALoss(2, 3).estimator.CoVariance.dim() == 3 else "diagonal"


def require_device(parser: argparse.ArgumentParser, name: str) -> bool:
    """Select a device and return whether it is a GPU; exit with an error if it does not exist."""
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"--device must be cpu or cuda, got {name!r}")
    if device.type != "cuda":
        return False
    if (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {name} needs a GPU, and torch finds {torch.cuda.device_count()}")
    return _use_device(name)


def _use_device(name: str) -> bool:
    """Make a GPU the current device; return whether the device is a GPU."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device.type == "cuda"


def extra_device_memory(step: Callable[[], object]) -> int:
    """Peak GPU memory of a call in bytes, minus what was allocated before it."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def out_of_memory(error: Exception) -> bool:
    """Whether an error means out of memory; torch raises a RuntimeError for this."""
    words = ("allocate memory", "out of memory")  # on a CPU and on a GPU
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def three_digits(value: float | None) -> str:
    """Format with three significant digits and no exponent."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


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
            print(f"{'form':<13} {'covariance':<10} {'N, C, A':<16} {'ms':>10} {'extra MiB':>10}")
        sizes = ", ".join(map(str, case.shape))
        time_text, memory_text = three_digits(row.milliseconds), three_digits(row.extra_mebibytes)
        print(
            f"{row.form:<13} {row.structure:<10} {sizes:<16} {time_text:>10} {memory_text:>10}"
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
        if len(sizes) != 3 or min(sizes) < 1 or sizes[1] < 2:
            raise ValueError(text)
        return sizes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--repeat", type=int, default=20, help="timed steps per case (default: 20)")
    add(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="number of CPU threads of torch",
    )
    add(
        "--shapes", type=shape, nargs="+", default=SHAPES, metavar="N,C,A", help="shapes to measure"
    )
    add("--forms", nargs="+", choices=TIMED, default=TIMED[:3], help="default: ce library direct")
    add(
        "--structures",
        nargs="+",
        choices=STRUCTURES,
        default=STRUCTURES,
        help="covariance structures",
    )
    add(
        "--peer",
        type=Path,
        help="also measure this local copy of the authors' ISDA.py or ISDA_imagenet.py",
    )
    add("--out", type=Path, help="CSV file to write; a plot is written next to it")
    add("--plot", type=Path, help="PNG file to write, if not next to --out")
    add("--table", type=Path, metavar="CSV", help="do not measure; print this CSV file as Markdown")
    options = parser.parse_args(arguments)
    if options.repeat < 1 or options.threads < 1:
        parser.error("--repeat and --threads must be >= 1")
    cuda = require_device(parser, options.device)
    if options.peer and not cuda:
        parser.error("--peer needs --device cuda: the authors' file puts its state on a GPU")
    for path in filter(None, (options.peer, options.table)):
        if not path.is_file():
            parser.error(f"no such file: {path}")
    return options


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    of_peer = peer_structure(options.peer) if options.peer else None
    for n, c, a in options.shapes:
        candidates = [("ce", "none")]
        for structure in options.structures:
            if structure == "diagonal" or c * a * a <= LARGEST_STATE:
                candidates += [("library", structure), ("direct", structure)]
                candidates += [("peer", structure)] * (structure == of_peer)
        candidates += [(form, "none") for form in BASELINES]
        for form, structure in candidates:
            if form not in options.forms and form != "peer":
                continue
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
    compute = _loss(case, features, target, head)

    def step() -> None:
        features.grad = None
        head.zero_grad(set_to_none=True)
        compute().backward()

    return step


def _loss(case: Case, features: Tensor, target: Tensor, head: nn.Linear) -> Callable[[], Tensor]:
    if case.form == "ce":
        return lambda: F.cross_entropy(F.linear(features, head.weight, head.bias), target)
    if case.form == "peer":
        assert case.peer is not None
        of_peer = peer_loss(case.peer, head)
        return lambda: of_peer(features, target)
    criterion = _criterion(case, head.in_features, head.out_features).to(case.device)
    with torch.no_grad():
        for tensor in (*criterion.buffers(), *criterion.parameters()):
            tensor.add_(0)  # zeros take up no memory before they are written to

    def compute() -> Tensor:
        criterion.zero_grad(set_to_none=True)
        return criterion(features, head.weight, target, bias=head.bias, progress=0.5)

    return compute


def _criterion(case: Case, num_features: int, num_classes: int) -> nn.Module:
    if case.form in BASELINES:
        from isda.experiments import losses

        create: dict[str, Callable[[], nn.Module]] = {
            "focal": losses.FocalLoss,
            "lq": losses.LqLoss,
            "disturb_label": lambda: losses.DisturbLabelLoss(num_classes),
            "center": lambda: losses.CenterLoss(num_features, num_classes),
            "large_margin": losses.LargeMarginLoss,
        }
        return create[case.form]()
    kind: Callable[..., nn.Module] = {"library": isda.ISDALoss, "direct": DirectLoss}[case.form]
    return kind(num_features, num_classes, lambda_0=0.5, covariance=case.structure)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _times(step: Callable[[], None], repeat: int, cuda: bool) -> list[float]:
    """Seconds of each step, after two warm-up steps."""
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


def _extra_host_memory(step: Callable[[], None]) -> int:
    held = _process_memory("VmRSS")
    step()
    return max(_process_memory("VmHWM") - held, 0)


def _process_memory(name: str) -> int:
    """Memory of this process in bytes from ``/proc``: VmRSS is the current value, VmHWM the peak.

    ``ru_maxrss`` does not work on Linux, because a process inherits it from its parent.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _kibibytes(Path("/proc/self/status"), name) * 1024


def _limit_memory() -> None:
    """Make an allocation fail with an error before the machine runs out of memory."""
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


def _groups(rows: list[Row]) -> list[Group]:
    """Rows of each shape and structure; cross entropy belongs to every one."""
    others = [row for row in rows if row.form != "ce"] or rows
    groups: dict[tuple[int, int, int, str], list[Row]] = {
        (row.N, row.C, row.A, row.structure): [] for row in others
    }
    for (*shape, structure), group in groups.items():
        same = [row for row in rows if shape == [row.N, row.C, row.A]]
        group += [row for row in same if row.form == "ce" or row.structure == structure]
    return list(groups.items())


def _table(groups: list[Group]) -> str:
    """A line for each shape and structure, a column for each form."""
    structured = groups[0][0][3] != "none"
    forms = _present(row for _, group in groups for row in group)
    head = ["N, C, A", *["covariance"] * structured, *(FORMS[form][0] for form in forms)]
    head += ["direct ÷ torch-isda"] * structured
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (*shape, structure), group in groups:
        cells = [", ".join(map(str, shape)), *[structure] * structured]
        cells += [_cell(_only(group, form=form)) for form in forms]
        if structured:
            cells.append(_ratio(_only(group, form="direct"), _only(group, form="library")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _present(rows: Iterable[Row]) -> list[str]:
    """Forms that the rows have."""
    found = {row.form for row in rows}
    return [form for form in FORMS if form in found]


def _only(rows: list[Row], *, form: str) -> list[Row]:
    return [row for row in rows if row.form == form]


def _cell(found: list[Row]) -> str:
    if not found or found[0].milliseconds is None:
        return found[0].note if found else ""
    return f"{three_digits(found[0].milliseconds)} ms, {three_digits(found[0].extra_mebibytes)} MiB"


def _ratio(slow: list[Row], fast: list[Row]) -> str:
    if not (slow and fast) or slow[0].milliseconds is None or fast[0].milliseconds is None:
        return ""
    assert slow[0].extra_mebibytes is not None
    assert fast[0].extra_mebibytes is not None
    time_ratio = slow[0].milliseconds / fast[0].milliseconds
    memory_ratio = slow[0].extra_mebibytes / max(fast[0].extra_mebibytes, 0.01)
    return f"{time_ratio:.1f}× time, {memory_ratio:.1f}× memory"


if __name__ == "__main__":
    main()
