"""Figures of pages, from run records: an SVG for light and one for dark backgrounds each.

They are drawn for a width of 7 inches, that of a column of text, and are readable there. The
numbers are in the description of the SVG, so that a figure can be compared with its records.
"""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import escape
from matplotlib.figure import Figure

from isda.experiments.errors import InputError
from isda.experiments.files import write_text
from isda.experiments.published import PUBLISHED
from isda.experiments.records import Run
from isda.experiments.report.comparison import Comparison
from isda.experiments.report.evidence import (
    QUANTITIES,
    DataSizes,
    Strengths,
    comparisons,
    data_sizes,
    strengths,
    training,
)
from isda.experiments.report.intervals import Estimate, difference, estimate

__all__ = [
    "MOST_TRAININGS",
    "describe_data_sizes",
    "describe_effect",
    "describe_strengths",
    "write_figures",
]

MOST_TRAININGS = 4
"""The figure of the effect shows the trainings with the most seeds, at most this many."""

_WIDTH = 7.0  # inches
_THEMES = {
    "light": {"ink": "#24292f", "baseline": "#9a6700", "method": "#0969da"},
    "dark": {"ink": "#d7dde3", "baseline": "#e3b341", "method": "#6cb6ff"},
}


def write_figures(folder: Path | str, runs: Iterable[Run]) -> list[Path]:
    """Write the figure ``effect`` of trainings of the paper; with several λ₀ in the records,
    ``lambda_0``; with several numbers of training images, ``images``.

    Args:
        folder: folder for ``NAME-light.svg`` and ``NAME-dark.svg``.
        runs: run records.

    Returns:
        The files.

    Raises:
        InputError: there is nothing to draw.
    """
    runs, folder = list(runs), Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"figures must be a folder, got the file {folder}")
    results, groups, sizes = _most_seeds(comparisons(runs)), strengths(runs), data_sizes(runs)
    if not (results or groups or sizes):
        raise InputError(
            "the records have nothing for a figure: it needs a training of the paper with two "
            "seeds, several lambda_0, or several images_per_class"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for theme, colours in _THEMES.items():
        with matplotlib.rc_context(_style(colours["ink"])):
            figures = {}
            if results:
                figures["effect"] = _draw_effect(results, colours), describe_effect(runs)
            if groups:
                drawn = _draw_strengths(groups, colours)
                figures["lambda_0"] = drawn, describe_strengths(runs)
            if sizes:
                figures["images"] = _draw_data_sizes(sizes, colours), describe_data_sizes(runs)
            for name, (figure, text) in figures.items():
                written.append(folder / f"{name}-{theme}.svg")
                write_text(written[-1], _svg(figure, text))
    return written


def describe_effect(runs: Iterable[Run]) -> str:
    """The numbers in the figure of the effect."""
    lines = []
    for result in _most_seeds(comparisons(runs)):
        for quantity in QUANTITIES:
            values = [estimate(list(quantity.of(side).values())) for side in result.sides]
            shown = ", ".join(
                f"{side.label} {_with_interval(value, quantity.digits)}"
                for side, value in zip(result.sides, values, strict=True)
            )
            lines.append(f"{training(result.method)}, {quantity.title}: {shown}.")
    return " ".join(lines)


def describe_strengths(runs: Iterable[Run]) -> str:
    """The numbers in the figure of λ₀."""
    lines = []
    for group in strengths(runs):
        for lambda_0, side in group.sides.items():
            lines.append(f"{group.title}, λ₀ = {lambda_0:g}: {_with_interval(side.error, 2)} %.")
    return " ".join(lines)


def describe_data_sizes(runs: Iterable[Run]) -> str:
    """The numbers in the figure of the training images."""
    lines = []
    for group in data_sizes(runs):
        for number, result in group.results.items():
            for quantity in QUANTITIES:
                shown = ", ".join(
                    f"{side.label} {_with_interval(estimate(list(quantity.of(side).values())), 3)}"
                    for side in result.sides
                )
                where = f"{group.title}, {number} images per class, {quantity.title}"
                lines.append(f"{where}: {shown}.")
    return " ".join(lines)


def _most_seeds(results: Iterable[Comparison]) -> list[Comparison]:
    """Trainings of the paper with an interval, those with the most seeds first."""
    own = [one for one in results if one.difference.interval and one.method.name in PUBLISHED]
    return sorted(own, key=lambda one: -min(one.difference.counts))[:MOST_TRAININGS]


def _draw_effect(results: Sequence[Comparison], colours: dict[str, str]) -> Figure:
    """Bars from 0 for cross entropy and ISDA with 95 % intervals, a row per training."""
    figure = Figure(figsize=(_WIDTH, 0.1 + 1.15 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), len(QUANTITIES), squeeze=False)
    for row, result in zip(panels, results, strict=True):
        for panel, quantity in zip(row, QUANTITIES, strict=True):
            for place, side in enumerate(result.sides):
                value = estimate(list(quantity.of(side).values()))
                colour = colours["method" if place else "baseline"]
                low, high = value.interval or (value.mean, value.mean)
                panel.barh(place, value.mean, 0.72, color=colour, alpha=0.75, linewidth=0)
                panel.errorbar(
                    value.mean, place, xerr=[[value.mean - low], [high - value.mean]],
                    color=colours["ink"], capsize=3, linewidth=1.2,
                )  # fmt: skip
                panel.annotate(
                    f"{value.mean:.{quantity.digits}f}", (high, place), (5, 0),
                    textcoords="offset points", va="center", color=colours["ink"],
                )  # fmt: skip
            panel.set_xlim(0, 1.32 * panel.dataLim.x1)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[["top", "right", "bottom"]].set_visible(False)
            panel.invert_yaxis()
        row[0].set_yticks([0, 1], ["CE", "ISDA"])
        seeds = min(result.difference.counts)
        for panel, quantity in zip(row, QUANTITIES, strict=True):
            above = f"{training(result.method)}, {seeds} seeds" if panel is row[0] else ""
            panel.set_title(f"{above}\n{quantity.title}", loc="left")
    return figure


def _draw_strengths(groups: Sequence[Strengths], colours: dict[str, str]) -> Figure:
    """Change of the error against cross entropy by λ₀, with the paired 95 % interval."""
    figure = Figure(figsize=(_WIDTH, 0.3 + 2.3 * len(groups)), layout="constrained")
    for panel, group in zip(figure.subplots(len(groups), squeeze=False)[:, 0], groups, strict=True):
        base = group.sides.get(0.0)
        places, means, spreads = [], [], []
        for lambda_0, side in group.sides.items():
            if lambda_0 == 0:
                continue
            value = difference(base.errors, side.errors) if base else side.error
            low, high = value.interval or (value.mean, value.mean)
            places.append(lambda_0)
            means.append(value.mean)
            spreads.append((value.mean - low, high - value.mean))
        panel.errorbar(
            places, means, yerr=list(zip(*spreads, strict=True)), color=colours["method"],
            marker="o", capsize=3, linewidth=1.4,
        )  # fmt: skip
        panel.set_xscale("log")
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.minorticks_off()
        panel.set_xlabel("λ₀")
        if base:
            panel.axhline(0, color=colours["baseline"], linewidth=1.4)
        panel.set_ylabel("error minus that\nof cross entropy" if base else "error, %")
        panel.set_title(group.title, loc="left")
        panel.grid(axis="y", alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_data_sizes(groups: Sequence[DataSizes], colours: dict[str, str]) -> Figure:
    """Cross entropy and ISDA with 95 % intervals against the number of training images."""
    figure = Figure(figsize=(_WIDTH, 0.3 + 2.3 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), len(QUANTITIES), squeeze=False)
    for row, group in zip(panels, groups, strict=True):
        for panel, quantity in zip(row, QUANTITIES, strict=True):
            for place, (label, colour) in enumerate((("CE", "baseline"), ("ISDA", "method"))):
                means, spreads = [], []
                for result in group.results.values():
                    value = estimate(list(quantity.of(result.sides[place]).values()))
                    low, high = value.interval or (value.mean, value.mean)
                    means.append(value.mean)
                    spreads.append((value.mean - low, high - value.mean))
                panel.errorbar(
                    list(group.results), means, yerr=list(zip(*spreads, strict=True)), label=label,
                    color=colours[colour], marker="o", capsize=3, linewidth=1.4,
                )  # fmt: skip
            panel.set_xscale("log")
            panel.set_xticks(list(group.results), [str(number) for number in group.results])
            panel.minorticks_off()
            panel.set_ylim(0, None)
            panel.set_xlabel("images per class")
            above = group.title if panel is row[0] else ""
            panel.set_title(f"{above}\n{quantity.title}", loc="left")
            panel.grid(axis="y", alpha=0.2)
            panel.spines[["top", "right"]].set_visible(False)
        row[0].legend(frameon=False, loc="lower left")
    return figure


def _with_interval(value: Estimate, digits: int) -> str:
    if value.interval is None:
        return f"{value.mean:.{digits}f}"
    low, high = value.interval
    return f"{value.mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _style(ink: str) -> Any:
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    sizes = {"font.size": 10, "axes.titlesize": 10, "svg.hashsalt": "isda", "grid.color": ink}
    return dict.fromkeys(names, ink) | sizes


def _svg(figure: Figure, text: str) -> str:
    """The figure as text, with a description for screen readers and for comparisons."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
    # glyphs are named by their number in the font, which differs between builds of matplotlib
    glyphs = dict.fromkeys(re.findall(r'<path id="(\w+-[0-9a-f]+)"', svg))
    numbers = {name: f"glyph{number}" for number, name in enumerate(glyphs)}
    svg = re.sub(r'(id="|href="#)(\w+-[0-9a-f]+)"',
                 lambda found: f'{found[1]}{numbers.get(found[2], found[2])}"', svg)  # fmt: skip
    return re.sub(r"(<svg[^>]*>)", rf"\1<desc>{escape(text)}</desc>", svg, count=1)
