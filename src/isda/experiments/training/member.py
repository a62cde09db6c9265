"""A run in training: the lane that computes it and the folder that records it."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from isda import distributed
from isda.experiments.errors import InputError, RunError
from isda.experiments.predictions import save_predictions
from isda.experiments.records import summary
from isda.experiments.training.failures import together
from isda.experiments.training.predicted_images import predictions_of
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.training_step import Lane

__all__ = ["Member"]


@dataclass(frozen=True)
class Member:
    """One of the runs of a command; without a folder on ranks other than 0."""

    number: int
    """Index of the plan."""
    lane: Lane
    run: RunFolder | None

    def restore(self) -> None:
        """Restore the last checkpoint on every rank; raises RunError."""
        lane = self.lane
        with together():
            try:
                if self.run is not None:
                    self._load(self.run)
            except RunError:
                raise
            except InputError as error:
                raise RunError(str(error)) from error
        if lane.world > 1:
            epoch = torch.tensor(lane.epoch, device=lane.device)
            distributed.broadcast([epoch, *lane.tensors()])
            lane.epoch = int(epoch)

    def _load(self, run: RunFolder) -> None:
        def restore(state: dict[str, Any]) -> None:
            try:
                self.lane.load_state_dict(state)
            except InputError as error:
                raise InputError(f"{run.folder}: {error}") from error

        run.record_weights(self.lane.network.weights)
        if run.load(restore) is None:
            done = summary(run)
            if done.finished:  # an exported record has no checkpoint
                self.lane.epoch = self.lane.recipe.epochs
            elif done.epochs:
                warnings.warn(f"{run.folder} has no checkpoint: the run starts again", stacklevel=2)
        run.rewind(self.lane.epoch)

    def metrics(
        self,
        epoch: int,
        result: list[float],
        seconds: float,
        side_by_side: int,
        memory: dict[str, float],
    ) -> dict[str, Any]:
        """Record of an epoch: a line of ``metrics.jsonl``.

        Args:
            epoch: its number, from 0.
            result: training loss, and the test metrics of the network.
            seconds: share of this run in the time of all runs side by side.
            side_by_side: number of these runs.
            memory: peaks of the device's memory.
        """
        lane, recipe = self.lane, self.lane.recipe
        loss, error, test_loss, calibration, top5_error = result
        return {
            "epoch": epoch,
            "learning_rate": recipe.learning_rate_at(epoch) * recipe.warmup_at(epoch + 1),
            "strength": recipe.lambda_0 * recipe.progress_at(epoch),
            "train_loss": loss,
            "test_error": error,
            "test_loss": test_loss,
            "test_ece": calibration,
            "test_top5_error": top5_error,
            "seconds": seconds,
            "images_per_second": lane.num_images / seconds,
            "side_by_side": side_by_side,
            "statistics_mib": sum(b.nbytes for b in lane.criterion.buffers()) / 2**20,
            **({"generator_digest": lane.generator_digest} if lane.generator_digest else {}),
            **memory,
        }

    def write(self, metrics: dict[str, Any], writer: Any, *, save: bool, last: bool) -> None:
        """Write the metrics of an epoch, the predictions of the last one, and maybe a checkpoint.

        Args:
            metrics: see :meth:`metrics`.
            writer: for TensorBoard, or None.
            save: whether to write a checkpoint.
            last: whether this command trains no further epoch of the run.
        """
        state = self.lane.state_dict() if save else None  # gathers from all ranks
        if self.run is not None:
            self.run.append(metrics)
            if self.lane.epoch == self.lane.recipe.epochs:
                save_predictions(self.run, predictions_of(self.lane))
            if state is not None:
                self.run.save(state, last=last)
        if writer is not None:
            for key, value in metrics.items():
                writer.add_scalar(key, value, metrics["epoch"])
