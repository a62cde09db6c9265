"""Temperature scaling (Guo et al., 2017): ``isda calibrate``.

Methods are trained side by side without some training images, which are held out. After training,
one number T per run is fitted on them, and the test images, which neither the training nor the fit
has seen, are evaluated with T and without it. All methods are trained on the same images, so that
cross entropy, label smoothing and ISDA can be compared before and after temperature scaling.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from isda.experiments.calibration import Calibration, load_calibration, save_calibration
from isda.experiments.errors import InputError, TimeUp
from isda.experiments.plans import Calibrations
from isda.experiments.search import default_hold_out
from isda.experiments.settings import Options
from isda.experiments.training import loop
from isda.experiments.training.device import choose_kernels, join_processes
from isda.experiments.training.failures import finished_first
from isda.experiments.training.groups import Plan, own_images
from isda.experiments.training.images import kept_images
from isda.experiments.training.metrics import classification_metrics
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.run_images import RunImages
from isda.experiments.training.start import finished_runs
from isda.experiments.training.training_step import Lane

__all__ = ["LIMITS", "calibrate", "fit_temperature", "measure"]

LIMITS = (0.01, 100.0)
"""Smallest and largest temperature. Without any error on the held-out images, the likelihood
always grows when T falls, and the fit ends at the lower limit."""


def fit_temperature(logits: Tensor, target: Tensor) -> float:
    """Temperature T in ``LIMITS`` that minimises the mean cross entropy of ``logits / T``.

    The loss is convex in β = 1/T, and its derivative is the mean over the samples of
    Σ_j p_j z_j − z_y, which grows with β; so its zero is found by bisection.

    Args:
        logits: logits of images that were not used for training.
        target: class indices.

    Shape:
        logits (N, C), target (N,).
    """
    logits = logits.double()
    own = logits.gather(1, target[:, None]).mean()
    low, high = (1 / limit for limit in reversed(LIMITS))
    for _ in range(60):
        middle = (low * high) ** 0.5
        expected = ((middle * logits).softmax(1) * logits).sum(1).mean()
        low, high = (low, middle) if expected > own else (middle, high)
    return (low * high) ** -0.5


def measure(run: RunFolder, options: Options, device: torch.device) -> Calibration:
    """Fit the temperature of a finished run on its held-out images, and test it.

    Raises:
        InputError: the run is not finished, has no checkpoint or no held-out images.
    """
    recipe, plan = run.recipe, Plan(run.name, run.recipe, run.seed)
    if not recipe.hold_out:
        raise InputError(
            f"{run.folder} has no held-out images to fit a temperature on: train with --hold-out"
        )
    with kept_images() as store:
        own = own_images(store.get(recipe, options, device), plan)
        # the test images of the data set, also if the run has drawn its training images
        data = store.get(replace(recipe, hold_out=0), options, device)
    lane = Lane(recipe, run.seed, own, device)
    if run.load(lane.load_state_dict) is None or lane.epoch != recipe.epochs:
        raise InputError(f"{run.folder} has no checkpoint of its last epoch to calibrate")
    held_out, held_out_target = lane.predict(lane.images)
    images = RunImages(recipe, run.seed, data, device, rank=0, world=1, compiled=False)
    test, test_target = lane.predict(images)
    temperature = fit_temperature(held_out, held_out_target)

    def metrics(logits: Tensor, target: Tensor) -> list[list[float]]:
        return [classification_metrics(logits / t, target).tolist() for t in (1.0, temperature)]

    before, after = metrics(held_out, held_out_target)
    plain, scaled = metrics(test, test_target)
    return Calibration(
        temperature=temperature,
        held_out_images=len(held_out_target),
        held_out_loss=before[1],
        held_out_scaled_loss=after[1],
        test_images=len(test_target),
        test_error=plain[0],
        test_loss=plain[1],
        test_ece=plain[2],
        scaled_loss=scaled[1],
        scaled_ece=scaled[2],
    )


def calibrate(
    task: Calibrations, options: Options, *, waiting: Callable[[Plan], bool] | None = None
) -> list[RunFolder]:
    """Train what is missing, and calibrate the runs; those that are calibrated stay as they are.

    Args:
        task: methods and seeds.
        options: how to run the training.
        waiting: whether a run is to be trained and calibrated; by default all are.

    Returns:
        The calibrated runs.

    Raises:
        RunsFailed: runs that failed; the others are calibrated.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError(
            "isda calibrate needs a single process: train the runs with torchrun and isda train "
            "--hold-out, then calibrate them without torchrun and with --resume"
        )
    hold_out = task.recipe.hold_out or default_hold_out(task.recipe, options)
    plans = [plan for plan in task.planned(hold_out).plans() if waiting is None or waiting(plan)]
    with (
        join_processes(options.device) as (device, *_),
        choose_kernels(options, device),
        kept_images(),
    ):
        try:
            with finished_first(loop.train, plans, options) as runs:
                _measure_missing(runs, options, device)
        except TimeUp:  # the finished ones need not wait for the others, nor keep a checkpoint
            with contextlib.suppress(InputError):  # reported when all are finished
                _measure_missing(finished_runs(plans, options).values(), options, device)
            raise
    return runs


def _measure_missing(runs: Iterable[RunFolder], options: Options, device: torch.device) -> None:
    for run in runs:
        if load_calibration(run) is None:
            save_calibration(run, measure(run, options, device))
