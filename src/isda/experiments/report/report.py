"""``isda report``: the paper's tables, curves and a page, from run records alone.

The result of a run is its mean test error over the last 10 epochs; of a recipe, mean ± standard
deviation over seeds; of ISDA against its baseline, the difference with a 95 % interval.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isda.experiments.errors import InputError
from isda.experiments.files import write_text
from isda.experiments.flags import parse_flags
from isda.experiments.published import PUBLISHED
from isda.experiments.recipes import RECIPES
from isda.experiments.records import LAST_EPOCHS, Run, export, load_runs, summary
from isda.experiments.report.comparison import (
    Comparison,
    Side,
    comparison,
    comparison_table,
    create_sides,
    distinct,
    environments,
    left_out_line,
    page,
    pair_up,
    sentence,
    signed,
    text_table,
    write_comparison_page,
)
from isda.experiments.report.curves import BASELINE, METHOD, OTHERS, Line, curves
from isda.experiments.report.paper_tables import DASH, NAMES, TABLES, cell_recipes
from isda.experiments.report.tables import (
    cost_rows,
    markdown_rows,
    ours,
    pair_rows,
    pairs,
    pairs_markdown,
    section,
    usual_folder,
    verdict,
)

__all__ = [
    "Comparison",
    "Side",
    "comparison",
    "comparison_table",
    "main",
    "markdown_table",
    "recipes_table",
    "report_markdown",
    "sentence",
    "update_markdown",
    "write_comparison_page",
    "write_report_page",
]


@dataclass(frozen=True)
class _Arguments:
    runs: Path | None = None
    """Folder of runs or of run records; if not given runs, or else results."""

    export: Path | None = None
    """Copy the records of finished runs, without checkpoints, into this folder."""

    update: tuple[Path, ...] = ()
    """Markdown files whose tables, between <!-- runs:NAME --> marks, are made anew."""

    page: Path | None = None
    """Write tables, comparisons and curves as one HTML page that needs nothing else."""

    costs: tuple[Path, ...] = ()
    """CSV files of isda cost, whose numbers are shown below Table 1."""


def main(arguments: list[str]) -> None:
    """Show the paper's tables with our numbers, keep records, and bring pages up to date."""
    given = parse_flags(_Arguments, arguments, prog="isda report", description=main.__doc__)
    folder = given.runs or usual_folder()
    if folder is None:
        raise InputError(
            "no folder runs or results here to report on: train something first, such as "
            "isda compare, or name the folder of the records with --runs"
        )
    runs = distinct(load_runs(folder))
    costs = cost_rows(given.costs) if given.costs else []
    finished = [run for run in runs if summary(run).finished]
    if given.export is not None:
        first: dict[tuple[str, int], Run] = {}
        for run in finished:
            twin = first.setdefault((run.name, run.seed), run)
            if twin is not run:
                raise InputError(f"{twin.folder} and {run.folder} have the same name and seed")
        for run in finished:
            print(export(run, given.export))
    print(report_markdown(runs, costs))
    for path in given.update:
        print(f"{path}: {'updated' if update_markdown(path, finished) else 'up to date'}")
    if given.page is not None:
        write_report_page(given.page, runs, costs)
        print(given.page)


def report_markdown(runs: Iterable[Run], costs: Sequence[list[str]] = ()) -> str:
    """Tables 1 to 5 in the paper's layout with our numbers, and every comparison, as Markdown.

    Args:
        runs: run records.
        costs: what ``cost_rows`` gives, if it is to be shown.
    """
    found = _found(runs)
    parts = [section(table, found.sides) for table in TABLES.values()]
    if costs:
        header, *rows = costs
        parts[1:1] = [f"{_COSTS}:", markdown_rows(header, rows, left=(0, len(header) - 1))]
    if found.others:
        parts += ["## Beyond the paper's tables", pairs_markdown(found.others)]
    parts += ["## In words", " ".join(found.overview)]
    parts += ["\n".join(f"* {name}: {words}" for name, words in found.sentences.items())]
    return "\n\n".join(parts)


def recipes_table(results: Path | str | None = None) -> str:
    """All recipes with the paper's test error and ours.

    Args:
        results: folder of run records; those of a recipe changed by the user do not count.
    """
    runs = [] if results is None else load_runs(results)
    sides, left_out = create_sides(runs)
    rows = []
    for name, recipe in RECIPES.items():
        ours = f"{sides[name].result} ({len(sides[name].runs)})" if name in sides else "–"
        paper = str(PUBLISHED[name]) if name in PUBLISHED else "–"
        rows.append([name, paper, ours, f"{recipe.lambda_0:g}", str(recipe.epochs)])
    table = text_table(["recipe", "paper %", "ours % (runs)", "λ₀", "epochs"], rows)
    return "\n\n".join([table, *map(left_out_line, left_out.values())])


def markdown_table(runs: Iterable[Run], prefix: str = "") -> str:
    """Markdown table of every ISDA recipe with records of it and of its baseline.

    Args:
        runs: run records.
        prefix: beginning of the names of the recipes to show, such as ``cifar100-``.
    """
    sides, left_out = create_sides(run for run in runs if run.name.startswith(prefix))
    if left_out:
        raise InputError("; ".join(left_out.values()))
    results = [one for one in pair_up(sides.values()) if one.method.recipe.method == "isda"]
    if not results:
        raise InputError(f"no records of an ISDA recipe {prefix}… and of its baseline")
    rows = []
    for result in sorted(results, key=lambda result: _order(result.method.name)):
        paper = [str(PUBLISHED.get(side.name, DASH)) for side in result.sides]
        ours = [side.result for side in result.sides]
        count = " / ".join(dict.fromkeys(map(str, result.difference.counts)))
        rows.append([f"`{result.method.name}`", *paper, *ours, signed(result.difference), count])
    header = ["recipe", "paper: baseline", "paper: ISDA", "ours: baseline", "ours: ISDA"]
    header += ["difference (95 % interval)", "seeds"]
    return markdown_rows(header, rows, pad=False)


def update_markdown(path: Path | str, runs: Iterable[Run]) -> bool:
    """Rewrite the tables of a Markdown file; return whether the file changed.

    What is between ``<!-- runs:NAME -->`` and ``<!-- /runs -->`` becomes the table of the recipes
    whose names begin with NAME; ``all`` stands for every recipe.
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
            f"{path} must have each <!-- runs:NAME --> on a line of its own, closed by "
            "<!-- /runs -->, and at least one"
        )

    def table(match: re.Match[str]) -> str:
        prefix = "" if match[2] == "all" else match[2]
        return f"{match[1]}{markdown_table(runs, prefix)}\n{match[5]}"

    updated = re.sub(pattern, table, text, flags=re.DOTALL)
    if updated != text:
        write_text(path, updated)
    return updated != text


def write_report_page(
    path: Path | str, runs: Iterable[Run], costs: Sequence[list[str]] = ()
) -> None:
    """Write tables, comparisons and curves as one HTML page: no network, no scripts.

    Args:
        path: HTML file.
        runs: run records.
        costs: what ``cost_rows`` gives, if it is to be shown.
    """
    found = _found(runs)
    sections: list[dict[str, Any]] = []
    for table in TABLES.values():
        header, *rows = pair_rows(pairs(table, found.sides), table.published)
        own = [
            r for r in pairs(table, found.sides) if found.table_of[r.method.name] == table.number
        ]
        sections.append({"table": table, "header": header, "rows": rows, "details": own})
    header, *rows = pair_rows(found.others)
    text = page(
        "report.html",
        overview=found.overview,
        sections=sections,
        others={"header": header, "rows": rows, "details": found.others},
        ours=lambda cell: ours(cell, found.sides),
        costs=costs,
        costs_title=_COSTS,
        sentences=found.sentences,
        figures=[_figure(*figure, found.sides) for figure in _FIGURES],
        curves=curves,
        names=NAMES,
        environments=environments(found.sides.values()),
        last_epochs=LAST_EPOCHS,
    )
    write_text(Path(path), text)


@dataclass(frozen=True)
class _Found:
    """What the records hold."""

    sides: dict[str, Side]
    """The finished runs, by name."""

    table_of: dict[str, int]
    """The table in which a method is compared first."""

    results: list[Comparison]
    """Comparisons of the paper's tables, each once."""

    others: list[Comparison]
    """Methods against their baseline in other recipes, such as those with another λ₀."""

    outside: int
    """Finished runs that belong to no cell and no comparison."""

    unfinished: int

    left_out: dict[str, str]
    """Names whose runs are left out, and why."""

    @property
    def sentences(self) -> dict[str, str]:
        """Every comparison in words, by recipe."""
        words = {r.method.name: sentence(r) for r in [*self.results, *self.others]}
        return {name: text[0].upper() + text[1:] + "." for name, text in words.items()}

    @property
    def overview(self) -> list[str]:
        """How much was run, and how it came out, in sentences."""
        cells = [cell for table in TABLES.values() for cell in table.cells if cell.recipe]
        run = sum(cell.recipe in self.sides for cell in cells)
        words = [
            f"{run} of the {len(cells)} cells of Tables 1 to 5 that a recipe trains have been run."
        ]
        results = [*self.results, *self.others]
        isda = [result for result in results if result.method.recipe.method == "isda"]
        others = [result for result in results if result not in isda]
        for subject, own in (("ISDA", isda), ("other methods", others)):
            verdicts = Counter(verdict(result.difference) for result in own)
            found = [f"{count} {_VERDICTS[word][count > 1]}" for word, count in verdicts.items()]
            if len(own) == 1:
                found = [f"The one comparison of {subject} with a baseline {found[0][2:]}."]
            elif own:
                total = f"Of {len(own)} comparisons of {subject} with a baseline"
                found = [f"{total}, {', '.join(found)}."]
            words += found
        if self.unfinished:
            words.append(f"Left out because unfinished: {self.unfinished}.")
        if self.outside:
            words.append(f"Finished runs that belong to no cell and no comparison: {self.outside}.")
        return [*words, *map(left_out_line, self.left_out.values())]


def _found(runs: Iterable[Run]) -> _Found:
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
    unfinished = len(runs) - len(finished)
    return _Found(sides, table_of, results, others, outside, unfinished, left_out)


# The paper's curve figures: title, table and cell that train what they show.
_FIGURES = (
    ("Wide-ResNet-28-10 on CIFAR-100 (Figure 2)", 2, "cifar100/wide_resnet28_10"),
    ("ResNet-110 on CIFAR-10 (Appendix D)", 4, "cifar10/resnet110"),
    ("ResNet-110 on CIFAR-100 (Appendix D)", 4, "cifar100/resnet110"),
)


def _figure(title: str, table: int, cell: str, sides: Mapping[str, Side]) -> dict[str, Any]:
    """A figure of the paper as far as there are records, and what is missing for the rest."""
    recipes = cell_recipes(table, cell)
    training = recipes[0].rpartition("-")[0]
    colours = {f"{training}-ce": BASELINE, f"{training}-isda": METHOD}
    rest = itertools.cycle(OTHERS)
    colours |= {name: next(rest) for name in recipes if name not in colours}
    lines = [
        Line(sides[name].label, list(sides[name].runs.values()), colours[name])
        for name in recipes
        if name in sides
    ]
    picture = None
    if lines:
        band = len(lines) < 4
        picture = curves(lines, "test_error", "test error, %", band=band, salt=title)
    missing = [name.rpartition("-")[2] for name in recipes if name not in sides]
    command = f"isda table {table} --cell {cell} --resume"
    return {"title": title, "picture": picture, "missing": missing, "command": command}


_COSTS = "What ISDA adds to a training step, in theory and as measured on a device"

_VERDICTS = {  # of one comparison, of several
    "lower": ("finds a significantly lower error", "find a significantly lower error"),
    "higher": ("finds a significantly higher error", "find a significantly higher error"),
    "not significant": ("finds no significant difference", "find no significant difference"),
    "too few seeds": ("has too few seeds for an interval", "have too few seeds for an interval"),
}


def _order(name: str) -> tuple[int, str]:
    """Recipes in the paper's order, then others by name."""
    names = list(RECIPES)
    return (names.index(name) if name in names else len(names), name)
