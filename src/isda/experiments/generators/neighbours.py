"""Real images for augmented features: the training images nearest to them; no generator needed."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError
from isda.experiments.files import create_folder, write_json
from isda.experiments.generators.feature_moves import (
    as_long_as,
    choose_samples,
    draw_moves,
    eigenvector_moves,
    random_moves,
    strength_of,
)
from isda.experiments.generators.pictures import write_grid
from isda.experiments.generators.trained_classifier import TrainedClassifier

__all__ = ["nearest", "show_neighbours"]

_DRAWS, _RANDOM, _RANDOM_LEADING, _OTHER_CLASS = range(1, 5)  # key parts
_QUERIES = 500  # at a time


def show_neighbours(
    classifier: TrainedClassifier,
    out: Path,
    *,
    samples: int = 10,
    measured: int = 1000,
    draws: int = 5,
    eigenvectors: int = 5,
    strength: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Write ``neighbours.png`` and ``neighbours.json`` to a folder; return the JSON contents.

    A row of the grid shows a training image with features a, then the training images nearest to a,
    and to a + δ for these moves δ: draws from N(0, λΣ_y); draws with the covariance of the next
    class and random directions, both as long as the first draws; the leading eigenvectors of Σ_y;
    and random directions as long as those. The image itself never counts as a neighbour.

    Args:
        classifier: trained classifier with ISDA statistics.
        out: folder to write to.
        samples: rows of the grid.
        measured: number of images on which the shares are measured.
        draws: draws per image.
        eigenvectors: leading eigenvectors per image.
        strength: λ; by default λ₀ of the recipe.
        seed: seed of the choice of images and of the draws.
    """
    for name, value in (("samples", samples), ("measured", measured), ("draws", draws)):
        if value < 1:
            raise InputError(f"{name} must be >= 1, got {value}")
    strength = strength_of(classifier, strength)
    data = classifier.data
    number = min(len(data.train_target), max(samples, measured))
    chosen = choose_samples(classifier, number, seed)
    features = classifier.all_features(data.train_images)
    classes = data.train_target[chosen].tolist()
    key = counter_rng.key(seed, device=features.device)
    drawn = draw_moves(classifier, classes, draws, strength, counter_rng.fold(key, _DRAWS))
    others = [(one + 1) % data.num_classes for one in classes]
    foreign = draw_moves(classifier, others, draws, strength, counter_rng.fold(key, _OTHER_CLASS))
    leading = eigenvector_moves(classifier, classes, eigenvectors, strength)
    moves = {
        "none": torch.zeros_like(drawn[:, :1]),
        "draws of N(0, λΣ)": drawn,
        "draws with Σ of another class, as long as the draws": as_long_as(foreign, drawn),
        "random directions, as long as the draws": random_moves(
            drawn, counter_rng.fold(key, _RANDOM)
        ),
        "leading eigenvectors of Σ": leading,
        "random directions, as long as the eigenvectors": random_moves(
            leading, counter_rng.fold(key, _RANDOM_LEADING)
        ),
    }
    found = {
        name: nearest(features[chosen, None] + move, features, chosen)
        for name, move in moves.items()
        if move.shape[1]
    }
    columns = [chosen[:, None], *found.values()]
    create_folder(out)
    rules = tuple(accumulate(column.shape[1] for column in columns[:-1]))
    picture = classifier.training_images(torch.cat(columns, 1)[:samples])
    write_grid(out / "neighbours.png", picture, rules=rules)

    own = data.train_target[chosen][:, None]
    spread = (features[chosen, None] - features[found["none"]]).norm(dim=-1)
    spread = spread.clamp(min=1e-12)
    result = {
        "classifier": str(classifier.folder),
        "data": data.name,
        "images": number,
        "strength": strength,
        "seed": seed,
        "columns": {name: index.shape[1] for name, index in found.items()},
        "moves": {
            name: {
                "same_class": _share(data.train_target[index] == own),
                "changed": _share(index != found["none"]),
                "relative_length": _median(moves[name].norm(dim=-1) / spread),
                "relative_distance": _median(
                    (features[chosen, None] + moves[name] - features[index]).norm(dim=-1) / spread
                ),
            }
            for name, index in found.items()
        },
    }
    write_json(out / "neighbours.json", result)
    return result


def nearest(queries: Tensor, features: Tensor, own: Tensor) -> Tensor:
    """Index of the row of ``features`` that is nearest to each query, except its own row.

    Shape:
        queries (S, M, A), features (N, A), own (S,) indices to leave out; output (S, M).
    """
    flat, left_out = queries.flatten(0, 1), own.repeat_interleave(queries.shape[1])
    result = []
    for part, mine in zip(flat.split(_QUERIES), left_out.split(_QUERIES), strict=True):
        distance = torch.cdist(part, features, compute_mode="donot_use_mm_for_euclid_dist")
        result.append(distance.scatter_(1, mine[:, None], torch.inf).argmin(1))
    return torch.cat(result).view(queries.shape[:2])


def _share(holds: Tensor) -> float:
    return float(holds.double().mean())


def _median(values: Tensor) -> float:
    return float(values.median())
