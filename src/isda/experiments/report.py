"""Tables, curves and a page, from run records and the paper's numbers alone.

The result of a run is its mean test error over the last 10 epochs; of a recipe, mean ± standard
deviation over seeds; of ISDA against its baseline, the difference with a 95 % interval.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isda.experiments.errors import InputError
from isda.experiments.published import PUBLISHED
from isda.experiments.recipes import RECIPES, Recipe, baseline_of, differing_fields
from isda.experiments.runs import LAST_EPOCHS, Run, Summary, load_runs, summary
from isda.experiments.statistics import Difference, difference, estimate

__all__ = [
    "Comparison",
    "Side",
    "comparison",
    "comparison_table",
    "markdown_table",
    "recipes_table",
    "sentence",
    "update_markdown",
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
        words = {"ce": "Cross entropy", "isda": "ISDA", "autoaugment": "AutoAugment"}
        parts = self.name.partition("+")[0].rpartition("-")[2].split("_")
        return " + ".join(words.get(part, part.capitalize()) for part in parts)

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
    baseline, method = (_side(runs, name) for name in (baseline_name, method_name))
    return Comparison(baseline, method, difference(baseline.errors, method.errors))


def sentence(result: Comparison) -> str:
    """The comparison in one sentence."""
    change, interval = -result.difference.mean, result.difference.interval
    counts = result.difference.counts
    if result.difference.paired:
        seeds = f"{counts[0]} paired seeds" if counts[0] > 1 else "1 seed"
    else:
        seeds = f"{counts[0]} and {counts[1]} seeds"
    points = f"{abs(change):.2f}"
    verb = "lowers" if change > 0 else "raises"
    effect = f"{result.method.label} {verb} the {result.split} error by {points} points"
    if float(points) == 0:
        effect = f"{result.method.label} leaves the {result.split} error as it is"
    if interval is None:
        return f"{effect} ({seeds}); an interval needs at least 2 seeds on each side"
    low, high = sorted((-interval[0], -interval[1]) if change > 0 else interval)
    effect += _minus(f" (95 % interval {low:z.2f} to {high:z.2f}, {seeds})")
    if not result.difference.significant:
        at = seeds.replace("paired ", "")
        return f"the difference is not significant at {at}: {effect}"
    return effect


def comparison_table(result: Comparison) -> str:
    """The comparison as text: a table and a sentence."""
    header, *rows = _comparison_cells(result)
    notes = [_capital(sentence(result)) + "."]
    left_out = sum(side.unfinished for side in result.sides)
    if left_out:
        notes.append(f"Left out: {left_out} unfinished {_plural('run', left_out)}.")
    return "\n".join([_text_table(header, rows), "", *notes])


def recipes_table(results: Path | str | None = None) -> str:
    """All recipes with the paper's test error and ours.

    Args:
        results: folder of run records; those of a recipe changed by the user do not count.
    """
    runs = load_runs(results) if results is not None and Path(results).is_dir() else []
    rows = []
    for name, recipe in RECIPES.items():
        own = [run for run in runs if run.name == name and _same_training(run.recipe, recipe)]
        errors = [s.error for s in map(summary, own) if s.finished and s.error is not None]
        ours = f"{estimate(errors).format()} ({len(errors)})" if errors else "–"
        paper = str(PUBLISHED[name]) if name in PUBLISHED else "–"
        rows.append([name, paper, ours, f"{recipe.lambda_0:g}", str(recipe.epochs)])
    return _text_table(["recipe", "paper %", "ours % (runs)", "λ₀", "epochs"], rows)


def markdown_table(runs: Iterable[Run], prefix: str = "") -> str:
    """Markdown table of every ISDA recipe with records of it and of its baseline.

    Args:
        runs: run records.
        prefix: beginning of the names of the recipes to show, such as ``cifar100-``.
    """
    runs = list(runs)
    names = sorted({run.name for run in runs if run.name.startswith(prefix)})
    methods = [name for name in names if name.endswith("isda") and baseline_of(name) in names]
    if not methods:
        raise InputError(f"no records of an ISDA recipe {prefix}… and of its baseline")
    rows = []
    for name in sorted(methods, key=_order):
        result = comparison(runs, baseline_of(name), name)
        paper = [str(PUBLISHED.get(side.name, "–")) for side in result.sides]
        ours = [estimate(list(side.errors.values())).format() for side in result.sides]
        count = " / ".join(dict.fromkeys(map(str, result.difference.counts)))
        rows.append([f"`{name}`", *paper, *ours, _signed(result.difference), count])
    header = ["recipe", "paper: baseline", "paper: ISDA", "ours: baseline", "ours: ISDA"]
    header += ["difference (95 % interval)", "seeds"]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def update_markdown(path: Path | str, runs: Iterable[Run]) -> bool:
    """Rewrite the tables of a Markdown file; return whether the file changed.

    What is between ``<!-- runs:NAME -->`` and ``<!-- /runs -->`` becomes the table of the recipes
    whose names begin with NAME; ``all`` stands for every recipe.
    """
    path, runs = Path(path), list(runs)
    text = path.read_text(encoding="utf-8")
    begin, end = r"<!-- runs:(\S+) -->", r"<!-- /runs -->"
    pattern = rf"({begin}\n)((?:(?!{begin}).)*?)({end})"
    found = len(re.findall(pattern, text, flags=re.DOTALL))
    if not found or not found == len(re.findall(begin, text)) == len(re.findall(end, text)):
        raise InputError(
            f"{path} must have each <!-- runs:NAME --> on a line of its own, closed by "
            "<!-- /runs -->, and at least one"
        )

    def table(match: re.Match[str]) -> str:
        prefix = "" if match[2] == "all" else match[2]
        return f"{match[1]}{markdown_table(runs, prefix)}\n{match[5]}"

    updated = re.sub(pattern, table, text, flags=re.DOTALL)
    if updated != text:
        path.write_text(updated, encoding="utf-8")
    return updated != text


def write_comparison_page(path: Path | str, result: Comparison) -> None:
    """Write the comparison as one HTML page that needs nothing else: no network, no scripts."""
    header, *rows = _comparison_cells(result)
    seeds = sorted({seed for side in result.sides for seed in side.runs})
    fields = [
        (field, *(_setting(getattr(side.recipe, field)) for side in result.sides))
        for field in result.method.recipe.as_dict()
    ]
    environments: dict[str, list[str]] = {}
    for side in result.sides:
        for run in side.runs.values():
            for record in run.environments:
                for key, value in record.items():
                    if value is not None and str(value) not in environments.setdefault(key, []):
                        environments[key].append(str(value))
    template = files("isda.experiments").joinpath("compare.html").read_text(encoding="utf-8")
    engine = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = engine.from_string(template).render(
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
        environments=environments,
        error_curves=_curves(result, "test_error", f"{result.split} error, %"),
        loss_curves=_curves(result, "train_loss", "training loss"),
        last_epochs=min(LAST_EPOCHS, result.method.recipe.epochs),
    )  # fmt: skip
    Path(path).write_text(page, encoding="utf-8")


def _side(runs: Sequence[Run], name: str) -> Side:
    own = [(run, summary(run)) for run in runs if run.name == name]
    finished = [(run, result) for run, result in own if result.finished]
    if not finished:
        raise InputError(f"no finished run of {name!r} to compare")
    first = finished[0][0]
    for run, _ in finished[1:]:
        if not _same_training(run.recipe, first.recipe):
            fields = ", ".join(differing_fields(run.recipe, first.recipe))
            raise InputError(f"{run.folder} and {first.folder} differ in {fields}")
    by_seed = {run.seed: run for run, _ in finished}
    if len(by_seed) < len(finished):
        raise InputError(f"two runs of {name!r} have the same seed")
    results = {run.seed: result for run, result in finished}
    return Side(name, first.recipe, by_seed, results, len(own) - len(finished))


def _same_training(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes differ at most in how fast they run."""
    return differing_fields(one, other).keys() <= {"channels_last", "compile"}


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
            rows.append([title, *cells, _signed(difference(*sides), digits)])
    seconds = [side.values(lambda s: s.seconds / s.epochs) for side in result.sides]
    rows.append(["s / epoch", *(estimate(list(v.values())).format() for v in seconds), ""])
    return [*rows, ["seeds", *(str(len(side.runs)) for side in result.sides), ""]]


def _curves(result: Comparison, key: str, title: str) -> Markup:
    """Mean over seeds against the epoch, in a band from least to greatest, as inline SVG."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key, "font.size": 10}):
        figure = Figure(figsize=(4.4, 3.0), layout="constrained")
        axes = figure.subplots()
        framed: list[float] = []  # what the frame has to show: all but the first quarter
        for side, colour in zip(result.sides, (_BASELINE, _METHOD), strict=True):
            records = [run.metrics() for run in side.runs.values()]
            epochs = list(zip(*([epoch[key] for epoch in run] for run in records), strict=True))
            mean = [sum(values) / len(values) for values in epochs]
            x = range(1, len(epochs) + 1)
            low, high = ([pick(values) for values in epochs] for pick in (min, max))
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(x, mean, color=colour, linewidth=1.6, label=side.label)
            late = slice(len(epochs) // 4, None)
            framed += filter(math.isfinite, low[late] + high[late])
        bottom, top = min(framed, default=0.0), max(framed, default=1.0)
        margin = 0.08 * (top - bottom) or 0.5
        axes.set_ylim(max(bottom - margin, 0.0), top + margin)
        axes.set_xlim(1, max(2, result.method.recipe.epochs))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("epoch", color=_INK)
        axes.set_ylabel(title, color=_INK)
        axes.grid(color=_INK, alpha=0.15, linewidth=0.6)
        axes.tick_params(colors=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_INK)
        axes.legend(frameon=False, labelcolor=_INK)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in both pictures
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r' height="[^"]*pt"', "", svg, count=1)
    )
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title} against epoch"', 1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg)


# Colours that matplotlib draws with; the page sets them, for light and for dark screens.
_INK, _BASELINE, _METHOD = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "--ink", _BASELINE: "--baseline", _METHOD: "--method"}


def _signed(change: Difference, digits: int = 2) -> str:
    numbers = (change.mean, *(change.interval or ()))
    texts = [_minus(f"{number:+z.{digits}f}") for number in numbers]
    return texts[0] if change.interval is None else f"{texts[0]} ({texts[1]} to {texts[2]})"


def _seed_difference(result: Comparison, seed: int) -> str:
    one, other = (side.errors.get(seed) for side in result.sides)
    return "–" if one is None or other is None else _minus(f"{other - one:+z.2f}")


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


def _order(name: str) -> tuple[int, str]:
    """Recipes in the paper's order, then others by name."""
    names = list(RECIPES)
    return (names.index(name) if name in names else len(names), name)


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the others to the right."""
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


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
