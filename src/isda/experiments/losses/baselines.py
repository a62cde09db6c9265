"""The losses that ISDA is compared with, mostly Table 4, called like :class:`isda.ISDALoss`.

Each is a pure function per sample and a module that takes the mean. Samples with the target -100
are ignored. The modules can be attached to your own model: ``isda.attach(model, FocalLoss())``.
Dropout, the remaining row of the table, is the ``drop_rate`` of the network.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from isda import Covariance, FullCovariance, ISDALoss, distributed, ops
from isda.covariance import COVARIANCES
from isda.experiments.data import counter_rng
from isda.experiments.losses.base import (
    IGNORED,
    Batch,
    Criterion,
    is_number,
    require,
    require_count,
)
from isda.experiments.losses.large_margin import LargeMarginLoss
from isda.experiments.settings import Recipe

__all__ = [
    "CenterLoss",
    "CrossEntropyLoss",
    "DisturbLabelLoss",
    "FocalLoss",
    "LabelSmoothingLoss",
    "LqLoss",
    "center_loss",
    "center_update",
    "create_criterion",
    "disturb_label",
    "focal_loss",
    "lq_loss",
]

_NOISE = 0xD1  # part of the key


def focal_loss(logits: Tensor, target: Tensor, *, alpha: float, gamma: float) -> Tensor:
    r"""Focal loss −α (1 − p_y)^γ log p_y of every sample (Lin et al., 2017), with a softmax.

    Args:
        logits: output of the final linear layer.
        target: class indices in ``[0, C)``.
        alpha: α, the same for all classes.
        gamma: γ, how strongly well-classified samples are down-weighted.

    Shape:
        logits (N, C), target (N,); output (N,).
    """
    losses = ops.cross_entropy(logits, target, reduction="none")  # −log p_y
    wrong = -torch.expm1(-losses)  # 1 − p_y
    smallest = torch.finfo(wrong.dtype).tiny  # the gradient of a power γ < 1 is infinite at 0
    return alpha * wrong.clamp(min=smallest) ** gamma * losses


def lq_loss(logits: Tensor, target: Tensor, *, q: float) -> Tensor:
    r"""Generalized cross entropy (1 − p_y^q) / q of every sample (Zhang and Sabuncu, 2018).

    Args:
        logits: output of the final linear layer.
        target: class indices in ``[0, C)``.
        q: in (0, 1]; the limit 0 is cross entropy, and 1 is half the mean absolute error.

    Shape:
        logits (N, C), target (N,); output (N,).
    """
    return -torch.expm1(-q * ops.cross_entropy(logits, target, reduction="none")) / q


def disturb_label(
    target: Tensor, key: Tensor, *, num_classes: int, noise_rate: float, start: int | Tensor = 0
) -> Tensor:
    r"""Redraw every class index with probability ``noise_rate`` (Xie et al., 2016).

    As in the original, the new label is uniform over all C classes, including the correct one, so a
    label becomes wrong with probability noise_rate · (C − 1) / C.

    Args:
        target: class indices in ``[0, C)``.
        key: key of the random numbers, see :mod:`isda.experiments.data.counter_rng`.
        num_classes: number of classes C.
        noise_rate: probability that a label is redrawn.
        start: index of the first sample in the batch of all ranks; the random numbers of a sample
            depend on its index.

    Shape:
        target (N,); output (N,).
    """
    keys = counter_rng.fold(key, start + torch.arange(len(target), device=target.device))  # (N,)
    drawn = counter_rng.integers((), counter_rng.fold(keys, 0), high=num_classes)  # one per key
    disturbed = (counter_rng.uniform((), counter_rng.fold(keys, 1)) < noise_rate) & (
        target != IGNORED
    )
    return torch.where(disturbed, drawn, target)


def center_loss(features: Tensor, centers: Tensor, target: Tensor) -> Tensor:
    r"""Half the squared distance ½ |a − c_y|² of every sample to its center (Wen et al., 2016).

    Args:
        features: input of the final linear layer.
        centers: centers of the classes.
        target: class indices in ``[0, C)``.

    Shape:
        features (N, A), centers (C, A), target (N,); output (N,).
    """
    _, apart = _differences(features, centers, target)
    return 0.5 * apart.square().sum(1)


def center_update(features: Tensor, centers: Tensor, target: Tensor) -> Tensor:
    r"""Δc_j = Σ_{y_i = j} (c_j − a_i) / (1 + n_j) for every class j with n_j samples.

    Equation 4 of Wen et al. (2016): the centers move to c_j − α Δc_j. The 1 in the denominator
    keeps the center of a class without samples in place.

    Shape:
        features (N, A), centers (C, A), target (N,); output (C, A).
    """
    return _divide(_center_sums(features, centers, target))


class CrossEntropyLoss(Criterion):
    """Cross entropy; in training the mean is taken over the samples of all ranks."""

    def loss(self, batch: Batch) -> Tensor:
        return batch.cross_entropy()


class FocalLoss(Criterion):
    """Mean :func:`focal_loss`; α = 0.5 and γ = 1 are the paper's choice (Appendix B)."""

    def __init__(self, *, alpha: float = 0.5, gamma: float = 1.0) -> None:
        super().__init__()
        require(is_number(alpha) and 0 < alpha < math.inf, "alpha", alpha, "> 0 and finite")
        require(is_number(gamma) and 0 <= gamma < math.inf, "gamma", gamma, ">= 0 and finite")
        self.alpha, self.gamma = alpha, gamma

    def loss(self, batch: Batch) -> Tensor:
        losses = focal_loss(batch.logits, batch.target, alpha=self.alpha, gamma=self.gamma)
        return batch.mean(losses)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, gamma={self.gamma}"


class LqLoss(Criterion):
    """Mean :func:`lq_loss`; q = 0.4 is the paper's choice (Appendix B)."""

    def __init__(self, *, q: float = 0.4) -> None:
        super().__init__()
        require(is_number(q) and 0 < q <= 1, "q", q, "in (0, 1]")
        self.q = q

    def loss(self, batch: Batch) -> Tensor:
        return batch.mean(lq_loss(batch.logits, batch.target, q=self.q))

    def extra_repr(self) -> str:
        return f"q={self.q}"


class LabelSmoothingLoss(Criterion):
    """Cross entropy with smoothed labels (Szegedy et al., 2016), which is not in Table 4.

    The target of a sample is (1 − smoothing) for its class plus smoothing / C for every class, as
    in ``nn.CrossEntropyLoss(label_smoothing=...)``. Its effect on calibration is compared with
    that of ISDA.

    Args:
        smoothing: 0.1 is the value of Szegedy et al.
    """

    def __init__(self, *, smoothing: float = 0.1) -> None:
        super().__init__()
        holds = is_number(smoothing) and 0 <= smoothing < 1
        require(holds, "smoothing", smoothing, ">= 0 and < 1")
        self.smoothing = smoothing

    def loss(self, batch: Batch) -> Tensor:
        losses = ops.cross_entropy(
            batch.logits, batch.target, label_smoothing=self.smoothing, reduction="none"
        )
        return batch.mean(losses)

    def extra_repr(self) -> str:
        return f"smoothing={self.smoothing}"


class DisturbLabelLoss(Criterion):
    """Cross entropy with labels from :func:`disturb_label`, redrawn in every step.

    The random numbers depend on the seed, the step and the index of a sample in the batch of all
    ranks. Several ranks that split a batch therefore draw the same labels as one process, and a
    checkpoint needs only the ``step``.

    Args:
        num_classes: number of classes C.
        noise_rate: fraction of labels that are redrawn; in the paper 0.05, and 0.1 for ResNet-110
            on CIFAR-100 (Appendix B).
        seed: seed of the random numbers.
    """

    step: Tensor
    key: Tensor

    def __init__(self, num_classes: int, *, noise_rate: float = 0.05, seed: int = 0) -> None:
        super().__init__()
        require_count("num_classes", num_classes)
        holds = is_number(noise_rate) and 0 <= noise_rate <= 1
        require(holds, "noise_rate", noise_rate, "in [0, 1]")
        self.num_classes, self.noise_rate, self.seed = num_classes, noise_rate, seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("key", counter_rng.key(seed, _NOISE), persistent=False)

    def loss(self, batch: Batch) -> Tensor:
        shape = tuple(batch.logits.shape)
        require(shape[1] == self.num_classes, "logits", shape, f"of shape (N, {self.num_classes})")
        target = disturb_label(
            batch.target,
            counter_rng.fold(self.key, _snapshot(self.step)),
            num_classes=self.num_classes,
            noise_rate=self.noise_rate,
            start=batch.start(),
        )
        self.step += 1
        return batch._replace(target=target).cross_entropy()

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, noise_rate={self.noise_rate}, seed={self.seed}"


class CenterLoss(Criterion):
    r"""Cross entropy plus center_weight · mean ½ |a − c_y|² (Wen et al., 2016).

    The centers start at 0. Every call in training mode moves them by :func:`center_update`, after
    the loss was computed with the old ones, so the optimizer does not need them. With several ranks
    the update uses the samples of all ranks, and all ranks keep the same centers.

    Args:
        num_features: number of features A, the head's ``in_features``.
        num_classes: number of classes C, the head's ``out_features``.
        center_weight: weight of the center term. The paper does not state it; 0.003 is the value
            of Wen et al., who sum both terms over the batch, which gives the same ratio as means.
        learning_rate: step size α of the centers; 0.5 is the paper's choice (Appendix B).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> criterion = isda.attach(model, CenterLoss(num_features=8, num_classes=3))
        >>> criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0])).backward()
    """

    centers: Tensor

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        center_weight: float = 0.003,
        learning_rate: float = 0.5,
    ) -> None:
        super().__init__()
        require_count("num_features", num_features)
        require_count("num_classes", num_classes)
        holds = is_number(center_weight) and 0 <= center_weight < math.inf
        require(holds, "center_weight", center_weight, ">= 0 and finite")
        holds = is_number(learning_rate) and 0 < learning_rate <= 1
        require(holds, "learning_rate", learning_rate, "in (0, 1]")
        self.center_weight, self.learning_rate = center_weight, learning_rate
        self.register_buffer("centers", torch.zeros(num_classes, num_features))

    def loss(self, batch: Batch) -> Tensor:
        shape, expected = tuple(batch.weight.shape), tuple(self.centers.shape)
        require(shape == expected, "weight", shape, f"of shape {expected}")
        features = batch.features.to(batch.logits.dtype)
        centers = _snapshot(self.centers)
        losses = ops.cross_entropy(batch.logits, batch.target, reduction="none")
        losses = losses + self.center_weight * center_loss(features, centers, batch.target)
        with torch.no_grad():
            sums = distributed.sum_over_ranks(_center_sums(features, centers, batch.target))
            self.centers.sub_(self.learning_rate * _divide(sums))
        return batch.mean(losses)

    def extra_repr(self) -> str:
        return f"center_weight={self.center_weight}, learning_rate={self.learning_rate}"


def create_criterion(
    recipe: Recipe, *, num_features: int, num_classes: int, seed: int = 0
) -> nn.Module:
    """Criterion of a recipe, called with features, weight and target.

    Args:
        recipe: recipe of the run.
        num_features: number of features of the network.
        num_classes: number of classes of the data.
        seed: seed of the run, for criteria with random numbers.
    """
    builders: dict[str, Callable[[], nn.Module]] = {
        "ce": CrossEntropyLoss,
        "isda": lambda: ISDALoss(
            num_features,
            num_classes,
            lambda_0=recipe.lambda_0,
            covariance=_create_estimator(recipe, num_features, num_classes),
            ramp="constant" if recipe.ramp == "constant" else "linear",
        ),
        "large_margin": LargeMarginLoss,
        "disturb_label": lambda: DisturbLabelLoss(
            num_classes, noise_rate=recipe.noise_rate, seed=seed
        ),
        "focal": FocalLoss,
        "center": lambda: CenterLoss(num_features, num_classes),
        "lq": LqLoss,
        "label_smoothing": LabelSmoothingLoss,
    }
    return builders[recipe.method]()


def _differences(features: Tensor, centers: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Class and a − c_y of every sample; class 0 and zeros for ignored samples."""
    counted = target != IGNORED
    index = torch.where(counted, target, 0)
    return index, torch.where(counted[:, None], features - centers[index], 0.0)


def _center_sums(features: Tensor, centers: Tensor, target: Tensor) -> Tensor:
    """Σ (c_j − a_i) over the samples of each class, and their number as the last column."""
    index, apart = _differences(features, centers, target)
    rows = torch.cat((-apart, (target != IGNORED)[:, None].to(apart.dtype)), 1)  # (N, A + 1)
    return rows.new_zeros(len(centers), rows.shape[1]).index_add(0, index, rows)


def _divide(sums: Tensor) -> Tensor:
    return sums[:, :-1] / (1 + sums[:, -1:])


def _create_estimator(recipe: Recipe, num_features: int, num_classes: int) -> Covariance:
    """Estimator with the precision of the network in products; its statistics are float32."""
    if recipe.covariance == "full" and recipe.precision == "bf16":
        return FullCovariance(num_features, num_classes, decay=recipe.decay, precision="medium")
    return COVARIANCES[recipe.covariance](num_features, num_classes, decay=recipe.decay)


@torch.library.custom_op("isda::snapshot", mutates_args=())
def _snapshot(buffer: Tensor) -> Tensor:
    """Copy of a buffer that is updated in the same step.

    It is an operator because torch.compile may recompute plain arithmetic in the backward pass,
    when the buffer already has its new value.
    """
    return buffer.clone()


@_snapshot.register_fake
def _(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer)
