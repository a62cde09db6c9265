"""Temperature scaling (Guo et al., 2017) of a finished run.

One number T is fitted on held-out images, and the test images, which neither the training nor the
fit has seen, are evaluated with T and without it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from isda.experiments.calibration import Calibration
from isda.experiments.errors import InputError
from isda.experiments.settings import Options
from isda.experiments.training.groups import Plan, images_of_run
from isda.experiments.training.images import kept_images
from isda.experiments.training.metrics import classification_metrics
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.run_images import RunImages
from isda.experiments.training.training_step import Lane

__all__ = ["LIMITS", "calibration_of", "fit_temperature"]

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


def calibration_of(run: RunFolder, options: Options, device: torch.device) -> Calibration:
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
        own = images_of_run(store.get(recipe, options, device), plan)
        # the test images of the data set, even if the run has drawn its training images
        data = store.get(replace(recipe, hold_out=0), options, device)
    lane = Lane(recipe, run.seed, own, device)
    run.load_finished(lane.load_state_dict)
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
