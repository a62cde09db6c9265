"""Blocks of Markdown pages: what ISDA does to error, NLL and calibration in our runs.

A block is the text between two marks of a page; ``isda report --update`` regenerates it from the
records, so that no number on a page is typed by hand.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from isda.experiments.calibration import calibration_block
from isda.experiments.cost_records import cost_block
from isda.experiments.errors import InputError, reason, unknown
from isda.experiments.files import write_text
from isda.experiments.published import DASH, PUBLISHED
from isda.experiments.recipes import RECIPES, train_command
from isda.experiments.records import Run, summary
from isda.experiments.report.comparison import (
    Comparison,
    comparisons,
    data_sizes,
    pair_up,
    strengths,
    verdict,
)
from isda.experiments.report.feature_tables import FeatureTable
from isda.experiments.report.intervals import difference, signed
from isda.experiments.report.sides import (
    QUANTITIES,
    Quantity,
    Side,
    create_sides,
    recipe_order,
)
from isda.experiments.report.text import escape_markdown, markdown_rows, titled_table

__all__ = ["BLOCKS", "recipes_block", "update_markdown"]


def update_markdown(
    path: Path | str,
    runs: Iterable[Run],
    costs: Sequence[Mapping[str, str]] = (),
    pictures: Sequence[FeatureTable] = (),
) -> bool:
    """Regenerate the blocks of a Markdown file; return whether the file changed.

    The text between ``<!-- runs:NAME -->`` and ``<!-- /runs -->`` is replaced by the table of the
    recipes whose names start with NAME. ``all`` selects all recipes, ``paper`` the unchanged
    recipes that the paper has a number for. ``NAME:BLOCK`` shows one of :data:`BLOCKS`,
    ``all:cost`` the costs, and ``NAME:pictures`` the pictures in a folder called NAME.

    Args:
        path: Markdown file.
        runs: run records.
        costs: lines of the records of ``isda cost``.
        pictures: records of generators and augmented features.
    """
    path, runs = Path(path), list(runs)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {reason(error)}") from error
    begin, end = r"<!-- runs:(\S+) -->", r"<!-- /runs -->"
    pattern = rf"({begin}\n)((?:(?!{begin}).)*?)({end})"
    found = len(re.findall(pattern, text, flags=re.DOTALL))
    if not found or not found == len(re.findall(begin, text)) == len(re.findall(end, text)):
        raise InputError(
            f"{path} must have at least one <!-- runs:NAME --> on a line of its own, and a "
            "<!-- /runs --> for each"
        )

    def block(match: re.Match[str]) -> str:
        try:
            content = _content(match[2], runs, costs, pictures, path)
        except InputError as error:
            raise InputError(f"{path}: <!-- runs:{match[2]} -->: {error}") from error
        return f"{match[1]}{content}\n{match[5]}"

    updated = re.sub(pattern, block, text, flags=re.DOTALL)
    if updated != text:
        write_text(path, updated)
    return updated != text


def _content(
    mark: str,
    runs: Sequence[Run],
    costs: Sequence[Mapping[str, str]],
    pictures: Sequence[FeatureTable],
    page: Path,
) -> str:
    """What belongs between the marks with this name, with an empty line around text."""
    name, _, kind = mark.partition(":")
    if kind == "pictures":
        return f"\n{_pictures(name, pictures, page)}\n"
    if kind == "cost":
        if not costs:
            raise InputError("needs the records of isda cost: give them with --costs")
        return f"\n{cost_block(costs)}\n"
    if name == "paper":
        runs = [run for run in runs if run.name in PUBLISHED]
    elif name != "all":
        runs = [run for run in runs if run.name.startswith(name)]
        if not runs:
            raise InputError(f"there are no runs whose names begin with {name}")
    if not kind:
        return recipes_block(runs)
    if kind not in BLOCKS:
        raise unknown("block", kind, [*BLOCKS, "cost", "pictures"])
    _, left_out = create_sides(runs)
    if left_out:  # a table must not lose seeds silently
        raise InputError("; ".join(left_out.values()))
    return f"\n{BLOCKS[kind](runs)}\n"


def _pictures(name: str, pictures: Sequence[FeatureTable], page: Path) -> str:
    """The records of a folder with this name, each with its picture."""
    found = [one.block(page) for one in pictures if one.folder.resolve().name == name]
    if not found:
        raise InputError(f"needs a folder of records called {name}: give it with --pictures")
    return "\n\n".join(found)


def recipes_block(runs: Iterable[Run]) -> str:
    """Table: the ISDA recipes that have records, with their baselines, next to the paper."""
    rows = []
    for result in _some_comparisons(runs):
        paper = [str(PUBLISHED.get(side.name, DASH)) for side in result.sides]
        ours = [side.error.format() for side in result.sides]
        change = signed(result.difference)
        rows.append([result.method.name, *paper, *ours, change, result.seeds])
    header = ["recipe", "paper: baseline", "paper: ISDA", "ours: baseline", "ours: ISDA"]
    header += ["difference (95 % interval)", "seeds"]
    return markdown_rows(header, rows, code=(0,), pad=False)


def _effect(runs: Iterable[Run]) -> str:
    """Tables: error, NLL and ECE of cross entropy and ISDA with the interval of the difference.

    First the recipes as they are, then those with changed settings, by data set and network.
    """
    usual: list[Comparison] = []
    changed: dict[str, list[Comparison]] = {}
    for result in _some_comparisons(runs):
        subject = result.method.subject
        own = changed.setdefault(subject, []) if "+" in result.method.name else usual
        own.append(result)
    parts = []
    if usual:
        rows = [[result.title, *_effect_cells(result), result.seeds] for result in usual]
        parts.append(markdown_rows(["training", *_TITLES, "seeds"], rows, pad=False))
    for subject, results in changed.items():
        rows = [
            [result.settings, *_effect_cells(result), result.seeds]
            for result in sorted(results, key=_settings_order)
        ]
        parts.append(titled_table(subject, ["settings", *_TITLES, "seeds"], rows))
    return "\n\n".join(parts)


def _summary(runs: Iterable[Run]) -> str:
    """List: the trainings by verdict on the test error, best first; then worse NLL and ECE."""
    found: dict[str, list[str]] = {}
    for result in _some_comparisons(runs):
        for quantity in QUANTITIES[1:]:
            change = result.change(quantity)
            if change is not None and verdict(change) == "higher":
                name = quantity.title.removesuffix(", %")
                text = f"{result.title}: {name} {signed(change, quantity.digits)}"
                found.setdefault("worse", []).append(escape_markdown(text))
        text = f"{result.title}: {signed(result.difference)}"
        found.setdefault(verdict(result.difference), []).append(escape_markdown(text))
    lines = []
    for word, title in _SUMMARY.items():
        entries = found.get(word, ["none in our records"])
        lines += [f"* **{title}**", *(f"    * {entry}" for entry in entries)]
    return "\n".join(lines)


def _strengths(runs: Iterable[Run]) -> str:
    """Tables: results by λ₀, one table for each training with several values."""
    header = ["λ₀", *_TITLES, "error minus cross entropy (95 % interval)", "seeds"]
    parts = []
    for title, sides in strengths(runs):
        rows = []
        baseline = sides.get(0.0)
        for lambda_0, side in sides.items():
            cells = [_cell(side, quantity) for quantity in QUANTITIES]
            change = DASH
            if baseline is not None and lambda_0 > 0:
                change = signed(difference(baseline.errors, side.errors))
            name = f"{lambda_0:g}" if lambda_0 else "0 (cross entropy)"
            rows.append([name, *cells, change, str(len(side.runs))])
        parts.append(titled_table(title, header, rows))
    return "\n\n".join(parts) or "There are no records of a training with several values yet."


def _data_sizes(runs: Iterable[Run]) -> str:
    """Tables: error, NLL and ECE by number of training images."""
    header = ["images per class", *_TITLES, "batch size", "seeds"]
    parts = []
    for title, results in data_sizes(runs):
        rows = []
        for number, result in results.items():
            batch_size = str(result.method.recipe.batch_size)
            rows.append([str(number), *_effect_cells(result), batch_size, result.seeds])
        parts.append(titled_table(title, header, rows))
    return "\n\n".join(parts) or "There are no records with several numbers of images yet."


def _losses(runs: Iterable[Run]) -> str:
    """Tables: other losses and ISDA, each against cross entropy, by training."""
    sides, _ = create_sides(runs)
    groups: dict[str, list[Comparison]] = {}
    for result in sorted(pair_up(sides.values()), key=lambda result: recipe_order(result.method)):
        groups.setdefault(result.baseline.training(), []).append(result)
    parts = []
    for title, results in groups.items():
        if any(result.method.recipe.method != "isda" for result in results):
            rows = [[_loss(result), *_effect_cells(result), result.seeds] for result in results]
            parts.append(titled_table(title, ["loss", *_TITLES, "seeds"], rows))
    return "\n\n".join(parts) or "There are no records of other losses yet."


def _times(runs: Iterable[Run]) -> str:
    """Table: the commands that train the runs, and the time that they took."""
    sides, _ = create_sides(run for run in runs if run.name.partition("+")[0] in RECIPES)
    rows = []
    for side in sorted(sides.values(), key=recipe_order):
        minutes = sum(summary(run).seconds for run in side.runs.values()) / 60
        devices = dict.fromkeys(
            str(place.get("device")) for run in side.runs.values() for place in run.environments
        )
        command = train_command(side.name, side.recipe, side.runs)
        rows.append([command, ", ".join(devices), f"{minutes:.1f}"])
    return markdown_rows(["command", "device", "minutes"], rows, left=(0, 1), code=(0,), pad=False)


BLOCKS: dict[str, Callable[[Sequence[Run]], str]] = {
    "effect": _effect,
    "summary": _summary,
    "lambda_0": _strengths,
    "images": _data_sizes,
    "losses": _losses,
    "calibration": calibration_block,
    "times": _times,
}
"""Blocks by name, from run records."""


def _some_comparisons(runs: Iterable[Run]) -> list[Comparison]:
    """ISDA compared with cross entropy; raises InputError if no training has records of both."""
    found = comparisons(runs)
    if not found:
        raise InputError("no records of ISDA and its baseline")
    return found


def _loss(result: Comparison) -> str:
    """Name of the loss, with the settings that cross entropy does not have."""
    method, shared = result.method, {*result.baseline.settings(), result.method.label}
    words = [word for word in method.settings() if word not in shared]
    strength = [f"λ₀ = {method.recipe.lambda_0:g}"] * (method.recipe.method == "isda")
    return ", ".join([method.label, *words, *strength])


def _settings_order(result: Comparison) -> tuple[int, list[str], float]:
    """Sort key of changed recipes with the same data and network: number of images, others, λ₀."""
    recipe = result.method.recipe
    return recipe.images_per_class, result.method.settings(), recipe.lambda_0


def _effect_cells(result: Comparison) -> list[str]:
    """Both means and the difference of every quantity."""
    cells = []
    for quantity in QUANTITIES:
        change = result.change(quantity)
        cells.append(DASH)
        if change is not None:
            cells[-1] = f"{result.means(quantity)}: {signed(change, quantity.digits)}"
    return cells


def _cell(side: Side, quantity: Quantity) -> str:
    """Mean and standard deviation of a quantity, or a dash."""
    if not side.values(quantity.value):
        return DASH
    return side.estimate(quantity).format(quantity.digits)


_TITLES = [quantity.title for quantity in QUANTITIES]
_SUMMARY = {
    "lower": "Lower error, significant at 95 %:",
    "not significant": "No significant difference of the error:",
    "higher": "Higher error, significant at 95 %:",
    "worse": "Higher NLL or calibration error (ECE in percentage points), significant at 95 %:",
    "too few seeds": "Too few seeds for an interval:",
}
