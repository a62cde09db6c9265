"""Run records: ``<recipe>/<seed>/config.json`` and ``metrics.jsonl``, and the result of a run.

Reading records needs neither torch nor the training code;
:mod:`isda.experiments.training.run_folder` writes them.
"""

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from isda._version import __version__
from isda.experiments.errors import InputError, reason
from isda.experiments.files import read_bytes, write_bytes, write_folder
from isda.experiments.metrics_lines import (
    Checksum,
    config_checksum,
    first_checksum,
    is_number,
    is_object,
    read_line,
    require_metrics,
)
from isda.experiments.settings import Recipe

__all__ = [
    "CALIBRATION",
    "DamagedRun",
    "Run",
    "Summary",
    "default_folder",
    "export",
    "load_runs",
    "read_recipe",
    "require_name",
    "result_epochs",
    "summary",
]


CALIBRATION = "calibration.json"
"""File of a run whose temperature was fitted; see :mod:`isda.experiments.calibration`."""


def result_epochs(epochs: int) -> int:
    """Number of last epochs whose mean is the result of a run with so many epochs.

    It is 10, as in the paper, but at most a quarter of the epochs: in a short run, earlier epochs
    show how fast it learns, not how well it ends.

    >>> result_epochs(160), result_epochs(20), result_epochs(3)
    (10, 5, 1)
    """
    return max(1, min(10, epochs // 4))


class Run:
    """The record of one run: a recipe trained with a seed.

    Args:
        folder: folder that holds config.json; its path ends in the name and the seed of the run.

    Raises:
        InputError: config.json is damaged or belongs to another folder.
    """

    damage: str | None = None
    """Why the record cannot be used; see :class:`DamagedRun`."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / "config.json"
        config: dict[str, Any] = {}
        try:
            if not path.exists():
                raise InputError("it is missing")
            config = json.loads(read_bytes(path, most=_LARGEST).decode())
            if not isinstance(config, dict):
                raise InputError("it is not a JSON object")
            self.name: str = config["name"]
            self.seed: int = config["seed"]
            if not isinstance(self.name, str) or type(self.seed) is not int:
                raise TypeError(f"name {self.name!r}, seed {self.seed!r}")
            _require_folder(self.folder, self.name, self.seed)
            self.recipe = read_recipe(config["recipe"])
            self.environments: list[dict[str, Any]] = config["environments"]
            if not self.environments or not all(map(_is_environment, self.environments)):
                raise TypeError(f"environments {self.environments!r}")
            if not _is_weights(config.get("weights")):
                raise TypeError(f"weights {config['weights']!r}")
            if config.keys() - _FIELDS:
                raise InputError(f"unknown field {min(config.keys() - _FIELDS)!r}")
            expected = config_checksum(config)
            if config.get("check", expected) != expected:
                raise InputError("it does not match its checksum")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError,
                RecursionError) as error:  # fmt: skip
            raise InputError(
                f"{path} is not a run record: {_brief(_what_is_wrong(error))}{_written_by(config)}"
            ) from error
        self._config = config
        self._metrics: tuple[tuple[int, ...], list[dict[str, Any]]] = ((), [])  # as last read
        self._verified = False

    @property
    def pretrained(self) -> str:
        """Description of the pretrained weights that the run started from; "" if there are none."""
        found = self._config.get("weights")
        if found is None:
            return ""
        new = ", ".join(found["new"]) or "none"
        return (
            f"{found['file']} (SHA-256 {found['sha256'][:16]}…), {found['tensors']} tensors; "
            f"not loaded: {new}"
        )

    @property
    def verified(self) -> bool:
        """Whether every line of the metrics has a checksum; a wrong checksum is an error."""
        return bool(self.metrics()) and self._verified

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of all epochs so far, one dictionary per epoch; ignores a truncated last line.

        Raises:
            InputError: a line is damaged: its checksum is wrong, or it is not the record of its
                epoch, or a value is out of range.
        """
        path = self.folder / "metrics.jsonl"
        try:
            if not path.exists():
                return []
            stat = path.stat()
            version = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if version == self._metrics[0]:
                return self._metrics[1]
            most = _LARGEST + self.recipe.epochs * _LONGEST
            *lines, rest = read_bytes(path, most=most).split(b"\n")
        except OSError as error:
            raise InputError(f"cannot read {path}: {reason(error)}") from error
        records, checked, verified, checksum = [], False, True, self.checksum()
        for epoch, line in enumerate(lines):
            try:
                record, has_check = read_line(line, checksum)
                if checked and not has_check:
                    raise ValueError("has no checksum, but the line before it has one")
                require_metrics(record, epoch, self.recipe.epochs)
            except ValueError as error:
                raise InputError(
                    f"{path} is damaged: line {epoch + 1} {_brief(str(error))}; restore it from a "
                    "copy or train the run again"
                ) from error
            checked, verified = has_check, verified and has_check
            records.append(record)
        if is_object(rest[:-1]):
            raise InputError(f"{path} is damaged: line {len(lines) + 1} does not end in a newline")
        self._metrics, self._verified = (version, records), verified
        return records

    def checksum(self) -> Checksum:
        """Checksum before the first line of the metrics: of name, seed and recipe."""
        return first_checksum(self._config)


def read_recipe(fields: Any) -> Recipe:
    """Recipe from the fields of a file.

    Raises:
        TypeError: a value has a wrong type.
        InputError: a value is out of range, or a field is unknown or missing.
    """
    if not isinstance(fields, dict):
        raise TypeError(f"recipe {fields!r}")
    for field, kind in get_type_hints(Recipe).items():
        if field in fields and not _fits(fields[field], kind):
            raise TypeError(f"{field} of the recipe is {fields[field]!r}")
    return Recipe.from_dict(fields)


class DamagedRun(Run):
    """A record that cannot be used: no recipe, no metrics, only the reason.

    Args:
        folder: folder of the record.
        damage: what is wrong, and in which file.
    """

    def __init__(self, folder: Path, damage: str) -> None:
        self.folder, self.damage = folder, damage
        self.name, self.seed = folder.parent.name, int(folder.name)
        self.environments = []

    def metrics(self) -> list[dict[str, Any]]:
        return []


@dataclass(frozen=True)
class Summary:
    """The result of a run: means over its last epochs, see :func:`result_epochs`.

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
    window = 0 if run.damage is not None else result_epochs(run.recipe.epochs)

    def last(key: str) -> float | None:
        values = [record[key] for record in records[-window:] if key in record]
        return sum(values) / len(values) if values else None

    return Summary(
        error=last("test_error"),
        loss=last("test_loss"),
        ece=last("test_ece"),
        top5_error=last("test_top5_error"),
        epochs=len(records),
        finished=run.damage is None and len(records) == run.recipe.epochs,
        seconds=sum(record.get("seconds", 0.0) for record in records),
    )


def load_runs(out: Path | str) -> list[Run]:
    """All runs below a folder, sorted by name and seed.

    A record that cannot be read, or that is shorter than its config says, becomes a
    :class:`DamagedRun`, which counts as unfinished; the other records are still read.
    """
    if not Path(out).is_dir():
        problem = "is not a folder" if Path(out).exists() else "does not exist"
        raise InputError(f"{str(out)!r} {problem}")
    files = ("config.json", "metrics.jsonl")
    folders = {path.parent for file in files for path in Path(out).rglob(file)}
    runs = [_load(folder) for folder in folders if _SEED.fullmatch(folder.name)]
    return sorted(runs, key=lambda run: (run.name, run.seed, run.folder))


def _load(folder: Path) -> Run:
    try:
        run = Run(folder)
        epochs = len(run.metrics())
    except InputError as error:
        return DamagedRun(folder, str(error))
    if epochs < run.recipe.epochs and not any((folder / file).exists() for file in _TRAINING):
        return DamagedRun(
            folder,
            f"{folder} is damaged: it has {epochs} of {run.recipe.epochs} epochs and no "
            "checkpoint; restore it from a copy or train the run again",
        )
    return run


def default_folder() -> Path | None:
    """Folder of records if none is given: runs, else results, whichever exists and is not empty."""
    folders = (Path("runs"), Path("results"))
    return next((path for path in folders if path.is_dir() and any(path.iterdir())), None)


def require_name(name: str) -> None:
    """Raise InputError unless a run can have this name, which is also that of its folder."""
    if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        raise InputError(f"name of a run must be a valid folder name, got {name!r}")


def export(run: Run, to: Path | str) -> Path:
    """Copy the record of a finished run, without its checkpoint, to ``to/<name>/<seed>/``.

    The copy is complete or does not exist. An existing record is never changed, except that a
    missing calibration is added.

    Raises:
        InputError: the run is not finished, or another record has its name and seed.
    """
    result = summary(run)
    if run.damage is not None:
        raise InputError(run.damage)
    if not result.finished:
        raise InputError(
            f"{run.folder} is not finished: {result.epochs} of {run.recipe.epochs} epochs"
        )
    folder = Path(to) / run.name / str(run.seed)
    files = _contents(run.folder)
    if folder.is_dir() and any(folder.iterdir()):
        present = _contents(folder)
        missing = {CALIBRATION} & files.keys() - present.keys()
        if present | {file: files[file] for file in missing} != files:
            raise InputError(
                f"{folder} holds a different or damaged record of the same name and seed: move it "
                "away, or export to another folder"
            )
        for file in missing:
            write_bytes(folder / file, files[file])
        return folder
    write_folder(folder, files)
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    """The files of a record, without those that are missing."""
    paths = [folder / file for file in ("config.json", "metrics.jsonl", CALIBRATION)]
    return {path.name: read_bytes(path, most=2**30) for path in paths if path.exists()}


def _require_folder(folder: Path, name: str, seed: int) -> None:
    """Raise InputError unless the path of a folder ends in the name and the seed of its run."""
    require_name(name)
    place = Path(os.path.abspath(folder))
    if (place.parent.name, place.name) != (name, str(seed)):
        raise InputError(
            f"it is the record of {f'{name}/{seed}'!r}, but its folder is "
            f"{f'{place.parent.name}/{place.name}'!r}"
        )


def _brief(text: str) -> str:
    """The beginning of a text that may contain a damaged file."""
    return text if len(text) <= 300 else f"{text[:300]}…"


def _what_is_wrong(error: Exception) -> str:
    """Why a file is not a run record."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "it is not valid JSON"
    if isinstance(error, KeyError):
        return f"it has no field {error}"
    return str(error) if isinstance(error, InputError) else repr(error)


def _written_by(config: Any) -> str:
    """Note about the version that wrote a config, if it is not this one."""
    with contextlib.suppress(KeyError, TypeError, IndexError):
        version = config["environments"][-1]["isda"]
        if version != __version__:
            return f"; it was written by torch-isda {str(version)[:20]!r}, this is {__version__}"
    return ""


_FIELDS = {"name", "seed", "recipe", "environments", "weights", "check"}  # of config.json
_LARGEST, _LONGEST = 2**20, 2**16  # bytes of config.json, and of a line of the metrics
_SEED = re.compile("-?[0-9]+")
_TRAINING = ("lock", "checkpoint.pt", "checkpoint.previous.pt")  # files of a run, not of a copy


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the type of a field of a recipe."""
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is float:
        return is_number(value)
    if kind is int:
        return is_number(value) and isinstance(value, int)
    return isinstance(value, str if get_origin(kind) is Literal else kind)


def _is_environment(value: Any) -> bool:
    return isinstance(value, dict) and not any(
        isinstance(one, dict | list) for one in value.values()
    )


def _is_weights(value: Any) -> bool:
    """Whether a JSON value can be ``LoadedWeights.as_dict()``, or that of a run without them."""
    kinds = {"file": str, "sha256": str, "tensors": int, "new": list}
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(value.get(name), kind) for name, kind in kinds.items())
        and all(isinstance(name, str) for name in value["new"])
    )
