"""Validation of arguments and batches, without a synchronisation with the GPU.

Shapes, dtypes and devices are checked on the host before any state changes. Bad values (NaN
features, targets out of range) would corrupt the statistics permanently: ``ops.screen`` marks bad
samples with a negative class index, and ``ops.count_step`` skips the whole batch and sets a flag on
the device. ``ops.flag_overflow`` sets the flag if the loss is not finite.
On a CPU, the error is raised at the end of the same call. On a GPU, the host must not wait for the
flag, so the error is raised where the host synchronises anyway, such as in ``state_dict()``.
"""

import sys
import warnings
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "BAD_FEATURES",
    "BAD_TARGET",
    "FEATURE_LIMIT",
    "HAS_BAD_FEATURES",
    "HAS_BAD_TARGET",
    "MISMATCH",
    "OVERFLOW",
    "REJECTED",
    "SKIP",
    "argument_error",
    "known_on_host",
    "logits_differ",
    "overflow_message",
    "problem_message",
    "require_call",
    "require_class_weight",
    "require_label_smoothing",
    "require_lambda_0",
    "require_max_shift",
    "require_total_steps",
    "warn",
]

SKIP, BAD_FEATURES, BAD_TARGET = -1, -2, -3
"""Class indices that mark skipped samples, bad features, and bad targets."""

HAS_BAD_FEATURES, HAS_BAD_TARGET, REJECTED, OVERFLOW = 1, 2, 3, 4
"""Problem codes.

The first two are SKIP minus the class index that marks such a sample. REJECTED means that another
rank rejected its batch, OVERFLOW that a loss is not finite.
"""

FEATURE_LIMIT = 1e15
"""Features of this magnitude or more are rejected: their squares may sum to inf in float32."""

_REQUIRED = ("features", "target", "weight")
_TOLERANCE = 0.02  # relative error of logits: above the error of bfloat16, below a real mismatch

MISMATCH = (
    "logits must be the output of the attached layer in the last forward pass of the model, but "
    "they do not match it. If they come from an earlier pass, call the criterion after each pass. "
    "If they were modified after the layer (softmax, dropout, pooling, cropping, resizing other "
    "than with F.interpolate to a size), do so after computing the loss. If they come from "
    "another layer, pass it as head="
)


def require_lambda_0(lambda_0: float) -> None:
    if not isinstance(lambda_0, Real) or not 0 <= lambda_0 < float("inf"):
        raise ValueError(f"lambda_0 must be >= 0 and finite, got {lambda_0!r}")


def require_total_steps(total_steps: int | None) -> None:
    if total_steps is None:
        return
    if not isinstance(total_steps, Real) or not (total_steps >= 1 and total_steps % 1 == 0):
        raise ValueError(f"total_steps must be a whole number >= 1, got {total_steps!r}")


def require_max_shift(max_shift: float | None) -> None:
    if max_shift is not None and not (isinstance(max_shift, Real) and max_shift > 0):
        raise ValueError(f"max_shift must be > 0 or None, got {max_shift!r}")


def require_label_smoothing(label_smoothing: float) -> None:
    if not isinstance(label_smoothing, Real) or not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing!r}")


def require_class_weight(name: str, weight: Tensor | None, num_classes: int) -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor) or weight.shape != (num_classes,):
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"{name} must be a tensor of shape ({num_classes},), got {shape}")
    if not weight.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {weight.dtype}")


def require_call(
    num_features: int,
    num_classes: int,
    *,
    features: Tensor,
    target: Tensor,
    progress: float | Tensor | None = None,
    **others: Tensor | None,
) -> None:
    """Raise TypeError or ValueError for arguments of the wrong type, device, dtype or shape.

    Args:
        num_features: number of features A.
        num_classes: number of classes C.
        features: input of the final linear layer.
        target: class indices or class probabilities.
        progress: training progress t/T.
        others: "weight", "bias", "logits", "covariance_index", and "criterion": any of its buffers,
            which must be on the same device.
    """
    tensors = {"features": features, "target": target, **others}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in _REQUIRED):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    soft = target.is_floating_point()
    if features.dim() < 2 or features.shape[1] != num_features:
        raise ValueError(
            f"features must have shape (N, {num_features}), got {tuple(features.shape)}"
        )
    positions = (features.shape[0], *features.shape[2:])
    dense = (features.shape[0], num_classes, *features.shape[2:])
    kind = "probabilities" if soft else "indices"
    expected = {
        "weight": ("weight", (num_classes, num_features)),
        "bias": ("bias", (num_classes,)),
        "logits": (f"logits for features of shape {tuple(features.shape)}", dense),
        "target": (f"target of class {kind}", dense if soft else positions),
        "covariance_index": ("covariance_index", positions),
    }
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != features.device:
            raise ValueError(
                f"{name} must be on the device of the features, {features.device}, "
                f"got {tensor.device}"
            )
        if name in ("features", "weight", "bias", "logits") and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
        if name == "target" and not soft and tensor.dtype != torch.int64:
            raise ValueError(
                "target must be int64 class indices or floating-point class probabilities, "
                f"got {tensor.dtype}"
            )
        if name == "covariance_index" and tensor.dtype != torch.int64:
            raise ValueError(f"covariance_index must be int64 class indices, got {tensor.dtype}")
        label, shape = expected.get(name, (name, tensor.shape))
        if tensor.shape != shape:
            raise ValueError(f"{label} must have shape {shape}, got {tuple(tensor.shape)}")
    if progress is not None:
        _require_progress(progress, features.device)


def _require_progress(progress: float | Tensor, device: torch.device) -> None:
    if isinstance(progress, Tensor):
        if progress.numel() != 1:
            raise ValueError(f"progress must be a scalar, got shape {tuple(progress.shape)}")
        if progress.device.type != "cpu" and progress.device != device:
            raise ValueError(f"progress must be on the CPU or on {device}, got {progress.device}")
    elif not isinstance(progress, Real):
        raise ValueError(f"progress must be a number or a tensor, got {progress!r}")
    if (not isinstance(progress, Tensor) or known_on_host(progress)) and not 0 <= progress <= 1:
        raise ValueError(f"progress must be in [0, 1], got {progress}")


def known_on_host(tensor: Tensor) -> bool:
    """Whether reading the values of a tensor is free: on a CPU, and not while compiling."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


@torch.no_grad()
def logits_differ(
    features: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor, *, thorough: bool
) -> Tensor:
    """Whether the logits of any sample differ from the output of a linear layer.

    Args:
        features: input of the layer.
        weight: weight of the layer.
        bias: bias of the layer.
        logits: logits to compare with the output of the layer.
        thorough: True to compare up to 1024 samples, False for 64 classes of one sample. It is
            taken from the middle, because all resizing modes agree in the corners of a map.

    Shape:
        features (N, A), weight (C, A), bias (C,), logits (N, C); output (), bool.
    """
    number = len(features)
    first, classes = int(0.382 * number), None if thorough else 64
    samples = slice(None, None, number // 1024 + 1) if thorough else slice(first, first + 1)
    features, logits = features[samples].float(), logits[samples, :classes].float()
    weight = weight[:classes].float()
    with torch.autocast(features.device.type, enabled=False):
        expected = F.linear(features, weight, None if bias is None else bias[:classes].float())
    size = expected.norm(dim=1) + logits.norm(dim=1)
    # rounding errors do not cancel where the logits do
    size = size + features.norm(dim=1) * weight.norm() / weight.shape[1] ** 0.5
    wrong = (expected - logits).norm(dim=1) > _TOLERANCE * size + 1e-6  # false for NaN
    return wrong.any()


def overflow_message(strength: float, quadratic: float) -> str:
    """Error message for a loss that is not finite, with λ and the largest quadratic term."""
    if quadratic < 1e30:
        return (
            f"the loss is not finite at λ = {strength:.3g}, but the quadratic term is at most "
            f"{quadratic:.3g}: look for infinite logits"
        )
    return (
        f"the loss is no longer finite at λ = {strength:.3g}, with a quadratic term of "
        f"{quadratic:.3g}: the weights of the final layer diverge. Reduce lambda_0 or the learning "
        "rate, or use weight decay or max_shift"
    )


def problem_message(problem: int, num_classes: int, ignore_index: int) -> str:
    """Error message for a problem code."""
    if problem == OVERFLOW:
        return "the loss on another rank is no longer finite; see its error"
    if problem == REJECTED:
        return "another rank rejected its batch; see its error. No state was changed on any rank"
    if problem == HAS_BAD_FEATURES:
        return (
            f"features must be finite: found NaN or magnitudes of {FEATURE_LIMIT:g} or more; the "
            "batch was left out of the statistics"
        )
    return (
        f"target must be in [0, {num_classes}) or equal ignore_index={ignore_index}: found a class "
        "out of range (in target or covariance_index), or probabilities that are not finite or sum "
        "to 0; the batch was left out of the statistics"
    )


def argument_error(logits: Any, target: Any, covariance_index: Any) -> Exception:
    """Error for arguments of an attached criterion that are not tensors or are swapped."""
    if not isinstance(logits, Tensor):
        return TypeError(
            f"logits must be a tensor, got {type(logits).__name__}: pass only the logits, such as "
            'output.logits of a Hugging Face model, output["out"] of a torchvision segmentation '
            "model, or one of several outputs"
        )
    if not isinstance(target, Tensor):
        return TypeError(f"target must be a tensor, got {type(target).__name__}")
    if not logits.is_floating_point():
        return ValueError(
            f"logits must be floating point, got {logits.dtype}; the order of the arguments is "
            "criterion(logits, target)"
        )
    return TypeError(f"covariance_index must be a tensor, got {type(covariance_index).__name__}")


def warn(message: str) -> None:
    """Warn at the first caller outside isda and torch: the line in the user's code."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "isda",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
