"""Base class of ISDALoss and ISDABCEWithLogitsLoss: statistics, ramp of λ, ranks and state."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from isda import checks, distributed, functional
from isda.covariance import COVARIANCES, Covariance, Estimator, require_covariance_index
from isda.functional.losses import Reduction, require_reduction

__all__ = ["Criterion", "Ramp"]

Ramp = Literal["linear", "constant"]


class Criterion(nn.Module):
    """A loss with a covariance estimator and a strength λ that grows with the step count."""

    estimator: Estimator
    weight: Tensor | None
    step: Tensor

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        lambda_0: float,
        total_steps: int | None,
        covariance: str | Estimator,
        decay: float,
        ramp: Ramp,
        weight: Tensor | None,
        reduction: Reduction,
        max_shift: float | None,
        frozen: bool,
        synchronize: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        checks.require_lambda_0(lambda_0)
        checks.require_class_weight("weight", weight, num_classes)
        require_reduction(reduction)
        if ramp not in get_args(Ramp):
            raise ValueError(f"ramp must be 'linear' or 'constant', got {ramp!r}")
        checks.require_max_shift(max_shift)
        self.total_steps = total_steps
        self.estimator = _create_estimator(covariance, num_features, num_classes, decay)
        self.num_features = num_features
        self.num_classes = num_classes
        self.lambda_0 = lambda_0
        self.ramp = ramp
        self.reduction: Reduction = reduction
        self.max_shift = max_shift
        self.frozen = frozen
        self.synchronize = synchronize
        self.process_group = process_group
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    @property
    def total_steps(self) -> int | None:
        """Total number of training steps T; can be set before the first step."""
        return self._total_steps

    @total_steps.setter
    def total_steps(self, total_steps: int | None) -> None:
        checks.require_total_steps(total_steps)
        self._total_steps = None if total_steps is None else int(total_steps)
        self._warn_after = math.inf if total_steps is None else int(total_steps)  # later steps warn

    @property
    def strength(self) -> float:
        """λ of the next step, from the criterion's step count (synchronises with the GPU)."""
        if self.ramp == "constant":
            return self.lambda_0
        return self.lambda_0 * min(int(self.step) / self._require_total_steps(), 1.0)

    def grow(self, num_classes: int) -> None:
        """Increase the number of classes. New ones are appended; existing statistics are kept.

        Args:
            num_classes: new number of classes.
        """
        if not isinstance(self.estimator, Covariance):
            raise ValueError(f"grow needs an isda.Covariance, got {self.estimator!r}")
        if self.weight is not None and num_classes != self.num_classes:
            raise ValueError("grow needs a criterion without class weights: set weight to None")
        self.estimator.grow(num_classes)
        self.num_classes = num_classes

    def notify_ranks(self) -> None:
        """Make the other ranks raise too, instead of waiting for the batch of this rank."""
        if self.synchronize and not torch.compiler.is_compiling():
            distributed.agree(0, checks.REJECTED, self.process_group)

    def extra_repr(self) -> str:
        weight = None if self.weight is None else f"tensor of shape ({self.num_classes},)"
        group = self.process_group and dist.get_process_group_ranks(self.process_group)
        # modules are shown as children
        other = "" if isinstance(self.estimator, nn.Module) else f"covariance={self.estimator!r}, "
        return (
            f"{self.num_features}, {self.num_classes}, lambda_0={self.lambda_0}, "
            f"total_steps={self.total_steps}, {other}ramp={self.ramp!r}, weight={weight}, "
            f"reduction={self.reduction!r}, max_shift={self.max_shift}, frozen={self.frozen}, "
            f"synchronize={self.synchronize}, process_group={group}"
        )

    def _require_call(self, *, ranks_wait: bool, **arguments: Any) -> None:
        """Raise for arguments of the wrong type, device, dtype or shape.

        Args:
            ranks_wait: whether the other ranks wait for this one, and must therefore raise too.
            arguments: see :func:`isda.checks.require_call`.
        """
        try:
            checks.require_call(
                self.num_features, self.num_classes, criterion=self.step, **arguments
            )
            if arguments.get("covariance_index") is not None:
                require_covariance_index(self.estimator)
        except (TypeError, ValueError):
            if ranks_wait:
                self.notify_ranks()
            raise

    def _logits(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Output of the final linear layer, (N, A, ...) to (N, C, ...)."""
        try:
            return F.linear(features.movedim(1, -1), weight, bias).movedim(-1, 1)
        except RuntimeError:  # different dtypes, or out of memory
            if self.training:
                self.notify_ranks()
            raise

    def _strength_at(self, step: Tensor, progress: float | Tensor | None) -> Tensor:
        """λ at progress t/T, or at the given step if progress is None."""
        device = self.step.device
        if self.ramp == "constant":
            progress = 1.0
        if progress is None:
            progress = (step / self._require_total_steps()).clamp(max=1)
        elif not isinstance(progress, Tensor):  # full works in a CUDA graph, unlike a copy
            progress = torch.full((), progress, dtype=torch.float64, device=device)
        return functional.ramped_strength(self.lambda_0, progress.to(device).reshape(()))

    def _warn_of_steps(self) -> None:
        """Warn once that the step count exceeds ``total_steps``."""
        self._warn_after = math.inf
        checks.warn(
            f"the criterion has counted {int(self.step)} steps, more than "
            f"total_steps={self._total_steps}, so λ stays at lambda_0. Every call in training mode "
            "counts as a step: include all of them in total_steps, pass update=False in additional "
            "passes of the same training step (SAM, line searches, adversarial examples), and "
            "restore the criterion's state after running a learning-rate finder"
        )

    def _require_total_steps(self) -> int:
        if self._total_steps is None:
            raise ValueError(
                "total_steps must be set on the criterion, or progress passed to every call"
            )
        return self._total_steps

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        step = state_dict.get(prefix + "step")
        if step is not None:
            if step.is_floating_point() or step < 0:
                raise ValueError(f"{prefix}step must be a whole number >= 0, got {step}")
            if isinstance(self.estimator, Covariance):  # before the step count is overwritten
                self.estimator.check_state(state_dict, prefix + "estimator.")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _create_estimator(
    covariance: str | Estimator, num_features: int, num_classes: int, decay: float
) -> Estimator:
    """Create the estimator named by ``covariance``, or check the one that is passed."""
    if isinstance(covariance, str) and covariance in COVARIANCES:
        size = 4 * num_classes * num_features**2 / 2**30
        if covariance == "full" and size > 1:
            checks.warn(
                f"full covariances of {num_classes} classes with {num_features} features take "
                f'{size:.1f} GiB; covariance="diagonal" takes {1024 * size / num_features:.1f} MiB'
            )
        return COVARIANCES[covariance](num_features, num_classes, decay=decay)
    if isinstance(covariance, type | str) or not isinstance(covariance, Estimator):
        raise ValueError(
            f"covariance must be one of {', '.join(COVARIANCES)}, or an estimator with update and "
            f"quadratic, got {covariance!r}"
        )
    if decay != 1.0:
        raise ValueError(f"decay={decay} must be set on the estimator, not passed to the criterion")
    if isinstance(covariance, Covariance):
        found = (covariance.num_features, covariance.num_classes)
        if found != (num_features, num_classes):
            raise ValueError(
                f"covariance must have num_features={num_features} and "
                f"num_classes={num_classes}, got {covariance}"
            )
    return covariance
