"""Cost records: the CSV files of ``isda cost``, a line per network and case, and their tables."""

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from isda.experiments.errors import InputError, reason
from isda.experiments.files import create_folder, write_text
from isda.experiments.published import COST, PARAMETERS, Cost
from isda.experiments.report.text import markdown_rows, text_table

__all__ = [
    "CASES",
    "MeasuredCost",
    "TheoreticalCost",
    "cost_block",
    "cost_lines",
    "cost_rows",
    "cost_table",
    "costs_markdown",
    "measured_lines",
    "read_costs",
    "write_costs",
]

_Line = Mapping[str, str]
_Cases = Mapping[str, _Line]  # lines of one network on one device, by case

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


def write_costs(path: Path, lines: Sequence[_Line]) -> None:
    """Write lines of :func:`cost_lines` to a CSV file, which is replaced as a whole."""
    names = dict.fromkeys((*_FIELDS, *itertools.chain.from_iterable(lines)))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(names))
    writer.writeheader()
    writer.writerows(lines)
    create_folder(path.parent)
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
            missing = [name for name in _FIELDS if name not in (reader.fieldnames or ())]
            lines = [line for line in reader if line.get("case")]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from error
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


def cost_rows(lines: Iterable[_Line], layout: str) -> list[list[str]]:
    """Header, then a row per network and device; the last measurement of a case counts.

    Args:
        lines: lines of a cost record.
        layout: ``terminal``, ``page``, ``report`` or ``block``: the columns to show.
    """
    networks: dict[tuple[str, str], dict[str, _Line]] = {}
    for line in lines:
        place = networks.setdefault((line["network"], line.get("device", "")), {})
        place[line.get("case", "")] = line
    titles = _LAYOUTS[layout]
    if not any("ce" in cases for cases in networks.values()):
        titles = tuple(title for title in titles if title not in _MEASURED)
    return [
        list(titles),
        *([_COLUMNS[title](cases) for title in titles] for cases in networks.values()),
    ]


def costs_markdown(paths: Iterable[Path]) -> str:
    """CSV files of ``isda cost`` as a Markdown table."""
    header, *rows = cost_rows(read_costs(paths), "page")
    return markdown_rows(header, rows, pad=False)


def cost_block(lines: Iterable[_Line]) -> str:
    """Block of a page: what ISDA adds to a training step, as Markdown."""
    _, *rows = cost_rows(lines, "block")
    titles = ["network", "CE, ms per step", "ISDA, diagonal", "ISDA, full", "paper (diagonal)"]
    return markdown_rows(titles, rows, pad=False)


def cost_table(lines: Sequence[_Line]) -> str:
    """Costs as text for a terminal, with notes."""
    header, *rows = cost_rows(lines, "terminal")
    return "\n".join([text_table(header, rows), *_notes(lines)])


_PAPER = ("paper_theoretical_percent", "paper_wall_percent")
_FIELDS = (
    *(field.name for field in fields(TheoreticalCost)),
    *_PAPER,
    *(field.name for field in fields(MeasuredCost)),
)


def _finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _cell(
    case: str, name: str, form: str, scale: float = 1.0, unit: str = ""
) -> Callable[[_Cases], str]:
    """A cell of a column: a number of a case, its note, or nothing."""

    def cell(cases: _Cases) -> str:
        line = cases.get(case, {}) if case else next(iter(cases.values()))
        if case and line.get("note"):
            return line["note"] if name in ("milliseconds", "added_percent") else ""
        text = line.get(name, "")
        return f"{float(text) * scale:{form}}{unit}".replace("-", "−") if text else ""

    return cell


_COLUMNS: dict[str, Callable[[_Cases], str]] = {
    "network": lambda cases: next(iter(cases.values()))["network"],
    "params M": _cell("", "parameters", ".1f", 1e-6),
    "mult-adds G": _cell("", "multiply_adds", ".2f", 1e-9),
    "A": _cell("", "num_features", ".0f"),
    "theory": _cell("", "theoretical_percent", ".2f", unit=" %"),
    "paper": _cell("", "paper_theoretical_percent", ".2f", unit=" %"),
    "batch": _cell("ce", "batch_size", ".0f"),
    "CE ms": _cell("ce", "milliseconds", ".2f"),
    "+ diagonal": _cell("diagonal", "added_percent", "+.2f", unit=" %"),
    "+ full": _cell("full", "added_percent", "+.2f", unit=" %"),
    "paper +": _cell("", "paper_wall_percent", ".1f", unit=" %"),
    "CE MiB": _cell("ce", "mebibytes", ".0f"),
    "+ diagonal MiB": _cell("diagonal", "added_mebibytes", ".0f"),
    "+ full MiB": _cell("full", "added_mebibytes", ".0f"),
    "device": lambda cases: next(iter(cases.values())).get("device", ""),
}
_TIMES = ("CE ms", "+ diagonal", "+ full", "paper +")
_MEASURED = ("batch", *_TIMES, "CE MiB", "+ diagonal MiB", "+ full MiB")
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "terminal": ("network", "params M", "mult-adds G", "A", "theory", "paper", *_TIMES,
                 "CE MiB", "+ diagonal MiB", "+ full MiB"),
    "page": ("network", "batch", "A", *_TIMES, "+ diagonal MiB", "+ full MiB"),
    "report": ("network", "params M", "theory", "paper", *_TIMES, "device"),
    "block": ("network", *_TIMES),
}  # fmt: skip


def _notes(lines: Sequence[_Line]) -> Iterator[str]:
    """How to read the numbers, and where the paper prints different ones."""
    yield "\ntheory: 5·C·A as a percentage of the multiply-adds of the forward pass"
    networks = {line["network"]: line for line in lines if line["paper_theoretical_percent"]}
    formula = [
        name
        for name, line in networks.items()
        if f"{float(line['theoretical_percent']):.2f}"
        != f"{float(line['paper_theoretical_percent']):.2f}"
    ]
    if formula:
        yield f"{', '.join(formula)}: the paper prints a different number than this formula gives"
    sizes = {
        name: PARAMETERS[name]
        for name, line in networks.items()
        if f"{int(line['parameters']) / 1e6:.1f}" != f"{PARAMETERS[name]:.1f}"
    }
    if sizes:
        printed = ", ".join(f"{millions:.1f}" for millions in sizes.values())
        yield f"{', '.join(sizes)}: the paper prints a different number of parameters, {printed} M"
    measured = [line for line in lines if line.get("case")]
    if measured:
        batch = dict.fromkeys(f"{line['batch_size']} ({line['precision']})" for line in measured)
        yield f"ms, MiB: of a training step with batch size {', '.join(batch)}"
        yield "+: added to the time and memory of cross entropy (CE)"
    spreads = [float(line["spread_percent"]) for line in measured if line["spread_percent"]]
    if spreads:
        yield f"single repeats deviate by up to {max(spreads):.1f} % from the medians shown"
