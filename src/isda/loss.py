"""ISDALoss: Algorithm 1 as a stateful module."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from isda import checks, distributed, functional, ops
from isda.checks import BAD_TARGET, OVERFLOW, SKIP
from isda.covariance import COVARIANCES, Estimator, FullCovariance
from isda.criterion import Criterion, Ramp
from isda.distributed import ShardedCovariance
from isda.functional.losses import Reduction, flatten, flatten_target

__all__ = ["ISDALoss"]

_BUILT_IN = (*COVARIANCES.values(), ShardedCovariance)


class ISDALoss(Criterion):
    r"""Cross entropy under infinite semantic augmentation of the features (Eq. 4, Algorithm 1).

    Every call in training mode merges the batch into the statistics of its classes and returns
    :func:`isda.functional.isda_cross_entropy` at strength λ = λ₀ · progress. In eval mode, it
    returns ordinary cross entropy and does not change its state. In the statistics, a sample with
    class probabilities is assigned to its most probable class. All state is stored in buffers.

    With an initialised process group, the features of all ranks are gathered, so the statistics
    equal those of a single process. The mean is taken over the samples of all ranks (each rank
    returns ``world_size * sum / number of all samples``), so the gradients averaged by
    DistributedDataParallel equal those of a single process even if the batches are uneven. Keep the
    criterion outside the DDP module. Under ``torch.compile``, all ranks must have batches of the
    same size.

    Args:
        num_features: number of features A, the head's ``in_features``.
        num_classes: number of classes C, the head's ``out_features``.
        lambda_0: final strength λ₀ of the augmentation.
        total_steps: total number of training steps T; not needed if every call passes
            ``progress``, or with ``ramp="constant"``. If it is not known yet, set the attribute
            before the first step.
        covariance: "full", "diagonal", "shared", "identity", or an :class:`isda.Estimator`.
        decay: weight of old samples, see :class:`isda.Covariance`.
        ramp: "linear" for λ = λ₀ t/T, "constant" for λ = λ₀.
        weight: weight of each class, as in ``nn.CrossEntropyLoss``.
        label_smoothing: as in ``nn.CrossEntropyLoss``. A sample with a class index is augmented
            with the covariance of that class; with class probabilities, each label uses its own.
        ignore_index: class index of samples to exclude from the loss and the statistics.
        reduction: "mean", "sum" or "none".
        max_shift: maximum shift (λ/2) q of a logit, see :func:`isda.functional.limit_shift`; None
            for no limit, as in the paper.
        frozen: use the statistics without updating them; can be changed at any time.
        synchronize: gather the features of all ranks; False if each rank trains its own model.
        process_group: the ranks that train the model together; None for all.

    Shape:
        features (N, A) or (N, A, ...), weight (C, A), target (N,) or (N, ...) class indices, or (N,
        C) or (N, C, ...) class probabilities; output () or, with reduction "none", the shape of
        class indices.

    Example:
        >>> criterion = ISDALoss(num_features=8, num_classes=3, lambda_0=0.5, total_steps=100)
        >>> head = nn.Linear(8, 3)
        >>> features, target = torch.randn(4, 8), torch.tensor([0, 2, 1, 2])
        >>> loss = criterion(features, head.weight, target, bias=head.bias)
        >>> loss.backward()
    """

    problem: Tensor
    overflow: Tensor

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        lambda_0: float = 0.5,
        total_steps: int | None = None,
        covariance: str | Estimator = "full",
        decay: float = 1.0,
        ramp: Ramp = "linear",
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        max_shift: float | None = None,
        frozen: bool = False,
        synchronize: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if num_classes == 1:
            raise ValueError(
                "num_classes must be >= 2, got 1: with one logit, use isda.ISDABCEWithLogitsLoss"
            )
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
        checks.require_label_smoothing(label_smoothing)
        if isinstance(self.estimator, ShardedCovariance):
            self.estimator.check_ranks(process_group, synchronize=synchronize)
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.register_buffer("problem", torch.zeros((), dtype=torch.int64), persistent=False)
        # λ and the largest quadratic term of the first loss that was not finite
        self.register_buffer("overflow", torch.zeros(2), persistent=False)

    def forward(
        self,
        features: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        logits: Tensor | None = None,
        progress: float | Tensor | None = None,
        covariance_index: Tensor | None = None,
        update: bool = True,
    ) -> Tensor:
        """Merge the batch into the statistics and return the loss.

        Args:
            features: input of the final linear layer.
            weight: weight of the final linear layer.
            target: class indices or class probabilities.
            bias: bias of the final linear layer.
            logits: output of the final linear layer, if already computed. Margins and shifts of the
                mean can be added to it.
            progress: training progress t/T in [0, 1], a number or a tensor, to use instead of the
                criterion's step count.
            covariance_index: class whose covariance augments each sample, by default its target;
                for example a pseudo-label. With class probabilities, it is used for every label.
            update: False to leave the statistics and the step count unchanged, for a second loss in
                the same training step; λ is that of the last counted step.
        """
        self._require_call(
            ranks_wait=self.training,
            features=features,
            weight=weight,
            target=target,
            bias=bias,
            logits=logits,
            progress=progress,
            covariance_index=covariance_index,
        )
        if logits is None:
            logits = self._logits(features, weight, bias)
        if not self.training:
            return self.evaluate(logits, target)
        positions = features.shape[:1] + features.shape[2:]
        if features.dim() > 2:
            features, logits, target = flatten(features), flatten(logits), flatten_target(target)
        learn = update and not self.frozen
        with torch.autocast(features.device.type, enabled=False):
            batch = self._gather(features.detach(), target, covariance_index, learn=learn)
            batch, scale, strength = self._count_step(batch, target, progress, update=update)
            quadratic = self._update_and_quadratic(
                batch, weight, target, covariance_index, learn=learn
            )
            if self.max_shift is not None:
                quadratic = functional.limit_shift(quadratic, strength, self.max_shift)
            loss = ops.scaled_isda_cross_entropy(
                logits,
                target if target.is_floating_point() else batch.index[batch.local],
                quadratic,
                strength=strength,
                scale=scale,
                class_weight=self.weight,
                label_smoothing=self.label_smoothing,
                ignore_index=SKIP,
                reduction=self.reduction,
            )
            ops.flag_overflow(
                self.problem, self.overflow, loss.detach(), quadratic.detach(), strength.detach()
            )
        if checks.known_on_host(loss):
            # with several ranks, all raise together in the next _gather
            if self.problem and (batch.world_size == 1 or self.problem != OVERFLOW):
                self.check()
            if self.step > self._warn_after:
                self._warn_of_steps()
        return loss.view(positions) if self.reduction == "none" else loss

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """Merge the samples of all ranks into the statistics, even if frozen. Counts no step.

        Args:
            features: input of the final linear layer.
            target: class indices or class probabilities.

        Shape:
            features (N, A) or (N, A, ...), target (N,) or (N, ...), or probabilities (N, C) or (N,
            C, ...).
        """
        self._require_call(ranks_wait=True, features=features, target=target)
        batch = self._gather(flatten(features), flatten_target(target), None, learn=True)
        batch, _, _ = self._count_step(batch, target, 0.0, update=False)
        self._merge(batch)
        if checks.known_on_host(features):
            self.check()

    def evaluate(self, logits: Tensor, target: Tensor) -> Tensor:
        """Ordinary cross entropy, as in eval mode."""
        return ops.cross_entropy(
            logits,
            target,
            class_weight=self.weight,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def check(self) -> None:
        """Raise any error deferred since the last check (synchronises with the GPU).

        Warns if the step count exceeds ``total_steps``.

        Raises:
            ValueError: if a batch had bad features or a bad target and was left out.
            FloatingPointError: if a loss was not finite.
        """
        if self.step > self._warn_after:
            self._warn_of_steps()
        problem = int(self.problem)
        if not problem:
            return
        self.problem.zero_()
        if problem == OVERFLOW:
            raise FloatingPointError(checks.overflow_message(*self.overflow.tolist()))
        raise ValueError(checks.problem_message(problem, self.num_classes, self.ignore_index))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Buffers of the criterion and its estimator; calls :meth:`check` first."""
        self.check()
        return super().state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, label_smoothing={self.label_smoothing}, "
            f"ignore_index={self.ignore_index}"
        )

    def _gather(
        self, features: Tensor, target: Tensor, covariance_index: Tensor | None, *, learn: bool
    ) -> "_Batch":
        """Samples of all ranks; bad ones have a negative code of ``checks`` as class index."""
        if target.is_floating_point():
            index = ops.screen(features, target.argmax(1), self.num_classes, SKIP)
            valid = target.isfinite().all(1) & (target.sum(1) != 0)
            index = torch.where(valid, index, BAD_TARGET)
        else:
            index = ops.screen(features, target, self.num_classes, self.ignore_index)
        if covariance_index is not None:
            chosen = covariance_index.flatten()
            valid = (index == SKIP) | ((chosen >= 0) & (chosen < self.num_classes))
            index = torch.where(valid, index, BAD_TARGET)
        group = self.process_group
        world_size = distributed.world_size(group) if self.synchronize else 1
        if world_size == 1:
            return _Batch(features, index, slice(None), 1)
        number = size = len(index)  # size becomes the largest batch size
        if not torch.compiler.is_compiling():
            # the loss of one rank may have been infinite in the last step
            problem = int(self.problem) if index.device.type == "cpu" else 0
            size, problem = distributed.agree(size, problem, group)
            if problem:
                self.check()  # raises if it was this rank
                raise ValueError(
                    checks.problem_message(problem, self.num_classes, self.ignore_index)
                )
        if learn:
            features, index = distributed.gather_batch(features, index, group, size=size)
        else:
            index = distributed.gather_target(index, group, size=size)
        start = size * distributed.rank(group)
        return _Batch(features, index, slice(start, start + number), world_size)

    def _count_step(
        self, batch: "_Batch", target: Tensor, progress: float | Tensor | None, *, update: bool
    ) -> tuple["_Batch", Tensor, Tensor]:
        """The batch, the factor for the sum of losses, and λ. A bad batch is skipped entirely."""
        if self.ramp == "constant":
            progress = 1.0
        if progress is None and self._total_steps is None:
            self._require_total_steps()
        index, scale, strength = ops.count_step(
            self.step if update else (self.step - 1).clamp(min=0),
            self.problem,
            batch.index,
            self.lambda_0,
            self._total_steps or 1,
            batch.world_size,
            self.reduction == "mean",
        )
        if progress is not None:
            strength = self._strength_at(self.step, progress)
            if update:
                self._warn_after = math.inf  # λ does not follow the step count
        if self.weight is not None and self.reduction == "mean" and not target.is_floating_point():
            total = torch.where(index < 0, 0.0, self.weight.double()[index.clamp(min=0)]).sum()
            total = torch.where(total == 0, 1.0, total)
            scale = torch.where(scale == 0, 0.0, batch.world_size / total)
        # not _replace, whose result torch 2.11 cannot restore after a graph break
        return _Batch(batch.features, index, batch.local, batch.world_size), scale, strength

    def _merge(self, batch: "_Batch") -> None:
        """Merge the batch into the statistics."""
        features = batch.features
        if type(self.estimator) not in _BUILT_IN:  # a custom one may multiply NaN by 0
            features = torch.where(batch.index[:, None] < 0, 0.0, features)
        self.estimator.update(features, batch.index)

    def _update_and_quadratic(
        self,
        batch: "_Batch",
        weight: Tensor,
        target: Tensor,
        covariance_index: Tensor | None,
        *,
        learn: bool,
    ) -> Tensor:
        """Update the statistics, and return the variance of every logit margin of this rank.

        The result has one row per sample. For class probabilities, it has one row per label, or per
        sample and label with ``covariance_index``.
        """
        soft, index = target.is_floating_point(), batch.index[batch.local]
        estimator: Any = self.estimator  # the protocol does not require covariance_index
        simple = batch.world_size == 1 and covariance_index is None and not soft
        if learn and simple and type(estimator) is FullCovariance:  # a subclass may override both
            return ops.update_and_quadratic(
                estimator.moments,
                batch.features,
                index,
                weight.float(),
                estimator.decay,
                estimator.precision,
            )
        if learn:
            self._merge(batch)
        label = torch.arange(self.num_classes, device=index.device) if soft else index.clamp(min=0)
        if covariance_index is None:
            return estimator.quadratic(weight, label)
        chosen = torch.where(index < 0, 0, covariance_index.flatten())
        if not soft:
            return estimator.quadratic(weight, label, covariance_index=chosen)
        chosen = chosen.repeat_interleave(len(label))
        rows = estimator.quadratic(weight, label.repeat(len(index)), covariance_index=chosen)
        return rows.view(len(index), len(label), len(label))


class _Batch(NamedTuple):
    """Samples of all ranks."""

    features: Tensor  # (M, A); only of this rank if no statistics are updated
    index: Tensor  # type: ignore[assignment]  # (M,) classes, negative for skipped samples
    local: slice  # the samples of this rank
    world_size: int
