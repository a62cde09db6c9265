"""A method beside its baseline: error, calibration and time over seeds, as text and as a page.

The result of a run is its mean over the last 10 epochs; of a recipe, mean ± standard deviation over
seeds; of two recipes, the difference with a 95 % interval, paired where the seeds are the same.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from isda.experiments.errors import InputError
from isda.experiments.files import write_text
from isda.experiments.published import PUBLISHED
from isda.experiments.recipes import COMPANIONS, RECIPES, Recipe, differing_fields
from isda.experiments.records import LAST_EPOCHS, Run, Summary, summary
from isda.experiments.report.curves import BASELINE, METHOD, Line, curves
from isda.experiments.report.intervals import Difference, difference, estimate

__all__ = [
    "Comparison",
    "Side",
    "compare",
    "comparison",
    "comparison_table",
    "create_side",
    "create_sides",
    "distinct",
    "environments",
    "left_out_line",
    "page",
    "pair_up",
    "same_training",
    "sentence",
    "signed",
    "text_table",
    "write_comparison_page",
]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the finished runs of a recipe."""

    name: str
    """Name of the recipe."""

    recipe: Recipe
    """The recipe of all these runs."""

    runs: dict[int, Run]
    """Run by seed."""

    summaries: dict[int, Summary]
    """Result by seed."""

    unfinished: int
    """Runs left out because they are not finished."""

    @property
    def label(self) -> str:
        """Method in words, such as ``Cutout + ISDA``."""
        method = self.name.partition("+")[0].rpartition("-")[2]
        told = "isda" if method.endswith("isda") else "ce" if method in COMPANIONS else method
        if told != self.recipe.method:  # changed since
            method = self.recipe.method
        if method in _LABELS:
            return _LABELS[method]
        return " + ".join(_LABELS.get(part, part.capitalize()) for part in method.split("_"))

    def only(self, seeds: Collection[int]) -> "Side":
        """The same with the runs of some seeds."""
        return replace(
            self,
            runs={seed: run for seed, run in self.runs.items() if seed in seeds},
            summaries={seed: one for seed, one in self.summaries.items() if seed in seeds},
        )

    @property
    def result(self) -> str:
        """Error over the seeds, percent, such as ``30.18 ± 0.56``."""
        return estimate(list(self.errors.values())).format()

    @property
    def errors(self) -> dict[int, float]:
        """Error by seed, percent."""
        return self.values(lambda result: result.error)

    def values(self, quantity: Callable[[Summary], float | None]) -> dict[int, float]:
        """A quantity of the results by seed, without the seeds that did not record it."""
        values = {seed: quantity(result) for seed, result in self.summaries.items()}
        return {seed: value for seed, value in values.items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """A method beside its baseline."""

    baseline: Side
    method: Side
    difference: Difference
    """Error of the method minus that of the baseline, in points."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.baseline, self.method

    @property
    def lines(self) -> list[Line]:
        """Both sides as lines of a picture."""
        colours = (BASELINE, METHOD)
        return [
            Line(side.label, list(side.runs.values()), colour)
            for side, colour in zip(self.sides, colours, strict=True)
        ]

    @property
    def split(self) -> str:
        """What was evaluated: the test set, or images held out for validation."""
        return "validation" if self.method.recipe.hold_out else "test"


def comparison(runs: Iterable[Run], baseline_name: str, method_name: str) -> Comparison:
    """Compare the finished runs of two recipes.

    Raises:
        InputError: a side has no finished run, two of the same seed, or runs that differ in their
            recipe.
    """
    runs = list(runs)
    return compare(*(create_side(runs, name) for name in (baseline_name, method_name)))


def compare(baseline: Side, method: Side) -> Comparison:
    """Compare a method with its baseline; of runs that are paired, those without partner go."""
    change = difference(baseline.errors, method.errors)
    if change.paired:
        shared = baseline.errors.keys() & method.errors.keys()
        baseline, method = baseline.only(shared), method.only(shared)
    return Comparison(baseline, method, change)


def pair_up(sides: Iterable[Side]) -> list[Comparison]:
    """Every method beside the plain cross entropy of the same training, where both were run."""
    sides = sorted(sides, key=lambda side: len(side.name))  # of the same by two names, the shorter
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
    """Finished runs of that name; raises as ``comparison`` does."""
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
    """The finished runs of every name, and for each name whose runs do not go together, why.

    Runs that were evaluated on held-out images do not count, nor those that have the name of a
    recipe but are changed.
    """
    by_name: dict[str, list[Run]] = {}
    for run in distinct(runs):
        if (
            summary(run).finished
            and not run.recipe.hold_out
            and same_training(run.recipe, RECIPES.get(run.name, run.recipe))
        ):
            by_name.setdefault(run.name, []).append(run)
    sides, left_out = {}, {}
    for name, own in sorted(by_name.items()):
        try:
            sides[name] = create_side(own, name)
        except InputError as error:
            left_out[name] = str(error)
    return sides, left_out


def left_out_line(reason: str) -> str:
    """What a table or a page says of a reason given by :func:`create_sides`."""
    return f"Left out: {reason}."


def distinct(runs: Iterable[Run]) -> list[Run]:
    """The runs without copies: of those with the same name, seed, recipe and result, the first."""
    found: dict[Any, Run] = {}
    for run in runs:
        result = replace(summary(run), seconds=0.0)
        found.setdefault((run.name, run.seed, run.recipe, result), run)
    return list(found.values())


def same_training(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes differ at most in how fast they run."""
    return differing_fields(one, other).keys() <= {"channels_last", "compile"}


def sentence(result: Comparison) -> str:
    """The comparison in one sentence."""
    change, interval = -result.difference.mean, result.difference.interval
    counts = result.difference.counts
    if result.difference.paired:
        seeds = f"{counts[0]} paired seeds" if counts[0] > 1 else "1 seed"
    else:
        seeds = f"{counts[0]} and {counts[1]} seeds"
    if result.difference.without:
        lacking = ", ".join(map(str, result.difference.without))
        seeds += f"; without {lacking}, which one side lacks"
    points = f"{abs(change):.2f}"
    verb = "lowers" if change > 0 else "raises"
    error = f"the {result.split} error"
    if result.baseline.label != _LABELS["ce"]:
        error += f" of {result.baseline.label}"
    effect = f"{result.method.label} {verb} {error} by {points} points"
    if float(points) == 0:
        effect = f"{result.method.label} leaves {error} as it is"
    if interval is None:
        return f"{effect} ({seeds}); an interval needs at least 2 seeds on each side"
    low, high = sorted((-interval[0], -interval[1]) if change > 0 else interval)
    effect += _minus(f" (95 % interval {low:z.2f} to {high:z.2f}, {seeds})")
    if not result.difference.significant:
        at = seeds.partition(";")[0].replace("paired ", "")
        return f"the difference is not significant at {at}: {effect}"
    return effect


def comparison_table(result: Comparison) -> str:
    """The comparison as text: a table and a sentence."""
    header, *rows = _comparison_cells(result)
    notes = [_capital(sentence(result)) + "."]
    left_out = sum(side.unfinished for side in result.sides)
    if left_out:
        notes.append(f"Left out: {left_out} unfinished {_plural('run', left_out)}.")
    return "\n".join([text_table(header, rows), "", *notes])


def write_comparison_page(path: Path | str, result: Comparison) -> None:
    """Write the comparison as one HTML page that needs nothing else: no network, no scripts."""
    header, *rows = _comparison_cells(result)
    seeds = sorted({seed for side in result.sides for seed in side.runs})
    fields = [
        (field, *(_setting(getattr(side.recipe, field)) for side in result.sides))
        for field in result.method.recipe.as_dict()
    ]
    text = page(
        "compare.html",
        result=result,
        verdict=_capital(sentence(result)) + ".",
        header=header,
        rows=rows,
        seeds=[
            (seed, *(_optional(side.errors.get(seed)) for side in result.sides),
             _seed_difference(result, seed))
            for seed in seeds
        ],
        paper=[(side.label, PUBLISHED[side.name]) for side in result.sides
               if side.name in PUBLISHED],
        fields=fields,
        environments=environments(result.sides),
        error_curves=curves(result.lines, "test_error", f"{result.split} error, %"),
        loss_curves=curves(result.lines, "train_loss", "training loss"),
        last_epochs=min(LAST_EPOCHS, result.method.recipe.epochs),
    )  # fmt: skip
    write_text(Path(path), text)


def environments(sides: Iterable[Side]) -> dict[str, list[str]]:
    """Versions, devices and commits of all runs: the values of each, once."""
    found: dict[str, list[str]] = {}
    for side in sides:
        for run in side.runs.values():
            for record in run.environments:
                for key, value in record.items():
                    if value is not None and str(value) not in found.setdefault(key, []):
                        found[key].append(str(value))
    return found


def page(template: str, **content: Any) -> str:
    """A page from one of the templates beside this file."""
    folder = files("isda.experiments.report")
    engine = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return engine.get_template(template).render(**content)


def signed(change: Difference | float, digits: int = 2) -> str:
    """``−0.69 (−1.20 to −0.18)``, or the number alone where there is no interval."""
    if isinstance(change, Difference):
        ends = " to ".join(signed(end, digits) for end in change.interval or ())
        return signed(change.mean, digits) + (f" ({ends})" if ends else "")
    return _minus(f"{change:+z.{digits}f}")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table for a terminal: first column to the left, the others to the right."""
    padded = [[*row, *[""] * (len(header) - len(row))] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in padded
    ]
    return "\n".join([lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


_LABELS = {
    "ce": "Cross entropy",
    "isda": "ISDA",
    "autoaugment": "AutoAugment",
    "large_margin": "Large margin",
    "disturb_label": "Disturb label",
    "focal": "Focal loss",
    "center": "Center loss",
    "lq": "Lq loss",
    "identity_isda": "ISDA with identity matrix",
    "diagonal_isda": "ISDA with diagonal covariance",
    "shared_isda": "ISDA with one covariance",
    "constant_isda": "ISDA with constant λ",
}


def _comparison_cells(result: Comparison) -> list[list[str]]:
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
    rows.append(["s / epoch", *(estimate(list(v.values())).format() for v in seconds), ""])
    return [*rows, ["seeds", *(str(len(side.runs)) for side in result.sides), ""]]


def _seed_difference(result: Comparison, seed: int) -> str:
    one, other = (side.errors.get(seed) for side in result.sides)
    return "–" if one is None or other is None else signed(other - one)


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _optional(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _setting(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
