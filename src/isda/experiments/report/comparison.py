"""A method compared with its baseline over seeds.

The result of a run is its mean over its last epochs. Recipes are reported as mean ± standard
deviation over seeds, and compared by the difference with a 95 % interval, paired by seed where both
sides have the same seeds.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from isda.experiments.errors import InputError
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.recipes import COMPANIONS, RECIPES
from isda.experiments.records import Run, Summary, result_epochs, summary
from isda.experiments.report.intervals import (
    Difference,
    Estimate,
    difference,
    estimate,
    interval_words,
    seeds_needed,
    signed,
)
from isda.experiments.report.text import text_table
from isda.experiments.settings import Recipe

__all__ = [
    "Comparison",
    "Side",
    "advice",
    "compare",
    "comparison",
    "comparison_rows",
    "comparison_table",
    "create_side",
    "create_sides",
    "distinct",
    "left_out_line",
    "pair_up",
    "same_training",
    "sentence",
    "verdict",
    "window_words",
]


@dataclass(frozen=True)
class Side:
    """The finished runs of a recipe: one side of a comparison."""

    name: str
    """Name of the recipe."""

    recipe: Recipe
    """The recipe of all these runs."""

    runs: dict[int, Run]
    """Runs by seed."""

    summaries: dict[int, Summary]
    """Results by seed."""

    unfinished: int
    """Number of runs that were left out because they are not finished."""

    @property
    def label(self) -> str:
        """Display name of the method, such as ``Cutout + ISDA``."""
        method = self.name.partition("+")[0].rpartition("-")[2]
        named = "isda" if method.endswith("isda") else "ce" if method in COMPANIONS else method
        if named != self.recipe.method:  # changed by a flag
            method = self.recipe.method
        if method in _LABELS:
            return _LABELS[method]
        return " + ".join(_LABELS.get(part, part.capitalize()) for part in method.split("_"))

    def only(self, seeds: Collection[int]) -> "Side":
        """A copy with the runs of the given seeds."""
        return replace(
            self,
            runs={seed: run for seed, run in self.runs.items() if seed in seeds},
            summaries={seed: one for seed, one in self.summaries.items() if seed in seeds},
        )

    @property
    def error(self) -> Estimate:
        """Mean and standard deviation of the error over seeds, in percent."""
        return estimate(list(self.errors.values()))

    @property
    def errors(self) -> dict[int, float]:
        """Errors by seed, in percent."""
        return self.values(lambda result: result.error)

    @property
    def verified(self) -> bool:
        """Whether the records of all runs have checksums."""
        return all(run.verified for run in self.runs.values())

    def values(self, quantity: Callable[[Summary], float | None]) -> dict[int, float]:
        """A quantity of the results by seed, without seeds that did not record it."""
        values = {seed: quantity(result) for seed, result in self.summaries.items()}
        return {seed: value for seed, value in values.items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """A method and its baseline."""

    baseline: Side
    method: Side
    difference: Difference
    """Error of the method minus error of the baseline, in percentage points."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.baseline, self.method

    @property
    def split(self) -> str:
        """Split that was evaluated: the test set, or held-out training images."""
        return "validation" if self.method.recipe.hold_out else "test"


def comparison(runs: Iterable[Run], baseline_name: str, method_name: str) -> Comparison:
    """Compare the finished runs of two recipes.

    Raises:
        InputError: a side has no finished run, two runs with the same seed, or runs with different
            recipes.
    """
    runs = list(runs)
    return compare(*(create_side(runs, name) for name in (baseline_name, method_name)))


def compare(baseline: Side, method: Side) -> Comparison:
    """Compare a method with its baseline; paired sides keep only the seeds that both have."""
    change = difference(baseline.errors, method.errors)
    if change.paired:
        shared = baseline.errors.keys() & method.errors.keys()
        baseline, method = baseline.only(shared), method.only(shared)
    return Comparison(baseline, method, change)


def pair_up(sides: Iterable[Side]) -> list[Comparison]:
    """Compare every method with cross entropy under the same recipe, if there are runs of both."""
    sides = sorted(sides, key=lambda side: len(side.name))  # prefer the shorter of two names
    pairs = [
        (
            next((b for b in sides if same_training(b.recipe, method.recipe.baseline())), None),
            method,
        )
        for method in sides
        if method.recipe.method != "ce"
    ]
    found = [compare(baseline, method) for baseline, method in pairs if baseline is not None]
    return sorted(found, key=lambda result: result.method.name)


def create_side(runs: Iterable[Run], name: str) -> Side:
    """The finished runs with a name; raises InputError like :func:`comparison`."""
    own = [(run, summary(run)) for run in runs if run.name == name]
    finished = [(run, result) for run, result in own if result.finished]
    if not finished:
        raise InputError(f"no finished run of {name!r} to compare")
    first = finished[0][0]
    for run, _ in finished[1:]:
        if not same_training(run.recipe, first.recipe):
            fields = ", ".join(differing_fields(run.recipe, first.recipe))
            raise InputError(f"{run.folder} and {first.folder} differ in {fields}")
    by_seed: dict[int, Run] = {}
    for run, _ in finished:
        twin = by_seed.setdefault(run.seed, run)
        if twin is not run:
            raise InputError(
                f"two runs of {name!r} have the same seed: {twin.folder}, {run.folder}"
            )
    results = {run.seed: result for run, result in finished}
    return Side(name, first.recipe, by_seed, results, len(own) - len(finished))


def create_sides(runs: Iterable[Run]) -> tuple[dict[str, Side], dict[str, str]]:
    """Sides by name, and reasons why runs are left out, by name or folder.

    Left out are damaged records, and all runs of a name if they contradict each other.

    Skips runs evaluated on held-out images, and runs that have the name of a recipe but different
    settings.
    """
    by_name: dict[str, list[Run]] = {}
    damaged: dict[str, str] = {}
    for run in distinct(runs):
        if run.damage is not None:
            damaged[str(run.folder)] = run.damage
        elif (
            summary(run).finished
            and not run.recipe.hold_out
            and same_training(run.recipe, RECIPES.get(run.name, run.recipe))
        ):
            by_name.setdefault(run.name, []).append(run)
    sides, left_out = {}, damaged
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
    """Whether two recipes differ at most in settings that change only the speed."""
    return differing_fields(one, other).keys() <= {"channels_last", "compile"}


def sentence(result: Comparison) -> str:
    """The comparison in one sentence."""
    text = _clause(result)
    return f"{text[0].upper()}{text[1:]}."


def comparison_table(result: Comparison) -> str:
    """The comparison as a text table and a sentence."""
    header, *rows = comparison_rows(result)
    notes = [sentence(result), window_words(result)]
    left_out = sum(side.unfinished for side in result.sides)
    if left_out:
        notes.append(f"Left out: {left_out} unfinished run{'s' if left_out > 1 else ''}.")
    return "\n".join([text_table(header, rows), "", *notes])


def window_words(result: Comparison) -> str:
    """Sentence on the epochs whose mean is the result of a run."""
    epochs = result.method.recipe.epochs
    number = result_epochs(epochs)
    last = "its last epoch" if number == 1 else f"the mean of its last {number} epochs"
    return f"The result of a run is {last} of {epochs}."


def verdict(change: Difference) -> str:
    """The difference in one or two words."""
    if change.interval is None:
        return "too few seeds"
    if not change.significant:
        return "not significant"
    return "lower" if change.mean < 0 else "higher"


def advice(result: Comparison) -> tuple[str, str]:
    """Whether to use the method, in a word or two, and why or what to do next."""
    change, label = result.difference, result.method.label
    if change.significant:
        if change.mean < 0:
            return "Yes", f"{label} has the lower {result.split} error here."
        return "No", f"{label} has the higher {result.split} error here."
    more = "continue with more --seeds and --resume"
    if change.interval is None:
        return "Too early to say", f"One seed cannot tell a difference from chance: {more}."
    if change.constant:
        return "Too early to say", f"All seeds agree, which is chance in so few images: {more}."
    needed = seeds_needed(change)
    if not change.paired or needed is None:
        return (
            "Not clear from these seeds",
            f"A difference of this size needs many seeds to be shown: {more}.",
        )
    size = f"{abs(change.mean):.2f} points"
    return (
        "Not clear from these seeds",
        f"If the difference is {size}, about {needed} seeds would show it: {more}.",
    )


def comparison_rows(result: Comparison) -> list[list[str]]:
    """Header, then one row per quantity: baseline, method, difference."""
    rows = [["", *(side.label for side in result.sides), "difference (95 % interval)"]]
    quantities: dict[str, tuple[int, Callable[[Summary], float | None]]] = {
        f"{result.split} error, %": (2, lambda s: s.error),
        "NLL": (3, lambda s: s.loss),
        "ECE, %": (2, lambda s: None if s.ece is None else 100 * s.ece),
    }
    for title, (digits, quantity) in quantities.items():
        sides = [side.values(quantity) for side in result.sides]
        if all(sides):
            cells = [estimate(list(values.values())).format(digits) for values in sides]
            rows.append([title, *cells, signed(difference(*sides), digits)])
    seconds = [side.values(lambda s: s.seconds / s.epochs) for side in result.sides]
    means = [estimate(list(values.values())) for values in seconds]
    added = ""
    if any(_mixed(run) for side in result.sides for run in side.runs.values()):
        added = "both trained side by side"
    elif means[0].mean > 0:
        added = f"{100 * (means[1].mean / means[0].mean - 1):+.0f} %".replace("-", "−")
    rows.append(["s / epoch", *(mean.format() for mean in means), added])
    for title, key in (("statistics, MiB", "statistics_mib"), ("peak GPU memory, MiB", "peak_mib")):
        sizes = [
            [run.metrics()[-1][key] for run in side.runs.values() if key in run.metrics()[-1]]
            for side in result.sides
        ]
        if all(sizes):
            most = [max(side) for side in sizes]
            rows.append([title, *(f"{size:.2f}" for size in most), f"{most[1] - most[0]:+.2f}"])
    return [*rows, ["seeds", *(str(len(side.runs)) for side in result.sides), ""]]


def _mixed(run: Run) -> bool:
    """Whether a run trained next to another method, so that its time is that of both.

    Only then a run of several side by side on a GPU has no memory of its own.
    """
    last = run.metrics()[-1]
    return last.get("side_by_side", 1) > 1 and "peak_mib" not in last


_LABELS = {
    "ce": "Cross entropy",
    "isda": "ISDA",
    "autoaugment": "AutoAugment",
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


def _clause(result: Comparison) -> str:
    change, interval = -result.difference.mean, result.difference.interval
    counts = result.difference.counts
    if result.difference.paired:
        seeds = f"{counts[0]} paired seeds" if counts[0] > 1 else "1 seed"
    else:
        seeds = f"{counts[0]} and {counts[1]} seeds"
    if result.difference.without:
        lacking = ", ".join(map(str, result.difference.without))
        seeds += f"; without {lacking}, missing on one side"
    points = f"{abs(change):.2f}"
    verb = "lowers" if change > 0 else "raises"
    error = f"the {result.split} error"
    if result.baseline.label != _LABELS["ce"]:
        error += f" of {result.baseline.label}"
    effect = f"{result.method.label} {verb} {error} by {points} points"
    if float(points) == 0:
        effect = f"{result.method.label} does not change {error}"
    if result.difference.constant:
        same = " in any seed" if float(points) == 0 else ", the same in all seeds"
        return f"{effect}{same} ({seeds})"
    if interval is None:
        return f"{effect} ({seeds}); an interval needs at least 2 seeds per side"
    limits = f"95 % interval of the difference {interval_words(interval)}, {seeds}"
    if not result.difference.significant:
        effect = f"{result.method.label} makes no significant difference to {error}"
        return f"{effect}: {signed(-change)} points ({limits})"
    return f"{effect} ({limits})"
