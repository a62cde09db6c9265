"""The heavy operations of covariances, done for the classes of the batch and no others.

They are torch operators, so that ``torch.compile(fullgraph=True)`` and CUDA graphs see one node
with static shapes, while the code inside may look at the classes present. On a CPU that is a loop
over those classes, in place; on CUDA see ``kernels/full.py``. The plain forms they equal stand in
``functional.py``: ``update_moments`` and ``full_quadratic``.

Statistics may be those of some classes alone, from ``first_class`` on; samples of other classes are
left out of the update, and their quadratic term is 0.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from isda import kernels

__all__ = [
    "full_quadratic_op",
    "sample_share",
    "update_and_quadratic",
    "update_full_op",
    "update_variances_op",
]


def sample_share(count: Tensor, batch_count: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Weight of the batch in the merged moments: m / (n + m), and at least 1 − decayᵐ."""
    number = batch_count.to(dtype)
    share = number / (count + batch_count).clamp(min=1)
    if decay == 1.0:
        return share
    return torch.maximum(share, -torch.expm1(number * math.log(decay)))


def update_and_quadratic(
    count: Tensor,
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    index: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    decay: float,
    precision: str,
    first_class: int,
) -> Tensor:
    """Merge a batch into per-class moments in place, then the quadratic term of Eq. 4.

    Args:
        count: of each class here.
        mean: of each class here.
        covariance: of each class here.
        features: of the batch.
        index: class indices of the batch; a negative one is left out.
        weight: rows of the final linear layer, of all classes.
        target: class indices to give the quadratic term for: ``index``, or some of them.
        decay: see ``isda.functional.merge_moments``.
        precision: of the products on CUDA, "high" or "medium".
        first_class: the first class here.

    Shape:
        count (C',), mean (C', A), covariance (C', A, A), features (N, A), index (N,), weight (C,
        A), target (N',); output (N', C).
    """
    if not kernels.usable(covariance):
        update_full_op(count, mean, covariance, features, index, decay, first_class)
        return full_quadratic_op(weight, target, covariance, precision, first_class)[0]
    products = _update_and_multiply_op(
        count,
        mean,
        covariance,
        features,
        index,
        weight.detach(),
        target,
        decay,
        precision,
        first_class,
    )
    return _gather_op(weight, target, *products, first_class)


@torch.library.custom_op("isda::update_full_", mutates_args=("count", "mean", "covariance"))
def update_full_op(
    count: Tensor,
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    target: Tensor,
    decay: float,
    first_class: int,
) -> None:
    """Merge a batch into per-class moments in place; a negative target is left out.

    Shape:
        count (C,), mean (C, A), covariance (C, A, A), features (N, A), target (N,).
    """
    if kernels.usable(covariance):
        kernels.update(count, mean, covariance, features, target, decay, first_class)
        return
    target = _local(target, len(count), first_class)
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
    count: Tensor,
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    target: Tensor,
    decay: float,
    first_class: int,
) -> None:
    pass


@torch.library.custom_op(
    "isda::update_variances_", mutates_args=("count", "mean", "variance"), device_types="cuda"
)
def update_variances_op(
    count: Tensor, mean: Tensor, variance: Tensor, features: Tensor, target: Tensor, decay: float
) -> None:
    """Merge a batch into per-class moments with variances in place.

    Shape:
        count (C,), mean (C, A), variance (C, A), features (N, A), target (N,).
    """
    kernels.update_variances(count, mean, variance, features, target, decay)


@update_variances_op.register_fake
def _(
    count: Tensor, mean: Tensor, variance: Tensor, features: Tensor, target: Tensor, decay: float
) -> None:
    pass


@torch.library.custom_op("isda::full_quadratic", mutates_args=())
def full_quadratic_op(
    weight: Tensor, target: Tensor, covariance: Tensor, precision: str, first_class: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quadratic term of Eq. 4, and what its backward pass needs.

    Shape:
        weight (C, A), target (N,), covariance (C', A, A), with P = min(N, C'); outputs: quadratic
        (N, C), product (P, C, A) = (W − w_c) Σ_c, own (0, A), slot (C',) of each class, −1 for
        absent ones, and classes (P,) with −1 in unused slots; on CUDA see ``kernels.Products``.
    """
    slots = min(target.numel(), len(covariance))
    if kernels.usable(covariance):
        products = kernels.multiply(weight, target, covariance, precision, first_class)
        rows = kernels.gather_rows(products.partial, products.slot, target, first_class)
        return rows, *products[1:]
    target = _local(target, len(covariance), first_class)
    present = target[target >= 0].unique()
    slot = torch.full((len(covariance),), -1, device=target.device)
    slot[present] = torch.arange(len(present), device=target.device)
    product = weight.new_empty(slots, *weight.shape)  # pages of unused slots are never touched
    table = weight.new_zeros(len(present) + 1, len(weight))  # the last for samples of no class here
    for position, index in enumerate(present.tolist()):
        margin = weight - weight[index + first_class]  # (C, A)
        torch.mm(margin, covariance[index], out=product[position])
        torch.linalg.vecdot(product[position], margin, out=table[position])
    classes = F.pad(present, (0, slots - len(present)), value=-1)
    return (
        table[_slots_of(target, slot, len(present))],
        product,
        weight.new_empty(0, weight.shape[1]),
        slot.to(torch.int32),
        classes.to(torch.int32),
    )


@full_quadratic_op.register_fake
def _(
    weight: Tensor, target: Tensor, covariance: Tensor, precision: str, first_class: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = min(target.shape[0], covariance.shape[0])
    if kernels.usable(covariance):
        _, product, own = kernels.empty_products(weight, slots, precision)
    else:
        product = weight.new_empty(slots, *weight.shape)
        own = weight.new_empty(0, weight.shape[1])
    quadratic = weight.new_empty(target.shape[0], weight.shape[0])
    return quadratic, product, own, *_empty_slots(target, slots, covariance.shape[0])


@torch.library.custom_op(
    "isda::update_and_multiply_",
    mutates_args=("count", "mean", "covariance"),
    device_types="cuda",
)
def _update_and_multiply_op(
    count: Tensor,
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    index: Tensor,
    weight: Tensor,
    target: Tensor,
    decay: float,
    precision: str,
    first_class: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return kernels.update_and_multiply(
        count,
        mean,
        covariance,
        features,
        index,
        weight,
        target,
        decay,
        precision,
        first_class,
    )


@_update_and_multiply_op.register_fake
def _(
    count: Tensor,
    mean: Tensor,
    covariance: Tensor,
    features: Tensor,
    index: Tensor,
    weight: Tensor,
    target: Tensor,
    decay: float,
    precision: str,
    first_class: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = min(target.shape[0], covariance.shape[0])
    products = kernels.empty_products(weight, slots, precision)
    return *products, *_empty_slots(target, slots, covariance.shape[0])


@torch.library.custom_op("isda::gather", mutates_args=(), device_types="cuda")
def _gather_op(
    weight: Tensor,
    target: Tensor,
    partial: Tensor,
    product: Tensor,
    own: Tensor,
    slot: Tensor,
    classes: Tensor,
    first_class: int,
) -> Tensor:
    """Quadratic term of the samples; where its gradient flows back to the weight."""
    return kernels.gather_rows(partial, slot, target, first_class)


@_gather_op.register_fake
def _(
    weight: Tensor,
    target: Tensor,
    partial: Tensor,
    product: Tensor,
    own: Tensor,
    slot: Tensor,
    classes: Tensor,
    first_class: int,
) -> Tensor:
    return weight.new_empty(target.shape[0], weight.shape[0])


@torch.library.custom_op("isda::full_quadratic_backward", mutates_args=())
def _full_quadratic_backward_op(
    grad: Tensor,
    target: Tensor,
    product: Tensor,
    own: Tensor,
    slot: Tensor,
    classes: Tensor,
    first_class: int,
) -> Tensor:
    """Gradient of the weight; with G_cj the gradient of the classes' rows, the sum over c of

    2 G_cj T_cj into row j, and −2 Σ_j G_cj T_cj into row c (the quadratic part of Eq. 13, whose row
    j = y_i the paper prints wrongly for C > 2: its rows must sum to zero).
    """
    if kernels.usable(grad):
        return kernels.weight_gradient(grad, target, product, own, slot, classes, first_class)
    target = _local(target, len(slot), first_class)
    rows = grad.new_zeros(len(classes) + 1, grad.shape[1])  # (P + 1, C)
    rows.index_add_(0, _slots_of(target, slot, len(classes)), grad)
    weight_grad = grad.new_zeros(product.shape[1:])
    for position, index in enumerate(classes.tolist()):
        if index < 0:
            break
        weight_grad.addcmul_(product[position], rows[position][:, None], value=2)
        own_row = weight_grad[index + first_class]
        own_row.addmv_(product[position].T, rows[position], alpha=-2)
    return weight_grad


@_full_quadratic_backward_op.register_fake
def _(
    grad: Tensor,
    target: Tensor,
    product: Tensor,
    own: Tensor,
    slot: Tensor,
    classes: Tensor,
    first_class: int,
) -> Tensor:
    return grad.new_empty(product.shape[1:])


def _local(target: Tensor, number: int, first_class: int) -> Tensor:
    """Classes counted from the first one here, −1 for those not here."""
    local = target - first_class
    return torch.where((local >= 0) & (local < number), local, -1)


def _slots_of(target: Tensor, slot: Tensor, absent: int) -> Tensor:
    """Slot of every sample, ``absent`` for samples of no class here."""
    return torch.where(target >= 0, slot[target], absent)


def _empty_slots(target: Tensor, slots: int, num_classes: int) -> tuple[Tensor, Tensor]:
    slot = target.new_empty(num_classes, dtype=torch.int32)
    return slot, target.new_empty(slots, dtype=torch.int32)


def _save_product(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    _, target, _, _, first_class = inputs
    ctx.first_class = first_class  # type: ignore[attr-defined]
    ctx.save_for_backward(target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros (P, C, A) for the product


def _weight_gradient(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor | None, *_unused: Tensor | None
) -> tuple[Tensor | None, None, None, None, None]:
    if grad is None:  # the quadratic term was not used
        return None, None, None, None, None
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    gradient = _full_quadratic_backward_op(grad, *saved, ctx.first_class)  # type: ignore[attr-defined]
    return gradient, None, None, None, None


def _save_gathered(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, target, _, *products, first_class = inputs
    ctx.first_class = first_class  # type: ignore[attr-defined]
    ctx.save_for_backward(target, *products)


def _gathered_gradient(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    gradient = _full_quadratic_backward_op(grad, *saved, ctx.first_class)  # type: ignore[attr-defined]
    return gradient, *(None,) * 7


full_quadratic_op.register_autograd(_weight_gradient, setup_context=_save_product)
_gather_op.register_autograd(_gathered_gradient, setup_context=_save_gathered)
