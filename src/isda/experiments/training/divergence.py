"""Detection of runs that diverge, and the message for the user."""

import math

from isda import ISDALoss
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.training_step import Lane

__all__ = ["divergence_message", "why_diverged"]


def why_diverged(lane: Lane, result: list[float]) -> str | None:
    """Why a run cannot continue: a loss that is not finite; the same on all ranks."""
    try:
        if isinstance(lane.criterion, ISDALoss):
            lane.criterion.check()
    except (ValueError, FloatingPointError) as error:
        return str(error)
    train_loss, _, test_loss, *_ = result
    for name, loss in (("training", train_loss), ("test", test_loss)):
        if not math.isfinite(loss):
            return f"the {name} loss is {loss}"
    return None


def divergence_message(lane: Lane, run: RunFolder | None, reason: str) -> str:
    """Message of a run that has diverged."""
    where = f"seed {lane.seed}" if run is None else str(run.folder)
    rate = lane.recipe.learning_rate_at(lane.epoch)
    saved = ""
    if run is not None:
        intact = run.has_checkpoint()
        saved = "; the last checkpoint is intact" if intact else "; there is no checkpoint"
    return (
        f"{where}, epoch {lane.epoch + 1}: {reason} (learning rate {rate:g}, lambda_0 "
        f"{lane.recipe.lambda_0:g}){saved}"
    )
