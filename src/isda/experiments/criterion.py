"""What the criteria of Table 4 have in common: their call, their mode and their mean over ranks."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from isda import distributed, functional

__all__ = ["Batch", "Criterion", "require"]


class Batch(NamedTuple):
    """What a criterion gets in training."""

    features: Tensor  # (N, A)
    weight: Tensor  # (C, A)
    target: Tensor  # (N,)
    raw_logits: Tensor  # (N, C), in the precision of the network
    progress: float | Tensor | None
    world: int  # number of ranks
    number: int | Tensor  # samples of all ranks, at least 1
    start: int | Tensor  # samples of the ranks before this one

    @property
    def logits(self) -> Tensor:
        """Logits in float32 or float64, (N, C)."""
        return self.raw_logits.to(torch.promote_types(self.raw_logits.dtype, torch.float32))

    def mean(self, losses: Tensor) -> Tensor:
        """Mean over the samples of all ranks, whose gradients will be averaged."""
        return losses.sum() * self.world / self.number

    def cross_entropy(self) -> Tensor:
        """Mean cross entropy over the samples of all ranks."""
        if self.world == 1:
            return functional.cross_entropy(self.raw_logits, self.target)
        losses = functional.cross_entropy(self.raw_logits, self.target, reduction="none")
        return self.mean(losses)


class Criterion(nn.Module):
    """Cross entropy in eval mode; in training what a subclass makes of the batch.

    With an initialised process group, means are over the samples of all ranks, as in
    :class:`isda.ISDALoss`; keep the criterion outside the DDP module.
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
            weight: of the final linear layer.
            target: class indices in ``[0, C)``.
            bias: of the final linear layer.
            logits: of the final linear layer, if they have been computed before.
            progress: t/T in [0, 1], a number or a device tensor; for :class:`LargeMarginLoss`.

        Shape:
            features (N, A), weight (C, A), target (N,), logits (N, C); output ().
        """
        _check_arguments(features, weight, target, logits, progress)
        if logits is None:
            logits = F.linear(features, weight, bias)
        with torch.autocast(logits.device.type, enabled=False):
            if not self.training:
                return functional.cross_entropy(logits, target)
            place = _place(len(target), logits.device)
            return self.loss(Batch(features, weight, target, logits, progress, *place))

    def loss(self, batch: Batch) -> Tensor:
        """Loss in training."""
        raise NotImplementedError


def require(holds: bool, name: str, value: Any, expectation: str) -> None:
    """Raise the error of a bad argument unless it holds."""
    if not holds:
        raise ValueError(f"{name} must be {expectation}, got {value}")


def _place(size: int, device: torch.device) -> tuple[int, int | Tensor, int | Tensor]:
    """Number of ranks, samples of all of them (at least 1), samples of those before this one."""
    world = distributed.world_size(None)
    if world == 1:
        return 1, max(size, 1), 0
    rank = dist.get_rank()
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    sizes[rank] = size
    sizes = distributed.sum_over_ranks(sizes)
    return world, sizes.sum().clamp(min=1), sizes[:rank].sum()


def _check_arguments(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    logits: Tensor | None,
    progress: float | Tensor | None,
) -> None:
    """Everything that shapes and types tell, before any state changes."""
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
