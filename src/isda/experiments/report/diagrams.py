"""Diagrams of a comparison: validation error over λ₀, and reliability."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from isda.experiments.report.curves import BASELINE, INK, METHOD, frame, plain, plot
from isda.experiments.report.intervals import mean_interval

if TYPE_CHECKING:
    from isda.experiments.commands.lambda_search import Choice  # which imports the training code

__all__ = ["lambda_curve", "reliability_diagram"]


def lambda_curve(choice: "Choice") -> Markup:
    """Validation error over λ₀, one line per round of a search.

    Points are seeds, lines join their means, and bars are 95 % intervals of the mean where there
    are several seeds; they may be longer than the plot.
    """
    with plot(x="λ₀", y="validation error, %", salt=choice.chosen.name) as drawn:
        axes, framed = drawn.axes, []
        for trials, style in zip(reversed(choice.rounds), ("-", ":", "--"), strict=False):
            trials = tuple(t for t in trials if t.recipe.method == "isda")
            sides = sorted(trials, key=lambda side: side.recipe.lambda_0)
            x = [side.recipe.lambda_0 for side in sides]
            epochs = sides[0].recipe.epochs
            label = f"{epochs} epochs, {len(sides[0].runs)} seed{'s' * (len(sides[0].runs) > 1)}"
            means = [side.error.mean for side in sides]
            colour = METHOD if style == "-" else INK
            axes.plot(x, means, style, color=colour, linewidth=1.6, label=label)
            for place, side in zip(x, sides, strict=True):
                values = list(side.errors.values())
                framed += values
                axes.plot([place] * len(values), values, "o", color=colour, markersize=3)
                if len(values) > 1:
                    low, high = mean_interval(values)
                    axes.vlines(place, low, high, color=colour, alpha=0.5, linewidth=1.2)
        chosen = choice.chosen
        axes.plot([chosen.recipe.lambda_0], [chosen.error.mean], "o", color=METHOD, markersize=9,
                  markerfacecolor="none", label=f"chosen: {chosen.recipe.lambda_0:g}")  # fmt: skip
        frame(axes, framed)
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return drawn.svg


def reliability_diagram(
    labels: Sequence[str], bins: Sequence[Sequence[tuple[float, float, float]]], salt: str
) -> Markup:
    """Accuracy against confidence of both sides; on the diagonal, confidence is what it claims.

    Args:
        labels: names of baseline and method.
        bins: mean confidence, accuracy and share of the images of every bin, of both sides.
        salt: makes the element ids of two plots on one page different.
    """
    with plot(x="confidence, %", y="accuracy, %", salt=f"reliability {salt}") as drawn:
        axes = drawn.axes
        axes.plot([0, 100], [0, 100], color=INK, alpha=0.4, linewidth=1, linestyle="--")
        for label, own, colour in zip(labels, bins, (BASELINE, METHOD), strict=True):
            x, y, share = ([100 * value for value in column] for column in zip(*own, strict=True))
            axes.plot(x, y, color=colour, linewidth=1.6, label=plain(label))
            axes.scatter(x, y, s=[6 + 1.2 * part for part in share], color=colour, linewidth=0)
        low = min(
            min(100 * confidence, 100 * accuracy) for own in bins for confidence, accuracy, _ in own
        )
        axes.set_xlim(max(0, low - 5), 101)
        axes.set_ylim(max(0, low - 5), 101)
        axes.legend(frameon=False, labelcolor=INK)
    return drawn.svg
