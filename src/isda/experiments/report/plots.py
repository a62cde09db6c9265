"""Plots of the HTML pages, as inline SVG in the colours of the page."""

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isda.experiments.report.sides import Side
from isda.experiments.report.text import printable

if TYPE_CHECKING:
    from isda.experiments.commands.lambda_search import Choice  # which imports the training code

__all__ = [
    "BASELINE",
    "METHOD",
    "OTHERS",
    "curves",
    "lambda_curve",
    "reliability_diagram",
    "svg_of",
]

# Placeholder colours for matplotlib; the page defines the real ones for light and dark mode.
_INK, BASELINE, METHOD = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "--ink", BASELINE: "--baseline", METHOD: "--method"}

OTHERS = ("#8a63d2", "#2e9e6b", "#c2428c", "#a08500", "#2b98a3", "#85898e", "#d2504a")
"""Colours of further lines, readable in light and dark mode."""


def curves(
    sides: Sequence[tuple[Side, str]],
    key: str,
    title: str,
    *,
    band: bool = True,
    salt: str = "",
) -> Markup:
    """Plot a metric against the epoch, mean over seeds, as an SVG that scales with the page.

    Args:
        sides: runs of a recipe and their colour, in the order of the legend. The second line of a
            colour is dashed.
        key: name of the metric in the records.
        title: label of the axis.
        band: shade the range from the lowest to the highest seed.
        salt: makes the element ids of two plots of the same runs on one page different.
    """
    folders = (ascii(str(run.folder)) for side, _ in sides for run in side.runs.values())

    def draw(axes: Any) -> None:
        framed: list[float] = []  # values in view: all but the first quarter of the epochs
        last = 2
        drawn: Counter[str] = Counter()  # lines by colour
        for side, colour in sides:
            records = [run.metrics() for run in side.runs.values()]
            values = ([epoch.get(key, math.nan) for epoch in run] for run in records)
            epochs = list(zip(*values, strict=True))
            mean = [sum(seeds) / len(seeds) for seeds in epochs]
            x = range(1, len(epochs) + 1)
            low, high = ([pick(seeds) for seeds in epochs] for pick in (min, max))
            if band:
                axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(x, mean, "--" if drawn[colour] else "-", color=colour, linewidth=1.6,
                      label=_plain(side.label))  # fmt: skip
            drawn[colour] += 1
            late = slice(len(epochs) // 4, None)
            shown = low[late] + high[late] if band else mean[late]
            framed += filter(math.isfinite, shown)
            last = max(last, len(epochs))
        _frame(axes, framed)
        axes.set_xlim(1, last)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, labelcolor=_INK, fontsize=8 if len(sides) > 3 else 10)

    return _plot(draw, x="epoch", y=title, salt=" ".join([salt, key, *folders]))


def lambda_curve(choice: "Choice") -> Markup:
    """Validation error over λ₀, one line per round of a search.

    Points are seeds, lines join their means, and bars are 95 % intervals of the mean where there
    are several seeds; they may be longer than the plot.
    """

    def draw(axes: Any) -> None:
        framed: list[float] = []
        for trials, style in zip(reversed(choice.rounds), ("-", ":", "--"), strict=False):
            trials = tuple(t for t in trials if t.recipe.method == "isda")
            sides = sorted(trials, key=lambda side: side.recipe.lambda_0)
            x = [side.recipe.lambda_0 for side in sides]
            epochs = sides[0].recipe.epochs
            label = f"{epochs} epochs, {len(sides[0].runs)} seed{'s' * (len(sides[0].runs) > 1)}"
            means = [side.error.mean for side in sides]
            colour = METHOD if style == "-" else _INK
            axes.plot(x, means, style, color=colour, linewidth=1.6, label=label)
            for place, side in zip(x, sides, strict=True):
                values = list(side.errors.values())
                framed += values
                axes.plot([place] * len(values), values, "o", color=colour, markersize=3)
                if side.error.interval is not None:
                    axes.vlines(place, *side.error.interval, color=colour, alpha=0.5, linewidth=1.2)
        chosen = choice.chosen
        axes.plot([chosen.recipe.lambda_0], [chosen.error.mean], "o", color=METHOD, markersize=9,
                  markerfacecolor="none", label=f"chosen: {chosen.recipe.lambda_0:g}")  # fmt: skip
        _frame(axes, framed)
        axes.legend(frameon=False, labelcolor=_INK, fontsize=8)

    return _plot(draw, x="λ₀", y="validation error, %", salt=choice.chosen.name)


def reliability_diagram(
    labels: Sequence[str], bins: Sequence[Sequence[tuple[float, float, float]]], salt: str
) -> Markup:
    """Accuracy against confidence of both sides; on the diagonal, they are equal.

    Args:
        labels: names of baseline and method.
        bins: mean confidence, accuracy and share of the images of every bin, of both sides.
        salt: makes the element ids of two plots on one page different.
    """

    def draw(axes: Any) -> None:
        axes.plot([0, 100], [0, 100], color=_INK, alpha=0.4, linewidth=1, linestyle="--")
        for label, own, colour in zip(labels, bins, (BASELINE, METHOD), strict=True):
            x, y, share = ([100 * value for value in column] for column in zip(*own, strict=True))
            axes.plot(x, y, color=colour, linewidth=1.6, label=_plain(label))
            axes.scatter(x, y, s=[6 + 1.2 * part for part in share], color=colour, linewidth=0)
        low = min(
            min(100 * confidence, 100 * accuracy) for own in bins for confidence, accuracy, _ in own
        )
        axes.set_xlim(max(0, low - 5), 101)
        axes.set_ylim(max(0, low - 5), 101)
        axes.legend(frameon=False, labelcolor=_INK)

    return _plot(draw, x="confidence, %", y="accuracy, %", salt=f"reliability {salt}")


def _plot(draw: Callable[[Any], None], *, x: str, y: str, salt: str) -> Markup:
    """A plot as SVG.

    Args:
        draw: draws into the axes.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        salt: makes the element ids of two plots on one page different.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}):
        figure = Figure(figsize=(4.4, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x, color=_INK)
        axes.set_ylabel(y, color=_INK)
        axes.grid(color=_INK, alpha=0.15, linewidth=0.6)
        axes.tick_params(colors=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_INK)
        draw(axes)
        return _inline(svg_of(figure), f"{y} against {x}")


def svg_of(figure: Figure) -> str:
    """The figure as SVG, without a background and without metadata such as the date."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return re.sub(r"\s*<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)


def _frame(axes: Any, values: Sequence[float]) -> None:
    """Limit the vertical axis to some values, which are not negative."""
    bottom, top = min(values, default=0.0), max(values, default=1.0)
    margin = 0.08 * (top - bottom) or 0.5
    axes.set_ylim(max(bottom - margin, 0.0), top + margin)


def _plain(label: str) -> str:
    """A label that matplotlib shows as it is, without mathematics."""
    return printable(label).replace("$", r"\$")


def _inline(svg: str, label: str) -> Markup:
    """SVG for embedding: no fixed size, no duplicate ids, colours as CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in all plots
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r' height="[^"]*pt"', "", svg, count=1)
    )
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg)
