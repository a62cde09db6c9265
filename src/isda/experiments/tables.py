"""Tables 1 to 5 in the paper's layout, and ``isda table``, which shows one or trains a cell of it.

A cell is addressed as ``DATA/NETWORK/METHOD``, the parts of its recipe's name. What it needs is its
recipe and the one it is compared with; the rows of the GANs have no recipe and are kept as printed.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from isda.experiments.comparison import (
    Side,
    comparison,
    comparison_table,
    create_side,
    same_training,
)
from isda.experiments.errors import InputError, unknown
from isda.experiments.published import ABLATION, COST, METHODS, PARAMETERS, PUBLISHED, Result
from isda.experiments.recipes import RECIPES, Recipe, baseline_of, get_recipe, run_name
from isda.experiments.runs import Run, load_runs, summary
from isda.experiments.train import Options, Plan, train

__all__ = [
    "TABLES",
    "Cell",
    "Table",
    "cell_recipes",
    "main",
    "markdown_rows",
    "paper_sides",
    "table_markdown",
]


@dataclass(frozen=True)
class Cell:
    """A number of the paper."""

    address: str
    """``DATA/NETWORK/METHOD``."""

    paper: Result
    """The number as printed."""

    recipe: str | None
    """Recipe that trains it; None for a GAN."""

    baseline: str | None
    """Recipe that it is compared with; None for a baseline."""

    @property
    def printed(self) -> str:
        """The paper's number, top-5 error included."""
        return str(self.paper) + (f" / {self.paper.top5}" if self.paper.top5 is not None else "")

    @property
    def missing(self) -> str:
        """What stands in place of our number where there is none."""
        return EMPTY if self.recipe else "GAN"


Row = tuple["str | Cell", ...]


@dataclass(frozen=True)
class Table:
    """A table as the paper prints it."""

    number: int
    title: str
    columns: tuple[str, ...]
    blocks: tuple[tuple[Row, ...], ...]
    """Rows, in the groups that the paper puts rules between."""

    spans: tuple[tuple[str, int], ...] = ()
    """The line above the columns: text and number of columns."""

    note: str = ""
    """What a reader has to know about our side of it."""

    @property
    def rows(self) -> list[Row]:
        return [row for block in self.blocks for row in block]

    @property
    def cells(self) -> list[Cell]:
        return [entry for row in self.rows for entry in row if isinstance(entry, Cell)]


EMPTY, DASH = "·", "–"
LEGEND = f"{EMPTY} not yet run   {DASH} not in the paper   GAN: no recipe trains it"


def cell_recipes(table: int, cell: str) -> list[str]:
    """Recipes that a cell needs, baselines first.

    >>> cell_recipes(2, "cifar100/resnet32")
    ['cifar100-resnet32-ce', 'cifar100-resnet32-isda']
    >>> cell_recipes(4, "cifar10/resnet110/focal")
    ['cifar10-resnet110-ce', 'cifar10-resnet110-focal']

    Args:
        table: number of the table.
        cell: ``DATA/NETWORK/METHOD``, or ``DATA/NETWORK`` for all methods of the table.
    """
    recipes = [
        name for found in _find(table, cell) for name in (found.baseline, found.recipe) if name
    ]
    if not recipes:
        raise InputError(f"cell {cell} is a GAN's: no recipe trains it")
    names = list(RECIPES)
    return sorted(set(recipes), key=names.index)


def paper_sides(runs: Iterable[Run]) -> dict[str, Side]:
    """Finished runs of the paper's recipes, by recipe; runs of a changed recipe do not count."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        if run.name in RECIPES and same_training(run.recipe, RECIPES[run.name]):
            by_name.setdefault(run.name, []).append(run)
    sides = {
        name: create_side(own, name)
        for name, own in by_name.items()
        if any(summary(run).finished for run in own)
    }
    return {name: side for name, side in sides.items() if side.errors}


def table_markdown(table: Table, sides: Mapping[str, Side]) -> str:
    """The table with a column for our numbers beside each of the paper's, as aligned Markdown."""
    width = [1] * len(table.columns)
    for row in table.rows:
        for place, entry in enumerate(row):
            width[place] = 2 if isinstance(entry, Cell) else width[place]
    spans = [text for text, count in table.spans for _ in range(count)] or [""] * len(width)
    header: list[str] = []
    for column, over, places in zip(table.columns, spans, width, strict=True):
        title = f"{over}, {column}" if over and places > 1 else column
        header += [title] if places == 1 else [f"{title}: paper", "ours (seeds)"]
    rows: list[list[str]] = []
    for row in table.rows:
        cells: list[str] = []
        for entry, places in zip(row, width, strict=True):
            if isinstance(entry, Cell):
                cells += [entry.printed, _ours(entry, sides)]
            else:
                cells += [entry, *[""] * (places - 1)]
        rows.append(cells)
    numbers = [place for place, count in enumerate(width) for _ in range(count)]
    left = {number for number, place in enumerate(numbers) if width[place] == 1}
    return markdown_rows(header, rows, left)


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
        [cell.ljust(widths[n]) if n in left else cell.rjust(widths[n]) for n, cell in enumerate(line)]
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
    """Folder of the run records to show, without --cell (default: results)."""

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
        given = {"epochs": self.epochs, "batch_size": self.batch_size}
        changes = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(recipe, **changes)


def main(arguments: list[str]) -> None:
    """Show a table of the paper with our numbers, or train what a cell of it needs."""
    given = tyro.cli(
        _Arguments,
        args=arguments,
        prog="isda table",
        description=main.__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    table = _table(given.table)
    if given.cell is None:
        if given != _Arguments(given.table, results=given.results):
            raise InputError("cell must be given to train: isda table N --cell DATA/NETWORK")
        folder = given.results or Path("results")
        runs = load_runs(folder) if given.results or folder.is_dir() else []
        print(f"Table {table.number}. {table.title}\n\n{table_markdown(table, paper_sides(runs))}")
        print(f"\n{LEGEND}" + (f"\n{table.note}" if table.note else ""))
        return
    if given.results is not None:
        raise InputError("results must not be given with --cell; --out is where its runs go")
    recipes = cell_recipes(given.table, given.cell)
    seeds = given.seeds
    if len({*seeds}) != len(seeds) or not seeds or not 0 <= min(seeds) <= max(seeds) < 2**32:
        listed = " ".join(map(str, seeds)) or "none"
        raise InputError(f"seeds must be different numbers from 0 to 2³² - 1, got {listed}")
    if given.dry_run:
        for name in recipes:
            print(shlex.join(["isda", "train", name, *_flags(given)]))
        return
    names = {}  # of the runs, by recipe
    plans = []
    for name in recipes:
        recipe = given.changed(get_recipe(name))
        names[name] = run_name(recipe, get_recipe(name), name)
        plans += [Plan(names[name], recipe, seed) for seed in seeds]
    runs = train(plans, given.options)
    if runs:  # else a rank that does not write
        print(_trained(_find(given.table, given.cell), names, runs))


def _trained(cells: Iterable[Cell], names: Mapping[str, str], runs: list[Run]) -> str:
    """What came of the runs of some cells: paper and ours, then each with its baseline."""
    rows, comparisons = [], []
    for name, own in names.items():
        side = create_side(runs, own)
        rows.append([own, str(PUBLISHED.get(name, DASH)), f"{side.result} ({len(side.runs)})"])
    for cell in cells:
        if cell.recipe and cell.baseline:
            result = comparison(runs, names[cell.baseline], names[cell.recipe])
            comparisons.append(f"{result.method.name}\n{comparison_table(result)}")
    return "\n\n".join([markdown_rows(["recipe", "paper, %", "ours, % (seeds)"], rows),
                        *comparisons])  # fmt: skip


def _ours(cell: Cell, sides: Mapping[str, Side]) -> str:
    side = sides.get(cell.recipe or "")
    return cell.missing if side is None else f"{side.result} ({len(side.errors)})"


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


def _table(number: int) -> Table:
    if number not in TABLES:
        raise InputError(f"table must be one of {', '.join(map(str, TABLES))}, got {number}")
    return TABLES[number]


def _find(table: int, address: str) -> list[Cell]:
    cells = _table(table).cells
    address = address.strip("/")
    found = [cell for cell in cells if address in (cell.address, cell.address.rpartition("/")[0])]
    if not found:
        groups = [cell.address.rpartition("/")[0] for cell in cells]
        known = dict.fromkeys([*groups, *(cell.address for cell in cells)])
        raise unknown(f"cell of Table {table}", address, known)
    return found


def _cell(recipe: str, paper: Result | None = None, baseline: str | None = None) -> Cell:
    if recipe.endswith("isda"):
        baseline = baseline_of(recipe)
    address = "/".join(recipe.split("-"))
    return Cell(address, PUBLISHED[recipe] if paper is None else paper, recipe, baseline)


_NAMES = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "resnet152": "ResNet-152",
    "densenet121": "DenseNet-BC-121",
    "densenet265": "DenseNet-BC-265",
    "resnext50_32x4d": "ResNeXt-50, 32x4d",
    "resnext101_32x8d": "ResNeXt-101, 32x8d",
    "resnet32": "ResNet-32",
    "resnet110": "ResNet-110",
    "se_resnet110": "SE-ResNet-110",
    "wide_resnet16_8": "Wide-ResNet-16-8",
    "wide_resnet28_10": "Wide-ResNet-28-10",
    "resnext29_8x64d": "ResNeXt-29, 8x64d",
    "densenet_bc100_12": "DenseNet-BC-100-12",
    "densenet_bc190_40": "DenseNet-BC-190-40",
    "shake_shake26_2x32d": "Shake-Shake (26, 2x32d)",
    "shake_shake26_2x112d": "Shake-Shake (26, 2x112d)",
}
_DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
