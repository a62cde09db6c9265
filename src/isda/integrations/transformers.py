"""Hugging Face Trainer: normalises the loss, ramps λ, and saves the state in checkpoints.

>>> criterion = isda.attach(model, lambda_0=0.5)
>>> trainer = Trainer(
...     model,
...     arguments,
...     train_dataset=dataset,
...     compute_loss_func=loss_func(criterion),
...     callbacks=[ISDACallback(criterion)],
... )
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isda import distributed
from isda.attach import AttachedLoss
from isda.distributed import ShardedCovariance
from isda.integrations.steps import (
    count_batches,
    has_total_steps,
    require_isda,
    set_total_steps,
)
from isda.multilabel import ISDABCEWithLogitsLoss

__all__ = ["ISDACallback", "loss_func"]

IGNORED = -100
"""The label that the Trainer does not count in ``num_items_in_batch``."""


def loss_func(criterion: AttachedLoss) -> Callable[..., Tensor]:
    """Function for ``Trainer(compute_loss_func=…)``.

    The Trainer expects the sum of the losses divided by ``num_items_in_batch``, the number of
    labels in all accumulated batches on all ranks. With a mean over each batch, such as
    ``criterion(outputs.logits, labels)``, the loss would be multiplied by the number of batches.
    Class weights do not change the divisor, as in the losses of transformers.

    Logits (N, C, h, w) of label maps (N, H, W) are resized bilinearly, as the segmentation models
    of transformers do for their own loss.

    Args:
        criterion: the criterion attached to the model, with ``reduction="mean"``.
    """
    require_isda(criterion)
    inner: Any = criterion.criterion
    ignored = getattr(inner, "ignore_index", IGNORED)
    if ignored != IGNORED:
        raise ValueError(
            f"ignore_index must be {IGNORED} with the Trainer, which counts all other labels, "
            f"got {ignored}: set such labels to {IGNORED} in the data set"
        )
    if inner.reduction != "mean":
        raise ValueError(
            "reduction must be 'mean', which loss_func replaces with the Trainer's normalisation, "
            f"got {inner.reduction!r}"
        )

    def compute_loss(
        outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if isinstance(outputs, dict):
            logits = outputs["logits"]
        else:
            logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
        if labels is None:
            raise ValueError('the batch must contain "labels", got None')
        maps = logits.dim() == 4 and labels.dim() == 3
        if maps and logits.shape[2:] != labels.shape[1:]:
            logits = F.interpolate(logits, labels.shape[1:], mode="bilinear", align_corners=False)
        if num_items_in_batch is None:
            return criterion(logits, labels)
        number = num_items_in_batch
        if labels.is_floating_point() and not isinstance(inner, ISDABCEWithLogitsLoss):
            number = number / inner.num_classes  # the Trainer counts all probabilities
        inner.reduction = "sum"
        try:
            loss: Tensor = criterion(logits, labels)
        finally:
            inner.reduction = "mean"
        return loss / number

    return compute_loss


class ISDACallback(TrainerCallback):
    """Sets ``total_steps`` and keeps the state of the criterion in the Trainer's checkpoints.

    Unless you have set ``total_steps``, each ``trainer.train()`` sets it and, if it starts at step
    0, restarts the ramp of λ. The state is saved as ``isda.pt`` in every checkpoint folder.
    Resuming without it raises an error, because λ and the statistics would start over.

    Args:
        criterion: the criterion attached to the model.
        resume_from_checkpoint: the folder that is passed to ``trainer.train()``. Only needed if it
            is not in ``output_dir``, because the Trainer does not pass it on to callbacks.
    """

    def __init__(
        self,
        criterion: AttachedLoss,
        *,
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        require_isda(criterion)
        self.criterion = criterion
        self.resume_from_checkpoint = resume_from_checkpoint
        self._is_given = has_total_steps(criterion)
        self._first_step: int | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        self._check(args, state, model)
        inner: Any = self.criterion.criterion
        if not self._is_given:
            if state.global_step == 0:
                inner.step.zero_()
            try:
                batches = len(train_dataloader)
            except TypeError:  # an iterable data set
                batches = None
            accumulation = args.gradient_accumulation_steps
            total_steps = count_batches(state.max_steps, batches, accumulation)
            set_total_steps(self.criterion, total_steps)
        if state.global_step > 0:
            self._load(args, state)
        self._first_step = int(inner.step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._first_step is None:
            return
        if self._first_step == int(self.criterion.criterion.step):
            raise ValueError(
                "the Trainer ran a step without calling the criterion: pass "
                "compute_loss_func=loss_func(criterion) to it"
            )
        self._first_step = None  # compared once, because it synchronises

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not (args.should_save or self._is_sharded()):
            return
        file = _checkpoint_folder(args, state) / self._file_name()
        torch.save(self.criterion.state_dict(), file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def _check(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Raise ValueError if the training loss would not be the requested one."""
        if state.is_hyper_param_search:
            raise ValueError(
                "ISDACallback cannot be used in trainer.hyperparameter_search, whose trials would "
                "share one criterion: create a separate Trainer for each trial"
            )
        smoothing = getattr(self.criterion.criterion, "label_smoothing", 0.0)
        if args.label_smoothing_factor not in (0.0, smoothing):
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} has no effect, because the "
                "Trainer ignores it with compute_loss_func: pass "
                f"label_smoothing={args.label_smoothing_factor} to isda.attach instead"
            )
        if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            raise ValueError(
                f"{type(model).__name__} is a language model, whose labels are shifted by one "
                "token, which loss_func does not do: use a classification model"
            )

    def _load(self, args: TrainingArguments, state: TrainerState) -> None:
        given = self.resume_from_checkpoint or args.resume_from_checkpoint
        if isinstance(given, str | os.PathLike) and Path(given).is_dir():
            folder = Path(given)
        else:
            folder = _checkpoint_folder(args, state)
        file = folder / self._file_name()
        if not file.exists() or not _is_state_of(folder, state):
            raise ValueError(
                f"training is resumed at step {state.global_step}, but the state of the "
                f"criterion is not in {folder}: pass ISDACallback(criterion, "
                "resume_from_checkpoint=…) if the checkpoint is elsewhere; to start ISDA from a "
                "checkpoint without it, load the model with from_pretrained instead of resuming"
            )
        self.criterion.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def _is_sharded(self) -> bool:
        return isinstance(self.criterion.estimator, ShardedCovariance)

    def _file_name(self) -> str:
        """One file, or one for each rank if the statistics are sharded."""
        return f"isda_{distributed.rank(None)}.pt" if self._is_sharded() else "isda.pt"


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Folder in which the Trainer saves its state."""
    assert args.output_dir is not None
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _is_state_of(folder: Path, state: TrainerState) -> bool:
    """Whether a checkpoint is the one that the Trainer's state was loaded from."""
    saved = TrainerState.load_from_json(str(folder / "trainer_state.json"))
    return all(
        json.dumps(getattr(saved, key)) == json.dumps(getattr(state, key))
        for key in ("global_step", "log_history")
    )
