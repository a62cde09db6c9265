"""The paper's tables with our numbers, and ``isda table``: show one, or train what a cell needs."""

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from isda.experiments.arguments import require_seeds
from isda.experiments.cost import measured_lines
from isda.experiments.errors import InputError
from isda.experiments.flags import parse_flags
from isda.experiments.published import PUBLISHED, Result
from isda.experiments.recipes import Recipe, get_recipe, run_name
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
    signed,
)
from isda.experiments.report.intervals import Difference, estimate
from isda.experiments.report.paper_tables import (
    DASH,
    NAMES,
    TABLES,
    Cell,
    Table,
    cell_recipes,
    find_cells,
    get_table,
)
from isda.experiments.training.loop import Options, Plan, train

__all__ = [
    "TABLES",
    "cell_recipes",
    "cost_rows",
    "main",
    "markdown_rows",
    "ours",
    "pair_rows",
    "pairs",
    "pairs_markdown",
    "section",
    "table_markdown",
    "usual_folder",
    "verdict",
]


def usual_folder() -> Path | None:
    """Folder of run records that is read if none is given: runs, or else results, if not empty."""
    folders = (Path("runs"), Path("results"))
    return next((path for path in folders if path.is_dir() and any(path.iterdir())), None)


def table_markdown(table: Table, sides: Mapping[str, Side]) -> str:
    """The table as aligned Markdown, a column for our numbers beside each of the paper's."""
    ours_too = [table.has_cells(column) for column in range(len(table.columns))]
    over = [text for text, count in table.spans for _ in range(count)] or [""] * len(ours_too)
    header: list[str] = []
    for title, above, both in zip(table.columns, over, ours_too, strict=True):
        twice = table.columns.count(title) > 1
        header += [f"{above} {title}" if twice else title, *["ours (n)"] * both]
    rows: list[list[str]] = []
    for row in table.rows:
        rows.append([])
        for entry, both in zip(row, ours_too, strict=True):
            if isinstance(entry, Cell):
                rows[-1] += [entry.printed, ours(entry, sides)]
            else:
                rows[-1] += [entry, *[""] * both]
    return markdown_rows(header, rows, left=range(ours_too.index(True)))


def section(table: Table, sides: Mapping[str, Side]) -> str:
    """The table with its title, marks and comparisons, as Markdown."""
    parts = [f"## Table {table.number}. {table.title}", table_markdown(table, sides)]
    parts.append(f"Beside each number of the paper ours: mean ± std over n seeds. {table.legend}")
    results = pairs(table, sides)
    return "\n\n".join([*parts, pairs_markdown(results, table.published)] if results else parts)


def ours(cell: Cell, sides: Mapping[str, Side]) -> str:
    """Our number for a cell with the number of seeds, or what stands in its place."""
    side = sides.get(cell.recipe or "")
    if side is None:
        return cell.missing
    top5 = list(side.values(lambda result: result.top5_error).values())
    second = f" / {estimate(top5).format()}" if cell.paper.top5 is not None and top5 else ""
    return f"{side.result}{second} ({len(side.errors)})"


def pairs(table: Table, sides: Mapping[str, Side]) -> list[Comparison]:
    """Each method of the table with its baseline, where there are records of both."""
    return [
        compare(sides[cell.baseline], sides[cell.recipe])
        for cell in table.cells
        if cell.baseline and cell.recipe and {cell.baseline, cell.recipe} <= sides.keys()
    ]


def pair_rows(
    results: Iterable[Comparison], published: Mapping[str, Result] = PUBLISHED
) -> list[list[str]]:
    """Header, then one row per comparison: what it comes to, and whether that is significant."""
    rows = [["recipe", "against", "paper", "ours (95 % interval)"]]
    rows[0] += ["verdict", "error, %", "NLL", "ECE, %", "seeds"]
    for result in results:
        one, other = (published.get(side.name) for side in result.sides)
        paper = signed(other.mean - one.mean) if one and other else DASH
        counts = " / ".join(dict.fromkeys(map(str, result.difference.counts)))
        rows.append(
            [
                result.method.name,
                _method(result.baseline.name),
                paper,
                signed(result.difference),
                verdict(result.difference),
                " → ".join(side.result for side in result.sides),
                _change(result, lambda s: s.loss, 3),
                _change(result, lambda s: None if s.ece is None else 100 * s.ece, 2),
                counts,
            ]
        )
    return rows


def pairs_markdown(
    results: Iterable[Comparison], published: Mapping[str, Result] = PUBLISHED
) -> str:
    """Comparisons as aligned Markdown."""
    header, *rows = pair_rows(results, published)
    title = "Differences of the test error from the baseline's, in points; baseline → method:"
    return f"{title}\n\n{markdown_rows(header, rows, left=(0, 1))}"


def cost_rows(paths: Iterable[Path]) -> list[list[str]]:
    """Header, then our cost of a network on a device beside the paper's; the last ones count.

    Args:
        paths: CSV files of ``isda cost``.
    """
    costs: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for path in paths:
        lines = measured_lines(path)
        if not lines:
            raise InputError(f"{path} has no measurements")
        for line in lines:
            where = line["network"], line.get("device") or DASH
            costs.setdefault(where, {})[line["case"]] = line
    rows = [["network", "params, M", "theory, %", "paper, %"]]
    rows[0] += ["time, diagonal, %", "time, full, %", "paper, %", "device"]
    for (network, device), cases in costs.items():
        ce = cases["ce"]
        paper, wall = ce["paper_theoretical_percent"], ce["paper_wall_percent"]
        times = (cases[case] for case in ("diagonal", "full"))
        rows.append(
            [
                NAMES.get(network, network),
                f"{int(ce['parameters']) / 1e6:.1f}",
                f"{float(ce['theoretical_percent']):.2f}",
                f"{float(paper):.2f}" if paper else DASH,
                *(line["note"] or signed(float(line["added_percent"]), 1) for line in times),
                signed(float(wall), 1) if wall else DASH,
                device,
            ]
        )
    return rows


def verdict(change: Difference) -> str:
    """The difference in a word or two."""
    if change.interval is None:
        return "too few seeds"
    if not change.significant:
        return "not significant"
    return "lower" if change.mean < 0 else "higher"


def markdown_rows(
    header: list[str], rows: list[list[str]], left: Iterable[int] = (0,), *, pad: bool = True
) -> str:
    """A Markdown table, padded so that it can be read as text; numbers of columns to the left."""
    left = set(left)
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) if pad else 0 for column in columns]
    rule = ["-" * max(width, 3) if n in left else "-" * max(width - 1, 3) + ":"
            for n, width in enumerate(widths)]  # fmt: skip
    widths = [max(width, len(text)) if pad else 0 for width, text in zip(widths, rule, strict=True)]
    lines = [
        [
            cell.ljust(widths[n]) if n in left else cell.rjust(widths[n])
            for n, cell in enumerate(line)
        ]
        for line in (header, rule, *rows)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True)
class _Arguments:
    table: tyro.conf.Positional[int]
    """Number of the table, 1 to 5."""

    cell: str | None = None
    """Train what this cell needs: DATA/NETWORK, or DATA/NETWORK/METHOD for one method."""

    results: Path | None = None
    """Folder of the run records to show, without --cell; if not given runs, or else results."""

    dry_run: bool = False
    """Print the commands that would train the cell, and train nothing."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each recipe for each seed."""

    epochs: int | None = None
    """Epochs in place of the recipe's."""

    batch_size: int | None = None
    """Batch size in place of the recipe's."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How it is trained."""

    def changed(self, recipe: Recipe) -> Recipe:
        return dataclasses.replace(
            recipe,
            epochs=recipe.epochs if self.epochs is None else self.epochs,
            batch_size=recipe.batch_size if self.batch_size is None else self.batch_size,
        )


def main(arguments: list[str]) -> None:
    """Show a table of the paper with our numbers, or train what a cell of it needs."""
    given = parse_flags(
        _Arguments,
        arguments,
        prog="isda table",
        description=main.__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    table = get_table(given.table)
    if given.cell is None:
        if given != _Arguments(given.table, results=given.results):
            raise InputError("cell must be given to train: isda table N --cell DATA/NETWORK")
        folder = given.results or usual_folder()
        runs = [] if folder is None else load_runs(folder)
        sides, left_out = create_sides(runs)
        print("\n\n".join([section(table, sides), *map(left_out_line, left_out.values())]))
        return
    if given.results is not None:
        raise InputError("results must not be given with --cell; --out is where its runs go")
    recipes = cell_recipes(given.table, given.cell)
    require_seeds("seeds", given.seeds)
    if given.dry_run:
        for name in recipes:
            print(shlex.join(["isda", "train", name, *_flags(given)]))
        return
    names = {}  # of the runs, by recipe
    plans = []
    for name in recipes:
        recipe = given.changed(get_recipe(name))
        names[name] = run_name(recipe, get_recipe(name), name)
        plans += [Plan(names[name], recipe, seed) for seed in given.seeds]
    trained = train(plans, given.options)
    if trained:  # else a rank that does not write
        print(_trained(table, given.cell, names, trained))


def _trained(table: Table, address: str, names: Mapping[str, str], runs: Sequence[Run]) -> str:
    """What came of the runs of some cells: paper and ours, then each with its baseline."""
    rows, comparisons = [], []
    for name, own in names.items():
        side = create_side(runs, own)
        rows.append([own, str(table.published[name]), f"{side.result} ({len(side.runs)})"])
    for cell in find_cells(table.number, address):
        if cell.recipe and cell.baseline:
            result = comparison(runs, names[cell.baseline], names[cell.recipe])
            comparisons.append(f"{result.method.name}\n{comparison_table(result)}")
    return "\n\n".join([markdown_rows(["recipe", "paper, %", "ours, % (seeds)"], rows),
                        *comparisons])  # fmt: skip


def _method(name: str) -> str:
    """The method in the name of a run, with what was changed."""
    recipe, plus, changes = name.partition("+")
    return recipe.rpartition("-")[2] + plus + changes


def _change(result: Comparison, quantity: Callable[[Summary], float | None], digits: int) -> str:
    sides = [list(side.values(quantity).values()) for side in result.sides]
    if not all(sides):
        return DASH
    return " → ".join(f"{estimate(values).mean:.{digits}f}" for values in sides)


def _flags(given: _Arguments) -> Iterator[str]:
    """The flags of ``isda train`` that say the same."""
    yield from ("--seeds", *map(str, given.seeds))
    for name in ("epochs", "batch_size"):
        if getattr(given, name) is not None:
            yield from (f"--{name.replace('_', '-')}", str(getattr(given, name)))
    for option in dataclasses.fields(Options):
        value, flag = getattr(given.options, option.name), option.name.replace("_", "-")
        if value != getattr(Options(), option.name):
            if isinstance(value, bool):
                yield f"--{flag}" if value else f"--no-{flag}"
            else:
                yield from (f"--{flag}", str(value))
