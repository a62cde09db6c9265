"""Online estimates of the feature covariance (Appendix A), in the structures of Table 5.

An estimator has two methods: ``update(features, target)`` merges a batch into its buffers, and
``quadratic(weight, target)`` gives the variance of every logit margin. Anything that has both can
be handed to :class:`isda.ISDALoss`.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from isda import functional, kernels, per_class
from isda.functional import Moments, Precision
from isda.per_class import update_full_op

__all__ = [
    "COVARIANCES",
    "Covariance",
    "DiagonalCovariance",
    "FullCovariance",
    "IdentityCovariance",
    "SharedCovariance",
]


class Covariance(nn.Module):
    """Base of the estimators: buffers that stay float32, refused when they come in another shape.

    Args:
        num_features: number A of features.
        num_classes: number C of classes.
        decay: below 1, a batch with m samples of a class weighs at least ``1 - decay**m`` in that
            class, so that old samples fade; 1 weighs all samples alike, as the paper does.
    """

    def __init__(self, num_features: int, num_classes: int, *, decay: float = 1.0) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features must be >= 1, got {num_features}")
        if num_classes < 2:
            raise ValueError(f"num_classes must be >= 2, got {num_classes}")
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        self.num_features = num_features
        self.num_classes = num_classes
        self.decay = decay

    def update(self, features: Tensor, target: Tensor) -> None:
        """Merge a batch into the statistics; samples with a negative target are left out.

        Shape:
            features (N, A), target (N,).
        """
        raise TypeError(f"{type(self).__name__} must define update(features, target)")

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """Variance of every logit margin (the exponent of Eq. 4).

        Shape:
            weight (C, A), target (N,); output (N, C).
        """
        raise TypeError(f"{type(self).__name__} must define quadratic(weight, target)")

    def update_and_quadratic(
        self, features: Tensor, index: Tensor, weight: Tensor, target: Tensor
    ) -> Tensor:
        """Merge a batch, then the variance of every logit margin.

        Args:
            features: of the batch.
            index: class indices of the batch; negative ones are left out.
            weight: rows of the final linear layer.
            target: class indices of the samples to give the variances for: ``index``, or, where
                ranks have gathered their batches, some of them.

        Shape:
            features (N, A), index (N,), weight (C, A), target (N',); output (N', C), in which the
            rows of negative targets mean nothing.
        """
        self.update(features, index)
        return self.quadratic(weight, target.clamp(min=0))

    def extra_repr(self) -> str:
        return f"{self.num_features}, {self.num_classes}, decay={self.decay}"

    def check_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Raise ValueError if a checkpoint is of another estimator or has another shape."""
        expected = self.state_dict()
        found = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        if found != expected.keys():
            raise ValueError(
                f"checkpoint must hold {list(expected)} for {type(self).__name__}, "
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

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            self.check_state(state_dict, prefix)
        dtypes = {name: buffer.dtype for name, buffer in self.named_buffers(recurse=False)}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, dtype in dtypes.items():  # with assign=True they are those of the checkpoint
            setattr(self, name, getattr(self, name).to(dtype))

    def _require_features(self, features: Tensor) -> None:
        if features.dim() != 2 or features.shape[1] != self.num_features:
            raise ValueError(
                f"features must have shape (N, {self.num_features}), got {tuple(features.shape)}"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Covariance":
        def keep_dtype(tensor: Tensor) -> Tensor:  # .half() and .double() move nothing but devices
            device = fn(tensor.new_empty(0)).device
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

        return super()._apply(keep_dtype, recurse)


class FullCovariance(Covariance):
    """One covariance matrix for every class: the paper's method on CIFAR.

    Args:
        num_features: number A of features.
        num_classes: number C of classes.
        decay: see :class:`Covariance`.
        precision: of the products (W − w_c) Σ_c on CUDA, in the words of torch's
            ``set_float32_matmul_precision``: "high" takes each number for the sum of two bfloat16
            (error 2⁻¹⁶), "medium" for one (error 2⁻⁸), which is faster with many classes. Sums and
            statistics are float32 either way; on a CPU so are the products.
    """

    count: Tensor
    mean: Tensor
    covariance: Tensor

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
        self.precision: Precision = precision
        self.register_buffer("count", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(num_classes, num_features, dtype=torch.float32))
        covariance = torch.zeros(num_classes, num_features, num_features, dtype=torch.float32)
        self.register_buffer("covariance", _align(covariance))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullCovariance":
        super()._apply(fn, recurse)
        self.covariance = _align(self.covariance)
        return self

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """See :func:`isda.functional.update_moments`, here in place."""
        self._require_features(features)
        update_full_op(self.count, self.mean, self.covariance, features, target, self.decay, 0)

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """See :func:`isda.functional.full_quadratic`."""
        return functional.full_quadratic(
            weight.float(), target, self.covariance, precision=self.precision
        )

    def update_and_quadratic(
        self, features: Tensor, index: Tensor, weight: Tensor, target: Tensor
    ) -> Tensor:
        """One pass over the covariances on CUDA; see :meth:`Covariance.update_and_quadratic`."""
        return per_class.update_and_quadratic(
            self.count,
            self.mean,
            self.covariance,
            features,
            index,
            weight.float(),
            target,
            decay=self.decay,
            precision=self.precision,
            first_class=0,
        )


class DiagonalCovariance(Covariance):
    """The variances of every class alone: the paper's method on ImageNet."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, num_features: int, num_classes: int, *, decay: float = 1.0) -> None:
        super().__init__(num_features, num_classes, decay=decay)
        self.register_buffer("count", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(num_classes, num_features, dtype=torch.float32))
        self.register_buffer(
            "variance", torch.zeros(num_classes, num_features, dtype=torch.float32)
        )

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """See :func:`isda.functional.update_moments`."""
        self._require_features(features)
        if kernels.usable(self.variance):
            per_class.update_variances_op(
                self.count, self.mean, self.variance, features, target, self.decay
            )
            return
        state = Moments(self.count, self.mean, self.variance)
        _copy(state, functional.update_moments(state, features.float(), target, decay=self.decay))

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """See :func:`isda.functional.diagonal_quadratic`."""
        with torch.autocast(weight.device.type, enabled=False):
            return functional.diagonal_quadratic(weight.float(), target, self.variance)


class SharedCovariance(Covariance):
    """One covariance matrix over the features of all classes (Table 5, "single")."""

    count: Tensor
    mean: Tensor
    covariance: Tensor

    def __init__(self, num_features: int, num_classes: int, *, decay: float = 1.0) -> None:
        super().__init__(num_features, num_classes, decay=decay)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(num_features, dtype=torch.float32))
        self.register_buffer(
            "covariance", torch.zeros(num_features, num_features, dtype=torch.float32)
        )

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """Merge a batch as if it were of one class."""
        self._require_features(features)
        counted = (target >= 0)[:, None]  # (N, 1)
        features = torch.where(counted, features.float(), 0.0)
        count = counted.sum()
        number = count.clamp(min=1)
        mean = features.sum(0) / number
        centred = torch.where(counted, features - mean, 0.0)
        with torch.autocast(features.device.type, enabled=False):
            covariance = centred.T @ centred / number
        batch = Moments(count[None], mean[None], covariance[None])
        state = Moments(self.count[None], self.mean[None], self.covariance[None])
        _copy(state, functional.merge_moments(state, batch, decay=self.decay))

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """See :func:`isda.functional.shared_quadratic`."""
        with torch.autocast(weight.device.type, enabled=False):
            # a copy: autograd keeps it, and the next batch is merged into the buffer
            return functional.shared_quadratic(weight.float(), target, self.covariance.clone())


class IdentityCovariance(Covariance):
    """The identity matrix for every class (Table 5): nothing is estimated."""

    def update(self, features: Tensor, target: Tensor) -> None:
        """Do nothing: there are no statistics."""

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """See :func:`isda.functional.identity_quadratic`."""
        with torch.autocast(weight.device.type, enabled=False):
            return functional.identity_quadratic(weight.float(), target)


COVARIANCES: dict[str, type[Covariance]] = {
    "full": FullCovariance,
    "diagonal": DiagonalCovariance,
    "shared": SharedCovariance,
    "identity": IdentityCovariance,
}


def _align(covariance: Tensor) -> Tensor:
    """On CUDA, begin every row at a multiple of 64 bytes: one reads them whole, not one by one."""
    number, width, _ = covariance.shape
    if not (covariance.is_cuda and width % 16 and covariance.stride(1) == width):
        return covariance
    room = covariance.new_zeros(number, width, width + -width % 16)
    room[..., :width] = covariance
    return room[..., :width]


def _copy(buffers: Moments, moments: Moments) -> None:
    for buffer, tensor in zip(buffers, moments, strict=True):
        buffer.copy_(tensor)
