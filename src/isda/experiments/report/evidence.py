"""What ISDA does to error, NLL and calibration in our runs: blocks of Markdown pages.

A block is the text between two marks of a page; ``isda report --update`` writes it again from the
records, so that no number on a page is typed by hand.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from isda.experiments.errors import InputError
from isda.experiments.published import DASH, NAMES
from isda.experiments.recipes import RECIPES, train_command
from isda.experiments.records import Run, Summary, summary
from isda.experiments.report.calibrated import calibrations
from isda.experiments.report.comparison import (
    Comparison,
    Side,
    create_side,
    create_sides,
    distinct,
    pair_up,
    verdict,
)
from isda.experiments.report.intervals import Difference, difference, estimate, signed
from isda.experiments.report.text import escape_markdown, markdown_rows

__all__ = [
    "BLOCKS",
    "QUANTITIES",
    "DataSizes",
    "Quantity",
    "Strengths",
    "comparisons",
    "data_sizes",
    "recipe_order",
    "strengths",
    "training",
]


@dataclass(frozen=True)
class Quantity:
    """A result of a run, as shown in tables and figures."""

    title: str
    digits: int
    value: Callable[[Summary], float | None]

    def of(self, side: Side) -> dict[int, float]:
        """Values by seed."""
        return side.values(self.value)


QUANTITIES = (
    Quantity("error, %", 2, lambda result: result.error),
    Quantity("NLL", 3, lambda result: result.loss),
    Quantity("ECE, %", 2, lambda result: None if result.ece is None else 100 * result.ece),
)
"""Test error, negative log-likelihood and expected calibration error."""


@dataclass(frozen=True)
class Strengths:
    """Runs that differ in λ₀ only."""

    title: str
    """The training."""

    sides: dict[float, Side]
    """Runs by λ₀; cross entropy is 0."""


@dataclass(frozen=True)
class DataSizes:
    """Comparisons that differ in the number of training images, and maybe in the batch size."""

    title: str
    """The training."""

    results: dict[int, Comparison]
    """Comparisons by number of training images per class."""


def comparisons(runs: Iterable[Run], prefix: str = "") -> list[Comparison]:
    """ISDA compared with cross entropy in every training that has records of both.

    Args:
        runs: run records.
        prefix: prefix of the names of the recipes.

    Raises:
        InputError: there are none, or records are damaged or contradict each other.
    """
    sides, left_out = create_sides(run for run in runs if run.name.startswith(prefix))
    if left_out:
        raise InputError("; ".join(left_out.values()))
    results = [one for one in pair_up(sides.values()) if one.method.recipe.method == "isda"]
    if not results:
        raise InputError(f"no records of an ISDA recipe {prefix}… and its baseline")
    return sorted(results, key=lambda result: recipe_order(result.method.name))


def strengths(runs: Iterable[Run], prefix: str = "") -> list[Strengths]:
    """Trainings that were run with cross entropy or ISDA and at least two values of λ₀ > 0.

    Runs on held-out images, as in ``isda search``, are a training of their own.
    """
    sides: dict[str, Side] = {}
    finished = [run for run in distinct(runs) if summary(run).finished]
    for run in finished:
        if run.name.startswith(prefix) and run.name not in sides:
            sides[run.name] = create_side(finished, run.name)
    groups: dict[object, dict[float, Side]] = {}
    for side in sorted(sides.values(), key=lambda side: recipe_order(side.name)):
        if side.recipe.method in ("ce", "isda"):
            groups.setdefault(_without_strength(side), {}).setdefault(side.recipe.lambda_0, side)
    return [
        Strengths(training(next(iter(group.values()))), dict(sorted(group.items())))
        for group in groups.values()
        if sum(lambda_0 > 0 for lambda_0 in group) > 1
    ]


def data_sizes(runs: Iterable[Run], prefix: str = "") -> list[DataSizes]:
    """Trainings that were compared with at least two numbers of training images.

    Without ``images_per_class``, a run of CIFAR has all images; other data sets then do not count.
    """
    groups: dict[object, dict[int, Comparison]] = {}
    for result in comparisons(runs, prefix):
        recipe = result.method.recipe
        number = recipe.images_per_class or _IMAGES_PER_CLASS.get(recipe.data, 0)
        if number:
            same = replace(recipe, images_per_class=0, batch_size=1, channels_last=False,
                           compile=False)  # fmt: skip
            groups.setdefault(same, {}).setdefault(number, result)
    found = []
    for group in groups.values():
        if len(group) > 1:
            first = max(group.items())[1]
            words = training(first.method, without=("images_per_class", "batch_size"))
            title = f"{words}, λ₀ = {first.method.recipe.lambda_0:g}"
            found.append(DataSizes(title, dict(sorted(group.items()))))
    return found


def training(side: Side, *, without: Collection[str] = ()) -> str:
    """Data set, network and settings that differ from the recipe's, except λ₀.

    Such as ``CIFAR-100, ResNet-32``.

    Args:
        side: runs of a recipe.
        without: settings to leave out.
    """
    parts = side.name.partition("+")[0].rsplit("-", 2)
    if len(parts) < 3:  # a name that no recipe gives
        return side.name
    data, network, _ = parts
    network = NAMES.get(network, network.replace("resnet", "ResNet-"))
    words = [NAMES.get(data, data), network]
    if side.recipe.method == "isda" and side.label != "ISDA":
        words.append(side.label)
    for change in side.name.split("+")[1:]:
        field, _, value = change.partition("=")
        if field not in ("lambda_0", *without):
            words.append(_WORDS.get(field, field.replace("_", " ") + " {}").format(value))
    return ", ".join(words)


def recipe_order(name: str) -> tuple[int, str]:
    """Sort key: recipes in the paper's order, then others by name."""
    names = list(RECIPES)
    return (names.index(name) if name in names else len(names), name)


def _effect(runs: Iterable[Run], prefix: str) -> str:
    """Table: error, NLL and ECE of cross entropy and ISDA with the interval of the difference."""
    rows = []
    for result in comparisons(runs, prefix):
        cells = [_effect_cell(result, quantity) for quantity in QUANTITIES]
        rows.append([_with_strength(result), *cells, _seeds(result)])
    header = ["training", *(quantity.title for quantity in QUANTITIES), "seeds"]
    return markdown_rows(header, rows, pad=False)


def _verdicts(runs: Iterable[Run], prefix: str) -> str:
    """Table: whether ISDA is better, in each training and quantity."""
    rows = []
    for result in comparisons(runs, prefix):
        cells = []
        for quantity in QUANTITIES:
            change = _change(result, quantity)
            cells.append(DASH if change is None else verdict(change))
        rows.append([_with_strength(result), *cells, _seeds(result)])
    header = ["training", "error", "NLL", "ECE", "seeds"]
    return markdown_rows(header, rows, left=range(4), pad=False)


def _summary(runs: Iterable[Run], prefix: str) -> str:
    """List: the trainings by verdict on the test error, best first; then worse NLL and ECE."""
    found: dict[str, list[str]] = {}
    for result in comparisons(runs, prefix):
        for quantity in QUANTITIES[1:]:
            change = _change(result, quantity)
            if change is not None and verdict(change) == "higher":
                text = f"{_with_strength(result)}: {quantity.title.removesuffix(', %')} "
                text += signed(change, quantity.digits)
                found.setdefault("worse", []).append(escape_markdown(text))
        text = f"{_with_strength(result)}: {signed(result.difference)}"
        found.setdefault(verdict(result.difference), []).append(escape_markdown(text))
    lines = []
    for word, title in _SUMMARY.items():
        entries = found.get(word, ["none in our records"])
        lines += [f"* **{title}**", *(f"    * {entry}" for entry in entries)]
    return "\n".join(lines)


def _strengths(runs: Iterable[Run], prefix: str) -> str:
    """Tables: results by λ₀, one table for each training with several values."""
    parts = []
    for group in strengths(runs, prefix):
        rows = []
        baseline = group.sides.get(0.0)
        for lambda_0, side in group.sides.items():
            cells = [estimate(list(q.of(side).values())).format(q.digits) for q in QUANTITIES]
            change = DASH
            if baseline is not None and lambda_0 > 0:
                change = signed(difference(baseline.errors, side.errors))
            name = f"{lambda_0:g}" if lambda_0 else "0 (cross entropy)"
            rows.append([name, *cells, change, str(len(side.runs))])
        header = ["λ₀", *(quantity.title for quantity in QUANTITIES)]
        header += ["error minus cross entropy (95 % interval)", "seeds"]
        parts.append(f"{escape_markdown(group.title)}:\n\n{markdown_rows(header, rows, pad=False)}")
    return "\n\n".join(parts) or "There are no records of a training with several values yet."


def _data_sizes(runs: Iterable[Run], prefix: str) -> str:
    """Tables: error, NLL and ECE by number of training images."""
    parts = []
    for group in data_sizes(runs, prefix):
        rows = [
            [
                str(number),
                *(_effect_cell(result, quantity) for quantity in QUANTITIES),
                str(result.method.recipe.batch_size),
                _seeds(result),
            ]
            for number, result in group.results.items()
        ]
        header = ["images per class", *(quantity.title for quantity in QUANTITIES)]
        table = markdown_rows([*header, "batch size", "seeds"], rows, pad=False)
        parts.append(f"{escape_markdown(group.title)}:\n\n{table}")
    return "\n\n".join(parts) or "There are no records with several numbers of images yet."


def _times(runs: Iterable[Run], prefix: str) -> str:
    """Table: the commands that train the runs, and the time that they took."""
    runs = [run for run in runs if run.name.startswith(prefix) and run.name.partition("+")[0] in
            RECIPES]  # fmt: skip
    sides, _ = create_sides(runs)
    rows = []
    for side in sorted(sides.values(), key=lambda side: recipe_order(side.name)):
        minutes = sum(summary(run).seconds for run in side.runs.values()) / 60
        devices = dict.fromkeys(
            str(place.get("device")) for run in side.runs.values() for place in run.environments
        )
        command = train_command(side.name, side.recipe, side.runs)
        rows.append([command, ", ".join(devices), f"{minutes:.1f}"])
    return markdown_rows(["command", "device", "minutes"], rows, left=(0, 1), code=(0,), pad=False)


BLOCKS: dict[str, Callable[[Sequence[Run], str], str]] = {
    "effect": _effect,
    "verdicts": _verdicts,
    "summary": _summary,
    "lambda_0": _strengths,
    "images": _data_sizes,
    "calibration": calibrations,
    "times": _times,
}
"""Blocks by name, from run records and the prefix of the recipes to show."""


def _effect_cell(result: Comparison, quantity: Quantity) -> str:
    change = _change(result, quantity)
    if change is None:
        return DASH
    means = [estimate(list(quantity.of(side).values())).mean for side in result.sides]
    before, after = (f"{mean:.{quantity.digits}f}" for mean in means)
    return f"{before} → {after}: {signed(change, quantity.digits)}"


def _with_strength(result: Comparison) -> str:
    return f"{training(result.method)}, λ₀ = {result.method.recipe.lambda_0:g}"


def _change(result: Comparison, quantity: Quantity) -> Difference | None:
    baseline, method = (quantity.of(side) for side in result.sides)
    return difference(baseline, method) if baseline and method else None


def _seeds(result: Comparison) -> str:
    return " / ".join(dict.fromkeys(map(str, result.difference.counts)))


def _without_strength(side: Side) -> object:
    """Recipe without what depends on λ₀ and what changes only the speed."""
    return replace(side.recipe.baseline(), channels_last=False, compile=False)


_WORDS = {
    "epochs": "{} epochs",
    "batch_size": "batches of {}",
    "images_per_class": "{} images per class",
    "drop_rate": "dropout {}",
    "hold_out": "validation on {} held-out images",
}
_IMAGES_PER_CLASS = {"cifar10": 5000, "cifar100": 500}  # of the whole training set
_SUMMARY = {
    "lower": "Lower error, significant at 95 %:",
    "not significant": "No significant difference of the error:",
    "higher": "Higher error, significant at 95 %:",
    "worse": "Higher NLL or calibration error (ECE in percentage points), significant at 95 %:",
    "too few seeds": "Too few seeds for an interval:",
}
