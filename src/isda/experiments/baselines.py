"""The losses that ISDA is compared with (Table 4), with the same call as :class:`isda.ISDALoss`.

Each is a pure function of the samples and a thin module that takes its mean. The modules also serve
a model of one's own: ``isda.attach(model, FocalLoss())``. Dropout, the remaining row of the table,
is a ``drop_rate`` of the network.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from isda import ISDALoss, distributed, functional
from isda.experiments import draws
from isda.experiments.errors import unknown
from isda.experiments.large_margin import annealed_beta, large_margin_logits
from isda.experiments.recipes import Recipe

__all__ = [
    "CenterLoss",
    "CrossEntropyLoss",
    "DisturbLabelLoss",
    "FocalLoss",
    "LargeMarginLoss",
    "LqLoss",
    "center_gradient",
    "center_loss",
    "create_criterion",
    "disturb_label",
    "focal_loss",
    "lq_loss",
]

_NOISE = 0xD1  # purpose of the key


def focal_loss(logits: Tensor, target: Tensor, *, alpha: float, gamma: float) -> Tensor:
    r"""Focal loss −α (1 − p_y)^γ log p_y of every sample (Lin et al., 2017), for a softmax.

    Args:
        logits: of the final linear layer.
        target: class indices in ``[0, C)``.
        alpha: α, the same for all classes.
        gamma: γ, how much less a sample counts that is right already.

    Shape:
        logits (N, C), target (N,); output (N,).
    """
    losses = functional.cross_entropy(logits, target, reduction="none")  # −log p_y
    wrong = -torch.expm1(-losses)  # 1 − p_y
    smallest = torch.finfo(wrong.dtype).tiny  # a power γ < 1 has no slope at 0
    return alpha * wrong.clamp(min=smallest) ** gamma * losses


def lq_loss(logits: Tensor, target: Tensor, *, q: float) -> Tensor:
    r"""Generalized cross entropy (1 − p_y^q) / q of every sample (Zhang and Sabuncu, 2018).

    Args:
        logits: of the final linear layer.
        target: class indices in ``[0, C)``.
        q: in (0, 1]; towards 0 it is cross entropy, at 1 half the mean absolute error.

    Shape:
        logits (N, C), target (N,); output (N,).
    """
    return -torch.expm1(-q * functional.cross_entropy(logits, target, reduction="none")) / q


def disturb_label(
    target: Tensor, key: Tensor, *, num_classes: int, noise_rate: float, start: int | Tensor = 0
) -> Tensor:
    r"""Class indices, each with probability ``noise_rate`` drawn anew (Xie et al., 2016).

    As in the original the new one is uniform over all C classes, the right one included, so that a
    label turns wrong with probability noise_rate · (C − 1) / C.

    Args:
        target: class indices in ``[0, C)``.
        key: of the draws, see :mod:`isda.experiments.draws`.
        num_classes: C.
        noise_rate: probability of a draw.
        start: place of the first sample in the batch of all ranks; a place decides its draws.

    Shape:
        target (N,); output (N,).
    """
    keys = draws.fold(key, start + torch.arange(len(target), device=target.device))  # (N,)
    drawn = draws.integers((), draws.fold(keys, 0), high=num_classes)  # one for every key
    return torch.where(draws.uniform((), draws.fold(keys, 1)) < noise_rate, drawn, target)


def center_loss(features: Tensor, centers: Tensor, target: Tensor) -> Tensor:
    r"""Half the squared distance ½ |a − c_y|² of every sample to its center (Wen et al., 2016).

    Args:
        features: deep features.
        centers: of the classes.
        target: class indices in ``[0, C)``.

    Shape:
        features (N, A), centers (C, A), target (N,); output (N,).
    """
    return 0.5 * (features - centers[target]).square().sum(1)


def center_gradient(features: Tensor, centers: Tensor, target: Tensor) -> Tensor:
    r"""Σ (c_j − a_i) over the samples i of each class j: ∂/∂c of the sum of :func:`center_loss`.

    Shape:
        features (N, A), centers (C, A), target (N,); output (C, A).
    """
    apart = centers[target] - features
    return torch.zeros_like(centers, dtype=apart.dtype).index_add(0, target, apart)


class _Batch(NamedTuple):
    """What a criterion gets in training; logits are float32 or float64."""

    features: Tensor  # (N, A)
    weight: Tensor  # (C, A)
    target: Tensor  # (N,)
    logits: Tensor  # (N, C)
    progress: float | Tensor | None
    world: int  # number of ranks
    number: int | Tensor  # samples of all ranks, at least 1
    start: int | Tensor  # samples of the ranks before this one

    def mean(self, losses: Tensor) -> Tensor:
        """Mean over the samples of all ranks, whose gradients will be averaged."""
        return losses.sum() * self.world / self.number


class _Criterion(nn.Module):
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
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        with torch.autocast(logits.device.type, enabled=False):
            if not self.training:
                return functional.cross_entropy(logits, target)
            place = _place(len(target), logits.device)
            return self._loss(_Batch(features, weight, target, logits, progress, *place))

    def _loss(self, batch: _Batch) -> Tensor:
        raise NotImplementedError


class CrossEntropyLoss(_Criterion):
    """Cross entropy; in training its mean is over the samples of all ranks, as in ISDALoss."""

    def _loss(self, batch: _Batch) -> Tensor:
        losses = functional.cross_entropy(batch.logits, batch.target, reduction="none")
        return batch.mean(losses)


class FocalLoss(_Criterion):
    """Mean of :func:`focal_loss`; α = 0.5 and γ = 1 are the paper's choice (Appendix B)."""

    def __init__(self, *, alpha: float = 0.5, gamma: float = 1.0) -> None:
        super().__init__()
        _require(0 < alpha < float("inf"), "alpha", alpha, "> 0 and finite")
        _require(0 <= gamma < float("inf"), "gamma", gamma, ">= 0 and finite")
        self.alpha, self.gamma = alpha, gamma

    def _loss(self, batch: _Batch) -> Tensor:
        losses = focal_loss(batch.logits, batch.target, alpha=self.alpha, gamma=self.gamma)
        return batch.mean(losses)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, gamma={self.gamma}"


class LqLoss(_Criterion):
    """Mean of :func:`lq_loss`; q = 0.4 is the paper's choice (Appendix B)."""

    def __init__(self, *, q: float = 0.4) -> None:
        super().__init__()
        _require(0 < q <= 1, "q", q, "in (0, 1]")
        self.q = q

    def _loss(self, batch: _Batch) -> Tensor:
        return batch.mean(lq_loss(batch.logits, batch.target, q=self.q))

    def extra_repr(self) -> str:
        return f"q={self.q}"


class DisturbLabelLoss(_Criterion):
    """Cross entropy with the labels of :func:`disturb_label`, disturbed anew in every step.

    The draws depend on the seed, the step and the place of a sample in the batch of all ranks: they
    are the same for one process and for several that hold its batch in the order of ranks, and a
    checkpoint needs no more than the ``step``.

    Args:
        num_classes: number C of classes.
        noise_rate: share of the labels drawn anew; 0.05 in the paper, for ResNet-110 on CIFAR-100
            0.1 (Appendix B).
        seed: of the draws.
    """

    step: Tensor
    key: Tensor

    def __init__(self, num_classes: int, *, noise_rate: float = 0.05, seed: int = 0) -> None:
        super().__init__()
        _require(num_classes >= 1, "num_classes", num_classes, ">= 1")
        _require(0 <= noise_rate <= 1, "noise_rate", noise_rate, "in [0, 1]")
        self.num_classes, self.noise_rate, self.seed = num_classes, noise_rate, seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("key", draws.key(seed, _NOISE), persistent=False)

    def _loss(self, batch: _Batch) -> Tensor:
        target = disturb_label(
            batch.target,
            _step_key_op(self.key, self.step),
            num_classes=self.num_classes,
            noise_rate=self.noise_rate,
            start=batch.start,
        )
        self.step += 1
        return batch.mean(functional.cross_entropy(batch.logits, target, reduction="none"))

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, noise_rate={self.noise_rate}, seed={self.seed}"


class CenterLoss(_Criterion):
    r"""Cross entropy plus center_weight · mean ½ |a − c_y|² (Wen et al., 2016).

    The centers c are parameters with a learning rate of their own: give them to an optimiser as a
    group with ``lr=criterion.learning_rate``, without momentum and weight decay. Their gradient is
    that of the mean ½ |a − c_y|² alone: it does not depend on ``center_weight``, so that neither
    does the rate at which they follow the features. It is that of all ranks' samples on every rank;
    no rank need average it. The centers start at 0.

    Args:
        num_features: number A of features, the head's ``in_features``.
        num_classes: number C of classes, the head's ``out_features``.
        center_weight: of the center term. The paper does not tell; 0.003 is that of the original's
            experiments, where both terms are sums over the batch: the same ratio as for means.
        learning_rate: of the centers; 0.5 is the paper's choice (Appendix B).
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        center_weight: float = 0.003,
        learning_rate: float = 0.5,
    ) -> None:
        super().__init__()
        _require(num_features >= 1, "num_features", num_features, ">= 1")
        _require(num_classes >= 1, "num_classes", num_classes, ">= 1")
        finite = float("inf")
        _require(0 <= center_weight < finite, "center_weight", center_weight, ">= 0 and finite")
        _require(0 < learning_rate < finite, "learning_rate", learning_rate, "> 0 and finite")
        self.center_weight, self.learning_rate = center_weight, learning_rate
        self.centers = nn.Parameter(torch.zeros(num_classes, num_features))

    def _loss(self, batch: _Batch) -> Tensor:
        features, centers = batch.features.to(batch.logits.dtype), self.centers.detach()
        losses = functional.cross_entropy(batch.logits, batch.target, reduction="none")
        losses = losses + self.center_weight * center_loss(features, centers, batch.target)
        gradient = center_gradient(features.detach(), centers, batch.target)
        gradient = distributed.sum_over_ranks(gradient) / batch.number
        follow = (self.centers * gradient).sum()
        return batch.mean(losses) + (follow - follow.detach())  # a gradient, no value

    def extra_repr(self) -> str:
        return f"center_weight={self.center_weight}, learning_rate={self.learning_rate}"


class LargeMarginLoss(_Criterion):
    """Cross entropy of :func:`large_margin_logits`, annealed (Liu et al., 2016).

    β falls with ``progress`` as in :func:`annealed_beta`, so every call in training needs it, unless
    ``beta_start <= beta_min``, when β is ``beta_min`` throughout. The paper gives neither margin nor
    annealing; both are those of the original's published CIFAR-10 training with augmentation.

    Args:
        margin: m; 1 is cross entropy.
        beta_start: β at the start.
        beta_min: smallest β.
    """

    def __init__(
        self, *, margin: int = 2, beta_start: float = 1000.0, beta_min: float = 0.0
    ) -> None:
        super().__init__()
        _require(isinstance(margin, int) and margin >= 1, "margin", margin, "an integer >= 1")
        _require(0 <= beta_start < float("inf"), "beta_start", beta_start, ">= 0 and finite")
        _require(0 <= beta_min < float("inf"), "beta_min", beta_min, ">= 0 and finite")
        self.margin, self.beta_start, self.beta_min = margin, beta_start, beta_min

    def _loss(self, batch: _Batch) -> Tensor:
        logits = large_margin_logits(
            batch.features.to(batch.logits.dtype),
            batch.weight.to(batch.logits.dtype),
            batch.target,
            batch.logits,
            margin=self.margin,
            beta=self._beta(batch.progress),
        )
        return batch.mean(functional.cross_entropy(logits, batch.target, reduction="none"))

    def _beta(self, progress: float | Tensor | None) -> float | Tensor:
        if self.beta_start <= self.beta_min:
            return self.beta_min
        if progress is None:
            raise ValueError("progress must be given to each call, for β to fall; got None")
        return annealed_beta(progress, beta_start=self.beta_start, beta_min=self.beta_min)

    def extra_repr(self) -> str:
        return f"margin={self.margin}, beta_start={self.beta_start}, beta_min={self.beta_min}"


def create_criterion(
    recipe: Recipe, *, num_features: int, num_classes: int, seed: int = 0
) -> nn.Module:
    """The criterion of a recipe, called with features, weight and target.

    Args:
        recipe: what is trained and how.
        num_features: of the network.
        num_classes: of the data.
        seed: of the run, for criteria that draw.
    """
    builders: dict[str, Callable[[], nn.Module]] = {
        "ce": CrossEntropyLoss,
        "isda": lambda: ISDALoss(
            num_features,
            num_classes,
            lambda_0=recipe.lambda_0,
            covariance=recipe.covariance,
            decay=recipe.decay,
            ramp="constant" if recipe.ramp == "constant" else "linear",
        ),
        "large_margin": LargeMarginLoss,
        "disturb_label": lambda: DisturbLabelLoss(
            num_classes, noise_rate=getattr(recipe, "noise_rate", 0.05), seed=seed
        ),
        "focal": FocalLoss,
        "center": lambda: CenterLoss(num_features, num_classes),
        "lq": LqLoss,
    }
    if recipe.method not in builders:
        raise unknown("method", recipe.method, builders)
    return builders[recipe.method]()


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
    _require(same, "features and weight", found, "of shapes (N, A) and (C, A)")
    number, classes = len(features), len(weight)
    indices = target.dtype == torch.int64 and target.shape == (number,)
    expected = f"int64 class indices of shape ({number},)"
    _require(indices, "target", f"{target.dtype} of shape {tuple(target.shape)}", expected)
    if logits is not None:
        shape = tuple(logits.shape)
        _require(shape == (number, classes), "logits", shape, f"of shape ({number}, {classes})")
    if isinstance(progress, int | float):
        _require(0 <= progress <= 1, "progress", progress, "in [0, 1]")


def _require(holds: bool, name: str, value: Any, expectation: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {expectation}, got {value}")


@torch.library.custom_op("isda::step_key", mutates_args=())
def _step_key_op(key: Tensor, step: Tensor) -> Tensor:
    """Key of a step.

    An operator, because torch.compile may compute plain arithmetic once more for the backward pass,
    when the step has been counted already (pytorch/pytorch#197039).
    """
    return draws.fold(key, step)


@_step_key_op.register_fake
def _(key: Tensor, step: Tensor) -> Tensor:
    return torch.empty_like(key)
