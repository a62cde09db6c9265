"""Records of calibrated runs: ``calibration.json`` beside the metrics of a run.

The temperature T is fitted on training images that were held out; the test images are evaluated
with the logits as they are, and divided by T. See :mod:`isda.experiments.temperature`.
"""

import dataclasses
from dataclasses import dataclass

from isda.experiments.errors import InputError
from isda.experiments.files import read_bytes, write_bytes
from isda.experiments.metrics_lines import is_number, read_line, sealed
from isda.experiments.records import CALIBRATION, Run

__all__ = ["Calibration", "load_calibration", "save_calibration"]


@dataclass(frozen=True)
class Calibration:
    """Temperature of a run after its last epoch, and what it changes on the test images."""

    temperature: float
    """T, the logits are divided by it."""

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
            raise ValueError("has other fields")
        if not all(is_number(value) and value >= 0 for value in record.values()):
            raise ValueError("has values that are not numbers >= 0")
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: it {error}; without it, isda calibrate measures again"
        ) from error
    return Calibration(**record)
