"""What the tests of the search for λ₀ share: the command and a stand-in that trains nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import command_line
import pytest

from isda.experiments.cli import run as run_command
from isda.experiments.commands.search import Search, SearchResult
from isda.experiments.recipes import RECIPES, Start
from isda.experiments.records import Run
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.loop import Plan
from isda.experiments.training.run_folder import RunFolder

__all__ = ["DIGITS", "Trainer", "elsewhere", "fields", "main", "search", "trainer"]

main = partial(run_command, "search")

DIGITS = RECIPES["digits-resnet8-isda"]
elsewhere = command_line.elsewhere


def search(recipe: Recipe, name: str | None = None, **given: Any) -> SearchResult | None:
    return Search(recipe, Start(RECIPES.get(name or "", recipe), name), **given).search()


class Trainer:
    """Stand-in for ``train`` that writes records; the error is a function of recipe and seed."""

    def __init__(self, error: Callable[[Recipe, int], float]) -> None:
        self.error = error
        self.calls: list[list[Plan]] = []
        self.options: list[Options] = []

    def __call__(self, plans: Sequence[Plan], options: Options) -> list[Run]:
        self.calls.append(list(plans))
        self.options.append(options)
        runs = []
        for plan in plans:
            run = RunFolder.create(
                options.out, plan.name, plan.recipe, plan.seed, resume=options.resume
            )
            run.rewind(0)
            for epoch in range(plan.recipe.epochs):
                # far off before the epochs of the result; their offsets cancel out
                number = max(1, min(10, plan.recipe.epochs // 4))
                last = epoch - plan.recipe.epochs + number
                offset = 50.0 if last < 0 else 0.01 * (last - (number - 1) / 2)
                run.append(
                    {"epoch": epoch, "test_error": self.error(plan.recipe, plan.seed) + offset}
                )
            runs.append(run)
        return runs


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    def install(error: Callable[[Recipe, int], float]) -> Trainer:
        stand_in = Trainer(error)
        monkeypatch.setattr(loop, "train", stand_in)
        return stand_in

    return install


def fields(plans: Sequence[Plan]) -> list[tuple[float, int, int]]:
    return [(plan.recipe.lambda_0, plan.recipe.hold_out, plan.seed) for plan in plans]
