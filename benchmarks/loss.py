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
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from authors import peer_loss, peer_structure
from device import (
    extra_device_memory,
    extra_host_memory,
    limit_memory,
    out_of_memory,
    require_device,
    use_device,
)
from direct import DirectLoss
from loss_table import Row, draw, markdown
from rows import read_rows, three_digits, write_rows
from torch import Tensor, nn
from torch.nn import functional as F

import isda

__all__ = ["Case", "main", "measure"]

STRUCTURES = ("full", "diagonal", "shared", "identity")
SHAPES = ((128, 10, 64), (128, 100, 640), (64, 100, 2190), (256, 1000, 2048))
LARGEST_STATE = 2**31  # elements of Σ; beyond it (ImageNet's C = 1000) only diagonals are timed
PATIENCE = 30.0  # seconds after which a slow case is not repeated further than three times
BASELINES = ("focal", "lq", "disturb_label", "center", "large_margin")  # of Table 4
TIMED = ("ce", "library", "direct", *BASELINES)  # forms that need no file of the authors'


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


def measure(case: Case) -> Row:
    """Measure time and extra memory of a case. Call it in a fresh process."""
    torch.set_num_threads(case.threads)
    cuda = use_device(case.device)
    milliseconds = extra = None
    note = ""
    _create_step(case, (4, 3, 5))()  # loads the libraries and starts the threads
    if not cuda:
        limit_memory()
    try:
        step = _create_step(case, case.shape)
        extra = (extra_device_memory if cuda else extra_host_memory)(step) / 2**20
        milliseconds = 1e3 * statistics.median(_times(step, case.repeat, cuda))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        milliseconds, note = None, "does not fit in memory"
    return _row(case, milliseconds, extra, note)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = _parse(arguments)
    if options.table:
        rows = read_rows(options.table, Row)
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
        write_rows(options.out, [asdict(row) for row in rows])
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


if __name__ == "__main__":
    main()
