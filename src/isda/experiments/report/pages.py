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

from isda.experiments.errors import InputError
from isda.experiments.files import write_text
from isda.experiments.published import DASH, PUBLISHED, cell_recipes
from isda.experiments.records import Run
from isda.experiments.report.classes import (
    ComparedPredictions,
    changed_images,
    class_rows,
    compared_predictions,
    confused_rows,
    reliability,
)
from isda.experiments.report.comparison import (
    Comparison,
    advice,
    comparison_rows,
    sentence,
    window_words,
)
from isda.experiments.report.feature_tables import FeatureTable
from isda.experiments.report.intervals import signed
from isda.experiments.report.plots import (
    BASELINE,
    METHOD,
    OTHERS,
    curves,
    lambda_curve,
    reliability_diagram,
)
from isda.experiments.report.sides import Side
from isda.experiments.report.tables import (
    COSTS_TITLE,
    Overview,
    legend,
    our_result,
    pair_rows,
    pairs,
)

if TYPE_CHECKING:
    from isda.experiments.commands.lambda_search import Choice  # which imports the training code

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
        choice: how λ₀ was chosen, if there was a search.
        pictures: PNG pictures of test images by index, given the seed of a run and the indices.
    """
    found, missing = None, ""
    try:
        found = compared_predictions(result)
    except InputError as error:
        missing = str(error)
    answer, reason = advice(result)
    header, *rows = comparison_rows(result)
    seeds = sorted({seed for side in result.sides for seed in side.runs})
    settings = [_settings(side) for side in result.sides]
    text = _page(
        "compare.html",
        result=result,
        verdict=sentence(result),
        header=header,
        rows=rows,
        seeds=[_seed_row(result, seed) for seed in seeds],
        paper=[(side.label, PUBLISHED[side.name]) for side in result.sides
               if side.name in PUBLISHED],
        fields=[(field, value, settings[1][field]) for field, value in settings[0].items()],
        environments=_environments(result.sides),
        curves=_curves(result),
        window=window_words(result),
        answer=answer,
        reason=_with_code(reason),
        choice=choice,
        predictions=found,
        missing=missing,
        **(_image_parts(found, result, pictures) if found else {}),
        lambda_curve=lambda_curve(choice) if choice is not None else None,
    )  # fmt: skip
    write_text(Path(path), text)


def _image_parts(
    found: ComparedPredictions,
    result: Comparison,
    pictures: Callable[[int, list[int]], dict[int, bytes]] | None,
) -> dict[str, Any]:
    """Parts of the page that look at single images: classes, confusions, reliability, examples."""
    examples, shared = [], len(found.sides[0].keys() & found.sides[1].keys())
    for label, images in zip(reversed(found.labels), changed_images(found), strict=True):
        by_seed: dict[int, list[int]] = {}
        for one in images:
            by_seed.setdefault(one.seed, []).append(one.index)
        shown = {seed: pictures(seed, own) if pictures else {} for seed, own in by_seed.items()}
        cards = [
            (one, base64.b64encode(shown[one.seed][one.index]).decode())
            for one in images
            if one.index in shown[one.seed]
        ]
        examples.append((f"Only {label.replace('Cross', 'cross')} is right", cards))
    return {
        "classes": class_rows(found),
        "confused": confused_rows(found),
        "examples": examples,
        "several": shared if shared > 1 and found.same_images else 0,  # seeds
        "reliability": reliability_diagram(
            found.labels, [reliability(side) for side in found.sides], result.method.name
        ),
    }


def write_report_page(
    path: Path | str,
    runs: Iterable[Run],
    costs: Sequence[Mapping[str, str]] = (),
    pictures: Sequence[FeatureTable] = (),
) -> None:
    """Write tables, comparisons and curves as one HTML page without scripts or external files.

    Args:
        path: HTML file.
        runs: run records.
        costs: lines of the records of ``isda cost``, shown below Table 1.
        pictures: records of generators and augmented features, shown at the end.
    """
    found = Overview(runs, costs)
    sections: list[dict[str, Any]] = []
    for table in found.tables:
        header, *rows = pair_rows(pairs(table, found.sides), table.published)
        own = found.results[table.number]
        sections.append({"table": table, "header": header, "rows": rows, "details": own})
    header, *rows = pair_rows(found.others)
    text = _page(
        "report.html",
        overview=found.words,
        sections=sections,
        others={"header": header, "rows": rows, "details": found.others},
        others_title=found.others_title,
        legend=legend,
        ours=lambda cell: our_result(cell, found.sides),
        costs=found.costs,
        costs_title=COSTS_TITLE,
        sentences=found.sentences,
        figures=[_figure(*figure, found.sides) for figure in _FIGURES if found.tables],
        pictures=pictures,
        curves=_curves,
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


def _curves(result: Comparison) -> list[Markup]:
    """Error and training loss of both sides of a comparison against the epoch."""
    sides = list(zip(result.sides, (BASELINE, METHOD), strict=True))
    titles = {"test_error": f"{result.split} error, %", "train_loss": "training loss"}
    return [curves(sides, key, title) for key, title in titles.items()]


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
    """A figure of the paper from the available records, and the recipes that are missing."""
    recipes = cell_recipes(table, cell)
    training = recipes[0].rpartition("-")[0]
    colours = {f"{training}-ce": BASELINE, f"{training}-isda": METHOD}
    rest = itertools.cycle(OTHERS)
    colours |= {name: next(rest) for name in recipes if name not in colours}
    shown = [(sides[name], colours[name]) for name in recipes if name in sides]
    picture = None
    if shown:
        band = len(shown) < 4
        picture = curves(shown, "test_error", "test error, %", band=band, salt=title)
    missing = [name.rpartition("-")[2] for name in recipes if name not in sides]
    command = f"isda table {table} --cell {cell} --resume"
    return {"title": title, "picture": picture, "missing": missing, "command": command}


def _with_code(text: str) -> Markup:
    """Text with command-line flags as code, which is not broken at a hyphen."""
    return Markup(re.sub(r"--[a-z][a-z0-9-]*", r"<code>\g<0></code>", str(escape(text))))


def _seed_row(result: Comparison, seed: int) -> list[str]:
    """A seed, the errors of both sides, and their difference."""
    verified = all(side.runs[seed].verified for side in result.sides if seed in side.runs)
    one, other = errors = [side.errors.get(seed) for side in result.sides]
    cells = [DASH if error is None else f"{error:.2f}" for error in errors]
    change = DASH if one is None or other is None else signed(other - one)
    return [f"{seed}" if verified else f"{seed} (unverified)", *cells, change]


def _settings(side: Side) -> dict[str, str]:
    """Fields of the recipe of a side, and the pretrained weights of its runs if there are some."""
    recipe = side.recipe
    words = {}
    for field in recipe.as_dict():
        value = recipe.augmentation if field == "augment" else getattr(recipe, field)
        if isinstance(value, tuple):
            value = ", ".join(map(str, value)) or "none"
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        words[field] = f"{value:g}" if isinstance(value, float) else str(value) or "none"
    if recipe.pretrained:
        loaded = dict.fromkeys(run.pretrained for run in side.runs.values())
        words["pretrained weights"] = "; ".join(loaded)
    return words
