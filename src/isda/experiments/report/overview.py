"""All run records at a glance: which cells of the paper they fill, and every comparison."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isda.experiments.published import TABLES
from isda.experiments.records import Run, summary
from isda.experiments.report.comparison import (
    Comparison,
    Side,
    create_sides,
    distinct,
    left_out_line,
    pair_up,
    sentence,
    verdict,
)
from isda.experiments.report.evidence import QUANTITIES, training
from isda.experiments.report.intervals import estimate
from isda.experiments.report.tables import pairs, pairs_markdown, section
from isda.experiments.report.text import escape_markdown, markdown_rows

__all__ = ["COSTS_TITLE", "Overview", "overview", "report_markdown"]

COSTS_TITLE = "What ISDA adds to a training step, in theory and measured"


def report_markdown(runs: Iterable[Run], costs: Sequence[list[str]] = ()) -> str:
    """Tables 1 to 5 with our numbers next to the paper's, and every comparison, as Markdown.

    Args:
        runs: run records.
        costs: rows of :func:`isda.experiments.cost_records.cost_rows`, shown below Table 1.
    """
    found = overview(runs)
    parts = [section(table, found.sides) for table in TABLES.values()]
    if costs:
        header, *rows = costs
        parts[1:1] = [f"{COSTS_TITLE}:", markdown_rows(header, rows, left=(0, len(header) - 1))]
    if found.others:
        parts += ["## Beyond the paper's tables", pairs_markdown(found.others)]
    parts += ["## In words", escape_markdown(" ".join(found.words))]
    parts += [
        "\n".join(
            "* " + escape_markdown(f"{name}: {words}") for name, words in found.sentences.items()
        )
    ]
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Overview:
    """What the records contain."""

    sides: dict[str, Side]
    """Finished runs, by name."""

    table_of: dict[str, int]
    """First table that compares a method, by name of its recipe."""

    results: list[Comparison]
    """Comparisons in the paper's tables, each once."""

    others: list[Comparison]
    """Comparisons of other recipes, such as those with a different λ₀."""

    outside: int
    """Number of finished runs in no cell and no comparison."""

    unfinished: int
    """Number of unfinished runs."""

    unverified: int
    """Number of finished runs whose records have no checksums."""

    left_out: dict[str, str]
    """Reasons why runs are left out, by name or folder."""

    @property
    def sentences(self) -> dict[str, str]:
        """Every comparison in words, by recipe."""
        return {r.method.name: sentence(r) for r in [*self.results, *self.others]}

    @property
    def words(self) -> list[str]:
        """Sentences on what was found, then on how much was run."""
        words = []
        results = [*self.results, *self.others]
        isda = [result for result in results if result.method.recipe.method == "isda"]
        others = [result for result in results if result not in isda]
        in_tables = [result for result in self.results if result in isda]
        if isda:
            words.append(_finding(max(in_tables or isda, key=_number_of_seeds)))
        for subject, own in (("ISDA", isda), ("other methods", others)):
            verdicts = Counter(verdict(result.difference) for result in own)
            found = [f"{count} {_VERDICTS[word][count > 1]}" for word, count in verdicts.items()]
            if len(own) == 1:
                found = [f"The one comparison of {subject} with a baseline {found[0][2:]}."]
            elif own:
                total = f"Of {len(own)} comparisons of {subject} with a baseline"
                found = [f"{total}, {', '.join(found)}."]
            words += found
        cells = [cell for table in TABLES.values() for cell in table.cells]
        run = sum(cell.recipe in self.sides for cell in cells)
        words.append(
            f"{run} of the {len(cells)} cells of Tables 1 to 5 that have a recipe have been run."
        )
        if self.unfinished:
            words.append(f"Unfinished runs that are left out: {self.unfinished}.")
        if self.unverified:
            words.append(f"Finished runs without checksums (unverified): {self.unverified}.")
        if self.outside:
            words.append(f"Finished runs in no cell and no comparison: {self.outside}.")
        return [*words, *map(left_out_line, self.left_out.values())]


def overview(runs: Iterable[Run]) -> Overview:
    """Sort run records into the paper's tables and further comparisons."""
    runs = distinct(runs)
    sides, left_out = create_sides(runs)
    table_of: dict[str, int] = {}
    results = []
    for table in TABLES.values():
        for result in pairs(table, sides):
            if result.method.name not in table_of:
                table_of[result.method.name] = table.number
                results.append(result)
    finished = [run for run in runs if summary(run).finished]
    in_tables = {cell.recipe for table in TABLES.values() for cell in table.cells}
    others = [one for one in pair_up(sides.values()) if one.method.name not in in_tables]
    used = {run.folder for side in sides.values() if side.name in in_tables
            for run in side.runs.values()}  # fmt: skip
    used |= {run.folder for one in others for side in one.sides for run in side.runs.values()}
    outside = sum(run.folder not in used and run.name not in left_out for run in finished)
    unfinished = sum(run.damage is None for run in runs) - len(finished)
    unverified = sum(not run.verified for run in finished)
    return Overview(sides, table_of, results, others, outside, unfinished, unverified, left_out)


def _finding(result: Comparison) -> str:
    """A comparison in words, with NLL and ECE."""
    words = f"{training(result.method)}: {sentence(result)}"
    changes = []
    for quantity in QUANTITIES[1:]:
        values = [estimate(list(quantity.of(side).values())) for side in result.sides if
                  quantity.of(side)]  # fmt: skip
        if len(values) == 2:
            name, _, unit = quantity.title.partition(", ")
            before, after = (f"{value.mean:.{quantity.digits}f}" for value in values)
            changes.append(f"{name} {before} → {after} {unit}".rstrip())
    return f"{words} {', '.join(changes)}." if changes else words


def _number_of_seeds(result: Comparison) -> int:
    return min(result.difference.counts)


_VERDICTS = {  # of one comparison, of several
    "lower": ("finds a significantly lower error", "find a significantly lower error"),
    "higher": ("finds a significantly higher error", "find a significantly higher error"),
    "not significant": ("finds no significant difference", "find no significant difference"),
    "too few seeds": ("has too few seeds for an interval", "have too few seeds for an interval"),
}
