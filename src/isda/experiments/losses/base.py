"""Base class of the losses of Table 4: arguments, training mode, and the mean over all ranks."""

from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda import distributed, ops

__all__ = ["IGNORED", "Batch", "Criterion", "is_number", "require", "require_count"]

IGNORED = -100
"""Target of an ignored sample, as in ``torch.nn.CrossEntropyLoss``."""


class Batch(NamedTuple):
    """Arguments of a criterion in training."""

    features: Tensor  # (N, A)
    weight: Tensor  # (C, A)
    target: Tensor  # (N,)
    raw_logits: Tensor  # (N, C), in the precision of the network
    progress: float | Tensor | None
    world: int  # number of ranks

    @property
    def logits(self) -> Tensor:
        """Logits in float32 or float64, (N, C)."""
        return self.raw_logits.to(torch.promote_types(self.raw_logits.dtype, torch.float32))

    def mean(self, losses: Tensor) -> Tensor:
        """Mean over all samples of all ranks that are not ignored.

        It is scaled for DDP, which averages the gradients of the ranks. The losses of ignored
        samples must be 0. Without samples the mean is 0.
        """
        number = distributed.sum_over_ranks((self.target != IGNORED).sum())
        return losses.sum() * self.world / number.clamp(min=1)

    def start(self) -> int | Tensor:
        """Number of samples on lower ranks, including ignored ones."""
        if self.world == 1:
            return 0
        rank = distributed.rank(None)
        sizes = torch.zeros(self.world, dtype=torch.int64, device=self.target.device)
        sizes[rank] = len(self.target)
        return distributed.sum_over_ranks(sizes)[:rank].sum()

    def cross_entropy(self) -> Tensor:
        """Mean cross entropy over all samples of all ranks that are not ignored."""
        if self.world == 1:
            return ops.cross_entropy(self.raw_logits, self.target)
        losses = ops.cross_entropy(self.raw_logits, self.target, reduction="none")
        return self.mean(losses)


class Criterion(nn.Module):
    """Cross entropy in eval mode; subclasses implement the loss in training mode.

    Samples with the target -100 are ignored. With an initialised process group, means are taken
    over the samples of all ranks, as in :class:`isda.ISDALoss`; keep the criterion outside the DDP
    module.
    """

    def forward(
        self,
        features: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        logits: Tensor | None = None,
        progress: float | Tensor | None = None,
    ) -> Tensor:
        """Loss of a batch.

        Args:
            features: input of the final linear layer.
            weight: weight of the final linear layer.
            target: class indices in ``[0, C)``, or -100 for ignored samples.
            bias: bias of the final linear layer.
            logits: output of the final linear layer, if it is already known.
            progress: t/T in [0, 1], a number or a device tensor; for :class:`LargeMarginLoss`.

        Shape:
            features (N, A), weight (C, A), target (N,), logits (N, C); output ().
        """
        _check_arguments(features, weight, target, logits, progress)
        if logits is None:
            logits = F.linear(features, weight, bias)
        with torch.autocast(logits.device.type, enabled=False):
            if not self.training:
                return ops.cross_entropy(logits, target)
            world = distributed.world_size(None)
            return self.loss(Batch(features, weight, target, logits, progress, world))

    def loss(self, batch: Batch) -> Tensor:
        """Loss in training mode."""
        raise NotImplementedError


def require(holds: bool, name: str, value: Any, expectation: str) -> None:
    """Raise a ValueError for an argument unless the condition holds."""
    if not holds:
        raise ValueError(f"{name} must be {expectation}, got {value}")


def require_count(name: str, value: Any) -> None:
    """Raise a ValueError unless an argument is an integer >= 1."""
    whole = isinstance(value, Integral) and is_number(value)
    require(whole and value >= 1, name, value, "an integer >= 1")


def is_number(value: Any) -> bool:
    """Whether a value is a real number; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_arguments(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    logits: Tensor | None,
    progress: float | Tensor | None,
) -> None:
    """Check shapes and types before any state changes."""
    found = tuple(features.shape), tuple(weight.shape)
    same = features.dim() == weight.dim() == 2 and features.shape[1] == weight.shape[1]
    require(same, "features and weight", found, "of shapes (N, A) and (C, A)")
    number, classes = len(features), len(weight)
    indices = target.dtype == torch.int64 and target.shape == (number,)
    expected = f"int64 class indices of shape ({number},)"
    require(indices, "target", f"{target.dtype} of shape {tuple(target.shape)}", expected)
    if logits is not None:
        shape = tuple(logits.shape)
        require(shape == (number, classes), "logits", shape, f"of shape ({number}, {classes})")
    if isinstance(progress, int | float):
        require(0 <= progress <= 1, "progress", progress, "in [0, 1]")
