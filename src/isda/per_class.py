"""The two heavy operations of full covariances, done for the classes of the batch and no others.

Both are torch operators, so that ``torch.compile(fullgraph=True)`` and CUDA graphs see one node
with static shapes, while the code inside may look at the classes present. On a CPU that is a loop
over those classes, in place; on CUDA see ``kernels.py``. The plain forms they equal stand in
``functional.py``: ``update_moments`` and ``full_quadratic``.
"""

import math

import torch
from torch import Tensor

from isda import kernels

__all__ = ["full_quadratic_op", "present_classes", "sample_share", "update_full_op"]


def sample_share(count: Tensor, batch_count: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Weight of the batch in the merged moments: m / (n + m), and at least 1 − decayᵐ."""
    number = batch_count.to(dtype)
    share = number / (count + batch_count).clamp(min=1)
    if decay == 1.0:
        return share
    return torch.maximum(share, -torch.expm1(number * math.log(decay)))


def present_classes(target: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Classes in P = min(N, C) slots, present ones first, and the slot of every sample.

    Shape:
        target (N,); classes (P,), of which the ones behind the last present class are absent; slot
        (N,).
    """
    slots = min(target.numel(), num_classes)
    if slots == num_classes:
        return torch.arange(num_classes, device=target.device), target
    counted = torch.zeros(num_classes, dtype=torch.int64, device=target.device)
    counted.scatter_(0, target, 1)
    order = counted.argsort(descending=True, stable=True)
    return order[:slots], order.argsort()[target]


@torch.library.custom_op("isda::update_full_", mutates_args=("count", "mean", "covariance"))
def update_full_op(
    count: Tensor, mean: Tensor, covariance: Tensor, features: Tensor, target: Tensor, decay: float
) -> None:
    """Merge a batch into per-class moments in place; a negative target is left out.

    Shape:
        count (C,), mean (C, A), covariance (C, A, A), features (N, A), target (N,).
    """
    _update_class_by_class(count, mean, covariance, features, target, decay)


def _update_class_by_class(
    count: Tensor, mean: Tensor, covariance: Tensor, features: Tensor, target: Tensor, decay: float
) -> None:
    order = target.argsort(stable=True)
    order = order[int((target < 0).sum()) :]  # (N',)
    batch_count = torch.bincount(target[order], minlength=len(count))
    present = batch_count.nonzero().flatten()  # (P,)
    number = batch_count[present]
    slots = torch.arange(len(present), device=target.device)
    slot = slots.repeat_interleave(number)  # (N',)
    share = sample_share(count[present], number, decay, mean.dtype)
    batch = features[order].to(mean.dtype)
    total = batch.new_zeros(len(present), batch.shape[1]).index_add_(0, slot, batch)
    batch_mean = total / number[:, None]
    shift = batch_mean - mean[present]  # (P, A)
    # of every class its centred samples, then its shift: one product gives both terms of Eq. 10
    rows = batch.new_empty(len(order) + len(present), batch.shape[1])
    scale = (share / number).sqrt()[slot]
    rows[torch.arange(len(order), device=target.device) + slot] = (
        batch - batch_mean[slot]
    ) * scale[:, None]
    rows[number.cumsum(0) + slots] = shift * (share * (1 - share)).sqrt()[:, None]
    parts = rows.split((number + 1).tolist())
    for index, part, weight in zip(present.tolist(), parts, share.tolist(), strict=True):
        covariance[index].addmm_(part.T, part, beta=1 - weight)  # Eq. 10
    mean[present] += share[:, None] * shift  # Eq. 9
    count += batch_count  # Eq. 11


@update_full_op.register_fake
def _(
    count: Tensor, mean: Tensor, covariance: Tensor, features: Tensor, target: Tensor, decay: float
) -> None:
    pass


@update_full_op.register_kernel("cuda")
def _(
    count: Tensor, mean: Tensor, covariance: Tensor, features: Tensor, target: Tensor, decay: float
) -> None:
    if not kernels.usable(covariance):
        _update_class_by_class(count, mean, covariance, features, target, decay)
        return
    sums = count.new_zeros(len(count) + 1)
    sums.scatter_add_(0, torch.where(target < 0, len(count), target), torch.ones_like(target))
    batch_count = sums[:-1]
    kernels.update_full(
        mean,
        covariance,
        features,
        target,
        batch_count,
        sample_share(count, batch_count, decay, mean.dtype),
    )
    count += batch_count


@torch.library.custom_op("isda::full_quadratic", mutates_args=())
def full_quadratic_op(
    weight: Tensor, target: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quadratic term of Eq. 4, and what its backward pass needs.

    Shape:
        weight (C, A), target (N,), covariance (C, A, A), with P = min(N, C); outputs: quadratic (N,
        C), product (P, C, A) = (W − w_c) Σ_c, classes (P,) with −1 in unused slots, slot (N,).
    """
    slots = min(target.numel(), len(weight))
    present, slot = target.unique(return_inverse=True)
    product = weight.new_empty(slots, *weight.shape)  # pages of unused slots are never touched
    table = weight.new_empty(len(present), len(weight))
    for position, index in enumerate(present.tolist()):
        margin = weight - weight[index]  # (C, A)
        torch.mm(margin, covariance[index], out=product[position])
        torch.linalg.vecdot(product[position], margin, out=table[position])
    classes = torch.nn.functional.pad(present, (0, slots - len(present)), value=-1)
    return table[slot], product, classes, slot


@full_quadratic_op.register_fake
def _(weight: Tensor, target: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = min(target.numel(), weight.shape[0])
    quadratic = weight.new_empty(target.shape[0], weight.shape[0])
    product = weight.new_empty(slots, *weight.shape)
    return quadratic, product, target.new_empty(slots), torch.empty_like(target)


@full_quadratic_op.register_kernel("cuda")
def _(weight: Tensor, target: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    classes, slot = present_classes(target, len(weight))
    weight = weight - weight.mean(0)  # margins do not change; avoids cancellation
    own = weight[classes]  # (P, A)
    selected = covariance if len(classes) == len(covariance) else covariance[classes]
    product = weight @ selected  # (P, C, A)
    product -= own[:, None] @ selected
    table = torch.einsum("pja,ja->pj", product, weight) - torch.einsum("pja,pa->pj", product, own)
    table = table.scatter(1, classes[:, None], 0.0)  # exactly 0 at the target
    classes = classes.clone() if len(classes) == len(covariance) else classes
    return table[slot], product, classes, slot.clone()


@torch.library.custom_op("isda::full_quadratic_backward", mutates_args=())
def _full_quadratic_backward_op(
    grad: Tensor, product: Tensor, classes: Tensor, slot: Tensor
) -> Tensor:
    """Gradient of the weight; with G_cj the gradient of the classes' rows, the sum over c of

    2 G_cj T_cj into row j, and −2 Σ_j G_cj T_cj into row c (the quadratic part of Eq. 13, whose row
    j = y_i the paper prints wrongly for C > 2: its rows must sum to zero).
    """
    rows = grad.new_zeros(len(classes), grad.shape[1]).index_add_(0, slot, grad)  # (P, C)
    weight_grad = grad.new_zeros(product.shape[1:])
    for position, index in enumerate(classes.tolist()):
        if index < 0:
            break
        weight_grad.addcmul_(product[position], rows[position][:, None], value=2)
        weight_grad[index].addmv_(product[position].T, rows[position], alpha=-2)
    return weight_grad


@_full_quadratic_backward_op.register_fake
def _(grad: Tensor, product: Tensor, classes: Tensor, slot: Tensor) -> Tensor:
    return grad.new_empty(product.shape[1:])


@_full_quadratic_backward_op.register_kernel("cuda")
def _(grad: Tensor, product: Tensor, classes: Tensor, slot: Tensor) -> Tensor:
    rows = 2 * grad.new_zeros(len(classes), grad.shape[1]).index_add_(0, slot, grad)  # (P, C)
    weight_grad = torch.einsum("pj,pja->ja", rows, product)
    return weight_grad.index_add_(0, classes, -torch.einsum("pj,pja->pa", rows, product))


def _save_product(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros (P, C, A) for the product


def _weight_gradient(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor | None, *_unused: Tensor | None
) -> tuple[Tensor | None, None, None]:
    if grad is None:  # the quadratic term was not used
        return None, None, None
    product, classes, slot = ctx.saved_tensors  # type: ignore[attr-defined]
    return _full_quadratic_backward_op(grad, product, classes, slot), None, None


full_quadratic_op.register_autograd(_weight_gradient, setup_context=_save_product)
