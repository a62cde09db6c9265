"""The cost of ISDA as a table (Table 1), from cost records."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from isda.experiments.cost_records import read_costs
from isda.experiments.errors import InputError
from isda.experiments.published import PARAMETERS
from isda.experiments.report.terminal import text_table
from isda.experiments.report.text import markdown_rows

__all__ = ["cost_rows", "cost_table", "costs_markdown"]

_Line = Mapping[str, str]
_Cases = Mapping[str, _Line]  # lines of one network on one device, by case


def cost_rows(lines: Iterable[_Line], layout: str) -> list[list[str]]:
    """Header, then a row per network and device; the last measurement of a case counts.

    Args:
        lines: lines of a cost record.
        layout: ``terminal``, ``page`` or ``report``: the columns to show.
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
    """Cost records as a Markdown table.

    Args:
        paths: CSV files of ``isda cost``.
    """
    paths = list(paths)
    for path in paths:
        if not path.is_file():
            raise InputError(f"table must name CSV files, got {path}")
    header, *rows = cost_rows(read_costs(paths), "page")
    return markdown_rows(header, rows, pad=False)


def cost_table(lines: Sequence[_Line]) -> str:
    """Costs as text for a terminal, with notes."""
    header, *rows = cost_rows(lines, "terminal")
    return "\n".join([text_table(header, rows), *_notes(lines)])


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
_MEASURED = (
    "batch",
    "CE ms",
    "+ diagonal",
    "+ full",
    "CE MiB",
    "+ diagonal MiB",
    "+ full MiB",
    "paper +",
)
_TIMES = ("CE ms", "+ diagonal", "+ full", "paper +")
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "terminal": ("network", "params M", "mult-adds G", "A", "theory", "paper", *_TIMES,
                 "CE MiB", "+ diagonal MiB", "+ full MiB"),
    "page": ("network", "batch", "A", *_TIMES, "+ diagonal MiB", "+ full MiB"),
    "report": ("network", "params M", "theory", "paper", *_TIMES, "device"),
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
