"""What a command trains: runs that are known, or runs that depend on the results of others."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from isda import distributed
from isda.experiments.records import Run, summary
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.failures import finished_first
from isda.experiments.training.groups import Plan
from isda.experiments.training.start import records_of

__all__ = ["PlannedRuns", "Task", "result_line"]


class Task(ABC):
    """What a command trains; a queue can also train it."""

    options: Options
    """How to run the training."""

    @abstractmethod
    def plans(self) -> list[Plan]:
        """All runs; with the λ₀ of the recipe where it is still to be chosen."""

    @abstractmethod
    def train_missing(self, title: str, records: Path) -> None:
        """Train what is missing, and print the results.

        Args:
            title: the line of a queue, for messages.
            records: folder of finished runs, which are not trained again.
        """

    def with_options(self, options: Options) -> "Task":
        """The same task with other options."""
        return replace(self, options=options)  # type: ignore[type-var]


@dataclass(frozen=True)
class PlannedRuns(Task):
    """Runs whose recipes are known."""

    recipes: dict[str, Recipe]
    """Recipes by the name of their runs."""

    seeds: tuple[int, ...]
    """One run of every recipe per seed."""

    options: Options
    """How to run the training."""

    def __post_init__(self) -> None:
        for recipe in self.recipes.values():
            recipe.require_ramp()

    def plans(self) -> list[Plan]:
        """One plan per recipe and seed; all recipes of a seed, which are compared, come first."""
        return [Plan(name, recipe, seed) for seed in self.seeds
                for name, recipe in self.recipes.items()]  # fmt: skip

    def missing(self, title: str, records: Path) -> list[Plan]:
        """The unfinished runs; prints how many are finished."""
        plans = self.plans()
        missing = [plan for plan in plans if not records_of(plan, self.options.out, records)]
        done = len(plans) - len(missing)
        many = "s" * (len(plans) != 1)
        if distributed.rank(None) == 0:
            print(f"{title}: {done} of {len(plans)} run{many} finished", flush=True)
        return missing

    def train_missing(self, title: str, records: Path) -> None:
        missing = self.missing(title, records)
        if not missing:
            return
        with finished_first(loop.train, missing, self.options) as runs:
            for run in runs:
                print(result_line(run), flush=True)


def result_line(run: Run) -> str:
    """Folder, error and time of a finished run."""
    result = summary(run)
    split = "validation" if run.recipe.hold_out else "test"
    return f"{run.folder}: {split} error {result.error:.2f} %, {result.seconds:.0f} s"
