"""The heavy operations of covariances, done for the classes of the batch and no others.

They are operators (see ``operators.py``), so that ``torch.compile(fullgraph=True)`` sees one node
with static shapes, while the code inside may look at the classes present. On a CPU that is a loop
over those classes, in place; on CUDA see ``kernels/products.py``. The plain forms they equal stand
in ``functional.py``: ``update_moments`` and ``full_quadratic``.

Statistics may be those of some classes alone, from ``first_class`` on; samples of other classes are
left out of the update, and their quadratic term is 0.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isda import kernels
from isda.operators import operator

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
    quadratic: Tensor
    if not kernels.usable(covariance):
        update_full_op(count, mean, covariance, features, index, decay, first_class)
        quadratic, *_ = full_quadratic_op(weight, target, covariance, precision, first_class)
        return quadratic
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
    quadratic = _gather_op(weight, target, *products, first_class)
    return quadratic


def _update_full(
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
    # one by one: of millions of samples float32 would lose the last ones
    total = batch.new_zeros(len(present), batch.shape[1], dtype=torch.float64)
    batch_mean = (total.index_add_(0, slot, batch.double()) / number[:, None]).to(mean.dtype)
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


def _update_variances(
    count: Tensor, mean: Tensor, variance: Tensor, features: Tensor, target: Tensor, decay: float
) -> None:
    """Merge a batch into per-class moments with variances in place.

    Shape:
        count (C,), mean (C, A), variance (C, A), features (N, A), target (N,).
    """
    kernels.update_variances(count, mean, variance, features, target, decay)


def _full_quadratic(
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


def _fake_full_quadratic(
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


def _update_and_multiply(
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


def _fake_update_and_multiply(
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


def _gather(
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


def _full_quadratic_backward(
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


def _save_products(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, target, _, _, ctx.first_class = inputs
    ctx.save_for_backward(target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros (P, C, A) for the product


def _save_gathered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, target, _, *products, ctx.first_class = inputs
    ctx.save_for_backward(target, *products)


def _weight_gradient(
    ctx: Any, backward: Callable[..., Any], grad: Tensor | None, *_unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (len(ctx.needs_input_grad) - 1)
    if grad is None:  # the quadratic term was not used
        return None, *nothing
    return backward(grad, *ctx.saved_tensors, ctx.first_class), *nothing


update_full_op = operator(
    "isda::update_full_",
    _update_full,
    lambda *_inputs: None,
    mutates_args=("count", "mean", "covariance"),
)
update_variances_op = operator(
    "isda::update_variances_",
    _update_variances,
    lambda *_inputs: None,
    mutates_args=("count", "mean", "variance"),
)
_update_and_multiply_op = operator(
    "isda::update_and_multiply_",
    _update_and_multiply,
    _fake_update_and_multiply,
    mutates_args=("count", "mean", "covariance"),
)
_backward_op = operator(
    "isda::full_quadratic_backward",
    _full_quadratic_backward,
    lambda grad, target, product, *_slots: grad.new_empty(product.shape[1:]),
)
full_quadratic_op = operator(
    "isda::full_quadratic",
    _full_quadratic,
    _fake_full_quadratic,
    save=_save_products,
    backward=_backward_op,
    gradient=_weight_gradient,
)
_gather_op = operator(
    "isda::gather",
    _gather,
    lambda weight, target, *_products: weight.new_empty(target.shape[0], weight.shape[0]),
    save=_save_gathered,
    backward=_backward_op,
    gradient=_weight_gradient,
)
