"""Records of calibrated runs, ``calibration.json`` beside the metrics of a run, and their table.

The temperature T is fitted on training images that were held out; the test images are evaluated
with the unscaled logits and with the logits divided by T. See :mod:`isda.experiments.temperature`.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from isda.experiments.errors import InputError
from isda.experiments.files import read_bytes, write_bytes
from isda.experiments.metrics_lines import is_number, read_line, sealed
from isda.experiments.records import CALIBRATION, Run, summary
from isda.experiments.report.intervals import estimate
from isda.experiments.report.sides import create_side, distinct
from isda.experiments.report.text import text_table, titled_table

__all__ = [
    "Calibration",
    "calibration_block",
    "calibration_text",
    "load_calibration",
    "save_calibration",
]


@dataclass(frozen=True)
class Calibration:
    """Temperature of a run after its last epoch, and its effect on the test images."""

    temperature: float
    """Temperature T, by which the logits are divided."""

    held_out_images: int
    """Number of held-out images, on which T was fitted."""

    held_out_loss: float
    """Their negative log-likelihood with T = 1."""

    held_out_scaled_loss: float
    """Their negative log-likelihood with T."""

    test_images: int
    """Number of test images."""

    test_error: float
    """Test error in percent, which T does not change."""

    test_loss: float
    """Negative log-likelihood of the test images with T = 1."""

    test_ece: float
    """Expected calibration error on the test images with T = 1, as a fraction."""

    scaled_loss: float
    """Negative log-likelihood of the test images with T."""

    scaled_ece: float
    """Expected calibration error on the test images with T, as a fraction."""


def save_calibration(run: Run, calibration: Calibration) -> None:
    """Write the calibration of a run, with a checksum that depends on its recipe and seed."""
    line = sealed(dataclasses.asdict(calibration), run.checksum())
    write_bytes(run.folder / CALIBRATION, line + b"\n")


def load_calibration(run: Run) -> Calibration | None:
    """The calibration of a run; None if it has none.

    Raises:
        InputError: the file is damaged or belongs to another run.
    """
    path = run.folder / CALIBRATION
    if not path.exists():
        return None
    content = read_bytes(path, most=2**16).removesuffix(b"\n")
    try:
        record, checked = read_line(content, run.checksum())
        if not checked or not isinstance(record, dict):
            raise ValueError("has no checksum")
        if record.keys() != {field.name for field in dataclasses.fields(Calibration)}:
            raise ValueError("does not have the expected fields")
        if not all(is_number(value) and value >= 0 for value in record.values()):
            raise ValueError("has values that are not numbers >= 0")
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: it {error}; delete it and run isda calibrate again"
        ) from error
    return Calibration(**record)


def calibration_text(runs: Iterable[Run]) -> str:
    """The calibrated runs as a table for a terminal, a row per recipe."""
    return text_table(_HEADER, [row for _, row in _rows(runs)])


def calibration_block(runs: Iterable[Run]) -> str:
    """Block of a page: a table per training."""
    tables: dict[str, list[list[str]]] = {}
    for training, row in _rows(runs):
        tables.setdefault(training, []).append(row)
    parts = [titled_table(training, _HEADER, rows) for training, rows in tables.items()]
    return "\n\n".join(parts) or "There are no records of calibrated runs yet."


_HEADER = ["method", "error, %", "NLL", "ECE, %", "T", "NLL with T", "ECE with T, %", "seeds"]


def _rows(runs: Iterable[Run]) -> list[tuple[str, list[str]]]:
    """Training and row of each recipe that has calibrated runs."""
    by_name: dict[str, list[Calibration]] = {}
    finished = [run for run in distinct(runs) if summary(run).finished]
    for run in finished:
        found = load_calibration(run)
        if found is not None:
            by_name.setdefault(run.name, []).append(found)
    rows = []
    for name, own in by_name.items():
        side = create_side(finished, name)
        label = side.label
        if side.recipe.lambda_0:
            label += f", λ₀ = {side.recipe.lambda_0:g}"
        columns = (
            ([one.test_error for one in own], 2),
            ([one.test_loss for one in own], 3),
            ([100 * one.test_ece for one in own], 2),
            ([one.temperature for one in own], 2),
            ([one.scaled_loss for one in own], 3),
            ([100 * one.scaled_ece for one in own], 2),
        )
        settings = side.training(without=("hold_out",))
        training = f"{settings}, {own[0].held_out_images} images held out"
        cells = (estimate(values).format(digits) for values, digits in columns)
        rows.append((training, [label, *cells, str(len(own))]))
    return rows
