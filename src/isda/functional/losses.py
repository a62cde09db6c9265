r"""The closed-form loss (Eq. 4), its binary form, and ordinary cross entropy."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "Reduction",
    "cross_entropy",
    "flatten",
    "flatten_target",
    "isda_binary_cross_entropy",
    "isda_cross_entropy",
    "isda_logits",
    "isda_loss",
    "limit_shift",
    "ramped_strength",
    "require_reduction",
]

Reduction = Literal["mean", "sum", "none"]
Number = TypeVar("Number", float, Tensor)


def ramped_strength(lambda_0: float, progress: Number) -> Number:
    r"""Strength λ = (t/T) λ₀ at progress t/T (Sec. 3.1)."""
    return lambda_0 * progress


def isda_logits(logits: Tensor, quadratic: Tensor, strength: float | Tensor) -> Tensor:
    r"""Logits z_j + (λ/2) (w_j − w_y)ᵀ Σ_y (w_j − w_y) (the exponent of Eq. 4).

    Args:
        logits: output of the final linear layer.
        quadratic: variance of every logit margin.
        strength: λ.

    Shape:
        logits (N, C), quadratic (N, C); output (N, C).
    """
    # 0 · inf would be NaN
    quadratic = torch.where(quadratic.isfinite() | (strength != 0), quadratic, 0.0)
    return logits + 0.5 * strength * quadratic


def limit_shift(quadratic: Tensor, strength: float | Tensor, max_shift: float) -> Tensor:
    r"""Quadratic terms q, limited so that no shift (λ/2) q exceeds ``max_shift``.

    Smaller terms are unchanged. Larger ones become a constant without a gradient, so they cannot
    make the training diverge. The loss is then no longer an upper bound on the expected loss under
    augmentation, but it is still at least the cross entropy.

    Args:
        quadratic: variance of every logit margin.
        strength: λ.
        max_shift: maximum shift of a logit.

    Shape:
        quadratic (N, C); output (N, C).
    """
    if isinstance(strength, Tensor):
        positive = torch.where(strength > 0, strength, 0.0)  # no NaN gradient of 1 / 0
        return torch.minimum(quadratic, (2 * max_shift / positive).to(quadratic.dtype))
    return quadratic.clamp(max=2 * max_shift / strength) if strength else quadratic


def isda_cross_entropy(
    logits: Tensor,
    target: Tensor,
    quadratic: Tensor,
    *,
    strength: float | Tensor,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The upper bound on the expected cross entropy under infinite augmentation (Eq. 4).

    For class indices y without smoothing, it equals
    ``F.cross_entropy(isda_logits(logits, quadratic, strength), target)``. In general, the bound on
    the expected loss of label k is

        log Σ_j exp(z_j + (λ/2) q_j) − z_k,

    because the expected value of a logit is z_k. Class weights and label smoothing apply to these
    bounds as in ``F.cross_entropy``, which this equals at λ = 0. For class probabilities p, the
    loss is Σ_k p_k times the bound of label k with its own quadratic term.

    Args:
        logits: output of the final linear layer.
        target: class indices or class probabilities.
        quadratic: variance of every logit margin; for class probabilities, a table with a row for
            every label k, either shared by all samples or one per sample.
        strength: λ.
        class_weight: weight of each class, as ``weight`` in ``F.cross_entropy``.
        label_smoothing: fraction of the target that is spread over all classes.
        ignore_index: class index of samples to ignore.
        reduction: "mean", "sum" or "none". The mean over zero samples is 0.

    Shape:
        logits (N, C), target (N,) or (N, C), quadratic (N, C) for class indices, (C, C) or (N, C,
        C) for class probabilities; output () or (N,).
    """
    logits = logits.to(torch.promote_types(logits.dtype, quadratic.dtype))
    logits = logits - logits.detach().amax(1, keepdim=True)  # margins do not change
    if target.is_floating_point():
        table = isda_logits(torch.zeros_like(quadratic), quadratic, strength)
        if table.dim() == 2:
            total = _LogMatmulExp.apply(logits, table)  # (N, C)
        else:
            total = (logits[:, None] + table).logsumexp(-1)  # (N, C)
    else:
        total = isda_logits(logits, quadratic, strength).logsumexp(1, keepdim=True)  # (N, 1)
    losses, count = _weigh(total - logits, target, class_weight, label_smoothing, ignore_index)
    return _reduce(losses, count, reduction)


def isda_loss(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    quadratic: Callable[[Tensor, Tensor], Tensor],
    *,
    strength: float | Tensor,
    bias: Tensor | None = None,
    logits: Tensor | None = None,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The ISDA loss of a linear layer: :func:`isda_cross_entropy` with its quadratic term.

    Args:
        features: deep features.
        weight: rows of the final linear layer.
        target: class indices or class probabilities.
        quadratic: function of (weight, class indices) that returns the variance of every logit
            margin, such as ``functools.partial(full_quadratic, covariance=covariance)``.
        strength: λ.
        bias: bias of the final linear layer.
        logits: output of the final linear layer, if already computed.
        class_weight: see :func:`isda_cross_entropy`.
        label_smoothing: see :func:`isda_cross_entropy`.
        ignore_index: class index of samples to ignore.
        reduction: "mean", "sum" or "none".

    Shape:
        features (N, A) or (N, A, ...), weight (C, A), target (N,) or (N, ...), or probabilities (N,
        C) or (N, C, ...), bias (C,), logits (N, C) or (N, C, ...); output () or the shape of class
        indices.
    """
    shape = features.shape[:1] + features.shape[2:]
    logits = F.linear(flatten(features), weight, bias) if logits is None else flatten(logits)
    target = flatten_target(target)
    if target.is_floating_point():
        index = torch.arange(len(weight), device=weight.device)
    else:
        index = torch.where(target == ignore_index, 0, target)
    loss = isda_cross_entropy(
        logits,
        target,
        quadratic(weight, index),
        strength=strength,
        class_weight=class_weight,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return loss.view(shape) if reduction == "none" else loss


def isda_binary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    quadratic: Tensor,
    *,
    strength: float | Tensor,
    class_weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The upper bound on the expected binary cross entropy under infinite augmentation.

    A sample with features ã ~ N(a, λΣ) has logits N(z_k, λ q_k) with q_k = w_kᵀ Σ w_k. Jensen's
    inequality and the moment-generating function of the normal distribution give

        E[log(1 + exp(∓z̃_k))] ≤ log(1 + exp(∓z_k + (λ/2) q_k)),

    so the loss of label k is y_k · softplus(−z_k + (λ/2) q_k) + (1 − y_k) · softplus(z_k + (λ/2)
    q_k).

    Args:
        logits: output of the final linear layer.
        target: probability of each label, usually 0 or 1.
        quadratic: variance q_k of every logit.
        strength: λ.
        class_weight: weight of each label, as ``weight`` in ``nn.BCEWithLogitsLoss``.
        pos_weight: weight of positive examples of each label, as in ``nn.BCEWithLogitsLoss``.
        reduction: "mean", "sum" or "none".

    Shape:
        logits (N, C), target (N, C), quadratic (N, C); output () or (N, C).
    """
    target = target.to(torch.promote_types(target.dtype, quadratic.dtype))  # 1 − y is exact
    positive = target * F.softplus(isda_logits(-logits, quadratic, strength))
    if pos_weight is not None:
        positive = positive * pos_weight
    negative = (1 - target) * F.softplus(isda_logits(logits, quadratic, strength))
    losses = positive + negative
    if class_weight is not None:
        losses = losses * class_weight
    return _reduce(losses, torch.ones_like(losses), reduction)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Ordinary cross entropy (Eq. 4 at λ = 0), computed in float32 or float64.

    Unlike in torch, the mean over zero samples is 0.

    Args:
        logits: output of the final linear layer.
        target: class indices or class probabilities.
        class_weight: weight of each class, as ``weight`` in ``F.cross_entropy``.
        label_smoothing: fraction of the target that is spread over all classes.
        ignore_index: class index of samples to ignore.
        reduction: "mean", "sum" or "none".

    Shape:
        logits (N, C) or (N, C, ...), target (N,) or (N, ...), or probabilities like logits; output
        () or the shape of class indices.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    soft = target.is_floating_point()
    if soft:
        target = target.to(torch.promote_types(target.dtype, logits.dtype))
    losses = F.cross_entropy(
        logits,
        target,
        weight=None if class_weight is None else class_weight.to(logits.dtype),
        ignore_index=-100 if soft else ignore_index,  # torch rejects one >= 0 with probabilities
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if soft:
        return _reduce(losses, torch.ones_like(losses), reduction)
    valid = target != ignore_index
    if class_weight is None:
        return _reduce(losses, valid, reduction)
    weights = class_weight.to(losses.dtype)[torch.where(valid, target, 0)]
    return _reduce(losses, torch.where(valid, weights, 0), reduction)


def flatten(dense: Tensor) -> Tensor:
    """Move channels last and merge all positions: (N, A, ...) to (N', A)."""
    return dense if dense.dim() == 2 else dense.movedim(1, -1).flatten(0, -2)


def flatten_target(target: Tensor) -> Tensor:
    """Class indices (N, ...) to (N',), or class probabilities (N, C, ...) to (N', C)."""
    return flatten(target) if target.is_floating_point() else target.flatten()


def require_reduction(reduction: str) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def _weigh(
    bound: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Loss of each sample from the losses of all labels (N, C), and its weight in the mean."""
    if class_weight is not None:
        class_weight = class_weight.to(bound.dtype)
        bound = bound * class_weight
    spread = label_smoothing / bound.shape[1]
    if target.is_floating_point():
        target = target.to(torch.promote_types(target.dtype, bound.dtype))
        losses = (((1 - label_smoothing) * target + spread) * bound).sum(1)
        return losses, torch.ones_like(losses)
    valid = target != ignore_index
    index = torch.where(valid, target, 0)
    losses = bound.gather(1, index[:, None])[:, 0]
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + spread * bound.sum(1)
    count = valid if class_weight is None else valid * class_weight[index]
    return torch.where(valid, losses, 0.0), count


def _reduce(losses: Tensor, count: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    require_reduction(reduction)
    number = count.sum()
    return total / torch.where(number == 0, 1, number)


_BLOCK = 16  # labels at a time in _LogMatmulExp


class _LogMatmulExp(torch.autograd.Function):
    """log Σ_j exp(x_ij + y_kj), a block of k at a time to avoid the (N, K, J) intermediate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        rows = [
            (x[:, None] + part).logsumexp(-1)  # (N, block)
            for part in y.split(_BLOCK)
        ]
        return torch.cat(rows, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y, output = ctx.saved_tensors
        x_grad, y_grad = torch.zeros_like(x), []
        blocks = (tensor.split(_BLOCK, 1) for tensor in (output, grads[0]))
        for part, total, grad in zip(y.split(_BLOCK), *blocks, strict=True):
            share = (x[:, None] + part - total[:, :, None]).exp() * grad[:, :, None]
            x_grad = x_grad + share.sum(1)
            y_grad.append(share.sum(0))
        return x_grad, torch.cat(y_grad)
