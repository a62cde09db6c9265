"""A method compared with its baseline over seeds.

Recipes are reported as mean ± standard deviation over seeds, and compared by the difference with a
95 % interval, paired by seed where both sides have the same seeds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from isda.experiments.errors import InputError
from isda.experiments.records import Run, result_epochs, summary
from isda.experiments.report.intervals import (
    Difference,
    difference,
    estimate,
    interval_words,
    seeds_needed,
    signed,
)
from isda.experiments.report.sides import (
    ERROR,
    QUANTITIES,
    SPEED,
    Quantity,
    Side,
    create_side,
    create_sides,
    distinct,
    recipe_order,
    same_training,
)
from isda.experiments.report.text import text_table
from isda.experiments.settings import Recipe

__all__ = [
    "Comparison",
    "advice",
    "compare",
    "comparison",
    "comparison_rows",
    "comparison_table",
    "comparisons",
    "data_sizes",
    "pair_up",
    "sentence",
    "strengths",
    "verdict",
    "window_words",
]


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
    def title(self) -> str:
        """The training with λ₀, such as ``CIFAR-100, ResNet-32, λ₀ = 0.5``."""
        return f"{self.method.training()}, λ₀ = {self.method.recipe.lambda_0:g}"

    @property
    def settings(self) -> str:
        """The title without data set and network."""
        return ", ".join([*self.method.settings(), f"λ₀ = {self.method.recipe.lambda_0:g}"])

    @property
    def split(self) -> str:
        """Split that was evaluated: the test set, or held-out training images."""
        return "validation" if self.method.recipe.hold_out else "test"

    @property
    def seeds(self) -> str:
        """Number of pairs, or of the seeds of baseline and method, such as ``3 / 3``."""
        counts = self.difference.counts
        return " / ".join(map(str, counts[:1] if self.difference.paired else counts))

    def change(self, quantity: Quantity) -> Difference | None:
        """The method minus the baseline; None if a side did not record the quantity."""
        baseline, method = (side.values(quantity.value) for side in self.sides)
        return difference(baseline, method) if baseline and method else None

    def means(self, quantity: Quantity) -> str:
        """Means of baseline and method, such as ``1.386 → 1.084``."""
        means = (side.estimate(quantity).mean for side in self.sides)
        return " → ".join(f"{mean:.{quantity.digits}f}" for mean in means)


def comparison(runs: Iterable[Run], baseline_name: str, method_name: str) -> Comparison:
    """Compare the finished runs of two recipes; raises InputError like :func:`create_side`."""
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
    found = []
    for method in sides:
        own = [side for side in sides if same_training(side.recipe, method.recipe.baseline())]
        if method.recipe.method != "ce" and own:
            found.append(compare(own[0], method))
    return sorted(found, key=lambda result: result.method.name)


def comparisons(runs: Iterable[Run]) -> list[Comparison]:
    """ISDA compared with cross entropy in every training that has records of both.

    Raises:
        InputError: records are damaged or contradict each other.
    """
    sides, left_out = create_sides(runs)
    if left_out:
        raise InputError("; ".join(left_out.values()))
    results = [one for one in pair_up(sides.values()) if one.method.recipe.method == "isda"]
    return sorted(results, key=lambda result: recipe_order(result.method))


def strengths(runs: Iterable[Run]) -> list[tuple[str, dict[float, Side]]]:
    """Trainings with at least two values of λ₀ > 0: title, and sides by λ₀; cross entropy is 0.

    Runs on held-out images, as in ``isda search``, are a training of their own.
    """
    finished = [run for run in distinct(runs) if summary(run).finished]
    names = dict.fromkeys(run.name for run in finished)
    baselines: dict[Recipe, Side] = {}
    groups: dict[Recipe, dict[float, Side]] = {}  # by recipe without λ₀
    for side in sorted((create_side(finished, name) for name in names), key=recipe_order):
        same = replace(side.recipe, lambda_0=0.0, **SPEED)
        if side.recipe.method == "ce":
            baselines.setdefault(same, side)
        elif side.recipe.lambda_0 > 0:
            groups.setdefault(same, {}).setdefault(side.recipe.lambda_0, side)
    found = []
    for same, group in groups.items():
        if len(group) > 1:
            title, baseline = next(iter(group.values())).training(), baselines.get(same.baseline())
            sides = group if baseline is None else {0.0: baseline, **group}
            found.append((title, dict(sorted(sides.items()))))
    return found


def data_sizes(runs: Iterable[Run]) -> list[tuple[str, dict[int, Comparison]]]:
    """Trainings with at least two numbers of images: title, and comparisons by images per class.

    They may also differ in the batch size. Without ``images_per_class``, a run of CIFAR has all
    images; other data sets then do not count.
    """
    groups: dict[object, dict[int, Comparison]] = {}
    for result in comparisons(runs):
        recipe = result.method.recipe
        number = recipe.images_per_class or _IMAGES_PER_CLASS.get(recipe.data, 0)
        if number:
            same = replace(recipe, images_per_class=0, batch_size=1, **SPEED)
            groups.setdefault(same, {}).setdefault(number, result)
    found = []
    for group in groups.values():
        if len(group) > 1:
            largest = group[max(group)].method
            words = largest.training(without=("images_per_class", "batch_size"))
            title = f"{words}, λ₀ = {largest.recipe.lambda_0:g}"
            found.append((title, dict(sorted(group.items()))))
    return found


_IMAGES_PER_CLASS = {"cifar10": 5000, "cifar100": 500}  # of the whole training set


def sentence(result: Comparison) -> str:
    """The comparison in one sentence."""
    change, counts = result.difference, result.difference.counts
    if change.paired:
        seeds = f"{counts[0]} paired seeds" if counts[0] > 1 else "1 seed"
    else:
        seeds = f"{counts[0]} and {counts[1]} seeds"
    if change.without:
        seeds += f"; without {', '.join(map(str, change.without))}, missing on one side"
    points = f"{abs(change.mean):.2f}"
    verb = "lowers" if change.mean < 0 else "raises"
    error = f"the {result.split} error"
    if result.baseline.label != "Cross entropy":
        error += f" of {result.baseline.label}"
    effect = f"{result.method.label} {verb} {error} by {points} points"
    if float(points) == 0:
        effect = f"{result.method.label} does not change {error}"
    if change.constant:
        same = " in any seed" if float(points) == 0 else ", the same in all seeds"
        return f"{effect}{same} ({seeds})."
    if change.interval is None:
        return f"{effect} ({seeds}); an interval needs at least 2 seeds per side."
    limits = f"95 % interval of the difference {interval_words(change.interval)}, {seeds}"
    if change.significant:
        return f"{effect} ({limits})."
    effect = f"{result.method.label} makes no significant difference to {error}"
    return f"{effect}: {signed(change.mean)} points ({limits})."


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
    """Whether to use the method, in a few words, and why or what to do next.

    The answer depends on the significant differences of error, NLL and ECE.
    """
    change = result.difference
    others = [
        (quantity.title.removesuffix(", %"), result.change(quantity))
        for quantity in QUANTITIES
        if quantity is not ERROR
    ]
    found = [(name, other.mean) for name, other in others if other and other.significant]
    lower = [name for name, mean in found if mean < 0]
    higher = [name for name, mean in found if mean > 0]
    notes = [f"Its {_are(lower)} lower."] if lower else []
    if higher:
        remedy = "calibrate its probabilities before you use them"
        if result.method.recipe.method == "isda":
            remedy = "if you use its probabilities, try a smaller --lambda-0"
        notes.append(f"Its {_are(higher)} higher: {remedy}.")
    if change.significant:
        answer = "No" if change.mean > 0 else "Yes, for its accuracy" if higher else "Yes"
        return answer, " ".join(notes)
    answer, what_next = _next_step(change)
    if lower and not higher:
        answer = "Yes, for its probabilities"
    return answer, " ".join([*notes, what_next])


def _are(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _next_step(change: Difference) -> tuple[str, str]:
    """What an error without a significant difference means, and what to do next."""
    more = "choose a larger number of --seeds and continue with --resume"
    if change.interval is None:
        return "Too early to say", f"One seed cannot tell a difference from chance: {more}."
    if change.constant:
        return (
            "Too early to say",
            f"With so few test images, all seeds can agree by chance: {more}.",
        )
    if not change.paired:
        return (
            "Not clear from these seeds",
            "The two sides have different seeds, and the same seeds show smaller differences: "
            f"{more}.",
        )
    needed = seeds_needed(change)
    if needed is None:
        return (
            "Not clear from these seeds",
            "An error difference of this size takes too many seeds to show.",
        )
    size = f"{abs(change.mean):.2f} points"
    return (
        "Not clear from these seeds",
        f"If the error differs by {size}, about {needed} seeds would show it: continue with that "
        "many --seeds and --resume. Adding seeds until a difference is significant would mislead.",
    )


def comparison_rows(result: Comparison) -> list[list[str]]:
    """Header, then one row per quantity: baseline, method, difference."""
    rows = [["", *(side.label for side in result.sides), "difference (95 % interval)"]]
    for quantity in QUANTITIES:
        change = result.change(quantity)
        if change is not None:
            title = f"{result.split} {quantity.title}" if quantity is ERROR else quantity.title
            cells = [side.estimate(quantity).format(quantity.digits) for side in result.sides]
            rows.append([title, *cells, signed(change, quantity.digits)])
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
            added = signed(float(most[1] - most[0]))
            rows.append([title, *(f"{size:.2f}" for size in most), added])
    return [*rows, ["seeds", *(str(len(side.runs)) for side in result.sides), ""]]


def _mixed(run: Run) -> bool:
    """Whether a run trained next to another method, so that its time is the time of both.

    Only in this case does a run that trained side by side on a GPU record no memory.
    """
    last = run.metrics()[-1]
    return last.get("side_by_side", 1) > 1 and "peak_mib" not in last
