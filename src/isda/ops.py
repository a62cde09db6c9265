"""Dispatch: the only place that chooses between plain torch and Triton kernels.

Each operation is a custom operator, so that ``torch.compile(fullgraph=True)`` sees one node with
static shapes while the implementation may loop over the classes of the batch. Equations:
``isda/functional``; implementations: ``isda/kernels``.

The environment variable ``ISDA_TRITON=0`` (read at import) disables the Triton kernels.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from isda import functional
from isda.functional import Moments
from isda.functional.losses import Reduction, flatten, require_reduction
from isda.kernels import Products, plain
from isda.versions import HAS_KERNELS

__all__ = [
    "count_step",
    "cross_entropy",
    "flag_overflow",
    "full_quadratic",
    "scaled_isda_cross_entropy",
    "screen",
    "update_",
    "update_and_quadratic",
    "uses_triton",
]

_ENABLED = (
    os.environ.get("ISDA_TRITON", "1") != "0"
    and HAS_KERNELS
    and torch.version.hip is None
    and importlib.util.find_spec("triton") is not None
)


def uses_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels run on this tensor: on NVIDIA Ampere (sm_80) or newer."""
    return (
        tensor.is_cuda
        and _ENABLED
        and tensor.dtype != torch.float64
        and torch.cuda.get_device_properties(tensor.device).major >= 8
    )


def full_quadratic(weight: Tensor, target: Tensor, covariance: Tensor, precision: str) -> Tensor:
    """:func:`isda.functional.full_quadratic`, differentiable only with respect to the weight.

    Args:
        weight: rows of the final linear layer.
        target: class indices; rows with a negative index are 0.
        covariance: feature covariance of each class, symmetric.
        precision: precision of the products on CUDA, see :class:`isda.FullCovariance`.

    Shape:
        weight (C, A), target (N,), covariance (C', A, A) with C' <= C; output (N, C).
    """
    products = _multiply(covariance, weight.detach(), target, precision)
    rows: Tensor = _quadratic_rows(weight, target, *products)
    return rows


def update_and_quadratic(
    moments: Moments,
    features: Tensor,
    target: Tensor,
    weight: Tensor,
    decay: float,
    precision: str,
) -> Tensor:
    """``update_``, then :func:`full_quadratic`, on CUDA in one pass over the covariances."""
    products = _update_and_multiply_(
        list(moments), features, target, weight.detach(), decay, precision
    )
    rows: Tensor = _quadratic_rows(weight, target, *products)
    return rows


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """:func:`isda.functional.cross_entropy`, fused on CUDA."""
    if (
        uses_triton(logits)
        and class_weight is None
        and not label_smoothing
        and not target.is_floating_point()
        and target.shape == logits.shape[:1] + logits.shape[2:]
    ):
        require_reduction(reduction)
        loss, *_ = _fused_cross_entropy(
            flatten(logits), None, target.flatten(), None, None, ignore_index, reduction == "mean"
        )
        if reduction == "sum":
            return loss.sum()
        return loss.view(target.shape) if reduction == "none" else loss
    return functional.cross_entropy(
        logits,
        target,
        class_weight=class_weight,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction=reduction,
    )


def scaled_isda_cross_entropy(
    logits: Tensor,
    target: Tensor,
    quadratic: Tensor,
    *,
    strength: Tensor,
    scale: Tensor,
    class_weight: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
    reduction: Reduction,
) -> Tensor:
    """:func:`isda.functional.isda_cross_entropy`, fused on CUDA, summed and scaled.

    Arguments not listed here are the same as in the plain form.

    Args:
        scale: factor of the losses. 0 marks a bad batch: the loss is NaN and has no gradients.
        reduction: "none" for the loss of each sample, otherwise their scaled sum.
    """
    if (
        uses_triton(logits)
        and uses_triton(quadratic)
        and class_weight is None
        and not label_smoothing
        and not target.is_floating_point()
        and not strength.requires_grad
    ):
        require_reduction(reduction)
        loss, *_ = _fused_cross_entropy(
            logits, quadratic, target, strength.float(), scale, ignore_index, reduction != "none"
        )
        return loss
    loss = functional.isda_cross_entropy(
        logits,
        target,
        quadratic,
        strength=strength,
        class_weight=class_weight,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction="sum" if reduction == "mean" else reduction,
    )
    return torch.where(scale == 0, torch.nan, loss * scale.to(loss.dtype))


def _register(
    function: Callable[..., Any], fake: Callable[..., Any], *, mutates_args: Iterable[str] = ()
) -> CustomOpDef:
    """Register a function of ``kernels/plain.py`` and its CUDA counterpart as an operator."""
    name = function.__name__
    operator = custom_op(f"isda::{name}", function, mutates_args=mutates_args)
    operator.register_kernel("cuda", functools.partial(_dispatch_cuda, name))
    operator.register_fake(fake)
    return operator


def _dispatch_cuda(name: str, *args: Any) -> Any:
    """Call a Triton kernel on the device of its arguments, or fall back to plain torch."""
    first = args[0][2] if isinstance(args[0], list) else args[0]  # the covariance of moments
    function = getattr(_backend(first), name)
    with torch.cuda.device_of(first):  # Triton launches on the current device
        return function(*args)


def _backend(tensor: Tensor) -> Any:
    if uses_triton(tensor):
        from isda.kernels import cuda  # imports Triton

        return cuda
    return plain


def _fake_products(covariance: Tensor, weight: Tensor, target: Tensor, precision: str) -> Products:
    slots = min(target.shape[0], covariance.shape[0])
    partial, product, target_product = _backend(covariance).empty_products(weight, slots, precision)
    slot = target.new_empty(covariance.shape[0], dtype=torch.int32)
    return Products(
        partial, product, target_product, slot, target.new_empty(slots, dtype=torch.int32)
    )


screen = _register(plain.screen, lambda features, target, *_: torch.empty_like(target))
count_step = _register(
    plain.count_step,
    lambda step, problem, index, *_: (
        torch.empty_like(index),
        step.new_empty((), dtype=torch.float64),
        step.new_empty((), dtype=torch.float32),
    ),
    mutates_args=("step", "problem"),
)
flag_overflow = _register(
    plain.flag_overflow, lambda *_: None, mutates_args=("problem", "overflow")
)
update_ = _register(plain.update_, lambda *_: None, mutates_args=("moments",))
_multiply = _register(plain.multiply, _fake_products)
_update_and_multiply_ = _register(
    plain.update_and_multiply_,
    lambda moments, features, target, weight, decay, precision: _fake_products(
        moments[2], weight, target, precision
    ),
    mutates_args=("moments",),
)
_weight_gradient = _register(
    plain.weight_gradient, lambda grad, weight, *_: grad.new_empty(weight.shape)
)
_quadratic_rows = _register(
    plain.quadratic_rows,
    lambda weight, target, partial, *_: partial.new_empty(target.shape[0], weight.shape[0]),
)


def _save_products(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    weight, target, _, *products = inputs
    ctx.save_for_backward(weight, target, *products)


_quadratic_rows.register_autograd(
    lambda ctx, grad: (_weight_gradient(grad, *ctx.saved_tensors), *(None,) * 6),
    setup_context=_save_products,
)


@custom_op("isda::cross_entropy", mutates_args=(), device_types="cuda")
def _fused_cross_entropy(
    logits: Tensor,
    quadratic: Tensor | None,
    target: Tensor,
    strength: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    reduce: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of logits + (λ/2) quadratic in float32, computed by Triton.

    Args:
        logits: output of the final linear layer.
        quadratic: variance of every logit margin, float32; None for ordinary cross entropy.
        target: class indices; the loss for an index out of range is NaN.
        strength: λ, float32.
        scale: factor of the sum of the losses, see :func:`scaled_isda_cross_entropy`; None for the
            mean.
        ignore_index: class index of samples to ignore.
        reduce: False to return the loss of each sample.

    Returns:
        the loss, and for the backward pass the log-sum-exp of every sample and the factor.
    """
    from isda.kernels import cuda  # imports Triton

    with torch.cuda.device_of(logits):  # Triton launches on the current device
        return cuda.cross_entropy(logits, quadratic, target, strength, scale, ignore_index, reduce)


@_fused_cross_entropy.register_fake
def _(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    total = logits.new_empty(logits.shape[0], dtype=torch.float32)
    loss = logits.new_empty((), dtype=torch.float32) if others[-1] else torch.empty_like(total)
    return loss, total, logits.new_empty((), dtype=torch.float64)


@custom_op("isda::cross_entropy_backward", mutates_args=(), device_types="cuda")
def _cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    quadratic: Tensor | None,
    target: Tensor,
    strength: Tensor | None,
    total: Tensor,
    factor: Tensor,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the logits and the quadratic term (empty if there is none)."""
    from isda.kernels import cuda  # imports Triton

    with torch.cuda.device_of(logits):
        return cuda.cross_entropy_backward(
            grad, logits, quadratic, target, strength, total, factor, ignore_index
        )


@_cross_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, quadratic: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    quadratic_grad = (
        logits.new_empty(0) if quadratic is None else quadratic.new_empty(quadratic.shape)
    )
    return logits.new_empty(logits.shape), quadratic_grad


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, quadratic, target, strength, _, ctx.ignore_index, _ = inputs
    ctx.save_for_backward(logits, quadratic, target, strength, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate_cross_entropy(
    ctx: Any, grad: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    saved = ctx.saved_tensors  # gradient checkpointing allows only one access
    logits_grad, quadratic_grad = _cross_entropy_backward(grad, *saved, ctx.ignore_index)
    return logits_grad, None if saved[1] is None else quadratic_grad, *(None,) * 5


_fused_cross_entropy.register_autograd(
    _differentiate_cross_entropy, setup_context=_save_cross_entropy
)
