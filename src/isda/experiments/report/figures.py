"""Figures of pages, from run records: an SVG for light and one for dark backgrounds each.

They are drawn for a text column of 7 inches. The description of the SVG contains the numbers, so
that a figure can be compared with its records.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import escape
from matplotlib.figure import Figure

from isda.experiments.errors import InputError
from isda.experiments.files import create_folder, write_text
from isda.experiments.published import PUBLISHED
from isda.experiments.records import Run
from isda.experiments.report.comparison import (
    Comparison,
    comparisons,
    data_sizes,
    strengths,
)
from isda.experiments.report.intervals import Difference, Estimate, difference, signed
from isda.experiments.report.plots import svg_of
from isda.experiments.report.sides import QUANTITIES, Quantity, Side

__all__ = ["write_figures"]

_Strengths = Sequence[tuple[str, dict[float, Side]]]
_DataSizes = Sequence[tuple[str, dict[int, Comparison]]]

_MOST_TRAININGS = 4  # in the figure of the effect
_WIDTH = 7.0  # inches
_LETTERS = 85  # of a line of this width
_THEMES = {
    "light": {"ink": "#24292f", "baseline": "#9a6700", "method": "#0969da"},
    "dark": {"ink": "#d7dde3", "baseline": "#e3b341", "method": "#6cb6ff"},
}


def write_figures(folder: Path | str, runs: Iterable[Run]) -> list[Path]:
    """Write the figure ``effect`` for trainings of the paper; ``lambda_0`` if the records have
    several λ₀; ``images`` if they have several numbers of training images.

    Args:
        folder: folder for ``NAME-light.svg`` and ``NAME-dark.svg``.
        runs: run records.

    Returns:
        The files.

    Raises:
        InputError: there is nothing to draw.
    """
    folder, runs = Path(folder), list(runs)
    shown = {name: found for name, (find, _, _) in _FIGURES.items() if (found := find(runs))}
    if not shown:
        raise InputError(
            "the records have nothing for a figure: it needs a training of the paper with two "
            "seeds, several lambda_0, or several images_per_class"
        )
    create_folder(folder)
    written = []
    for theme, colours in _THEMES.items():
        with matplotlib.rc_context(_style(colours["ink"])):
            for name, found in shown.items():
                _, draw, describe = _FIGURES[name]
                written.append(folder / f"{name}-{theme}.svg")
                write_text(written[-1], _svg(draw(found, colours), describe(found)))
    return written


def _find_effect(runs: Sequence[Run]) -> list[Comparison]:
    """Trainings of the paper with an interval, those with the most seeds first."""
    own = [r for r in comparisons(runs) if r.difference.interval and r.method.name in PUBLISHED]
    own = list(filter(_has_all, own))
    return sorted(own, key=lambda one: -min(one.difference.counts))[:_MOST_TRAININGS]


def _find_data_sizes(runs: Sequence[Run]) -> _DataSizes:
    return [one for one in data_sizes(runs) if all(map(_has_all, one[1].values()))]


def _has_all(result: Comparison) -> bool:
    """Whether both sides have recorded all quantities."""
    return all(result.change(quantity) is not None for quantity in QUANTITIES)


def _describe_effect(results: Sequence[Comparison]) -> str:
    return " ".join(
        _description(result.method.training(), result, quantity, quantity.digits)
        for result in results
        for quantity in QUANTITIES
    )


def _describe_strengths(groups: _Strengths) -> str:
    parts = []
    for title, sides in groups:
        base = sides.get(0.0)
        for lambda_0, side in sides.items():
            text = f"{title}, λ₀ = {lambda_0:g}: {_with_interval(side.error, 2)} %"
            if base and lambda_0 > 0:
                text += f", minus cross entropy {signed(difference(base.errors, side.errors))}"
            parts.append(f"{text}.")
    return " ".join(parts)


def _describe_data_sizes(groups: _DataSizes) -> str:
    return " ".join(
        _description(f"{title}, {number} images per class", result, quantity, 3)
        for title, results in groups
        for number, result in results.items()
        for quantity in QUANTITIES
    )


def _description(title: str, result: Comparison, quantity: Quantity, digits: int) -> str:
    sides = (f"{x.label} {_with_interval(x.estimate(quantity), digits)}" for x in result.sides)
    return f"{title}, {quantity.title}: {', '.join(sides)}."


def _draw_effect(results: Sequence[Comparison], colours: dict[str, str]) -> Figure:
    """Bars from 0 for cross entropy and ISDA with 95 % intervals, a row per training."""
    figure = Figure(figsize=(_WIDTH, 0.1 + 1.15 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), len(QUANTITIES), squeeze=False)
    for row, result in zip(panels, results, strict=True):
        for panel, quantity in zip(row, QUANTITIES, strict=True):
            for place, side in enumerate(result.sides):
                value = side.estimate(quantity)
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
        _set_titles(row, f"{result.method.training()}, {min(result.difference.counts)} seeds")
    return figure


def _draw_strengths(groups: _Strengths, colours: dict[str, str]) -> Figure:
    """Change of the error against cross entropy by λ₀, with the paired 95 % interval."""
    figure = Figure(figsize=(_WIDTH, 0.3 + 2.3 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False)[:, 0]
    for panel, (title, sides) in zip(panels, groups, strict=True):
        base = sides.get(0.0)
        values: dict[float, Estimate | Difference] = {
            lambda_0: difference(base.errors, side.errors) if base else side.error
            for lambda_0, side in sides.items()
            if lambda_0 > 0
        }
        _draw_intervals(panel, values, color=colours["method"])
        panel.set_xscale("log")
        panel.set_xticks(list(values), [f"{place:g}" for place in values])
        panel.minorticks_off()
        panel.set_xlabel("λ₀")
        if base:
            panel.axhline(0, color=colours["baseline"], linewidth=1.4)
        panel.set_ylabel("error minus that\nof cross entropy" if base else "error, %")
        panel.set_title(textwrap.fill(title, _LETTERS), loc="left")
        panel.grid(axis="y", alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_data_sizes(groups: _DataSizes, colours: dict[str, str]) -> Figure:
    """Cross entropy and ISDA with 95 % intervals against the number of training images."""
    figure = Figure(figsize=(_WIDTH, 0.3 + 2.3 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), len(QUANTITIES), squeeze=False)
    for row, (title, results) in zip(panels, groups, strict=True):
        for panel, quantity in zip(row, QUANTITIES, strict=True):
            for place, (label, colour) in enumerate((("CE", "baseline"), ("ISDA", "method"))):
                values = {
                    number: result.sides[place].estimate(quantity)
                    for number, result in results.items()
                }
                _draw_intervals(panel, values, color=colours[colour], label=label)
            panel.set_xscale("log")
            panel.set_xticks(list(results), [str(number) for number in results])
            panel.minorticks_off()
            panel.set_ylim(0, None)
            panel.set_xlabel("images per class")
            panel.grid(axis="y", alpha=0.2)
            panel.spines[["top", "right"]].set_visible(False)
        _set_titles(row, title)
        row[0].legend(frameon=False, loc="lower left")
    return figure


_Find = Callable[[Sequence[Run]], Sequence[Any]]
_Draw = Callable[[Any, dict[str, str]], Figure]
_Describe = Callable[[Any], str]
_FIGURES: dict[str, tuple[_Find, _Draw, _Describe]] = {
    "effect": (_find_effect, _draw_effect, _describe_effect),
    "lambda_0": (strengths, _draw_strengths, _describe_strengths),
    "images": (_find_data_sizes, _draw_data_sizes, _describe_data_sizes),
}


def _set_titles(row: Sequence[Any], title: str) -> None:
    """Quantities above the panels of a row, and above them a title as wide as the row."""
    for panel, quantity in zip(row, QUANTITIES, strict=True):
        panel.set_title(f"\n{quantity.title}", loc="left")
    size = matplotlib.rcParams["axes.titlesize"]
    above = row[0].annotate(
        title, (0, 1), (0, 1.9 * size), xycoords="axes fraction", textcoords="offset points",
        fontsize=size,
    )  # fmt: skip
    above.set_in_layout(False)  # it would widen the first panel


def _draw_intervals(panel: Any, values: Mapping[Any, Estimate | Difference], **style: Any) -> None:
    """Line through means by their place, with bars for the 95 % intervals."""
    ends = [value.interval or (value.mean, value.mean) for value in values.values()]
    means = [value.mean for value in values.values()]
    spreads = [(mean - low, high - mean) for mean, (low, high) in zip(means, ends, strict=True)]
    panel.errorbar(
        list(values), means, yerr=list(zip(*spreads, strict=True)), marker="o", capsize=3,
        linewidth=1.4, **style,
    )  # fmt: skip


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
    svg = re.sub(r"[ \t]+$", "", svg_of(figure), flags=re.MULTILINE)
    # glyphs are named by their number in the font, which differs between builds of matplotlib
    glyphs = dict.fromkeys(re.findall(r'<path id="(\w+-[0-9a-f]+)"', svg))
    numbers = {name: f"glyph{number}" for number, name in enumerate(glyphs)}
    svg = re.sub(r'(id="|href="#)(\w+-[0-9a-f]+)"',
                 lambda found: f'{found[1]}{numbers.get(found[2], found[2])}"', svg)  # fmt: skip
    return re.sub(r"(<svg[^>]*>)", rf"\1<desc>{escape(text)}</desc>", svg, count=1)
