"""``isda calibrate``: train with some images held out, and fit a temperature on them.

All methods are trained on the same images, so that cross entropy, label smoothing and ISDA can be
compared before and after temperature scaling.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from isda.experiments.calibration import calibration_text, load_calibration, save_calibration
from isda.experiments.commands.lambda_search import with_hold_out
from isda.experiments.commands.recipe_arguments import RecipeArguments, parse_recipe
from isda.experiments.commands.task import PlannedRuns, Task
from isda.experiments.errors import InputError, TimeUp, unknown
from isda.experiments.recipes import Start, with_method
from isda.experiments.report.text import show
from isda.experiments.settings import METHODS, Options
from isda.experiments.temperature import calibration_of
from isda.experiments.training import loop
from isda.experiments.training.device import choose_kernels, join_processes
from isda.experiments.training.failures import finished_first
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import kept_images
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.start import finished_runs, records_of

__all__ = ["Calibrate", "plan", "run"]


@dataclass(frozen=True)
class Calibrate(RecipeArguments, Task):
    """Arguments of ``isda calibrate``."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each method per seed."""

    methods: tuple[str, ...] = ("ce", "label_smoothing", "isda")
    """Losses to compare. The temperature is fitted on held-out training images; without --hold-out,
    a tenth of them is held out (imagenet: 50,000)."""

    def plans(self) -> list[Plan]:
        held = with_hold_out(self.recipe, self.options)
        recipes = {}
        for method in self.methods:
            recipe = held if method == "isda" else with_method(held, method)
            if method in ("isda", "ce"):
                name = self.start.pair_name(recipe)
            else:
                name = Start(with_method(self.start.recipe, method)).run_name(recipe)
            recipes[name] = recipe
        return PlannedRuns(recipes, self.seeds, self.options).plans()

    def train_missing(self, title: str, records: Path) -> None:
        print(title, flush=True)
        for one in self.calibrate(records):
            found = load_calibration(one)
            assert found is not None
            print(f"{one.folder}: temperature {found.temperature:.3f}", flush=True)

    def calibrate(self, records: Path | None = None) -> list[RunFolder]:
        """Train missing runs, and calibrate all runs that are not calibrated yet.

        Args:
            records: skip runs that are already calibrated in this folder or the folder of the runs.

        Returns:
            The calibrated runs.

        Raises:
            RunsFailed: some runs failed; the others are calibrated.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise InputError(
                "isda calibrate needs a single process: train the runs with torchrun and isda "
                "train --hold-out, then calibrate them without torchrun and with --resume"
            )
        options, plans = self.options, self.plans()
        if records is not None:
            found = {plan: records_of(plan, options.out, records) for plan in plans}
            plans = [plan for plan in plans if not any(map(load_calibration, found[plan]))]
        with (
            join_processes(options.device) as (device, *_),
            choose_kernels(options, device),
            kept_images(),
        ):
            try:
                with finished_first(loop.train, plans, options) as runs:
                    _calibrate_missing(runs, options, device)
            except TimeUp:  # calibrate finished runs now, so that they need not keep checkpoints
                with contextlib.suppress(InputError):  # reported when all are finished
                    _calibrate_missing(finished_runs(plans, options).values(), options, device)
                raise
        return runs


def plan(words: list[str]) -> Calibrate:
    """The task described by the arguments of the command."""
    task = parse_recipe(Calibrate, "calibrate", words)
    if task.recipe.method != "isda":
        raise InputError(
            f"method must be isda, got {task.recipe.method!r}: choose the losses to compare with "
            "--methods"
        )
    for method in task.methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    if not task.methods or len({*task.methods}) != len(task.methods):
        listed = " ".join(task.methods) or "none"
        raise InputError(f"methods must be different names, got {listed}")
    return task


def run(words: list[str]) -> None:
    """Train and calibrate, and print the NLL and the calibration error of every method."""
    show(calibration_text(plan(words).calibrate()))


def _calibrate_missing(runs: Iterable[RunFolder], options: Options, device: torch.device) -> None:
    for one in runs:
        if load_calibration(one) is None:
            save_calibration(one, calibration_of(one, options, device))
