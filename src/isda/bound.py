"""Eq. 4 in one operator for CUDA: shifted logits, cross entropy and their mean.

The plain form stands in ``functional.py``: ``isda_loss`` and, without a quadratic term,
``cross_entropy``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isda import kernels
from isda.operators import operator

__all__ = ["bound", "is_number"]


def bound(
    logits: Tensor,
    quadratic: Tensor | None,
    index: Tensor,
    strength: float | Tensor = 0.0,
    *,
    scale: Tensor | None = None,
    ignore_index: int = -100,
    reduce: bool = True,
) -> Tensor:
    """Cross entropy of logits + (λ/2) quadratic, in float32.

    Args:
        logits: of the final linear layer.
        quadratic: variance of every logit margin, float32; None for ordinary cross entropy.
        index: class indices; the loss of a class out of range is NaN.
        strength: λ, one number; a tensor gets no gradient, see :func:`is_number`.
        scale: factor of the sum of the losses, 0 to make them NaN, without gradients; None for
            their mean.
        ignore_index: class index of samples that do not count.
        reduce: False for the losses themselves.

    Shape:
        logits (N, C), quadratic (N, C), index (N,); output () or (N,).
    """
    if index.shape != logits.shape[:1] or index.dtype != torch.int64:
        raise ValueError(
            f"target must be int64 class indices, as many as there are logits ({len(logits)}), "
            f"got {index.dtype} of shape {tuple(index.shape)}"
        )
    factor = None
    if quadratic is not None:
        quadratic = quadratic.expand(logits.shape).contiguous()
        if isinstance(strength, Tensor):
            factor = strength.detach().to(logits.device, torch.float32)
        else:
            factor = torch.full((), strength, dtype=torch.float32, device=logits.device)
    loss, *_ = _bound_op(logits, quadratic, index, factor, scale, ignore_index, reduce)
    return loss


def is_number(strength: float | Tensor) -> bool:
    """Whether a strength is one that :func:`bound` takes: one number, that needs no gradient."""
    return not isinstance(strength, Tensor) or (
        strength.numel() == 1 and not strength.requires_grad
    )


def _bound(
    logits: Tensor,
    quadratic: Tensor | None,
    index: Tensor,
    strength: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    reduce: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.bound(
        logits.contiguous(),
        quadratic,
        index.contiguous(),
        strength,
        scale,
        ignore_index=ignore_index,
        reduce=reduce,
    )


def _fake_bound(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, reduce = others
    total = logits.new_empty(logits.shape[0], dtype=torch.float32)
    loss = logits.new_empty((), dtype=torch.float32) if reduce else torch.empty_like(total)
    return loss, total, logits.new_empty((), dtype=torch.float64)


def _bound_backward(
    grad: Tensor,
    logits: Tensor,
    quadratic: Tensor | None,
    index: Tensor,
    strength: Tensor | None,
    total: Tensor,
    scale: Tensor,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    return kernels.bound_backward(
        grad,
        logits.contiguous(),
        quadratic,
        index.contiguous(),
        strength,
        total,
        scale,
        ignore_index=ignore_index,
    )


def _fake_bound_backward(
    grad: Tensor, logits: Tensor, quadratic: Tensor | None, *_others: Tensor
) -> tuple[Tensor, Tensor]:
    quadratic_grad = logits.new_empty(0) if quadratic is None else torch.empty_like(quadratic)
    return torch.empty_like(logits.contiguous()), quadratic_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, quadratic, index, strength, _, ctx.ignore_index, _ = inputs
    ctx.save_for_backward(logits, quadratic, index, strength, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any, backward: Callable[..., Any], grad: Tensor | None, *_unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    logits, quadratic, *others = ctx.saved_tensors  # read once: a checkpoint allows no more
    logits_grad, quadratic_grad = backward(grad, logits, quadratic, *others, ctx.ignore_index)
    return logits_grad, None if quadratic is None else quadratic_grad, *(None,) * 5


_bound_op = operator(
    "isda::bound",
    _bound,
    _fake_bound,
    save=_save,
    backward=operator("isda::bound_backward", _bound_backward, _fake_bound_backward),
    gradient=_gradient,
)
