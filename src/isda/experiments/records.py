"""Run records: ``<recipe>/<seed>/config.json`` and ``metrics.jsonl``, and the result of a run.

Reading records needs neither torch nor the training code;
:mod:`isda.experiments.training.run_folder` writes them.
"""

import contextlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isda.experiments.errors import InputError
from isda.experiments.files import writing
from isda.experiments.settings import Recipe

__all__ = [
    "LAST_EPOCHS",
    "Run",
    "Summary",
    "default_folder",
    "export",
    "load_runs",
    "summary",
]

LAST_EPOCHS = 10
"""The result of a run is its mean test error over this many last epochs, as in the paper."""


class Run:
    """The record of one run: a recipe trained with a seed.

    Args:
        folder: folder that holds config.json.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            self.name: str = config["name"]
            self.seed: int = config["seed"]
            self.recipe = Recipe.from_dict(config["recipe"])
            self.environments: list[dict[str, Any]] = config["environments"]
            if not (isinstance(self.name, str) and isinstance(self.seed, int)):
                raise TypeError(f"name {self.name!r}, seed {self.seed!r}")
            if not self.environments or not all(isinstance(e, dict) for e in self.environments):
                raise TypeError(f"environments {self.environments!r}")
        except InputError as error:
            raise InputError(f"{path} is not a run record: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is not a run record: {error!r}") from error
        self._metrics: tuple[tuple[int, ...], list[dict[str, Any]]] = ((), [])  # as last read

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of all epochs so far, one dictionary per epoch; ignores a truncated last line."""
        path = self.folder / "metrics.jsonl"
        try:
            if not path.exists():
                return []
            stat = path.stat()
            version = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if version == self._metrics[0]:
                return self._metrics[1]
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        records = [_parse(line) for line in lines[:-1]]  # a line without a newline is incomplete
        for epoch, record in enumerate(records):
            if (
                not (isinstance(record, dict) and record.get("epoch") == epoch < self.recipe.epochs)
                or not all(isinstance(value, int | float) for value in record.values())
                or not math.isfinite(record.get("test_error", math.nan))
            ):
                raise InputError(
                    f"{path} is damaged: line {epoch + 1} is not the record of epoch {epoch} of "
                    f"{self.recipe.epochs}"
                )
        self._metrics = version, records
        return records


@dataclass(frozen=True)
class Summary:
    """The result of a run: means over the last 10 epochs, or over all if there are fewer.

    A metric is None if no epoch has it.
    """

    error: float | None
    """Test error in percent."""

    loss: float | None
    """Negative log-likelihood on the test set."""

    ece: float | None
    """Expected calibration error, as a fraction."""

    top5_error: float | None
    """Top-5 test error in percent."""

    epochs: int
    """Number of epochs done."""

    finished: bool
    """Whether all epochs of the recipe are done."""

    seconds: float
    """Total time of the epochs done."""


def summary(run: Run) -> Summary:
    """Result of a run, from its metrics."""
    records = run.metrics()

    def last(key: str) -> float | None:
        values = [record[key] for record in records[-LAST_EPOCHS:] if key in record]
        return sum(values) / len(values) if values else None

    return Summary(
        error=last("test_error"),
        loss=last("test_loss"),
        ece=last("test_ece"),
        top5_error=last("test_top5_error"),
        epochs=len(records),
        finished=len(records) == run.recipe.epochs,
        seconds=sum(record.get("seconds", 0.0) for record in records),
    )


def load_runs(out: Path | str) -> list[Run]:
    """All runs below a folder, sorted by name and seed."""
    if not Path(out).is_dir():
        raise InputError(f"folder {str(out)!r} does not exist")
    folders = [path.parent for path in Path(out).rglob("config.json")]
    runs = [Run(folder) for folder in folders if folder.name.lstrip("-").isdigit()]
    return sorted(runs, key=lambda run: (run.name, run.seed, run.folder))


def default_folder() -> Path | None:
    """Folder of records if none is given: runs, else results, whichever exists and is not empty."""
    folders = (Path("runs"), Path("results"))
    return next((path for path in folders if path.is_dir() and any(path.iterdir())), None)


def export(run: Run, to: Path | str) -> Path:
    """Copy the record of a finished run, without its checkpoint, to ``to/<name>/<seed>/``."""
    result = summary(run)
    if not result.finished:
        raise InputError(
            f"{run.folder} is not finished: {result.epochs} of {run.recipe.epochs} epochs"
        )
    folder = Path(to) / run.name / str(run.seed)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "metrics.jsonl"):
            shutil.copyfile(run.folder / file, folder / file)
    return folder


def _parse(line: bytes) -> Any:
    """The value of a line of JSON, or None if it is not valid JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return None
