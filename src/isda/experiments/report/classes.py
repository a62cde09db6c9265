"""What changed between baseline and method: by class, by pair of classes, and by image."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isda.experiments.errors import InputError
from isda.experiments.predictions import Predictions, load_predictions
from isda.experiments.report.comparison import Comparison
from isda.experiments.report.intervals import difference, estimate, signed
from isda.experiments.report.text import printable

__all__ = [
    "Changed",
    "ComparedPredictions",
    "changed_images",
    "class_rows",
    "compared_predictions",
    "confused_rows",
    "reliability",
]

_BINS = 15  # as in the calibration error


@dataclass(frozen=True)
class ComparedPredictions:
    """Predictions of both sides of a comparison."""

    sides: tuple[dict[int, Predictions], dict[int, Predictions]]
    """Predictions of baseline and method, by seed."""

    labels: tuple[str, str]
    """Display names of baseline and method."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, the same in all runs."""
        names = next(iter(self.sides[0].values())).class_names
        return tuple(map(printable, names))

    @property
    def number(self) -> int:
        """Number of images of a run."""
        return len(next(iter(self.sides[0].values())).target)

    @property
    def same_images(self) -> bool:
        """Whether all runs were tested on the same images."""
        targets = [one.target for side in self.sides for one in side.values()]
        return all(np.array_equal(targets[0], other) for other in targets[1:])


def compared_predictions(result: Comparison) -> ComparedPredictions:
    """Predictions of the runs of a comparison.

    Raises:
        InputError: some runs have none, or they are damaged or do not fit together.
    """
    sides: tuple[dict[int, Predictions], dict[int, Predictions]] = ({}, {})
    for side, own in zip(result.sides, sides, strict=True):
        for seed, run in side.runs.items():
            predictions = load_predictions(run)
            if predictions is None:
                raise InputError(f"{run.name}/{seed} has no predictions")
            own[seed] = predictions
    if len({one.class_names for side in sides for one in side.values()}) > 1:
        raise InputError("the classes of the runs have different names")
    return ComparedPredictions(sides, (result.baseline.label, result.method.label))


def class_rows(given: ComparedPredictions) -> list[list[str]]:
    """Error of every class in percent, the largest decrease first: a header, then rows."""
    number = len(given.class_names)
    images = [
        {seed: np.bincount(one.target, minlength=number) for seed, one in side.items()}
        for side in given.sides
    ]
    wrong = [
        {seed: np.bincount(one.target[one.wrong], minlength=number) for seed, one in side.items()}
        for side in given.sides
    ]
    rows = []
    for c, name in enumerate(given.class_names):
        errors = [
            {seed: float(100 * bad[seed][c] / all_of[seed][c]) for seed in bad if all_of[seed][c]}
            for bad, all_of in zip(wrong, images, strict=True)
        ]
        if not all(errors):
            continue  # no test images of this class
        change = difference(*errors)
        mean = round(np.mean([count[c] for count in images[0].values()]))
        means = [f"{estimate(list(values.values())).mean:.1f}" for values in errors]
        rows.append((change.mean, [name, str(mean), *means, signed(change, 1)]))
    header = ["class", "images", *given.labels, "difference (95 % interval)"]
    return [header, *(row for _, row in sorted(rows, key=lambda pair: pair[0]))]


def confused_rows(given: ComparedPredictions) -> list[list[str]]:
    """The ten pairs of classes whose confusions changed most: a header, then rows.

    Counts are means over seeds, of both directions; the largest changes come first.
    """
    means: list[Counter[tuple[int, int]]] = []
    for side in given.sides:
        total: Counter[tuple[int, int]] = Counter()
        for one in side.values():
            pairs = np.sort(np.stack([one.target, one.prediction], 1)[one.wrong], 1)
            total.update((a, b) for a, b in pairs.tolist())
        means.append(Counter({pair: count / len(side) for pair, count in total.items()}))
    changes = {pair: means[1][pair] - means[0][pair] for pair in means[0] | means[1]}
    largest = sorted(changes, key=lambda pair: (-abs(changes[pair]), pair))[:10]
    names = given.class_names
    rows = [
        [f"{names[a]} ↔ {names[b]}", *(f"{mean[a, b]:.1f}" for mean in means),
         signed(float(changes[a, b]), 1)]
        for a, b in largest if changes[a, b]
    ]  # fmt: skip
    return [["classes", *given.labels, "difference"], *rows]


def reliability(predictions: dict[int, Predictions]) -> list[tuple[float, float, float]]:
    """Mean confidence, accuracy and share of the images of every bin, over all seeds.

    The bins are the 15 of the calibration error, (b/15, (b+1)/15]; empty ones are left out.
    """
    confidence = np.concatenate([one.confidence for one in predictions.values()])
    right = ~np.concatenate([one.wrong for one in predictions.values()])
    index = np.clip(np.ceil(confidence * _BINS) - 1, 0, _BINS - 1)
    members = [index == number for number in range(_BINS)]
    return [
        (float(confidence[own].mean()), float(right[own].mean()), float(own.mean()))
        for own in members
        if own.any()
    ]


@dataclass(frozen=True)
class Changed:
    """A test image whose prediction changed."""

    seed: int
    """Seed of the run whose images and predictions these are."""

    index: int
    """Index of the image."""

    target: str
    """Its class."""

    before: str
    """Prediction of the baseline."""

    after: str
    """Prediction of the method."""

    gained: int
    """Seeds in which only the method is right, minus those in which only the baseline is."""


def changed_images(
    given: ComparedPredictions, limit: int = 7
) -> tuple[list[Changed], list[Changed]]:
    """Images that only the method, and images that only the baseline predicts correctly.

    Images on which most seeds agree come first. If every seed has its own test images, those of the
    first seed are shown.
    """
    shared = [seed for seed in given.sides[0] if seed in given.sides[1]]
    if not shared:
        return [], []
    seeds = shared if given.same_images else shared[:1]
    pairs = {seed: (given.sides[0][seed], given.sides[1][seed]) for seed in seeds}
    if any(len(one.target) != len(other.target) for one, other in pairs.values()):
        return [], []
    gained: NDArray[np.int64] = np.sum(
        [one.wrong.astype(int) - other.wrong.astype(int) for one, other in pairs.values()], axis=0
    )
    names = given.class_names
    lists = []
    for sign in (1, -1):
        order = np.argsort(-sign * gained, kind="stable")[:limit]
        chosen = []
        for index in order[sign * gained[order] > 0].tolist():
            seed, (one, other) = next(
                (seed, pair) for seed, pair in pairs.items()
                if int(pair[0].wrong[index]) - int(pair[1].wrong[index]) == sign
            )  # fmt: skip
            before, after = names[one.prediction[index]], names[other.prediction[index]]
            target = names[one.target[index]]
            chosen.append(Changed(seed, index, target, before, after, int(gained[index])))
        lists.append(chosen)
    return lists[0], lists[1]
