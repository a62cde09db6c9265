"""Moves of features: draws from N(0, λΣ_y), eigenvectors of Σ_y, and random directions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import by_class
from isda.experiments.errors import InputError
from isda.experiments.generators.trained_classifier import TrainedClassifier

__all__ = [
    "as_long_as",
    "choose_samples",
    "draw_moves",
    "eigenvector_moves",
    "random_moves",
    "strength_of",
]


def strength_of(classifier: TrainedClassifier, strength: float | None) -> float:
    """The strength λ: ``strength``, or by default λ₀ of the recipe."""
    found = classifier.recipe.lambda_0 if strength is None else strength
    if not 0 <= found < float("inf"):
        raise InputError(f"strength must be >= 0, got {found}")
    return found


def choose_samples(classifier: TrainedClassifier, number: int, seed: int) -> Tensor:
    """Indices of random training images, taken from each class in turn."""
    target = classifier.data.train_target
    if not 1 <= number <= len(target):
        raise InputError(f"samples must be between 1 and {len(target)}, got {number}")
    order, place = by_class(target, counter_rng.key(seed, device=target.device))
    return order[place.argsort(stable=True)][:number]


def draw_moves(
    classifier: TrainedClassifier, classes: Sequence[int], draws: int, strength: float, key: Tensor
) -> Tensor:
    """Draws from N(0, λΣ_y) for samples of given classes (Eq. 1).

    Shape:
        output (len(classes), draws, A).
    """
    size = classifier.network.num_features
    noise = counter_rng.normal((len(classes), draws, size), key).double()
    for index in {*classes}:
        rows = [row for row, one in enumerate(classes) if one == index]
        values, vectors = torch.linalg.eigh(classifier.class_covariance(index))
        root = vectors * (strength * values).clamp(min=0).sqrt()  # Σ may be singular
        noise[rows] = noise[rows] @ root.T
    return noise.float()


def eigenvector_moves(
    classifier: TrainedClassifier, classes: Sequence[int], number: int, strength: float
) -> Tensor:
    """Moves along the leading eigenvectors of Σ_y, as long as a draw is on average.

    The length is √(λ tr Σ_y), the root mean square of the length of a draw from N(0, λΣ_y).

    Shape:
        output (len(classes), number, A).
    """
    if not 0 <= number <= classifier.network.num_features:
        raise InputError(
            f"eigenvectors must be between 0 and {classifier.network.num_features}, got {number}"
        )
    moves = {}
    for index in {*classes}:
        values, vectors = torch.linalg.eigh(classifier.class_covariance(index))
        length = (strength * values.clamp(min=0).sum()).sqrt()
        moves[index] = length * vectors.T.flip(0)[:number]  # the largest first
    return torch.stack([moves[one] for one in classes]).float()


def random_moves(moves: Tensor, key: Tensor) -> Tensor:
    """Moves in random directions, each as long as the corresponding one of ``moves``."""
    return as_long_as(counter_rng.normal(tuple(moves.shape), key), moves)


def as_long_as(moves: Tensor, others: Tensor) -> Tensor:
    """Moves in the directions of ``moves``, with the lengths of ``others``."""
    length = moves.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return moves / length * others.norm(dim=-1, keepdim=True)
