"""Our numbers next to the paper's: its tables, every comparison, and the list of recipes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from isda.experiments.cost_records import cost_rows
from isda.experiments.published import (
    DASH,
    PUBLISHED,
    TABLES,
    Cell,
    Result,
    Table,
    find_cells,
)
from isda.experiments.recipes import RECIPES
from isda.experiments.records import Run, load_runs, summary
from isda.experiments.report.comparison import (
    Comparison,
    compare,
    comparison,
    comparison_table,
    pair_up,
    sentence,
    verdict,
)
from isda.experiments.report.intervals import estimate, signed
from isda.experiments.report.sides import (
    QUANTITIES,
    Side,
    create_side,
    create_sides,
    distinct,
    left_out_line,
)
from isda.experiments.report.text import OURS, escape_markdown, markdown_rows, text_table

__all__ = [
    "COSTS_TITLE",
    "Overview",
    "cell_results",
    "legend",
    "our_result",
    "pair_rows",
    "pairs",
    "recipes_table",
    "report_markdown",
    "section",
    "table_markdown",
]

_EMPTY = "·"  # mark of a number that was not run yet

COSTS_TITLE = "What ISDA adds to a training step, in theory and measured"


def report_markdown(runs: Iterable[Run], costs: Sequence[Mapping[str, str]] = ()) -> str:
    """Tables 1 to 5 with our numbers next to the paper's, and every comparison, as Markdown.

    Args:
        runs: run records.
        costs: lines of the records of ``isda cost``, shown below Table 1.
    """
    found = Overview(runs, costs)
    parts = [section(table, found.sides) for table in found.tables]
    if found.costs:
        header, *rows = found.costs
        parts[1:1] = [f"{COSTS_TITLE}:", markdown_rows(header, rows, left=(0, len(header) - 1))]
    if found.others:
        parts += [f"## {found.others_title}", _pairs_markdown(found.others)]
    parts += ["## In words", escape_markdown(" ".join(found.words))]
    sentences = (f"{name}: {words}" for name, words in found.sentences.items())
    parts.append("\n".join("* " + escape_markdown(one) for one in sentences))
    return "\n\n".join(parts)


def section(table: Table, sides: Mapping[str, Side]) -> str:
    """A table of the paper with title, legend and comparisons, as Markdown."""
    parts = [f"## Table {table.number}. {table.title}", table_markdown(table, sides)]
    parts.append(f"Ours: mean ± standard deviation over n seeds. {legend(table)}")
    results = pairs(table, sides)
    return "\n\n".join([*parts, _pairs_markdown(results, table.published)] if results else parts)


def table_markdown(table: Table, sides: Mapping[str, Side]) -> str:
    """A table of the paper as Markdown, with our numbers in a column next to each of its own."""
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


def our_result(cell: Cell, sides: Mapping[str, Side]) -> str:
    """Our number for a cell with the number of seeds, or a mark if there is none."""
    side = sides.get(cell.recipe)
    if side is None:
        return _EMPTY
    top5 = list(side.values(lambda result: result.top5_error).values())
    second = f" / {estimate(top5).format()}" if cell.paper.top5 is not None and top5 else ""
    return f"{side.error.format()}{second} ({len(side.errors)})"


def legend(table: Table) -> str:
    """Explanation of the marks in a table, and its note."""
    dash = any(entry == DASH for row in table.rows for entry in row)
    marks = [f"{_EMPTY}: not run yet.", *[f"{DASH}: not in the paper."] * dash]
    return " ".join([*marks, table.note]).rstrip()


def pairs(table: Table, sides: Mapping[str, Side]) -> list[Comparison]:
    """Comparisons of a table's methods with their baselines, if there are records of both."""
    return [
        compare(sides[cell.baseline], sides[cell.recipe])
        for cell in table.cells
        if cell.baseline and {cell.baseline, cell.recipe} <= sides.keys()
    ]


def pair_rows(
    results: Iterable[Comparison], published: Mapping[str, Result] | None = None
) -> list[list[str]]:
    """Header, then one row per comparison, with the difference in the paper if it is given."""
    paper = ["paper"] if published is not None else []
    rows = [["recipe", "against", *paper, "ours (95 % interval)", "verdict"]]
    rows[0] += [*(quantity.title for quantity in QUANTITIES), "seeds"]
    for result in results:
        if published is not None:
            one, other = (published.get(side.name) for side in result.sides)
            paper = [signed(other.mean - one.mean) if one and other else DASH]
        recipe, *changes = result.baseline.name.split("+")
        own = [change for change in changes if change not in result.method.name.split("+")]
        verified = all(side.verified for side in result.sides)
        rows.append(
            [
                result.method.name,
                "+".join([recipe.rpartition("-")[2], *own]),
                *paper,
                signed(result.difference),
                verdict(result.difference),
                " → ".join(side.error.format() for side in result.sides),
                *(result.means(q) if result.change(q) else DASH for q in QUANTITIES[1:]),
                result.seeds + " unverified" * (not verified),
            ]
        )
    return rows


def _pairs_markdown(
    results: Iterable[Comparison], published: Mapping[str, Result] | None = None
) -> str:
    header, *rows = pair_rows(results, published)
    title = "Test error minus that of the baseline, in percentage points; baseline → method:"
    return f"{title}\n\n{markdown_rows(header, rows, left=(0, 1))}"


class Overview:
    """What run records contain: which cells of the paper they fill, and every comparison.

    Args:
        runs: run records.
        costs: lines of the records of ``isda cost``, shown below Table 1.
    """

    sides: dict[str, Side]
    """Finished runs, by name."""

    tables: list[Table]
    """The paper's tables; none if all runs are other trainings, such as on your own images."""

    results: dict[int, list[Comparison]]
    """Comparisons by number of the first table that has them."""

    others: list[Comparison]
    """Comparisons of other recipes, such as those with a different λ₀."""

    costs: list[list[str]]
    """Header and rows of the costs; empty if there are none."""

    def __init__(self, runs: Iterable[Run], costs: Sequence[Mapping[str, str]] = ()) -> None:
        self._runs = distinct(runs)
        self.sides, self._left_out = create_sides(self._runs)
        self.results = {}
        seen: set[str] = set()
        for table in TABLES.values():
            found = {result.method.name: result for result in pairs(table, self.sides)}
            self.results[table.number] = [found[name] for name in found if name not in seen]
            seen |= found.keys()
        self.others = [r for r in pair_up(self.sides.values()) if r.method.name not in PUBLISHED]
        wanted = costs or not self._runs or any(run.name in PUBLISHED for run in self._runs)
        self.tables = list(TABLES.values()) if wanted else []
        self.costs = cost_rows(costs, "report") if costs else []

    @property
    def others_title(self) -> str:
        """Title of the other comparisons."""
        return "Beyond the paper's tables" if self.tables else "Comparisons"

    @property
    def comparisons(self) -> list[Comparison]:
        """All comparisons, each once."""
        return [*(result for own in self.results.values() for result in own), *self.others]

    @property
    def sentences(self) -> dict[str, str]:
        """Every comparison in words, by recipe."""
        return {result.method.name: sentence(result) for result in self.comparisons}

    @property
    def words(self) -> list[str]:
        """Sentences on what was found, then on how much was run, and on what was left out."""
        left_out = map(left_out_line, self._left_out.values())
        return [*self._findings(), *self._counts(), *left_out]

    def _findings(self) -> Iterator[str]:
        """A comparison in words, then the number of comparisons by verdict."""
        isda = [result for result in self.comparisons if result.method.recipe.method == "isda"]
        others = [result for result in self.comparisons if result not in isda]
        in_tables = [result for result in isda if result not in self.others]
        if isda:
            yield _finding(max(in_tables or isda, key=lambda r: min(r.difference.counts)))
        for subject, own in (("ISDA", isda), ("other methods", others)):
            verdicts = Counter(verdict(result.difference) for result in own)
            found = [f"{count} {_VERDICTS[word][count > 1]}" for word, count in verdicts.items()]
            if len(own) == 1:
                yield f"The one comparison of {subject} with a baseline {found[0][2:]}."
            elif own:
                yield f"Of {len(own)} comparisons of {subject} with a baseline, {', '.join(found)}."

    def _counts(self) -> Iterator[str]:
        """How many cells have been run, and runs that are unfinished, unverified or not shown."""
        recipes = [cell.recipe for table in TABLES.values() for cell in table.cells]
        shown = [self.sides[recipe] for recipe in recipes if recipe in self.sides]
        if self.tables:
            yield (
                f"{len(shown)} of the {len(recipes)} cells of Tables 1 to 5 that have a recipe "
                "have been run."
            )
        else:
            yield (
                "The paper's tables are left out, because none of their cells has been run: isda "
                "table N shows one."
            )
        shown += [side for result in self.others for side in result.sides]
        used = {run.folder for side in shown for run in side.runs.values()}
        finished = [run for run in self._runs if summary(run).finished]
        unfinished = [run for run in self._runs if run.damage is None and run not in finished]
        unverified = [run for run in finished if not run.verified]
        outside = [r for r in finished if r.folder not in used and r.name not in self._left_out]
        if unfinished:
            yield f"Unfinished runs that are left out: {len(unfinished)}."
        if unverified:
            yield f"Finished runs without checksums (unverified): {len(unverified)}."
        if outside:
            yield f"Finished runs in no cell and no comparison: {len(outside)}."


def _finding(result: Comparison) -> str:
    """A comparison in words, with NLL and ECE."""
    words = f"{result.method.training()}: {sentence(result)}"
    changes = []
    for quantity in QUANTITIES[1:]:
        if result.change(quantity) is not None:
            name, _, unit = quantity.title.partition(", ")
            changes.append(f"{name} {result.means(quantity)} {unit}".rstrip())
    return f"{words} {', '.join(changes)}." if changes else words


_VERDICTS = {  # of one comparison, of several
    "lower": ("finds a significantly lower error", "find a significantly lower error"),
    "higher": ("finds a significantly higher error", "find a significantly higher error"),
    "not significant": ("finds no significant difference", "find no significant difference"),
    "too few seeds": ("has too few seeds for an interval", "have too few seeds for an interval"),
}


def cell_results(
    table: Table, addresses: Sequence[str], names: Mapping[str, str], runs: Sequence[Run]
) -> str:
    """Results of the runs of cells next to the paper's, and comparisons with the baseline.

    Args:
        table: table of the paper.
        addresses: addresses of the cells.
        names: names of the runs, by recipe.
        runs: finished runs; those of a recipe may all be missing.
    """
    rows, parts, trained = [], [], {run.name for run in runs}
    names = {name: own for name, own in names.items() if own in trained}
    for name, own in names.items():
        side = create_side(runs, own)
        rows.append([own, str(table.published[name]), f"{side.error.format()} ({len(side.runs)})"])
    cells = [cell for address in addresses for cell in find_cells(table.number, address)]
    for cell in dict.fromkeys(cells):
        if cell.baseline and {cell.baseline, cell.recipe} <= names.keys():
            result = comparison(runs, names[cell.baseline], names[cell.recipe])
            parts.append(f"{result.method.name}\n{comparison_table(result)}")
    return "\n\n".join([markdown_rows(["recipe", "paper, %", "ours, % (seeds)"], rows), *parts])


def recipes_table(results: Path | str | None = None) -> str:
    """All recipes with the paper's test error and ours.

    Args:
        results: folder of run records; runs with changed settings are ignored.
    """
    sides, left_out = create_sides([] if results is None else load_runs(results))
    rows = []
    for name in RECIPES:
        side = sides.get(name)
        ours = DASH if side is None else f"{side.error.format()} ({len(side.runs)})"
        rows.append([name, str(PUBLISHED.get(name, DASH)), ours])
    table = text_table(["recipe", "paper %", "ours % (runs)"], rows)
    return "\n\n".join([table, *map(left_out_line, left_out.values())])
