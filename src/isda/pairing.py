"""Pairs rows of features with the logits that a linear layer computed from them.

After the final layer, a model may transpose or flatten the logits of its tokens, select one
position of a sequence, or resize a map. The functions here apply the same operation to the
features, so that the loss receives N rows of features, logits and target.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isda import checks
from isda.functional.losses import flatten

__all__ = ["Resizing", "Rows", "classes_second", "pair_rows"]


class Resizing(NamedTuple):
    """How a model resizes its logits: arguments of ``F.interpolate``."""

    mode: str
    align_corners: bool | None

    def resize(self, tensor: Tensor, size: torch.Size) -> Tensor:
        return F.interpolate(tensor, tuple(size), mode=self.mode, align_corners=self.align_corners)


class Rows(NamedTuple):
    """A batch with one row for each sample, token or pixel."""

    features: Tensor  # (M, A)
    logits: Tensor  # (M, C)
    target: Tensor  # (M,) or (M, C)
    positions: torch.Size  # original shape of the logits, without the class dimension
    resizing: Resizing | None  # None if there is none or it is ambiguous
    classes_last: bool | None  # None if unknown


def pair_rows(
    features: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    channels_last: bool,
    resizing: Resizing | None,
    classes_last: bool | None,
) -> Rows:
    """Reshape the features like the logits, and flatten both and the target into rows.

    Args:
        features: input of the final layer.
        logits: output of the model.
        target: class indices or class probabilities.
        weight: weight of the final layer.
        bias: bias of the final layer.
        channels_last: whether the features are in the last dimension, as for ``nn.Linear``.
        resizing: resizing found in earlier batches of the same sizes; None if unknown.
        classes_last: whether earlier batches had their classes in the last dimension; None if
            unknown.

    Shape:
        features (N, A), (N, ..., A) with channels_last, otherwise (N, A, ...); weight (C, A), bias
        (C,); logits (N, C), (N, C, ...), (N, ..., C) with channels_last, or rows (M, C); target
        like the logits, or without the class dimension.
    """
    if features.dim() < 2:
        raise ValueError(
            "the input of the attached layer must have a batch dimension, got shape "
            f"{tuple(features.shape)}"
        )
    inner = features.shape[1:-1] if channels_last else features.shape[2:]  # positions of a sample
    maps = features.movedim(-1, 1) if channels_last else features  # (N, A, ...)
    batch, num_classes = len(features), len(weight)
    second, last = (batch, num_classes, *inner), (batch, *inner, num_classes)
    positions = torch.Size((batch, *inner))
    if inner and channels_last and logits.shape == last:
        features = flatten(maps)
        if second == last:
            logits, target, classes_last = _token_rows(
                features, logits, target, weight, bias, classes_last
            )
        else:
            if target.shape == logits.shape:  # probabilities
                target = target.flatten(0, -2)
            logits, classes_last = logits.flatten(0, -2), True
    elif logits.shape == second:
        features, logits, classes_last = flatten(maps), flatten(logits), False
    elif logits.shape == (positions.numel(), num_classes):  # already rows
        features, positions = flatten(maps), torch.Size((len(logits),))
    elif logits.shape == (batch, num_classes):
        features = _pick(maps.flatten(2).mT, logits, weight, bias)
        positions = torch.Size((batch,))
    elif logits.dim() == maps.dim() and logits.shape[:2] == second[:2]:
        found = resizing
        if found is None:
            found, resizing = _find_resizing(maps, logits, weight, bias)
        positions = torch.Size((batch, *logits.shape[2:]))
        features = flatten(found.resize(maps, logits.shape[2:]))
        logits, classes_last = flatten(logits), False
    else:
        raise ValueError(_shape_message(features, logits, num_classes, channels_last=channels_last))
    if target.is_floating_point():
        target = flatten(target) if target.dim() > 2 else target
    elif target.dim() == 1 and len(positions) == 1:
        pass  # the criterion checks it
    elif target.shape == positions:
        target = target.flatten()
    else:
        raise ValueError(
            f"target of class indices must have shape {tuple(positions)}, like the logits, got "
            f"{tuple(target.shape)}"
        )
    return Rows(features, logits, target, positions, resizing, classes_last)


def classes_second(
    logits: Tensor, target: Tensor, num_classes: int, *, classes_last: bool
) -> tuple[Tensor, Tensor]:
    """Logits (N, ..., C) and their class probabilities in torch's order (N, C, ...).

    Args:
        logits: logits in either order.
        target: class indices, or class probabilities in the order of the logits.
        num_classes: number of classes C.
        classes_last: the order to assume if the shapes allow both.
    """
    if logits.dim() < 3 or logits.shape[-1] != num_classes:
        return logits, target
    if logits.shape[1] == num_classes:
        last, second = logits.shape[:-1], logits.shape[:1] + logits.shape[2:]  # of class indices
        if last != second and target.shape in (last, second):
            classes_last = target.shape == last
        if not classes_last:
            return logits, target
    soft = target.is_floating_point() and target.shape == logits.shape
    return logits.movedim(-1, 1), target.movedim(-1, 1) if soft else target


def _token_rows(
    features: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes_last: bool | None,
) -> tuple[Tensor, Tensor, bool | None]:
    """Rows of logits and target if C equals the number of tokens, and whether classes are last.

    The order, (N, ..., C) or torch's (N, C, ...), is inferred from the values. If the weight is 0,
    it is the order of earlier batches, or else of the layer. Until the order is known, every call
    synchronises with the GPU, except under torch.compile and during CUDA graph capture.
    """
    last, second = logits.flatten(0, -2), flatten(logits)
    on_host = checks.known_on_host(features)
    not_last, not_second = (
        checks.logits_differ(features, weight, bias, rows, thorough=on_host)
        for rows in (last, second)
    )
    usual = True if classes_last is None else classes_last
    use_last = torch.where(not_second == not_last, usual, not_second)
    fixed = torch.compiler.is_compiling() or (
        features.is_cuda and torch.cuda.is_current_stream_capturing()
    )
    if (on_host or (classes_last is None and not fixed)) and bool(not_second != not_last):
        classes_last = bool(not_second)
    if target.shape == logits.shape:  # probabilities
        target = torch.where(use_last, target.flatten(0, -2), flatten(target))
    return torch.where(use_last, last, second), target, classes_last


@torch.no_grad()
def _linear(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(features.device.type, enabled=False):
        return F.linear(features.float(), weight.float(), None if bias is None else bias.float())


def _pick(sequence: Tensor, logits: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Features of the position whose logits the model selected, (N, L, A) to (N, A).

    For example, GPT-2 for sequence classification returns the logits of the last token that is not
    padding. The logits of all positions are recomputed and compared.
    """
    outputs = _linear(sequence, weight, bias)  # (N, L, C)
    distance = (outputs - logits.detach().float()[:, None]).square().sum(-1)  # (N, L)
    index = distance.argmin(1)[:, None, None].expand(-1, 1, sequence.shape[-1])
    return sequence.gather(1, index)[:, 0]


@torch.no_grad()
def _find_resizing(
    maps: Tensor, logits: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Resizing, Resizing | None]:
    """The resizing that turns the layer's output into the logits; synchronises with the GPU.

    The layer is linear, so resized features give resized logits. The second result is None if
    another resizing fits as well but gives different features, as with a weight of zeros.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "the criterion must see a batch of resized logits before it is compiled: call it once "
            "without torch.compile"
        )
    smooth = {3: ["linear"], 4: ["bilinear", "bicubic"], 5: ["trilinear"]}.get(maps.dim())
    if smooth is None:
        raise ValueError(
            f"maps with {maps.dim() - 2} spatial dimensions cannot be resized: pass logits of the "
            f"size of the attached layer's input, {tuple(maps.shape[2:])}, got "
            f"{tuple(logits.shape[2:])}"
        )
    candidates = [Resizing(mode, corners) for mode in smooth for corners in (False, True)]
    candidates += [Resizing(mode, None) for mode in ("nearest", "nearest-exact")]
    size = logits.shape[2:]
    outputs = _linear(maps.movedim(1, -1), weight, bias).movedim(-1, 1)
    errors = torch.stack(
        [(each.resize(outputs, size) - logits).square().mean() for each in candidates]
    )
    found = candidates[int(errors.argmin())]
    resized = found.resize(maps, size)
    limit = 4 * errors.min() + 1e-8 * logits.square().mean()
    unique = all(
        torch.allclose(each.resize(maps, size), resized, atol=1e-5)
        for each, fits in zip(candidates, (errors <= limit).tolist(), strict=True)
        if fits
    )
    return found, found if unique else None


def _shape_message(
    features: Tensor, logits: Tensor, num_classes: int, *, channels_last: bool
) -> str:
    width = features.shape[-1 if channels_last else 1]
    inner = features.shape[1:-1] if channels_last else features.shape[2:]
    of_sample = (*inner, num_classes) if channels_last else (num_classes, *inner)
    found = f"got shape {tuple(logits.shape)}"
    if logits.dim() > 1 and num_classes not in logits.shape[1:]:
        return (
            f"logits must have {num_classes} classes, like the attached layer of {width} features, "
            f"{found}; pass head= if the model ends in another layer"
        )
    if logits.shape[1:] == of_sample:
        return (
            f"logits must come from the last batch of the model, {len(features)} samples, {found}; "
            "if the model runs several forward passes for one loss, combine them into one"
        )
    shapes = f"shape {(len(features), *of_sample)} for features of shape {tuple(features.shape)}"
    if not inner:
        return f"logits must have {shapes}, {found}"
    return (
        f"logits must include all positions, {shapes}, {found}; to merge dimensions, pass rows "
        f"(M, {num_classes}); to exclude positions, label them with ignore_index instead of "
        "selecting the others"
    )
