"""``isda table``: show a table of the paper with our numbers, or train what a cell of it needs.

Showing a table does not import the training code.
"""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from isda.experiments.commands.arguments import changed_options, parse, require_seeds
from isda.experiments.errors import InputError
from isda.experiments.published import cell_recipes, get_table
from isda.experiments.recipes import Start, flags, get_recipe
from isda.experiments.records import default_folder, load_runs
from isda.experiments.report.sides import create_sides, left_out_line
from isda.experiments.report.tables import cell_results, section
from isda.experiments.report.text import show
from isda.experiments.settings import Options

if TYPE_CHECKING:
    from isda.experiments.commands.task import PlannedRuns

__all__ = ["Table", "plan", "run"]


@dataclass(frozen=True)
class Table:
    """Arguments of ``isda table``."""

    table: tyro.conf.Positional[int]
    """Number of the table, 1 to 5."""

    cell: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Train the runs that a cell needs: DATA/NETWORK, or DATA/NETWORK/METHOD for one method. Repeat
    --cell to train several cells."""

    results: Path | None = None
    """Folder of run records to show; not with --cell. None: ./runs, or ./results if there are no
    runs."""

    dry_run: bool = False
    """Print the commands that would train the cell, and exit."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each recipe per seed."""

    epochs: int | None = None
    """Epochs; None: as in the recipes."""

    batch_size: int | None = None
    """Batch size; None: as in the recipes."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How to run the training."""

    def changes(self) -> dict[str, Any]:
        """Fields of the recipes that these arguments change."""
        given = {"epochs": self.epochs, "batch_size": self.batch_size}
        return {name: value for name, value in given.items() if value is not None}

    def train_flags(self) -> list[str]:
        """The same settings as flags of ``isda train``."""
        return flags({"seeds": self.seeds, **self.changes(), **changed_options(self.options)})

    def require_valid(self) -> None:
        """Raise InputError unless cells can be trained with these arguments."""
        if not self.cell:
            raise InputError("training needs a cell: isda table N --cell DATA/NETWORK")
        if self.results is not None:
            raise InputError("--results cannot be used with --cell: set the folder with --out")
        require_seeds("seeds", self.seeds)

    def planned(self) -> "PlannedRuns":
        """Runs that the cells need, with their baselines."""
        from isda.experiments.commands.task import PlannedRuns  # imports the training code

        starts = [Start(get_recipe(name), name) for name in cell_recipes(self.table, *self.cell)]
        changed = [(start, replace(start.recipe, **self.changes())) for start in starts]
        recipes = {start.run_name(recipe): recipe for start, recipe in changed}
        return PlannedRuns(recipes, self.seeds, self.options)


def plan(words: list[str]) -> "PlannedRuns":
    """The task described by the arguments of the command."""
    given = parse(Table, "table", words)
    given.require_valid()
    return given.planned()


def run(words: list[str]) -> None:
    """Show a table, or train its cells and show them."""
    given = parse(Table, "table", words)
    table = get_table(given.table)
    if given == Table(given.table, results=given.results):  # nothing to train
        folder = given.results or default_folder()
        sides, left_out = create_sides([] if folder is None else load_runs(folder))
        show("\n\n".join([section(table, sides), *map(left_out_line, left_out.values())]))
        return
    given.require_valid()
    names = cell_recipes(given.table, *given.cell)
    if given.dry_run:
        for name in names:
            print(shlex.join(["isda", "train", name, *given.train_flags()]))
        return
    from isda.experiments.training import loop
    from isda.experiments.training.failures import finished_first

    planned = given.planned()
    own = dict(zip(names, planned.recipes, strict=True))
    with finished_first(loop.train, planned.plans(), planned.options) as runs:
        if runs:  # only rank 0 has the records
            show(cell_results(table, given.cell, own, runs))
