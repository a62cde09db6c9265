r"""Explicit augmentation of the features (Eq. 1 and 2), which Eq. 4 replaces."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["monte_carlo_loss", "sample"]


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
        covariance: feature covariance or feature variances of each class; for one matrix shared by
            all classes, pass ``covariance.expand(C, A, A)``.
        strength: λ.
        num_samples: number of draws M for every sample.
        generator: pseudorandom number generator for the draws.

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
        if (
            covariance.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and (covariance < 0).any()
        ):
            raise ValueError("covariance must contain non-negative variances, got negative values")
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
        covariance: feature covariance or feature variances of each class.
        strength: λ.
        num_samples: number of draws M for every sample.
        bias: bias of the final linear layer.
        generator: pseudorandom number generator for the draws.

    Shape:
        features (N, A), weight (C, A), target (N,), covariance (C, A, A) or (C, A); output ().
    """
    if len(covariance) != len(weight):
        raise ValueError(
            f"covariance must have {len(weight)} classes, like weight, got {len(covariance)}"
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
