"""The losses that ISDA is compared with (Table 4), with the same call as :class:`isda.ISDALoss`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda import ISDALoss, distributed, functional
from isda.experiments.recipes import Recipe

__all__ = ["CrossEntropyLoss", "create_criterion"]


class CrossEntropyLoss(nn.Module):
    """Cross entropy; in training its mean is over the samples of all ranks, as in ISDALoss."""

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
        """Loss of a batch; ``progress`` plays no part.

        Shape:
            features (N, A), weight (C, A), target (N,), logits (N, C); output ().
        """
        if logits is None:
            logits = F.linear(features, weight, bias)
        loss = functional.cross_entropy(logits.float(), target, reduction="sum")
        world = distributed.world_size(None) if self.training else 1
        if world == 1:
            return loss / max(len(target), 1)
        number = torch.full((), len(target), device=loss.device)
        return loss * world / distributed.sum_over_ranks(number).clamp(min=1)


def create_criterion(recipe: Recipe, *, num_features: int, num_classes: int) -> nn.Module:
    """The criterion of a recipe, called with features, weight and target."""
    if recipe.method == "ce":
        return CrossEntropyLoss()
    return ISDALoss(
        num_features,
        num_classes,
        lambda_0=recipe.lambda_0,
        covariance=recipe.covariance,
        decay=recipe.decay,
        ramp="constant" if recipe.ramp == "constant" else "linear",
    )
