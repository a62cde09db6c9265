"""Test metrics, computed on the device without synchronisation."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["classification_metrics", "classified", "expected_calibration_error", "top_k_error"]


def classification_metrics(logits: Tensor, target: Tensor) -> Tensor:
    """Test error in percent, negative log-likelihood, calibration error, top-5 error in percent.

    For the test error, ``argmax`` breaks ties by class index, which does not depend on the target.

    Shape:
        logits (N, C), target (N,); output (4,).
    """
    error = (logits.argmax(1) != target).float().mean()
    return torch.stack(
        [
            100 * error,
            F.cross_entropy(logits, target),
            expected_calibration_error(logits.softmax(1), target),
            100 * top_k_error(logits, target),
        ]
    )


def classified(logits: Tensor, target: Tensor) -> Tensor:
    """Target, predicted class, its probability and the target's probability, for every image.

    Shape:
        logits (N, C), target (N,); output (N, 4) in float32, which holds class indices exactly.
    """
    probabilities = logits.float().softmax(1)
    prediction = logits.argmax(1)
    confidence = probabilities.gather(1, prediction[:, None])[:, 0]
    of_target = probabilities.gather(1, target[:, None])[:, 0]
    return torch.stack([target.float(), prediction.float(), confidence, of_target], 1)


def top_k_error(logits: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """Fraction of samples whose target is not among the k largest logits; ties are split fairly.

    bfloat16 logits often tie. If a logits are larger than the target's and t are equal to it
    (itself included), a random order of the tied classes puts the target among the first k with
    probability (k − a) / t, clamped to [0, 1]; that is what the sample counts as correct.

    Shape:
        logits (N, C), target (N,); output ().
    """
    own = logits.gather(1, target[:, None])  # (N, 1)
    above = (~(logits <= own)).sum(1)  # (N,); a nan counts as wrong
    tied = (logits == own).sum(1).clamp(min=1)
    return 1 - ((k - above) / tied).clamp(0, 1).mean()


def expected_calibration_error(probabilities: Tensor, target: Tensor, bins: int = 15) -> Tensor:
    r"""Expected difference between confidence and accuracy, as a fraction in [0, 1].

    Samples are put into ``bins`` equal intervals (b/B, (b+1)/B] by their largest probability; the
    result is Σ_b (n_b / N) · \|accuracy_b − confidence_b\|.

    Args:
        probabilities: class probabilities, such as softmax outputs.
        target: class indices.
        bins: number of intervals B.

    Shape:
        probabilities (N, C), target (N,); output ().
    """
    confidence, prediction = probabilities.float().max(-1)  # (N,)
    gap = (prediction == target).float() - confidence  # (N,)
    index = ((confidence * bins).ceil() - 1).nan_to_num(0.0).clamp(0, bins - 1)  # (N,)
    member = index[:, None] == torch.arange(bins, device=index.device)  # (N, B)
    sums = torch.where(member, gap[:, None], 0.0).sum(0)  # (B,); keeps a nan visible
    return sums.abs().sum() / confidence.shape[0]
