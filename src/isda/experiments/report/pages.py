"""Comparisons and the whole report as self-contained HTML pages."""

import base64
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from isda.experiments.files import write_text
from isda.experiments.published import PUBLISHED
from isda.experiments.records import Run
from isda.experiments.report.classes import (
    Evidence,
    changed_images,
    class_rows,
    confused_rows,
    evidence,
    reliability,
)
from isda.experiments.report.comparison import (
    Comparison,
    Side,
    advice,
    comparison_rows,
    sentence,
    window_words,
)
from isda.experiments.report.curves import BASELINE, METHOD, OTHERS, Line, curves
from isda.experiments.report.diagrams import lambda_curve, reliability_diagram
from isda.experiments.report.intervals import signed
from isda.experiments.report.overview import COSTS_TITLE, overview
from isda.experiments.report.paper_tables import NAMES, TABLES, cell_recipes
from isda.experiments.report.tables import our_result, pair_rows, pairs
from isda.experiments.settings import Recipe

if TYPE_CHECKING:
    from isda.experiments.commands.lambda_search import Choice  # which imports the training code
from isda.experiments.report.pictures_of_features import FeaturePictures

__all__ = ["write_comparison_page", "write_report_page"]


def write_comparison_page(
    path: Path | str,
    result: Comparison,
    *,
    choice: "Choice | None" = None,
    pictures: Callable[[int, list[int]], dict[int, bytes]] | None = None,
) -> None:
    """Write a comparison as one HTML page without scripts or external files.

    Args:
        path: HTML file.
        result: the comparison.
        choice: how λ₀ was chosen, if it was searched for.
        pictures: PNG pictures of test images by index, given the seed of a run and the indices.
    """
    found = evidence(result)
    answer, reason = advice(result)
    header, *rows = comparison_rows(result)
    seeds = sorted({seed for side in result.sides for seed in side.runs})
    fields = [
        (field, *(_setting(side.recipe, field) for side in result.sides))
        for field in result.method.recipe.as_dict()
    ]
    if result.method.recipe.pretrained:
        fields.append(("pretrained weights", *(_pretrained(side) for side in result.sides)))
    text = _page(
        "compare.html",
        result=result,
        verdict=sentence(result),
        header=header,
        rows=rows,
        seeds=[
            (_seed(result, seed), *(_optional(side.errors.get(seed)) for side in result.sides),
             _seed_difference(result, seed))
            for seed in seeds
        ],
        paper=[(side.label, PUBLISHED[side.name]) for side in result.sides
               if side.name in PUBLISHED],
        fields=fields,
        environments=_environments(result.sides),
        error_curves=curves(_lines(result), "test_error", f"{result.split} error, %"),
        loss_curves=curves(_lines(result), "train_loss", "training loss"),
        window=window_words(result),
        answer=answer,
        reason=_with_code(reason),
        choice=choice,
        evidence=found,
        **(_image_parts(found, result, pictures) if found else {}),
        lambda_curve=lambda_curve(choice) if choice is not None else None,
    )  # fmt: skip
    write_text(Path(path), text)


def _image_parts(
    found: Evidence,
    result: Comparison,
    pictures: Callable[[int, list[int]], dict[int, bytes]] | None,
) -> dict[str, Any]:
    """Parts of the page that look at single images: classes, confusions, reliability, examples."""
    labels = [side.label for side in result.sides]
    classes, confused = class_rows(found), confused_rows(found)
    for rows, first in ((classes, 2), (confused, 1)):
        rows[0][first : first + 2] = labels
    examples = []
    for title, images in zip(
        (f"Only {labels[1]} is right", f"Only {labels[0]} is right".replace("Cross", "cross")),
        changed_images(found),
        strict=True,
    ):
        by_seed: dict[int, list[int]] = {}
        for one in images:
            by_seed.setdefault(one.seed, []).append(one.index)
        shown = {seed: pictures(seed, own) if pictures else {} for seed, own in by_seed.items()}
        cards = [
            (one, base64.b64encode(shown[one.seed][one.index]).decode())
            for one in images
            if one.index in shown[one.seed]
        ]
        examples.append((title, cards))
    return {
        "classes": classes,
        "confused": confused,
        "examples": examples,
        "several": len(found.sides[0]) > 1 and found.same_images,
        "reliability": reliability_diagram(
            labels, [reliability(side) for side in found.sides], result.method.name
        ),
    }


def write_report_page(
    path: Path | str,
    runs: Iterable[Run],
    costs: Sequence[list[str]] = (),
    pictures: Sequence[FeaturePictures] = (),
) -> None:
    """Write tables, comparisons and curves as one HTML page without scripts or external files.

    Args:
        path: HTML file.
        runs: run records.
        costs: rows of :func:`isda.experiments.report.costs.cost_rows`, shown below Table 1.
        pictures: records of generators and augmented features, shown at the end.
    """
    found = overview(runs)
    sections: list[dict[str, Any]] = []
    for table in TABLES.values():
        header, *rows = pair_rows(pairs(table, found.sides), table.published)
        own = [
            r for r in pairs(table, found.sides) if found.table_of[r.method.name] == table.number
        ]
        sections.append({"table": table, "header": header, "rows": rows, "details": own})
    header, *rows = pair_rows(found.others)
    text = _page(
        "report.html",
        overview=found.words,
        sections=sections,
        others={"header": header, "rows": rows, "details": found.others},
        ours=lambda cell: our_result(cell, found.sides),
        costs=costs,
        costs_title=COSTS_TITLE,
        sentences=found.sentences,
        figures=[_figure(*figure, found.sides) for figure in _FIGURES],
        pictures=pictures,
        curves=curves,
        lines=_lines,
        names=NAMES,
        environments=_environments(found.sides.values()),
    )
    write_text(Path(path), text)


def _page(template: str, **content: Any) -> str:
    """Render one of the templates in this folder."""
    folder = files("isda.experiments.report")
    engine = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return engine.get_template(template).render(**content)


def _lines(result: Comparison) -> list[Line]:
    """Both sides of a comparison as lines of a plot."""
    return [
        Line(side.label, list(side.runs.values()), colour)
        for side, colour in zip(result.sides, (BASELINE, METHOD), strict=True)
    ]


def _environments(sides: Iterable[Side]) -> dict[str, list[str]]:
    """All versions, devices and commits of the runs, by key, without duplicates."""
    found: dict[str, list[str]] = {}
    for side in sides:
        for run in side.runs.values():
            for record in run.environments:
                for key, value in record.items():
                    if value is not None and str(value) not in found.setdefault(key, []):
                        found[key].append(str(value))
    return found


# The paper's figures of curves: title, table and cell whose recipes they show.
_FIGURES = (
    ("Wide-ResNet-28-10 on CIFAR-100 (Figure 2)", 2, "cifar100/wide_resnet28_10"),
    ("ResNet-110 on CIFAR-10 (Appendix D)", 4, "cifar10/resnet110"),
    ("ResNet-110 on CIFAR-100 (Appendix D)", 4, "cifar100/resnet110"),
)


def _figure(title: str, table: int, cell: str, sides: Mapping[str, Side]) -> dict[str, Any]:
    """A figure of the paper from the records there are, and the recipes that are missing."""
    recipes = cell_recipes(table, cell)
    training = recipes[0].rpartition("-")[0]
    colours = {f"{training}-ce": BASELINE, f"{training}-isda": METHOD}
    rest = itertools.cycle(OTHERS)
    colours |= {name: next(rest) for name in recipes if name not in colours}
    lines = [
        Line(sides[name].label, list(sides[name].runs.values()), colours[name])
        for name in recipes
        if name in sides
    ]
    picture = None
    if lines:
        band = len(lines) < 4
        picture = curves(lines, "test_error", "test error, %", band=band, salt=title)
    missing = [name.rpartition("-")[2] for name in recipes if name not in sides]
    command = f"isda table {table} --cell {cell} --resume"
    return {"title": title, "picture": picture, "missing": missing, "command": command}


def _with_code(text: str) -> Markup:
    """Text with command-line flags as code, which is not broken at a hyphen."""
    return Markup(re.sub(r"--[a-z][a-z0-9-]*", r"<code>\g<0></code>", str(escape(text))))


def _seed(result: Comparison, seed: int) -> str:
    runs = [side.runs[seed] for side in result.sides if seed in side.runs]
    return str(seed) if all(run.verified for run in runs) else f"{seed} (unverified)"


def _seed_difference(result: Comparison, seed: int) -> str:
    one, other = (side.errors.get(seed) for side in result.sides)
    return "–" if one is None or other is None else signed(other - one)


def _optional(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _pretrained(side: Side) -> str:
    """The files that the runs of a side were started from, in words."""
    return "; ".join(dict.fromkeys(run.pretrained for run in side.runs.values()))


def _setting(recipe: Recipe, field: str) -> str:
    value = recipe.augmentation if field == "augment" else getattr(recipe, field)
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
