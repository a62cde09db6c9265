"""Predictions of a finished run on the test images: ``predictions.npz`` in its folder.

The file holds arrays of numbers and class names; nothing in it is unpickled. The file is optional:
without it, a comparison lacks the parts about single images.
"""

import io
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isda.experiments.errors import InputError, reason
from isda.experiments.files import read_bytes, write_bytes
from isda.experiments.records import Run

__all__ = ["Predictions", "load_predictions", "save_predictions"]


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a network predicts for every test image, in their order."""

    target: NDArray[np.int32]
    """Class of the image, (N,)."""

    prediction: NDArray[np.int32]
    """Predicted class, (N,)."""

    confidence: NDArray[np.float32]
    """Probability of the predicted class, (N,)."""

    target_probability: NDArray[np.float32]
    """Probability of the class of the image, (N,)."""

    class_names: tuple[str, ...]
    """Names of the classes."""

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Whether the prediction is wrong, (N,)."""
        return self.prediction != self.target


def save_predictions(run: Run, predictions: Predictions) -> None:
    """Write the predictions of a run; a crash leaves either the earlier file or the new one."""
    buffer = io.BytesIO()
    arrays = {name: getattr(predictions, name) for name in _KINDS if name != "class_names"}
    np.savez_compressed(buffer, class_names=np.array(predictions.class_names), **arrays)
    write_bytes(run.folder / _NAME, buffer.getvalue())


def load_predictions(run: Run) -> Predictions | None:
    """The predictions of a finished run; None if it has none.

    Raises:
        InputError: the file is damaged or belongs to another run: its error is not the one that
            the last epoch recorded.
    """
    path = run.folder / _NAME
    if not path.exists():
        return None
    try:
        arrays = _read(read_bytes(path, most=_LARGEST))
        records = run.metrics()
        _require_valid(arrays, records[-1]["test_error"] if records else None)
    except InputError:  # the metrics are damaged
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise InputError(f"{path} is damaged: {reason(error)[:200]}") from error
    return Predictions(
        target=arrays["target"].astype(np.int32),
        prediction=arrays["prediction"].astype(np.int32),
        confidence=arrays["confidence"].astype(np.float32),
        target_probability=arrays["target_probability"].astype(np.float32),
        class_names=tuple(map(str, arrays["class_names"])),
    )


_NAME = "predictions.npz"
_KINDS = {"target": "i", "prediction": "i", "confidence": "f", "target_probability": "f",
          "class_names": "U"}  # fmt: skip
_LARGEST = 2**30  # bytes, of all arrays
_ROUNDING = 1e-3  # of an error in percent, and of probabilities


def _read(content: bytes) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(member.file_size for member in archive.infolist())
        if size > _LARGEST:
            raise ValueError(f"its arrays have {size} bytes")
        bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"wrong checksum of {bad}")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in _KINDS}


def _require_valid(arrays: dict[str, NDArray[Any]], error: float | None) -> None:
    """Raise ValueError unless the arrays fit together and have the recorded error in percent."""
    for name, kind in _KINDS.items():
        if arrays[name].dtype.kind != kind or arrays[name].ndim != 1:
            raise ValueError(f"{name} has type {arrays[name].dtype}, shape {arrays[name].shape}")
    numbers = [arrays[name] for name in _KINDS if name != "class_names"]
    target, prediction, confidence, target_probability = numbers
    if len({*map(len, numbers)}) != 1 or not len(target):
        raise ValueError("its arrays have different lengths or are empty")
    for name, classes in (("target", target), ("prediction", prediction)):
        if classes.min() < 0 or classes.max() >= len(arrays["class_names"]):
            raise ValueError(f"{name} has classes that have no name")
    if not (
        (target_probability >= 0).all()
        and (target_probability <= confidence + _ROUNDING).all()
        and (confidence <= 1 + _ROUNDING).all()
    ):
        raise ValueError("its probabilities are out of range")
    found = 100 * float((target != prediction).mean())
    if error is None or abs(found - error) > _ROUNDING:
        raise ValueError(f"its error is {found:.3f} %, but the last epoch recorded {error}")
