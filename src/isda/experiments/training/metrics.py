"""Test metrics that are computed on the device."""

import torch
from torch import Tensor

__all__ = ["expected_calibration_error"]


def expected_calibration_error(probabilities: Tensor, target: Tensor, bins: int = 15) -> Tensor:
    r"""Gap between confidence and accuracy, a fraction in [0, 1].

    Samples are put into ``bins`` equal intervals (b/B, (b+1)/B] of their largest probability; the
    result is Σ_b (n_b / N) · \|accuracy_b − confidence_b\|.

    Args:
        probabilities: class probabilities, for instance softmaxed logits.
        target: class indices.
        bins: number of intervals B.

    Shape:
        probabilities (N, C), target (N,); output a scalar tensor. Nothing is read back to the host.
    """
    confidence, prediction = probabilities.float().max(-1)  # (N,)
    gap = (prediction == target).float() - confidence  # (N,)
    index = ((confidence * bins).ceil() - 1).nan_to_num(0.0).clamp(0, bins - 1)  # (N,)
    member = index[:, None] == torch.arange(bins, device=index.device)  # (N, B)
    sums = torch.where(member, gap[:, None], 0.0).sum(0)  # (B,); a nan stays visible
    return sums.abs().sum() / confidence.shape[0]
