"""Online estimates of the feature covariance (Appendix A), in the structures of Table 5.

:class:`Estimator` is the interface that :class:`isda.ISDALoss` requires.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from isda import checks, functional, ops
from isda.checks import SKIP
from isda.functional import Moments

__all__ = [
    "COVARIANCES",
    "Covariance",
    "DiagonalCovariance",
    "Estimator",
    "FullCovariance",
    "IdentityCovariance",
    "SharedCovariance",
    "align_rows",
    "require_covariance_index",
]

Precision = Literal["high", "medium"]


@runtime_checkable
class Estimator(Protocol):
    """Any object with these two methods can be passed as ``covariance=``.

    If ``quadratic`` returns a tensor that depends on learned parameters, they receive a gradient.
    It must accept ``covariance_index`` to support that argument of :class:`isda.ISDALoss`.
    """

    def update(self, features: Tensor, target: Tensor) -> None:
        """Merge a batch into the statistics; skip samples with a negative target.

        The criterion sets the features of skipped samples to 0.

        Shape:
            features (N, A), target (N,).
        """

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """Variance of every logit margin (the exponent of Eq. 4).

        Shape:
            weight (C, A), target (N,); output (N, C).
        """


def require_covariance_index(estimator: Estimator) -> None:
    """Raise ValueError if an estimator cannot use the covariance of another class."""
    parameters = inspect.signature(estimator.quadratic).parameters
    if "covariance_index" not in parameters or getattr(estimator, "world_size", 1) > 1:
        raise ValueError(
            "covariance_index and multi-label targets require an estimator that is not sharded "
            f"across ranks and whose quadratic() accepts covariance_index, got {estimator!r}"
        )


class Covariance(nn.Module):
    """Base class of the estimators.

    Covariances are float32 regardless of the model's precision. Means are float64, because each new
    sample changes them less than the one before.

    Args:
        num_features: number of features A.
        num_classes: number of classes C.
        decay: if below 1, a batch with m samples of a class has a weight of at least
            ``1 - decay**m`` in the statistics of that class, so that old samples fade out. 1
            weights all samples equally, as in the paper.
    """

    def __init__(self, num_features: int, num_classes: int, *, decay: float = 1.0) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features must be >= 1, got {num_features}")
        if num_classes < 1:
            raise ValueError(f"num_classes must be >= 1, got {num_classes}")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        self.num_features = num_features
        self.num_classes = num_classes
        self.decay = decay

    def update(self, features: Tensor, target: Tensor) -> None:
        """See :meth:`Estimator.update`."""
        raise TypeError(f"{type(self).__name__} must define update(features, target)")

    def quadratic(
        self, weight: Tensor, target: Tensor, covariance_index: Tensor | None = None
    ) -> Tensor:
        """Variance of every logit margin (the exponent of Eq. 4).

        ``covariance_index`` is the class whose covariance each sample uses, by default its target.

        Shape:
            weight (C, A), target (N,), covariance_index (N,); output (N, C).
        """
        raise TypeError(f"{type(self).__name__} must define quadratic(weight, target)")

    def class_covariance(self, index: int) -> Tensor:
        """Covariance matrix (A, A) used for a class, whatever the structure."""
        raise TypeError(f"{type(self).__name__} must define class_covariance(index)")

    def class_mean(self, index: int) -> Tensor:
        """Mean (A,) of the features of a class, for structures that track it (full, diagonal)."""
        raise TypeError(f"{type(self).__name__} does not track per-class means")

    def grow(self, num_classes: int) -> None:
        """Increase the number of classes. The new ones are appended and start empty."""
        if not isinstance(num_classes, int) or num_classes < self.num_classes:
            raise ValueError(
                f"num_classes must be >= {self.num_classes}, the current number, got {num_classes}"
            )
        self.num_classes = num_classes

    def extra_repr(self) -> str:
        return f"{self.num_features}, {self.num_classes}, decay={self.decay}"

    def check_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Raise ValueError if a checkpoint is damaged, or if its estimator or shapes differ."""
        expected = self.state_dict()
        found = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        if found != expected.keys():
            raise ValueError(
                f"checkpoint must contain {list(expected)} for {type(self).__name__}, "
                f"got {sorted(found)}"
            )
        for name, buffer in expected.items():
            shape = tuple(state[prefix + name].shape)
            if shape != buffer.shape:
                raise ValueError(
                    f"{prefix + name} must have shape {tuple(buffer.shape)} "
                    f"for num_features={self.num_features} and num_classes={self.num_classes}, "
                    f"got {shape}"
                )
            low, high = state[prefix + name].aminmax() if buffer.numel() else (0, 0)
            least = 0 if name == "count" else -torch.finfo(torch.float32).max
            if not (least <= low and high < math.inf):  # false for NaN
                what = ">= 0" if name == "count" else "finite"
                raise ValueError(f"{prefix + name} must be {what}, got a damaged checkpoint")

    def _register_moments(self, *shape: int, covariance: str, square: bool) -> None:
        """Register the buffers of :class:`isda.functional.Moments`.

        Args:
            shape: shape of ``count``: (C,), or () for all classes combined.
            covariance: name of the third buffer.
            square: True for covariances (A, A), False for variances (A,).
        """
        width = self.num_features
        self.register_buffer("count", torch.zeros(shape, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(*shape, width, dtype=torch.float64))
        spread = (width, width) if square else (width,)
        self.register_buffer(covariance, torch.zeros(*shape, *spread, dtype=torch.float32))

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            self.check_state(state_dict, prefix)
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, dtype in dtypes.items():  # assign=True adopts the checkpoint's dtype
            setattr(self, name, getattr(self, name).to(dtype))

    def _require_batch(self, features: Tensor, target: Tensor) -> None:
        """Raise for wrong shapes and, if the values can be read for free, for bad values."""
        checks.require_call(self.num_features, self.num_classes, features=features, target=target)
        if target.dim() != 1:
            raise ValueError(f"target must be class indices (N,), got {tuple(target.shape)}")
        if checks.known_on_host(features):
            index = ops.screen(features, target.clamp(min=SKIP), self.num_classes, SKIP)
            if (index < SKIP).any():
                problem = SKIP - int(index.min())
                raise ValueError(checks.problem_message(problem, self.num_classes, SKIP))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Covariance":
        def keep_dtype(tensor: Tensor) -> Tensor:  # .half() and .double() keep the dtype
            device = fn(tensor.new_empty(0)).device
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

        return super()._apply(keep_dtype, recurse)


class _ClassCovariance(Covariance):
    """Count, mean and covariance of each class."""

    count: Tensor
    mean: Tensor
    _spread: str  # name of the third buffer

    @property
    def moments(self) -> Moments:
        """Count, mean and covariance (or variances) of each class: the buffers themselves."""
        return Moments(self.count, self.mean, getattr(self, self._spread))

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """In-place version of :func:`isda.functional.update_moments`."""
        self._require_batch(features, target)
        ops.update_(list(self.moments), features, target, self.decay)

    def class_mean(self, index: int) -> Tensor:
        return self.mean[index].float()

    def grow(self, num_classes: int) -> None:
        old = self.num_classes
        super().grow(num_classes)
        for name, buffer in self.named_buffers(recurse=False):
            grown = buffer.new_zeros(num_classes, *buffer.shape[1:])
            grown[:old] = buffer
            setattr(self, name, grown)


class FullCovariance(_ClassCovariance):
    """One covariance matrix for each class: the paper's method on CIFAR.

    Args:
        num_features: number of features A.
        num_classes: number of classes C.
        decay: see :class:`Covariance`.
        precision: precision of the products (W − w_c) Σ_c on CUDA, as in
            ``torch.set_float32_matmul_precision``: "high" splits every float32 into two bfloat16
            values (relative error 2⁻¹⁶), "medium" rounds it to one (2⁻⁸), which is faster with many
            classes. Sums, covariances and products on a CPU are always float32.
    """

    covariance: Tensor
    _spread = "covariance"

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        decay: float = 1.0,
        precision: Precision = "high",
    ) -> None:
        super().__init__(num_features, num_classes, decay=decay)
        if precision not in get_args(Precision):
            raise ValueError(f"precision must be 'high' or 'medium', got {precision!r}")
        self.precision = precision
        self._register_moments(num_classes, covariance="covariance", square=True)
        self.covariance = align_rows(self.covariance)

    def quadratic(
        self, weight: Tensor, target: Tensor, covariance_index: Tensor | None = None
    ) -> Tensor:
        """See :func:`isda.functional.full_quadratic`."""
        if covariance_index is None:
            return ops.full_quadratic(weight.float(), target, self.covariance, self.precision)
        with torch.autocast(weight.device.type, enabled=False):
            # a copy, because autograd saves it and the next update changes the buffer in place
            return functional.full_quadratic(
                weight.float(), target, self.covariance.clone(), covariance_index=covariance_index
            )

    def class_covariance(self, index: int) -> Tensor:
        return self.covariance[index].clone()

    def grow(self, num_classes: int) -> None:
        super().grow(num_classes)
        self.covariance = align_rows(self.covariance)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision!r}"

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.covariance = align_rows(self.covariance)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullCovariance":
        super()._apply(fn, recurse)
        self.covariance = align_rows(self.covariance)
        return self


class DiagonalCovariance(_ClassCovariance):
    """Only the variances of each class: the paper's method on ImageNet."""

    variance: Tensor
    _spread = "variance"

    def __init__(self, num_features: int, num_classes: int, *, decay: float = 1.0) -> None:
        super().__init__(num_features, num_classes, decay=decay)
        self._register_moments(num_classes, covariance="variance", square=False)

    def quadratic(
        self, weight: Tensor, target: Tensor, covariance_index: Tensor | None = None
    ) -> Tensor:
        """See :func:`isda.functional.diagonal_quadratic`."""
        with torch.autocast(weight.device.type, enabled=False):
            return functional.diagonal_quadratic(
                weight.float(), target, self.variance, covariance_index=covariance_index
            )

    def class_covariance(self, index: int) -> Tensor:
        return self.variance[index].diag()


class SharedCovariance(Covariance):
    """One covariance matrix over the features of all classes (Table 5, "single")."""

    count: Tensor
    mean: Tensor
    covariance: Tensor

    def __init__(self, num_features: int, num_classes: int, *, decay: float = 1.0) -> None:
        super().__init__(num_features, num_classes, decay=decay)
        self._register_moments(covariance="covariance", square=True)

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """Merge a batch as if all samples belonged to one class."""
        self._require_batch(features, target)
        state = Moments(*(buffer[None] for buffer in self.buffers(recurse=False)))
        with torch.autocast(features.device.type, enabled=False):
            merged = functional.update_moments(
                state, features.float(), torch.where(target < 0, -1, 0), decay=self.decay
            )
        for buffer, value in zip(state, merged, strict=True):
            buffer.copy_(value)

    def quadratic(
        self, weight: Tensor, target: Tensor, covariance_index: Tensor | None = None
    ) -> Tensor:
        """See :func:`isda.functional.shared_quadratic`; the index has no effect."""
        with torch.autocast(weight.device.type, enabled=False):  # a copy: see FullCovariance
            return functional.shared_quadratic(weight.float(), target, self.covariance.clone())

    def class_covariance(self, index: int) -> Tensor:
        return self.covariance.clone()


class IdentityCovariance(Covariance):
    """The identity matrix for each class (Table 5): nothing is estimated."""

    def update(self, features: Tensor, target: Tensor) -> None:
        """Do nothing."""

    def quadratic(
        self, weight: Tensor, target: Tensor, covariance_index: Tensor | None = None
    ) -> Tensor:
        """See :func:`isda.functional.identity_quadratic`; the index has no effect."""
        with torch.autocast(weight.device.type, enabled=False):
            return functional.identity_quadratic(weight.float(), target)

    def class_covariance(self, index: int) -> Tensor:
        return torch.eye(self.num_features)


COVARIANCES: dict[str, type[Covariance]] = {
    "full": FullCovariance,
    "diagonal": DiagonalCovariance,
    "shared": SharedCovariance,
    "identity": IdentityCovariance,
}


def align_rows(covariance: Tensor) -> Tensor:
    """On CUDA, pad rows to a multiple of 64 bytes, so that the kernels use vector loads."""
    number, width, _ = covariance.shape
    if not (covariance.is_cuda and width % 16 and covariance.stride(1) == width):
        return covariance
    room = covariance.new_zeros(number, width, width + -width % 16)
    room[..., :width] = covariance
    return room[..., :width]
