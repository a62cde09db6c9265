"""Lightning: ramps and logs λ, and saves the criterion's state in the Trainer's checkpoints.

>>> class Classifier(LightningModule):
...     def __init__(self):
...         super().__init__()
...         self.model = resnet18(num_classes=10)
...         self.criterion = ISDACallback(isda.attach(self.model, lambda_0=0.5))
>>> module = Classifier()
>>> trainer = Trainer(callbacks=[module.criterion])
"""

import math
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from isda.attach import AttachedLoss
from isda.covariance import Covariance
from isda.criterion import Criterion
from isda.distributed import ShardedCovariance
from isda.integrations.steps import (
    count_batches,
    has_total_steps,
    require_isda,
    set_total_steps,
)
from isda.loss import ISDALoss

__all__ = ["ISDACallback"]


class ISDACallback(Callback):
    """A criterion called with ``(logits, target)`` that is also a callback of the Trainer.

    * Unless ``total_steps`` is set, it is derived from ``trainer.estimated_stepping_batches``, and
      every ``fit`` that starts at step 0 restarts the ramp of λ.
    * ``isda/strength`` (λ) and ``isda/quadratic`` (mean of the quadratic term over the classes and
      the samples of a batch) are logged.
    * The state is saved in the Trainer's checkpoints. Resuming from a checkpoint without it raises
      an error, because λ and the statistics would start over.
    * It is not a submodule of the LightningModule, so that weight averaging does not average the
      statistics, DistributedDataParallel does not broadcast them for each batch, and
      ``load_from_checkpoint`` works without them.
    * Where Lightning computes a loss without training, the loss is ordinary cross entropy and does
      not change statistics or steps: in the last epoch of ``StochasticWeightAveraging``, which
      updates batch norm, and while ``Tuner`` searches for a learning rate or a batch size.

    Args:
        criterion: the criterion attached to the model.
    """

    def __init__(self, criterion: AttachedLoss) -> None:
        require_isda(criterion)
        self.criterion = criterion
        self._is_set_up = False
        self._is_training = False
        self._is_given = has_total_steps(criterion)
        self._last: tuple[Tensor, Tensor] | None = None  # λ and target of the last batch

    def __call__(self, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Loss of the last batch of the model, see :class:`isda.AttachedLoss`."""
        training = isinstance(logits, Tensor) and logits.requires_grad
        if training and not self._is_set_up:
            raise ValueError(
                "the criterion must be one of the Trainer's callbacks: "
                "Trainer(callbacks=[module.criterion])"
            )
        if training and not self._is_training:
            self.criterion.eval()
            try:
                return self.criterion(logits, target)
            finally:
                self.criterion.train()
        inner: Any = self.criterion.criterion
        step = inner.step.clone()
        loss: Tensor = self.criterion(logits, target, **options)
        if training and options.get("update", True):
            self._last = inner._strength_at(step, options.get("progress")), target
        return loss

    @property
    def state_key(self) -> str:
        return "isda"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_set_up, self._is_training = True, False
        if any(isinstance(module, Criterion | AttachedLoss) for module in pl_module.modules()):
            raise ValueError(
                "the criterion must not be a submodule of the LightningModule, whose buffers are "
                "averaged and broadcast: write self.criterion = ISDACallback(isda.attach(…))"
            )
        if trainer.world_size > 1 and isinstance(self.criterion.estimator, ShardedCovariance):
            raise ValueError(
                "ShardedCovariance cannot be saved in Lightning's checkpoints, which only rank 0 "
                'writes: use covariance="full" or "diagonal"'
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_set_up = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # not on_fit_start, where the number of batches is not known yet
        self._is_training = True
        if self._is_given:
            return
        if trainer.global_step == 0:
            self.criterion.criterion.step.zero_()
        updates = trainer.estimated_stepping_batches
        if not math.isfinite(updates) or updates < 1:
            raise ValueError(
                f"total_steps must be known, but the Trainer estimates {updates} steps: set "
                "max_steps of the Trainer, max_epochs if the data loader has a length, or "
                "total_steps of the criterion"
            )
        batches = trainer.num_training_batches
        total_steps = count_batches(
            int(updates),
            int(batches) if math.isfinite(batches) else None,
            trainer.accumulate_grad_batches,
        )
        if math.isfinite(batches):
            total_steps = min(total_steps, _num_epochs(trainer) * int(batches))
        set_total_steps(self.criterion, total_steps)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_training = trainer.current_epoch < _num_epochs(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_training = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._last is None:
            return
        (strength, target), self._last = self._last, None
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer.global_step % every:
            return
        pl_module.log("isda/strength", strength)
        cross_entropy = isinstance(self.criterion.criterion, ISDALoss)
        if cross_entropy and isinstance(self.criterion.estimator, Covariance):
            pl_module.log("isda/quadratic", self._mean_quadratic(target))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            raise ValueError(
                "the checkpoint does not contain the criterion's state, so λ and the statistics "
                "would start over: resume from one that was saved with ISDACallback, or load only "
                "the weights with load_from_checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        return dict(self.criterion.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.criterion.load_state_dict(state_dict)

    @torch.no_grad()
    def _mean_quadratic(self, target: Tensor) -> Tensor:
        """Mean of (w_j − w_y)ᵀ Σ_y (w_j − w_y) over the classes j and the samples of this rank."""
        inner: Any = self.criterion.criterion
        classes = target
        if target.is_floating_point():  # (N, C, ...), or (N, ..., C) for tokens
            classes = target.argmax(1 if target.shape[1] == inner.num_classes else -1)
        classes = classes[classes != inner.ignore_index]
        index, count = classes.unique(return_counts=True)
        weight = self.criterion.gather_parameters()[0].float()
        rows = self.criterion.estimator.quadratic(weight, index).mean(1)  # (K,)
        return (rows * count).sum() / count.sum().clamp(min=1)


def _num_epochs(trainer: Trainer) -> int:
    """Number of training epochs; ``StochasticWeightAveraging`` adds one to update batch norm."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averages = [each for each in callbacks if isinstance(each, StochasticWeightAveraging)]
    return min((each.swa_end + 1 for each in averages), default=sys.maxsize)
