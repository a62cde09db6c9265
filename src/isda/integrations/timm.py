"""timm: a training task for its ``train.py``, with the criterion's state in its checkpoints.

>>> task = ISDATask(model, nn.CrossEntropyLoss(), lambda_0=0.5)  # was timm.task.ClassificationTask
>>> task.total_steps = epochs * len(loader)
"""

import logging
from typing import Any

import torch
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask
from torch import Tensor, nn

import isda
from isda.distributed import ShardedCovariance

__all__ = ["ISDATask"]

_logger = logging.getLogger(__name__)


class ISDATask(ClassificationTask):
    """``timm.task.ClassificationTask`` with ISDA.

    Label smoothing, class weights and soft targets of the criterion are kept. The state of ISDA is
    saved as ``task_state`` in timm's checkpoints. Resuming from a checkpoint without it raises an
    error, because λ and the statistics would start over.

    Args:
        model: the model to train.
        criterion: the loss that ISDA replaces: ``nn.CrossEntropyLoss``, or timm's
            ``LabelSmoothingCrossEntropy`` or ``SoftTargetCrossEntropy``.
        device: see ``ClassificationTask``.
        dtype: see ``ClassificationTask``.
        verbose: log the criterion.
        options: options of :func:`isda.attach`, such as ``lambda_0`` and ``covariance``.
    """

    criterion: isda.AttachedLoss

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        attached = isda.attach(model, **{**_options_of(criterion), **options})
        if isinstance(attached.estimator, ShardedCovariance):
            raise ValueError(
                "ShardedCovariance cannot be saved in timm's checkpoints, which only rank 0 "
                'writes: use covariance="full" or "diagonal"'
            )
        super().__init__(model, attached, device=device, dtype=dtype, verbose=False)
        if verbose:
            _logger.info(f"ISDATask: {attached.criterion}")

    @property
    def total_steps(self) -> int | None:
        """Total number of training batches; set it before the first one."""
        return self.criterion.total_steps

    @total_steps.setter
    def total_steps(self, total_steps: int) -> None:
        self.criterion.total_steps = total_steps

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        return {} if ema else dict(self.criterion.state_dict())

    def load_task_state(
        self,
        state: dict[str, Tensor] | None,
        strict: bool = True,
        module: nn.Module | None = None,
        ema: bool = False,
    ) -> None:
        if ema:  # averaged weights have no statistics
            return
        if not state:
            raise ValueError(
                "the checkpoint does not contain the criterion's state, so λ and the statistics "
                "would start over: resume from one that was saved with ISDATask, or load only the "
                "weights with --initial-checkpoint"
            )
        self.criterion.load_state_dict(state, strict=strict)


def _options_of(criterion: nn.Module) -> dict[str, Any]:
    """Options of :func:`isda.attach` that are equivalent to those of a loss."""
    if isinstance(criterion, nn.CrossEntropyLoss):
        names = ("weight", "label_smoothing", "ignore_index", "reduction")
        return {name: getattr(criterion, name) for name in names}
    if isinstance(criterion, LabelSmoothingCrossEntropy):
        return {"label_smoothing": criterion.smoothing}
    if isinstance(criterion, SoftTargetCrossEntropy):
        return {}
    raise ValueError(
        "criterion must be nn.CrossEntropyLoss, LabelSmoothingCrossEntropy or "
        f"SoftTargetCrossEntropy, got {type(criterion).__name__}: train without --bce-loss and "
        "--jsd-loss"
    )
