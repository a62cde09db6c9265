"""ISDABCEWithLogitsLoss: the same augmentation for samples with several labels."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from isda import checks, distributed, functional
from isda.checks import FEATURE_LIMIT, HAS_BAD_FEATURES, HAS_BAD_TARGET, OVERFLOW
from isda.covariance import Covariance, require_covariance_index
from isda.criterion import Criterion, Ramp
from isda.functional.losses import Reduction

__all__ = ["ISDABCEWithLogitsLoss"]


class ISDABCEWithLogitsLoss(Criterion):
    r"""Binary cross entropy under infinite semantic augmentation, for multi-label targets.

    A sample with the set of labels P is augmented with the mean covariance of its classes, Σ =
    (1/|P|) Σ_{c ∈ P} Σ_c; a sample without labels is not augmented. The loss is the upper bound
    :func:`isda.functional.isda_binary_cross_entropy` at strength λ = λ₀ · progress. In the
    statistics, a sample counts once for each of its labels. In eval mode, this is
    ``nn.BCEWithLogitsLoss``.

    Every call reads the labels on the host. It therefore synchronises with the GPU, causes a graph
    break under ``torch.compile``, and raises immediately for bad values. Distributed training works
    as in :class:`isda.ISDALoss`.

    Arguments not listed here are the same as in :class:`isda.ISDALoss`.

    Args:
        covariance: "full", "diagonal", "shared", "identity", or an :class:`isda.Covariance`.
        weight: weight of each class, as in ``nn.BCEWithLogitsLoss``.
        pos_weight: weight of positive examples of each class, as in ``nn.BCEWithLogitsLoss``.

    Shape:
        features (N, A), weight (C, A), target (N, C); output () or (N, C).

    Example:
        >>> criterion = ISDABCEWithLogitsLoss(8, 3, lambda_0=0.5, total_steps=100)
        >>> head = torch.nn.Linear(8, 3)
        >>> features, target = torch.randn(2, 8), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
        >>> loss = criterion(features, head.weight, target, bias=head.bias)
    """

    pos_weight: Tensor | None

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        lambda_0: float = 0.5,
        total_steps: int | None = None,
        covariance: str | Covariance = "full",
        decay: float = 1.0,
        ramp: Ramp = "linear",
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        reduction: Reduction = "mean",
        max_shift: float | None = None,
        frozen: bool = False,
        synchronize: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            num_features,
            num_classes,
            lambda_0=lambda_0,
            total_steps=total_steps,
            covariance=covariance,
            decay=decay,
            ramp=ramp,
            weight=weight,
            reduction=reduction,
            max_shift=max_shift,
            frozen=frozen,
            synchronize=synchronize,
            process_group=process_group,
        )
        checks.require_class_weight("pos_weight", pos_weight, num_classes)
        require_covariance_index(self.estimator)
        self.register_buffer("pos_weight", pos_weight, persistent=False)

    def forward(
        self,
        features: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        logits: Tensor | None = None,
        progress: float | Tensor | None = None,
        update: bool = True,
    ) -> Tensor:
        """Merge the batch into the statistics and return the loss.

        Arguments not listed here are the same as in :meth:`isda.ISDALoss.forward`.

        Args:
            target: 1 for the labels of a sample, otherwise 0; or probabilities, where those above
                0.5 count as labels.
        """
        if self.training and torch.compiler.is_compiling():
            # one graph break for the whole loss: Dynamo cannot trace the collectives
            uncompiled: Any = torch.compiler.disable(ISDABCEWithLogitsLoss.forward)
            options = {"bias": bias, "logits": logits, "progress": progress, "update": update}
            return uncompiled(self, features, weight, target, **options)
        self._require_call(
            ranks_wait=self.training,
            features=features,
            weight=weight,
            target=target,
            bias=bias,
            logits=logits,
            progress=progress,
        )
        if logits is None:
            logits = self._logits(features, weight, bias)
        with torch.autocast(features.device.type, enabled=False):
            if not self.training:
                return self.evaluate(logits, target)
            step = self.step if update else (self.step - 1).clamp(min=0)
            strength = self._strength_at(step, progress)
            if progress is not None or self.ramp == "constant":
                self._warn_after = math.inf  # λ does not follow the step count
            world_size = distributed.world_size(self.process_group) if self.synchronize else 1
            learn = update and not self.frozen
            self._update(features.detach(), target, world_size, learn=learn)
            if update:
                self.step += 1
            quadratic = self._quadratic(weight, target)
            if self.max_shift is not None:
                quadratic = functional.limit_shift(quadratic, strength, self.max_shift)
            loss = functional.isda_binary_cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)),
                target,
                quadratic,
                strength=strength,
                class_weight=self.weight,
                pos_weight=self.pos_weight,
                reduction="sum" if self.reduction == "mean" else self.reduction,
            )
            self._require_finite(loss, quadratic, strength, world_size)
            if self.step > self._warn_after:
                self._warn_of_steps()
            if self.reduction != "mean":
                return loss
            number = torch.tensor(target.numel(), device=target.device)
            if world_size > 1:
                number = distributed.sum_over_ranks(number, self.process_group)
            return loss * world_size / number.clamp(min=1)

    def evaluate(self, logits: Tensor, target: Tensor) -> Tensor:
        """Ordinary binary cross entropy, as in eval mode.

        Shape:
            logits and target (N, C) or (N, C, ...); output () or their shape.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        loss = F.binary_cross_entropy_with_logits(
            logits.movedim(1, -1).to(dtype),  # weights apply to the last dimension
            target.movedim(1, -1).to(dtype),
            weight=self.weight,
            pos_weight=self.pos_weight,
            reduction=self.reduction,
        )
        return loss.movedim(-1, 1) if self.reduction == "none" else loss

    def grow(self, num_classes: int) -> None:
        if self.pos_weight is not None and num_classes != self.num_classes:
            raise ValueError("grow needs a criterion without pos_weight: set it to None")
        super().grow(num_classes)

    def extra_repr(self) -> str:
        weight = None if self.pos_weight is None else f"tensor of shape ({self.num_classes},)"
        return f"{super().extra_repr()}, pos_weight={weight}"

    def _require_call(self, *, ranks_wait: bool, **arguments: Any) -> None:
        features, target = arguments["features"], arguments["target"]
        tensors = isinstance(target, Tensor) and isinstance(features, Tensor)
        if tensors and (not target.is_floating_point() or features.dim() != 2):
            if ranks_wait:
                self.notify_ranks()
            if not target.is_floating_point():
                raise ValueError(
                    f"target must be floating point (0 or 1), got {target.dtype}: call .float()"
                )
            raise ValueError(f"features must have shape (N, A), got {tuple(features.shape)}")
        super()._require_call(ranks_wait=ranks_wait, **arguments)

    def _require_finite(
        self, loss: Tensor, quadratic: Tensor, strength: Tensor, world_size: int
    ) -> None:
        """Raise on all ranks if the loss on any rank is not finite at λ > 0."""
        bad = bool(not loss.isfinite().all() and strength > 0)
        problem = OVERFLOW if bad else 0
        if world_size > 1:
            _, problem = distributed.agree(0, problem, self.process_group)
        if bad:
            largest = float(quadratic.nan_to_num(nan=torch.inf).max())
            raise FloatingPointError(checks.overflow_message(float(strength), largest))
        if problem:
            raise ValueError(checks.problem_message(problem, self.num_classes, -100))

    def _update(self, features: Tensor, target: Tensor, world_size: int, *, learn: bool) -> None:
        """Merge every sample of all ranks into the statistics of each of its classes."""
        problem = 0
        if not (features.abs() < FEATURE_LIMIT).all():  # false for NaN
            problem = HAS_BAD_FEATURES
        if not ((target >= 0) & (target <= 1)).all():
            problem = HAS_BAD_TARGET
        rows, classes = (target > 0.5).nonzero(as_tuple=True)
        size = len(rows)
        if world_size > 1:
            size, problem = distributed.agree(size, problem, self.process_group)
        if problem == HAS_BAD_TARGET:
            raise ValueError("target must be in [0, 1]: found NaN or values out of range")
        if problem:
            raise ValueError(checks.problem_message(problem, self.num_classes, -100))
        if learn:
            features = features[rows]  # one row for each label
            if world_size > 1:
                features, classes = distributed.gather_batch(
                    features, classes, self.process_group, size=size
                )
            self.estimator.update(features, classes)

    def _quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """Variance of every logit, w_kᵀ Σ w_k with the mean covariance of the sample's classes."""
        # relative to a class whose weight is 0, a margin is the logit itself
        extended = F.pad(weight.float(), (0, 0, 0, 1))  # (C + 1, A)
        classes = torch.arange(self.num_classes, device=weight.device)
        zero = torch.full_like(classes, self.num_classes)
        estimator: Any = self.estimator  # the protocol does not require covariance_index
        table = estimator.quadratic(extended, zero, covariance_index=classes)[:, :-1]  # (C, C)
        labels = (target > 0.5).to(table.dtype)
        return labels / labels.sum(1, keepdim=True).clamp(min=1) @ table
