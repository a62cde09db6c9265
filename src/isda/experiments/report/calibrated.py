"""NLL and calibration error before and after temperature scaling, by method."""

from collections.abc import Iterable, Sequence

from isda.experiments.calibration import Calibration, load_calibration
from isda.experiments.records import Run, summary
from isda.experiments.report.comparison import create_side, distinct
from isda.experiments.report.intervals import estimate
from isda.experiments.report.text import markdown_rows, text_table

__all__ = ["calibration_rows", "calibration_text", "calibrations"]


def calibration_rows(runs: Iterable[Run], prefix: str = "") -> list[list[str]]:
    """Header, then one row per recipe that has calibrated runs.

    Args:
        runs: run records.
        prefix: prefix of the names of the recipes.
    """
    by_name: dict[str, dict[int, Calibration]] = {}
    finished = [run for run in distinct(runs) if summary(run).finished]
    for run in finished:
        found = load_calibration(run) if run.name.startswith(prefix) else None
        if found is not None:
            by_name.setdefault(run.name, {})[run.seed] = found
    rows = [_HEADER]
    for name, by_seed in by_name.items():
        side = create_side(finished, name)
        training = name.partition("+")[0].rpartition("-")[0]
        label = side.label
        if side.recipe.lambda_0:
            label += f", λ₀ = {side.recipe.lambda_0:g}"
        own = list(by_seed.values())
        rows.append(
            [
                f"{training}, {own[0].held_out_images} held out",
                label,
                _cell([one.test_error for one in own], 2),
                _cell([one.test_loss for one in own], 3),
                _cell([100 * one.test_ece for one in own], 2),
                _cell([one.temperature for one in own], 2),
                _cell([one.scaled_loss for one in own], 3),
                _cell([100 * one.scaled_ece for one in own], 2),
                str(len(own)),
            ]
        )
    return rows


def calibration_text(runs: Iterable[Run]) -> str:
    """The calibrated runs as a table for a terminal."""
    header, *rows = calibration_rows(runs)
    return text_table(header[1:], [row[1:] for row in rows])


def calibrations(runs: Sequence[Run], prefix: str) -> str:
    """Block of a page: the calibrated runs as Markdown."""
    header, *rows = calibration_rows(runs, prefix)
    if not rows:
        return "There are no records of calibrated runs yet."
    return markdown_rows(header, rows, left=(0, 1), pad=False)


_HEADER = ["training", "method", "error, %", "NLL", "ECE, %", "T", "NLL with T", "ECE with T, %",
           "seeds"]  # fmt: skip


def _cell(values: list[float], digits: int) -> str:
    return estimate(values).format(digits)
