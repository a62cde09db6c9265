"""The finished runs of a recipe over seeds: one side of a comparison.

The result of a run is its mean over its last epochs, see :func:`isda.experiments.records.summary`.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from isda.experiments.errors import InputError
from isda.experiments.published import NAMES
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.recipes import COMPANIONS, RECIPES
from isda.experiments.records import Run, Summary, summary
from isda.experiments.report.intervals import Estimate, estimate
from isda.experiments.settings import GanName, Recipe

__all__ = [
    "ERROR",
    "QUANTITIES",
    "SPEED",
    "Quantity",
    "Side",
    "create_side",
    "create_sides",
    "distinct",
    "left_out_line",
    "recipe_order",
    "same_training",
]


@dataclass(frozen=True)
class Quantity:
    """A result of a run, as shown in tables and figures."""

    title: str
    digits: int
    value: Callable[[Summary], float | None]


ERROR = Quantity("error, %", 2, lambda result: result.error)
QUANTITIES = (
    ERROR,
    Quantity("NLL", 3, lambda result: result.loss),
    Quantity("ECE, %", 2, lambda result: None if result.ece is None else 100 * result.ece),
)
"""Test error, negative log-likelihood and expected calibration error."""

SPEED: dict[str, Any] = {"channels_last": False, "compile": False}
"""Fields of a recipe that change only the speed, with their defaults."""


@dataclass(frozen=True)
class Side:
    """The finished runs of a recipe."""

    name: str
    """Name of the recipe."""

    recipe: Recipe
    """The recipe of all these runs."""

    runs: dict[int, Run]
    """Runs by seed."""

    unfinished: int
    """Number of runs that were left out because they are not finished."""

    @cached_property
    def summaries(self) -> dict[int, Summary]:
        """Results by seed."""
        return {seed: summary(run) for seed, run in self.runs.items()}

    @property
    def label(self) -> str:
        """Display name of the method, such as ``Cutout + ISDA``."""
        method = self.name.partition("+")[0].rpartition("-")[2]
        added = {*COMPANIONS, *get_args(GanName)}.issuperset(method.split("_"))
        named = "isda" if method.endswith("isda") else "ce" if added else method
        if named != self.recipe.method:  # changed by a flag
            method = self.recipe.method
        if method in _LABELS:
            return _LABELS[method]
        return " + ".join(_LABELS.get(part, part.capitalize()) for part in method.split("_"))

    @property
    def subject(self) -> str:
        """Data set and network, such as ``CIFAR-100, ResNet-32``."""
        parts = self.name.partition("+")[0].rsplit("-", 2)
        if len(parts) < 3:  # a name that no recipe gives
            return self.name
        data, network, _ = parts
        if self.recipe.pretrained:
            network = f"{self.recipe.network}, {'frozen' if self.recipe.freeze else 'fine-tuned'}"
        else:
            network = NAMES.get(network, network.replace("resnet", "ResNet-"))
        return f"{NAMES.get(data, data)}, {network}"

    def settings(self, *, without: Collection[str] = ()) -> list[str]:
        """Companions such as dropout, and settings that differ from the recipe's, except λ₀.

        Args:
            without: settings to leave out.
        """
        if self.subject == self.name:
            return []
        words, label = [], self.label
        if self.recipe.method in ("isda", "ce") and label not in (_LABELS["isda"], _LABELS["ce"]):
            words.append(label.removesuffix(" + ISDA"))
        for change in self.name.split("+")[1:]:
            field, _, value = change.partition("=")
            if field not in ("lambda_0", "method", *without):
                words.append(_SETTINGS.get(field, field.replace("_", " ") + " {}").format(value))
        return words

    def training(self, *, without: Collection[str] = ()) -> str:
        """Subject and settings, such as ``CIFAR-100, ResNet-32, 100 images per class``."""
        return ", ".join([self.subject, *self.settings(without=without)])

    def only(self, seeds: Collection[int]) -> "Side":
        """A copy with the runs of the given seeds."""
        return replace(self, runs={seed: run for seed, run in self.runs.items() if seed in seeds})

    @property
    def verified(self) -> bool:
        """Whether the records of all runs have checksums."""
        return all(run.verified for run in self.runs.values())

    @property
    def errors(self) -> dict[int, float]:
        """Errors by seed, in percent."""
        return self.values(ERROR.value)

    @property
    def error(self) -> Estimate:
        """Mean and standard deviation of the error over seeds, in percent."""
        return self.estimate(ERROR)

    def estimate(self, quantity: Quantity) -> Estimate:
        """Mean and standard deviation of a quantity over seeds."""
        return estimate(list(self.values(quantity.value).values()))

    def values(self, quantity: Callable[[Summary], float | None]) -> dict[int, float]:
        """A quantity of the results by seed, without seeds that did not record it."""
        values = {seed: quantity(result) for seed, result in self.summaries.items()}
        return {seed: value for seed, value in values.items() if value is not None}


def create_side(runs: Iterable[Run], name: str) -> Side:
    """The finished runs with a name.

    Raises:
        InputError: there are none, two have the same seed, or some have different recipes.
    """
    own = [run for run in runs if run.name == name]
    finished = [run for run in own if summary(run).finished]
    if not finished:
        raise InputError(f"no finished run of {name!r} to compare")
    first = finished[0]
    by_seed: dict[int, Run] = {}
    for run in finished:
        if not same_training(run.recipe, first.recipe):
            fields = ", ".join(differing_fields(run.recipe, first.recipe))
            raise InputError(f"{run.folder} and {first.folder} differ in {fields}")
        twin = by_seed.setdefault(run.seed, run)
        if twin is not run:
            raise InputError(
                f"two runs of {name!r} have the same seed: {twin.folder}, {run.folder}"
            )
    return Side(name, first.recipe, by_seed, len(own) - len(finished))


def create_sides(runs: Iterable[Run]) -> tuple[dict[str, Side], dict[str, str]]:
    """Sides by name, and reasons why runs are left out, by name or folder.

    Damaged records are left out, and all runs of a name if they contradict each other.

    Runs evaluated on held-out images, and runs that have the name of a recipe but different
    settings, are skipped silently.
    """
    by_name: dict[str, list[Run]] = {}
    sides: dict[str, Side] = {}
    left_out: dict[str, str] = {}
    for run in distinct(runs):
        if run.damage is not None:
            left_out[str(run.folder)] = run.damage
        elif (
            summary(run).finished
            and not run.recipe.hold_out
            and same_training(run.recipe, RECIPES.get(run.name, run.recipe))
        ):
            by_name.setdefault(run.name, []).append(run)
    for name, own in sorted(by_name.items()):
        try:
            sides[name] = create_side(own, name)
        except InputError as error:
            left_out[name] = str(error)
    return sides, left_out


def left_out_line(reason: str) -> str:
    """Sentence for a reason given by :func:`create_sides`."""
    return f"Left out: {reason}."


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Drop copies: keep one of the runs with the same name, seed, recipe and result.

    It is the first one with checksums, if there is one.
    """
    found: dict[Any, Run] = {}
    for run in runs:
        if run.damage is not None:
            found[run.folder] = run
            continue
        result = replace(summary(run), seconds=0.0)
        key = run.name, run.seed, run.recipe, result
        if key not in found or (run.verified and not found[key].verified):
            found[key] = run
    return list(found.values())


def same_training(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes differ at most in the fields of ``SPEED``."""
    return differing_fields(one, other).keys() <= SPEED.keys()


def recipe_order(side: Side) -> tuple[int, str]:
    """Sort key: recipes in the paper's order, then others by name."""
    names = list(RECIPES)
    return (names.index(side.name) if side.name in names else len(names), side.name)


_LABELS = {
    "ce": "Cross entropy",
    "isda": "ISDA",
    "autoaugment": "AutoAugment",
    "wgan": "WGAN",
    "cgan": "CGAN",
    "acgan": "ACGAN",
    "infogan": "infoGAN",
    "large_margin": "Large margin",
    "disturb_label": "Disturb label",
    "focal": "Focal loss",
    "center": "Center loss",
    "lq": "Lq loss",
    "label_smoothing": "Label smoothing",
    "identity_isda": "ISDA with identity matrix",
    "diagonal_isda": "ISDA with diagonal covariance",
    "shared_isda": "ISDA with one covariance",
    "constant_isda": "ISDA with constant λ",
}
_SETTINGS = {
    "epochs": "{} epochs",
    "batch_size": "batches of {}",
    "images_per_class": "{} images per class",
    "drop_rate": "dropout {}",
    "image_size": "{} pixels",
    "hold_out": "validation on {} held-out images",
}
