r"""One pure function per equation of the paper.

================================  ==================================================================
Sec. 3.1, λ = (t/T) λ₀            :func:`ramped_strength`
Eq. 1, ã ~ N(a, λΣ)               :func:`sample`
Eq. 2, L_M                        :func:`monte_carlo_loss`
Eq. 4, the exponent               :func:`full_quadratic`, :func:`diagonal_quadratic`,
                                  :func:`shared_quadratic`, :func:`identity_quadratic`,
                                  :func:`isda_logits`
Eq. 4, the bound on L_∞ (Eq. 3)   :func:`isda_loss`
Eq. 9, 10, 11 (Appendix A)        :func:`batch_moments`, :func:`merge_moments`,
                                  :func:`update_moments`
Eq. 12, 13, 14, the gradients     autograd; the quadratic part of Eq. 13 is written out in
                                  ``per_class.py`` and, for variances, here
================================  ==================================================================

Shapes use the paper's letters: N samples, C classes, A features.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from isda import kernels
from isda.bound import bound, is_number
from isda.operators import once
from isda.per_class import full_quadratic_op, sample_share, update_full_op

__all__ = [
    "Moments",
    "batch_moments",
    "cross_entropy",
    "diagonal_quadratic",
    "full_quadratic",
    "identity_quadratic",
    "isda_logits",
    "isda_loss",
    "merge_moments",
    "monte_carlo_loss",
    "ramped_strength",
    "sample",
    "shared_quadratic",
    "update_moments",
]

Reduction = Literal["mean", "sum", "none"]
Precision = Literal["high", "medium"]


class Moments(NamedTuple):
    """Number, mean and biased covariance (or variance) of the features of each class."""

    count: Tensor  # type: ignore[assignment]  # (C,), int64; hides tuple.count
    mean: Tensor  # (C, A)
    covariance: Tensor  # (C, A, A), or variances (C, A)


def batch_moments(
    features: Tensor, target: Tensor, num_classes: int, *, diagonal: bool = False
) -> Moments:
    r"""Moments m, μ' and Σ' of every class in one batch (Appendix A).

    Equivalent to ``features[target == c].mean(0)`` and ``features[target ==
    c].T.cov(correction=0)`` for each class c, and zero for absent classes.

    Args:
        features: deep features.
        target: class indices in ``[0, C)``; samples with a negative target are left out.
        num_classes: number of classes.
        diagonal: return variances instead of covariances.

    Shape:
        features (N, A), target (N,); see :class:`Moments`.

    Example:
        >>> features, target = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
        >>> batch_moments(features, target, 2, diagonal=True).covariance
        tensor([[1.],
                [0.]])
    """
    num_features = features.shape[1]
    shape = (num_classes, num_features) if diagonal else (num_classes, num_features, num_features)
    empty = Moments(
        torch.zeros(num_classes, dtype=torch.int64, device=features.device),
        features.new_zeros(num_classes, num_features),
        features.new_zeros(shape),
    )
    return update_moments(empty, features, target)


def merge_moments(moments: Moments, other: Moments, *, decay: float = 1.0) -> Moments:
    r"""Moments of two streams from the moments of each (Eq. 9, 10 and 11).

    Args:
        moments: of the stream so far: n, μ, Σ.
        other: of what follows it: m, μ', Σ'.
        decay: below 1, the weight of ``other`` is at least ``1 - decay**m`` in place of ``m / (n +
            m)``, so that a sample of a class loses weight with each one that follows.

    Shape:
        see :class:`Moments`.
    """
    share = sample_share(moments.count, other.count, decay, moments.mean.dtype)  # (C,)
    shift = other.mean - moments.mean  # (C, A)
    column = share[:, None]
    if moments.covariance.dim() == 3:
        spread, between = column[:, :, None], shift[:, :, None] * shift[:, None, :]
    else:
        spread, between = column, shift.square()
    return Moments(
        moments.count + other.count,  # Eq. 11
        moments.mean + column * shift,  # Eq. 9
        (1 - spread) * moments.covariance
        + spread * other.covariance
        + spread * (1 - spread) * between,  # Eq. 10
    )


def update_moments(
    moments: Moments, features: Tensor, target: Tensor, *, decay: float = 1.0
) -> Moments:
    r"""Moments of a stream after one more batch (Appendix A).

    Equivalent to ``merge_moments(moments, batch_moments(features, target, C), decay=decay)``,
    without the moments of absent classes.

    Args:
        moments: of the stream so far.
        features: deep features of the batch.
        target: class indices in ``[0, C)``; samples with a negative target are left out.
        decay: see :func:`merge_moments`.

    Shape:
        features (N, A), target (N,); see :class:`Moments`.
    """
    if moments.covariance.dim() == 2:
        return merge_moments(
            moments, _batch_variances(features, target, len(moments.count)), decay=decay
        )
    count, mean, covariance = (
        tensor.clone(memory_format=torch.contiguous_format) for tensor in moments
    )
    update_full_op(count, mean, covariance, features, target, decay, 0)
    return Moments(count, mean, covariance)


def ramped_strength(lambda_0: float, progress: float | Tensor) -> float | Tensor:
    r"""Strength λ = (t/T) λ₀ at progress t/T (Sec. 3.1)."""
    return lambda_0 * progress


def full_quadratic(
    weight: Tensor, target: Tensor, covariance: Tensor, *, precision: Precision = "high"
) -> Tensor:
    r"""Variance of every logit margin, (w_j − w_y)ᵀ Σ_y (w_j − w_y) (the exponent of Eq. 4).

    Equivalent to ``torch.einsum("nja,nab,njb->nj", d, covariance[target], d)`` with
    ``d = weight - weight[target][:, None]``, but done once per class of the batch; the product
    (W − w_c) Σ_c is kept for the backward pass. The covariance gets no gradient.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.
        covariance: feature covariance of each class.
        precision: of the products on CUDA, see :class:`isda.FullCovariance`.

    Shape:
        weight (C, A), target (N,), covariance (C, A, A); output (N, C).
    """
    if weight.dtype != covariance.dtype:
        raise ValueError(
            f"weight and covariance must have one dtype, got {weight.dtype} and {covariance.dtype}"
        )
    quadratic, *_ = full_quadratic_op(weight, target, covariance, precision, 0)
    return quadratic


def diagonal_quadratic(weight: Tensor, target: Tensor, variance: Tensor) -> Tensor:
    r"""Variance of every logit margin under a diagonal covariance (the exponent of Eq. 4).

    Equivalent to ``((weight - weight[target][:, None]) ** 2 * variance[target][:, None]).sum(-1)``
    without the (N, C, A) intermediate. The variance gets no gradient.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.
        variance: feature variances of each class.

    Shape:
        weight (C, A), target (N,), variance (C, A); output (N, C).
    """
    quadratic: Tensor = _DiagonalQuadratic.apply(weight, target, variance)
    return quadratic


def shared_quadratic(weight: Tensor, target: Tensor, covariance: Tensor) -> Tensor:
    r"""Variance of every logit margin under one covariance for all classes (Sec. 4.5, Table 5).

    Equivalent to ``full_quadratic(weight, target, covariance.expand(C, -1, -1))``.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.
        covariance: feature covariance over all classes.

    Shape:
        weight (C, A), target (N,), covariance (A, A); output (N, C).
    """
    weight = weight - weight.mean(0)  # margins do not change; avoids cancellation in float32
    return _squared_distance(weight @ covariance @ weight.T)[target]


def identity_quadratic(weight: Tensor, target: Tensor) -> Tensor:
    r"""Squared distance |w_j − w_y|², the quadratic term for Σ = I (Sec. 4.5, Table 5).

    Equivalent to ``(weight - weight[target][:, None]).square().sum(-1)``.

    Args:
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.

    Shape:
        weight (C, A), target (N,); output (N, C).
    """
    weight = weight - weight.mean(0)  # margins do not change; avoids cancellation in float32
    return _squared_distance(weight @ weight.T)[target]


def isda_logits(logits: Tensor, quadratic: Tensor, strength: float | Tensor) -> Tensor:
    r"""Logits z_j + (λ/2) (w_j − w_y)ᵀ Σ_y (w_j − w_y) (the exponent of Eq. 4).

    Args:
        logits: of the final linear layer.
        quadratic: variance of every logit margin.
        strength: λ.

    Shape:
        logits (N, C), quadratic (N, C); output (N, C).
    """
    return logits + 0.5 * strength * quadratic


def isda_loss(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    quadratic: Callable[[Tensor, Tensor], Tensor],
    *,
    strength: float | Tensor,
    bias: Tensor | None = None,
    logits: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The upper bound on the expected cross entropy under infinite augmentation (Eq. 4).

    Equivalent, for class indices, to ``F.cross_entropy(isda_logits(logits, quadratic(weight,
    target), strength), target)``. For class probabilities p it is Σ_k p_k times the bound for
    target k. The mean over no sample at all is 0.

    Args:
        features: deep features.
        weight: rows of the final linear layer.
        target: class indices or class probabilities.
        quadratic: function of (weight, class indices) that gives the variance of every logit
            margin, such as ``functools.partial(full_quadratic, covariance=covariance)``.
        strength: λ.
        bias: of the final linear layer.
        logits: of the final linear layer, if they have been computed before.
        ignore_index: class index of samples that do not count.
        reduction: "mean", "sum" or "none".

    Shape:
        features (N, A) or (N, A, ...), weight (C, A), target (N,) or (N, ...), or probabilities (N,
        C) or (N, C, ...), bias (C,), logits (N, C) or (N, C, ...); output () or the shape of class
        indices.
    """
    require_reduction(reduction)
    shape = features.shape[:1] + features.shape[2:]
    soft = target.is_floating_point()
    logits = F.linear(flatten(features), weight, bias) if logits is None else flatten(logits)
    target = flatten(target) if soft else target.reshape(-1)
    if soft:
        classes = torch.arange(len(weight), device=weight.device)
        table = 0.5 * strength * quadratic(weight, classes)  # (C, C)
        logits = logits.to(table.dtype)
        logits = logits - logits.detach().amax(1, keepdim=True)  # margins do not change
        bound = _LogMatmulExp.apply(logits, table) - logits  # (N, C)
        losses = (target * bound).sum(1)
        counted = torch.ones_like(losses)
    else:
        valid = target != ignore_index
        rows = quadratic(weight, torch.where(valid, target, 0))  # (N, C)
        if kernels.usable(logits) and kernels.usable(rows) and is_number(strength):
            return _fused(logits, rows, target, strength, ignore_index, reduction, shape)
        shifted = isda_logits(logits, rows, strength)
        losses = F.cross_entropy(shifted, target, ignore_index=ignore_index, reduction="none")
        counted = valid
    return _reduce(losses, counted, reduction, shape)


def cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: Reduction = "mean"
) -> Tensor:
    r"""Ordinary cross entropy, Eq. 4 at λ = 0, in float32 or more.

    Unlike torch's, its mean over no sample at all is 0; with the kernels for CUDA it can be
    differentiated once only.

    Args:
        logits: of the final linear layer.
        target: class indices or class probabilities.
        ignore_index: class index of samples that do not count.
        reduction: "mean", "sum" or "none".

    Shape:
        logits (N, C) or (N, C, ...), target (N,) or (N, ...), or probabilities like logits; output
        () or the shape of class indices.
    """
    require_reduction(reduction)
    soft = target.is_floating_point()
    if not soft and kernels.usable(logits):
        if target.shape != logits.shape[:1] + logits.shape[2:]:
            raise ValueError(
                f"target must have shape {tuple(logits.shape[:1] + logits.shape[2:])} for logits "
                f"{tuple(logits.shape)}, got {tuple(target.shape)}"
            )
        flat = flatten(logits), None, target.reshape(-1)
        return _fused(*flat, 0.0, ignore_index, reduction, target.shape)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if soft:  # torch refuses an ignore_index >= 0 beside probabilities
        ignore_index = -100
    losses = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    counted = torch.ones_like(losses) if soft else target != ignore_index
    return _reduce(losses, counted, reduction, losses.shape)


def sample(
    features: Tensor,
    target: Tensor,
    covariance: Tensor,
    *,
    strength: float,
    num_samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Explicitly augmented features ã ~ N(a, λ Σ_y) (Eq. 1).

    Args:
        features: deep features.
        target: class indices in ``[0, C)``.
        covariance: feature covariance of each class, or feature variances of each class; one
            matrix for all classes as ``covariance.expand(C, A, A)``.
        strength: λ.
        num_samples: number M of draws for every sample.
        generator: source of the draws.

    Shape:
        features (N, A), target (N,), covariance (C, A, A) or (C, A); output (M, N, A).

    Example:
        >>> sample(torch.zeros(3, 2), torch.tensor([0, 1, 1]), torch.ones(2, 2), strength=0.5).shape
        torch.Size([1, 3, 2])
    """
    if not strength >= 0:
        raise ValueError(f"strength must be >= 0, got {strength}")
    width = features.shape[1]
    if covariance.shape[1:] not in ((width,), (width, width)):
        raise ValueError(
            f"covariance must have shape (C, {width}, {width}) or (C, {width}), "
            f"got {tuple(covariance.shape)}"
        )
    dtype = torch.promote_types(features.dtype, covariance.dtype)
    covariance = covariance.to(dtype)
    noise = torch.randn(
        (num_samples, *features.shape),
        generator=generator,
        dtype=dtype,
        device=features.device,
    )
    if covariance.dim() == 2:
        if at_hand(covariance) and (covariance < 0).any():
            raise ValueError("covariance must hold variances, got negative ones")
        return (features + noise * (strength * covariance[target]).sqrt()).to(features.dtype)
    for index in target.unique().tolist():
        rows = (target == index).nonzero().flatten()
        eigenvalues, eigenvectors = torch.linalg.eigh(strength * covariance[index])
        root = eigenvectors * eigenvalues.clamp(min=0).sqrt()  # Σ may be singular: no Cholesky
        noise[:, rows] = noise[:, rows] @ root.T
    return (features + noise).to(features.dtype)


def monte_carlo_loss(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    covariance: Tensor,
    *,
    strength: float,
    num_samples: int,
    bias: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Cross entropy L_M over M explicit augmentations of every sample (Eq. 2).

    Its expectation L_∞ (Eq. 3) lies between the cross entropy and :func:`isda_loss`.

    Args:
        features: deep features.
        weight: rows of the final linear layer.
        target: class indices in ``[0, C)``.
        covariance: feature covariance of each class, or feature variances of each class.
        strength: λ.
        num_samples: M.
        bias: of the final linear layer.
        generator: source of the draws.

    Shape:
        features (N, A), weight (C, A), target (N,), covariance (C, A, A) or (C, A); output ().
    """
    if len(covariance) != len(weight):
        raise ValueError(
            f"covariance must be of {len(weight)} classes, as weight, got {len(covariance)}"
        )
    augmented = sample(
        features,
        target,
        covariance,
        strength=strength,
        num_samples=num_samples,
        generator=generator,
    )
    logits = F.linear(augmented, weight, bias)  # (M, N, C)
    return F.cross_entropy(logits.flatten(0, 1), target.repeat(num_samples))


def flatten(dense: Tensor) -> Tensor:
    """Channels last and all positions in one dimension: (N, A, ...) to (N', A)."""
    return dense if dense.dim() == 2 else dense.movedim(1, -1).flatten(0, -2)


def at_hand(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be looked at without waiting: on a CPU, not compiled."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def require_reduction(reduction: str) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def _reduce(losses: Tensor, counted: Tensor, reduction: Reduction, shape: torch.Size) -> Tensor:
    """Mean over the samples that count (0 if there are none), sum, or the losses in their shape."""
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum()
    return total / counted.sum().clamp(min=1) if reduction == "mean" else total


def _fused(
    logits: Tensor,
    rows: Tensor | None,
    target: Tensor,
    strength: float | Tensor,
    ignore_index: int,
    reduction: Reduction,
    shape: torch.Size,
) -> Tensor:
    """The same by the kernels for CUDA."""
    loss = bound(
        logits, rows, target, strength, ignore_index=ignore_index, reduce=reduction == "mean"
    )
    if reduction == "none":
        return loss.view(shape)
    return loss.sum() if reduction == "sum" else loss


def _squared_distance(inner: Tensor) -> Tensor:
    """Squared distances x_jj − 2 x_cj + x_cc from inner products (C, C); exactly 0 for j = c."""
    norm = inner.diagonal()
    return norm + norm[:, None] - (inner + inner.T)


def _batch_variances(features: Tensor, target: Tensor, num_classes: int) -> Moments:
    """Diagonal moments of a batch; negative targets fall into a class that is cut off."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    target = torch.where(target < 0, num_classes, target)
    count = torch.zeros(num_classes + 1, dtype=torch.int64, device=features.device)
    count = count.scatter_add_(0, target, torch.ones_like(target))

    def average(rows: Tensor) -> Tensor:
        # one by one: of millions of samples float32 would lose the last ones
        total = rows.new_zeros(num_classes + 1, rows.shape[1], dtype=torch.float64)
        total.index_add_(0, target, rows.double())
        return total.div_(count.clamp(min=1)[:, None]).to(rows.dtype)

    mean = average(features)
    variance = average((features - mean[target]).square())
    return Moments(count[:-1], mean[:-1], variance[:-1])


class _DiagonalQuadratic(torch.autograd.Function):
    """v·w_j² − 2 v·w_j w_y + v·w_y² with v = variance of y: one product of matrices each way."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, target: Tensor, variance: Tensor) -> Tensor:
        ctx.sources = (weight,)
        weight = weight - weight.mean(0)  # margins do not change; avoids cancellation in float32
        own, scale = weight[target], variance[target]  # (N, A)
        factors = torch.cat([scale, scale * own], 1)  # (N, 2A)
        ctx.save_for_backward(weight, target, factors)
        offset = torch.linalg.vecdot(factors[:, own.shape[1] :], own)  # (N,)
        return torch.addmm(offset[:, None], factors, torch.cat([weight.square(), -2 * weight], 1).T)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, target, factors = ctx.saved_tensors
        (grad,) = grads
        squares, cross = (grad.T @ factors).chunk(2, 1)  # (C, A)
        weight_grad = 2 * (weight * squares - cross)
        scale, product = factors.chunk(2, 1)  # (N, A)
        own_grad = product * grad.sum(1, keepdim=True) - scale * (grad @ weight)
        return weight_grad.index_add_(0, target, own_grad, alpha=2), None, None


_BLOCK = 16  # classes at a time in _LogMatmulExp


class _LogMatmulExp(torch.autograd.Function):
    """L_ik = log Σ_j exp(x_ij + y_kj), a block of k at a time: no (N, K, J) tensor is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        rows = [
            (x[:, None] + part).logsumexp(-1)  # (N, block)
            for part in y.split(_BLOCK)
        ]
        output = torch.cat(rows, 1)
        ctx.save_for_backward(x, y, output)
        return output

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
