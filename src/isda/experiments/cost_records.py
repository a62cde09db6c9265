"""Cost records: the CSV files of ``isda cost``, a line per network and case."""

import csv
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from isda.experiments.errors import InputError
from isda.experiments.files import write_text, writing
from isda.experiments.published import COST, Cost

__all__ = [
    "CASES",
    "MeasuredCost",
    "TheoreticalCost",
    "cost_lines",
    "measured_lines",
    "read_costs",
    "write_costs",
]

CASES = ("ce", "diagonal", "full")
"""What is measured: cross entropy, and ISDA with diagonal and full covariances."""


@dataclass(frozen=True)
class TheoreticalCost:
    """Size of a network, and the share of ISDA in its arithmetic."""

    network: str
    num_classes: int
    image_size: int
    num_features: int
    parameters: int
    multiply_adds: int  # of the forward pass of one image
    theoretical_percent: float

    @property
    def paper(self) -> Cost | None:
        """The paper's numbers, which hold for 1000 classes and 224×224 images."""
        usual = (self.num_classes, self.image_size) == (1000, 224)
        return COST.get(self.network) if usual else None


@dataclass(frozen=True)
class MeasuredCost:
    """Time and memory of a training step in one of ``CASES``; None if not measured."""

    case: str
    batch_size: int
    precision: str
    milliseconds: float | None = None  # of a step; median of the repeats
    spread_percent: float | None = None  # largest deviation of a repeat from the median
    added_percent: float | None = None  # time relative to cross entropy
    mebibytes: float | None = None  # peak tensor memory of a step, without the images
    added_mebibytes: float | None = None
    note: str = ""  # why there is no measurement


def cost_lines(
    theory: Sequence[TheoreticalCost],
    measured: Mapping[str, Sequence[MeasuredCost]],
    environment: Mapping[str, Any],
) -> list[dict[str, str]]:
    """Costs as lines of a CSV file: one per case of a measured network, one per other network.

    Args:
        theory: theoretical costs.
        measured: measured costs of some or all of these networks, by name.
        environment: versions and device.
    """
    lines: list[dict[str, Any]] = []
    for cost in theory:
        printed = (cost.paper.theoretical, cost.paper.wall) if cost.paper else (None, None)
        line = {**asdict(cost), **dict(zip(_PAPER, printed, strict=True)), **environment}
        cases = measured.get(cost.network, ())
        lines += [{**line, **asdict(case)} for case in cases] or [line]
    return [
        {name: "" if value is None else str(value) for name, value in line.items()}
        for line in lines
    ]


def write_costs(path: Path, lines: Sequence[Mapping[str, str]]) -> None:
    """Write lines of :func:`cost_lines` to a CSV file, which is replaced as a whole."""
    names = dict.fromkeys((*_COLUMNS, *itertools.chain.from_iterable(lines)))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(names))
    writer.writeheader()
    writer.writerows(lines)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def read_costs(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Measured lines of CSV files of ``isda cost``; each file must have some."""
    lines = []
    for path in paths:
        found = measured_lines(path)
        if not found:
            raise InputError(f"{path} has no measurements")
        lines += found
    return lines


def measured_lines(path: Path) -> list[dict[str, str]]:
    """Measured lines of a CSV file of ``isda cost``; raises InputError for any other file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            lines = [line for line in reader if line.get("case")]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if missing:
        raise InputError(f"{path} is not a CSV file of isda cost: it has no column {missing[0]}")
    cases: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        cases.setdefault((line["network"], line.get("device", "")), set()).add(line["case"])
        numbers = [name for name in (*_PAPER, "added_mebibytes") if line[name]]
        numbers.append("theoretical_percent")
        numbers += [] if line["note"] else ["milliseconds", "added_percent"]
        bad = [name for name in numbers if not _finite(line[name])]
        bad += [] if line["parameters"].isdecimal() else ["parameters"]
        if bad or "" in line:
            what = f"{bad[0]} {line[bad[0]]!r}" if bad else "more cells than columns"
            raise InputError(f"{path} has {what} for {line['network']}, {line['case']}")
    for (network, _), found in cases.items():
        if found != {*CASES}:
            raise InputError(
                f"{path} must have {', '.join(CASES)} for {network}, has {', '.join(sorted(found))}"
            )
    return lines


_PAPER = ("paper_theoretical_percent", "paper_wall_percent")
_COLUMNS = (
    *(field.name for field in fields(TheoreticalCost)),
    *_PAPER,
    *(field.name for field in fields(MeasuredCost)),
)


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
