"""Training curves as inline SVG: mean over seeds against the epoch, in the page's colours."""

import contextlib
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isda.experiments.records import Run
from isda.experiments.report.text import printable

__all__ = [
    "BASELINE",
    "INK",
    "METHOD",
    "OTHERS",
    "Line",
    "Plot",
    "curves",
    "frame",
    "plain",
    "plot",
]

# Placeholder colours for matplotlib; the page defines the real ones for light and dark mode.
INK, BASELINE, METHOD = "#010203", "#040506", "#070809"
_VARIABLES = {INK: "--ink", BASELINE: "--baseline", METHOD: "--method"}

OTHERS = ("#8a63d2", "#2e9e6b", "#c2428c", "#a08500", "#2b98a3", "#85898e", "#d2504a")
"""Colours of further lines, readable in light and dark mode."""


@dataclass(frozen=True)
class Line:
    """One line of a plot: the finished runs of a recipe."""

    label: str
    runs: Sequence[Run]
    colour: str


def curves(
    lines: Sequence[Line], key: str, title: str, *, band: bool = True, salt: str = ""
) -> Markup:
    """Plot a metric against the epoch, mean over seeds, as an SVG that scales with the page.

    Args:
        lines: lines in the order of the legend.
        key: name of the metric in the records.
        title: label of the axis.
        band: shade the range from the lowest to the highest seed.
        salt: makes the element ids of two plots of the same runs on one page different.
    """
    folders = (ascii(str(run.folder)) for line in lines for run in line.runs)
    with plot(x="epoch", y=title, salt=" ".join([salt, key, *folders])) as drawn:
        axes = drawn.axes
        framed: list[float] = []  # values in view: all but the first quarter of the epochs
        last = 2
        for line in lines:
            records = [run.metrics() for run in line.runs]
            values = ([epoch.get(key, math.nan) for epoch in run] for run in records)
            epochs = list(zip(*values, strict=True))
            mean = [sum(seeds) / len(seeds) for seeds in epochs]
            x = range(1, len(epochs) + 1)
            low, high = ([pick(seeds) for seeds in epochs] for pick in (min, max))
            if band:
                axes.fill_between(x, low, high, color=line.colour, alpha=0.2, linewidth=0)
            axes.plot(x, mean, color=line.colour, linewidth=1.6, label=plain(line.label))
            late = slice(len(epochs) // 4, None)
            shown = low[late] + high[late] if band else mean[late]
            framed += filter(math.isfinite, shown)
            last = max(last, len(epochs))
        frame(axes, framed)
        axes.set_xlim(1, last)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, labelcolor=INK, fontsize=8 if len(lines) > 3 else 10)
    return drawn.svg


class Plot:
    """A plot in the page's colours, which is an SVG when its context ends."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.svg = Markup()


@contextlib.contextmanager
def plot(*, x: str, y: str, salt: str) -> Iterator[Plot]:
    """Draw a plot.

    Args:
        x: label of the horizontal axis.
        y: label of the vertical axis.
        salt: makes the element ids of two plots on one page different.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}):
        figure = Figure(figsize=(4.4, 3.0), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x, color=INK)
        axes.set_ylabel(y, color=INK)
        axes.grid(color=INK, alpha=0.15, linewidth=0.6)
        axes.tick_params(colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        drawn = Plot(axes)
        yield drawn
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn.svg = _inline(buffer.getvalue(), f"{y} against {x}")


def frame(axes: Any, values: Sequence[float]) -> None:
    """Limit the vertical axis to some values, which are not negative."""
    bottom, top = min(values, default=0.0), max(values, default=1.0)
    margin = 0.08 * (top - bottom) or 0.5
    axes.set_ylim(max(bottom - margin, 0.0), top + margin)


def plain(label: str) -> str:
    """A label that matplotlib shows as it is, without mathematics."""
    return printable(label).replace("$", r"\$")


def _inline(svg: str, label: str) -> Markup:
    """SVG for embedding: no fixed size, no duplicate ids, colours as CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in all plots
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r' height="[^"]*pt"', "", svg, count=1)
    )
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return Markup(svg)
