"""``isda queue --dry-run``: what a queue still has to train, and about how long that takes.

The time of a run is its number of images divided by the speed of the same network, taken from the
records of earlier runs or else from a table of benchmarks/train.py. It excludes the start-up.
"""

import contextlib
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import torch

from isda.experiments.commands.queue_lines import Line
from isda.experiments.errors import InputError
from isda.experiments.generators.synthetic_images import require_generators
from isda.experiments.losses.baselines import create_criterion
from isda.experiments.networks import Network, outline
from isda.experiments.records import Run, load_runs, summary
from isda.experiments.report.text import fit, terminal_width, text_table
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.groups import Plan
from isda.experiments.training.start import records_of

__all__ = ["Speeds", "forecast_text", "state_size"]

# training images, classes, channels
_SIZES = {
    "digits": (1437, 10, 1),
    "cifar10": (50_000, 10, 3),
    "cifar100": (50_000, 100, 3),
    "imagenet": (1_281_167, 1000, 3),
}


def forecast_text(lines: Sequence[Line], records: Path, options: Options) -> str:
    """What is left to train as a table, what fits in the time limit, and which lines would fail.

    Args:
        lines: lines of the queue.
        records: folder of finished runs.
        options: options of the command, with its time limit.
    """
    speeds = Speeds([records, options.out])
    found, problems, seen = [], [], set[tuple[Path, Plan]]()
    for line in lines:
        out = line.task.options.out
        plans: list[Plan] = []
        missing: list[Plan] = []
        try:
            plans = line.task.plans()
            missing = [plan for plan in plans if not records_of(plan, out, records)]
            require_generators((plan.recipe for plan in missing), line.task.options)
        except InputError as error:
            problems.append(f"{line.place} will fail: {error}")
        left = [plan for plan in dict.fromkeys(missing) if (out.resolve(), plan) not in seen]
        seen |= {(out.resolve(), plan) for plan in left}
        found.append(_forecast(line, len(plans), left, speeds))
    width = terminal_width()
    devices = f" on {', '.join(speeds.devices)}" if speeds.devices else ", of which there are none"
    notes = [
        f"Minutes are estimated from the speed of earlier runs{devices}, without start-up; ? means "
        "unknown. MiB is the size of the largest checkpoint. For lines that choose λ₀, final runs "
        "are counted with the λ₀ of the recipe.",
        *([] if options.minutes is None else [_what_fits(found, options.minutes)]),
    ]
    return "\n".join([_table(found, width), "", *(fit(note, width) for note in notes), *problems])


class Speeds:
    """Images per second of all runs side by side together, by network.

    Args:
        folders: folders of runs or records. Later folders take precedence, and within a folder its
            runs over its benchmarks/train*.csv.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.devices: dict[str, None] = {}  # in order, each once
        self._known: dict[tuple[object, ...], float] = {}
        for folder in folders:
            self._add_benchmarks(folder / "benchmarks")
            if folder.is_dir():
                self._add_runs(load_runs(folder))

    def seconds_per_epoch(self, recipe: Recipe) -> float | None:
        """Time of an epoch of a run; None if it is unknown."""
        key = _kind(recipe.data, recipe.network, recipe.precision)
        speed = self._known.get((*key, recipe.images_per_class), self._known.get((*key, 0)))
        if speed is None or recipe.data not in _SIZES:
            return None
        images, classes, _ = _SIZES[recipe.data]
        drawn = recipe.images_per_class * classes
        return (drawn or images - recipe.hold_out) / (1 - recipe.synthetic) / speed

    def _add_benchmarks(self, folder: Path) -> None:
        """The highest speed of each network, with the best number of runs side by side."""
        for path in sorted(folder.glob("train*.csv")):
            with open(path, encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    with contextlib.suppress(KeyError, ValueError):  # another table
                        key = *_kind(row["data"], row["network"], row["precision"]), 0
                        speed = float(row["images_per_second"])
                        self._known[key] = max(speed, self._known.get(key, 0.0))
                        self.devices[row["device"]] = None

    def _add_runs(self, runs: Iterable[Run]) -> None:
        """The median speed of the runs of each network."""
        measured: dict[tuple[object, ...], list[float]] = {}
        for run in runs:
            speeds = [line["images_per_second"] for line in run.metrics()
                      if "images_per_second" in line]  # fmt: skip
            if speeds:
                recipe = run.recipe
                key = _kind(recipe.data, recipe.network, recipe.precision)
                measured.setdefault((*key, recipe.images_per_class), []).append(median(speeds))
                self.devices[str(run.environments[-1].get("device"))] = None
        self._known |= {key: median(speeds) for key, speeds in measured.items()}


def state_size(recipe: Recipe) -> int | None:
    """Bytes of the checkpoint of a run: weights, momentum and statistics; None if unknown."""
    if recipe.data not in _SIZES or recipe.freeze:
        return None
    _, classes, channels = _SIZES[recipe.data]
    network = _network(recipe.network, classes, channels)
    with torch.device("meta"):
        criterion = create_criterion(recipe, num_features=network.num_features, num_classes=classes)
    weights = sum(one.nbytes for one in network.parameters())
    copies = 2 + (recipe.optimizer == "adamw") + (recipe.ema > 0)
    buffers = [*network.buffers(), *criterion.buffers()]
    return copies * weights + sum(one.nbytes for one in buffers)


@cache
def _network(name: str, classes: int, channels: int) -> Network:
    return outline(name, num_classes=classes, in_channels=channels)


@dataclass(frozen=True)
class _Forecast:
    """What is left of a line of a queue."""

    line: Line
    """The line."""

    total: int
    """Number of its runs."""

    left: int
    """Runs that are not finished, and that no earlier line trains."""

    epochs: int
    """Epochs that are left, of all runs together."""

    seconds: float | None
    """Time of these epochs; None if the speed of a network is unknown."""

    state: int | None
    """Bytes of the largest checkpoint; None if it is unknown."""


def _forecast(line: Line, total: int, left: Sequence[Plan], speeds: Speeds) -> _Forecast:
    """What is left of a line, given the runs that it still has to train."""
    epochs = [plan.recipe.epochs - _epochs_done(plan, line.task.options.out) for plan in left]
    times = [speeds.seconds_per_epoch(plan.recipe) for plan in left]
    seconds = sum(number * (time or 0.0) for number, time in zip(epochs, times, strict=True))
    states = [state_size(plan.recipe) for plan in left]
    return _Forecast(
        line,
        total,
        len(left),
        sum(epochs),
        None if None in times else seconds,
        None if None in states else max(filter(None, states), default=0),
    )


def _table(lines: Sequence[_Forecast], width: int) -> str:
    """The forecasts in rows, and their sum."""
    rows = []
    for one in lines:
        size = "?" if one.state is None else f"{one.state / 2**20:.1f}" if one.left else ""
        rows.append([f"{one.line.number}: {one.line.text}", f"{one.left} of {one.total}",
                     str(one.epochs), _minutes(one.seconds), size])  # fmt: skip
    known = sum(one.seconds or 0.0 for one in lines)
    total = _minutes(known)
    if any(one.seconds is None for one in lines):
        total = f"> {total}" if known else "?"
    rows.append(["all lines", str(sum(one.left for one in lines)),
                 str(sum(one.epochs for one in lines)), total])  # fmt: skip
    header = ["line", "runs left", "epochs", "minutes", "MiB"]
    others = text_table(header[1:], [row[1:] for row in rows]).splitlines()
    room = max(width - 2 - max(map(len, others)), 20)
    for row in rows:
        row[0] = row[0] if len(row[0]) <= room else f"{row[0][: room - 1]}…"
    return text_table(header, rows)


def _what_fits(lines: Sequence[_Forecast], minutes: float) -> str:
    """Which lines are finished within a time limit, and which one is begun."""
    spent, whole = 0.0, list[str]()
    for one in lines:
        if not one.left:
            continue
        if one.seconds is None or spent + one.seconds > 60 * minutes:
            words = f"line{'s' * (len(whole) > 1)} {', '.join(whole)}" if whole else "no whole line"
            begun = f"line {one.line.number} begins and is continued by the next command"
            return f"{minutes:g} minutes are enough for {words}; {begun}."
        spent += one.seconds
        whole.append(one.line.number)
    return f"{minutes:g} minutes are enough for all lines."


def _epochs_done(plan: Plan, out: Path) -> int:
    try:
        return summary(Run(plan.folder(out))).epochs
    except InputError:  # not begun; or damaged, which is reported when the run is resumed
        return 0


def _kind(data: str, network: str, precision: str) -> tuple[str, ...]:
    """What the speed depends on; both CIFAR data sets have images of the same size."""
    return ("cifar" if data.startswith("cifar") else data), network, precision


def _minutes(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds / 60:.1f}"
