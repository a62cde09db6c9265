"""Tables with our numbers: the paper's, the list of recipes, and those in Markdown files."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from isda.experiments.cost_records import cost_block
from isda.experiments.errors import InputError, unknown
from isda.experiments.files import write_text
from isda.experiments.published import DASH, PUBLISHED, Cell, Result, Table, find_cells
from isda.experiments.recipes import RECIPES
from isda.experiments.records import Run, Summary, load_runs
from isda.experiments.report.comparison import (
    Comparison,
    Side,
    compare,
    comparison,
    comparison_table,
    create_side,
    create_sides,
    left_out_line,
    verdict,
)
from isda.experiments.report.evidence import BLOCKS, comparisons
from isda.experiments.report.intervals import estimate, signed
from isda.experiments.report.text import OURS, markdown_rows, text_table

__all__ = [
    "EMPTY",
    "cell_results",
    "legend",
    "markdown_table",
    "our_result",
    "pair_rows",
    "pairs",
    "pairs_markdown",
    "recipes_table",
    "section",
    "table_markdown",
    "update_markdown",
]


EMPTY = "·"
"""Mark of a number that was not run yet."""


def legend(table: Table) -> str:
    """Explanation of the marks in a table, and its note."""
    dash = any(entry == DASH for row in table.rows for entry in row)
    marks = [f"{EMPTY}: not run yet.", *[f"{DASH}: not in the paper."] * dash]
    return " ".join([*marks, table.note]).rstrip()


def table_markdown(table: Table, sides: Mapping[str, Side]) -> str:
    """A table of the paper as Markdown, with a column for our numbers next to each of its own."""
    ours_too = [table.has_cells(column) for column in range(len(table.columns))]
    over = [text for text, count in table.spans for _ in range(count)] or [""] * len(ours_too)
    header: list[str] = []
    for title, above, both in zip(table.columns, over, ours_too, strict=True):
        twice = table.columns.count(title) > 1
        header += [f"{above} {title}" if twice else title, *[OURS] * both]
    rows: list[list[str]] = []
    for row in table.rows:
        rows.append([])
        for entry, both in zip(row, ours_too, strict=True):
            if isinstance(entry, Cell):
                rows[-1] += [entry.printed, our_result(entry, sides)]
            else:
                rows[-1] += [entry, *[""] * both]
    return markdown_rows(header, rows, left=range(ours_too.index(True)))


def section(table: Table, sides: Mapping[str, Side]) -> str:
    """A table of the paper with title, legend and comparisons, as Markdown."""
    parts = [f"## Table {table.number}. {table.title}", table_markdown(table, sides)]
    parts.append(f"Ours: mean ± standard deviation over n seeds. {legend(table)}")
    results = pairs(table, sides)
    return "\n\n".join([*parts, pairs_markdown(results, table.published)] if results else parts)


def our_result(cell: Cell, sides: Mapping[str, Side]) -> str:
    """Our number for a cell with the number of seeds, or a mark if there is none."""
    side = sides.get(cell.recipe)
    if side is None:
        return EMPTY
    top5 = list(side.values(lambda result: result.top5_error).values())
    second = f" / {estimate(top5).format()}" if cell.paper.top5 is not None and top5 else ""
    return f"{side.error.format()}{second} ({len(side.errors)})"


def pairs(table: Table, sides: Mapping[str, Side]) -> list[Comparison]:
    """Comparisons of a table's methods with their baselines, if there are records of both."""
    return [
        compare(sides[cell.baseline], sides[cell.recipe])
        for cell in table.cells
        if cell.baseline and {cell.baseline, cell.recipe} <= sides.keys()
    ]


def pair_rows(
    results: Iterable[Comparison], published: Mapping[str, Result] = PUBLISHED
) -> list[list[str]]:
    """Header, then one row per comparison."""
    rows = [["recipe", "against", "paper", "ours (95 % interval)"]]
    rows[0] += ["verdict", "error, %", "NLL", "ECE, %", "seeds"]
    for result in results:
        one, other = (published.get(side.name) for side in result.sides)
        paper = signed(other.mean - one.mean) if one and other else DASH
        counts = " / ".join(dict.fromkeys(map(str, result.difference.counts)))
        if not all(side.verified for side in result.sides):
            counts += " unverified"
        rows.append(
            [
                result.method.name,
                _baseline(*(side.name for side in result.sides)),
                paper,
                signed(result.difference),
                verdict(result.difference),
                " → ".join(side.error.format() for side in result.sides),
                _change(result, lambda s: s.loss, 3),
                _change(result, lambda s: None if s.ece is None else 100 * s.ece, 2),
                counts,
            ]
        )
    return rows


def pairs_markdown(
    results: Iterable[Comparison], published: Mapping[str, Result] = PUBLISHED
) -> str:
    """Comparisons as Markdown."""
    header, *rows = pair_rows(results, published)
    title = "Test error minus that of the baseline, in percentage points; baseline → method:"
    return f"{title}\n\n{markdown_rows(header, rows, left=(0, 1))}"


def cell_results(
    table: Table, addresses: Sequence[str], names: Mapping[str, str], runs: Sequence[Run]
) -> str:
    """Results of the runs of cells next to the paper's, and comparisons with the baseline.

    Args:
        table: table of the paper.
        addresses: addresses of the cells.
        names: names of the runs, by recipe.
        runs: finished runs.
    """
    rows, comparisons = [], []
    for name, own in names.items():
        side = create_side(runs, own)
        rows.append([own, str(table.published[name]), f"{side.error.format()} ({len(side.runs)})"])
    cells = [cell for address in addresses for cell in find_cells(table.number, address)]
    for cell in dict.fromkeys(cells):
        if cell.baseline:
            result = comparison(runs, names[cell.baseline], names[cell.recipe])
            comparisons.append(f"{result.method.name}\n{comparison_table(result)}")
    return "\n\n".join([markdown_rows(["recipe", "paper, %", "ours, % (seeds)"], rows),
                        *comparisons])  # fmt: skip


def recipes_table(results: Path | str | None = None) -> str:
    """All recipes with the paper's test error and ours.

    Args:
        results: folder of run records; runs with changed settings are ignored.
    """
    runs = [] if results is None else load_runs(results)
    sides, left_out = create_sides(runs)
    rows = []
    for name in RECIPES:
        ours = f"{sides[name].error.format()} ({len(sides[name].runs)})" if name in sides else "–"
        paper = str(PUBLISHED[name]) if name in PUBLISHED else "–"
        rows.append([name, paper, ours])
    table = text_table(["recipe", "paper %", "ours % (runs)"], rows)
    return "\n\n".join([table, *map(left_out_line, left_out.values())])


def markdown_table(runs: Iterable[Run], prefix: str = "") -> str:
    """Markdown table of the ISDA recipes that have records, also of their baseline.

    Args:
        runs: run records.
        prefix: prefix of the names of the recipes to show, such as ``cifar100-``.
    """
    rows = []
    for result in comparisons(runs, prefix):
        paper = [str(PUBLISHED.get(side.name, DASH)) for side in result.sides]
        ours = [side.error.format() for side in result.sides]
        count = " / ".join(dict.fromkeys(map(str, result.difference.counts)))
        rows.append([result.method.name, *paper, *ours, signed(result.difference), count])
    header = ["recipe", "paper: baseline", "paper: ISDA", "ours: baseline", "ours: ISDA"]
    header += ["difference (95 % interval)", "seeds"]
    return markdown_rows(header, rows, code=(0,), pad=False)


def update_markdown(
    path: Path | str, runs: Iterable[Run], costs: Sequence[Mapping[str, str]] = ()
) -> bool:
    """Rewrite the tables of a Markdown file; return whether the file changed.

    The text between ``<!-- runs:NAME -->`` and ``<!-- /runs -->`` is replaced by the table of the
    recipes whose names start with NAME, or of all recipes for ``all``, or of the unchanged recipes
    that the paper has a number for, ``paper``. ``NAME:BLOCK`` shows one of
    :data:`isda.experiments.report.evidence.BLOCKS`, and ``all:cost`` the costs.

    Args:
        path: Markdown file.
        runs: run records.
        costs: lines of the records of ``isda cost``.
    """
    path, runs = Path(path), list(runs)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    begin, end = r"<!-- runs:(\S+) -->", r"<!-- /runs -->"
    pattern = rf"({begin}\n)((?:(?!{begin}).)*?)({end})"
    found = len(re.findall(pattern, text, flags=re.DOTALL))
    if not found or not found == len(re.findall(begin, text)) == len(re.findall(end, text)):
        raise InputError(
            f"{path} must have at least one <!-- runs:NAME --> on a line of its own, and a "
            "<!-- /runs --> for each"
        )

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}{_block(match[2], runs, costs)}\n{match[5]}"

    updated = re.sub(pattern, table, text, flags=re.DOTALL)
    if updated != text:
        write_text(path, updated)
    return updated != text


def _block(mark: str, runs: Sequence[Run], costs: Sequence[Mapping[str, str]]) -> str:
    """What belongs between the marks with this name, with an empty line around text."""
    name, _, kind = mark.partition(":")
    prefix = "" if name in ("all", "paper") else name
    if name == "paper":
        runs = [run for run in runs if run.name in PUBLISHED]
    if not kind:
        return markdown_table(runs, prefix)
    if kind == "cost":
        if not costs:
            raise InputError(
                f"<!-- runs:{mark} --> needs the records of isda cost: give them with --costs"
            )
        return f"\n{cost_block(costs)}\n"
    if kind not in BLOCKS:
        raise unknown("block", kind, [*BLOCKS, "cost"])
    return f"\n{BLOCKS[kind](runs, prefix)}\n"


def _baseline(baseline: str, method: str) -> str:
    """Method in the name of a baseline, with the changed fields that its counterpart lacks."""
    recipe, *changes = baseline.split("+")
    return "+".join(
        [recipe.rpartition("-")[2], *(x for x in changes if x not in method.split("+"))]
    )


def _change(result: Comparison, quantity: Callable[[Summary], float | None], digits: int) -> str:
    sides = [list(side.values(quantity).values()) for side in result.sides]
    if not all(sides):
        return DASH
    return " → ".join(f"{estimate(values).mean:.{digits}f}" for values in sides)
