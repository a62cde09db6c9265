"""Run folders: ``OUT/<recipe>/<seed>/`` with config.json, metrics.jsonl and checkpoint.pt.

A run may be killed at any moment, between any two instructions, and goes on from its last good
checkpoint. Files are written beside their final place and renamed; metrics are appended line by
line, before the checkpoint that covers them, and cut back to it on resume.
"""

import contextlib
import functools
import json
import math
import os
import platform
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from isda._version import __version__
from isda.experiments.errors import InputError
from isda.experiments.recipes import Recipe, differing_fields

__all__ = [
    "Run",
    "RunError",
    "Summary",
    "environment",
    "export",
    "load_runs",
    "require_free",
    "summary",
    "write_text",
]

LAST_EPOCHS = 10
"""Epochs at the end of a run whose mean test error is its result, as in the paper."""


class RunError(InputError):
    """A run folder that cannot be written; what was saved before is intact."""


class Run:
    """The records of one training: a recipe and a seed.

    Args:
        folder: where config.json is.
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
            raise InputError(f"{path} is not the record of a run: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is not the record of a run: {error!r}") from error
        self._trusted = True  # whether checkpoint.pt may replace checkpoint.previous.pt
        self._metrics: tuple[tuple[int, ...], list[dict[str, Any]]] = ((), [])  # as last read

    @classmethod
    def create(
        cls,
        out: Path | str,
        name: str,
        recipe: Recipe,
        seed: int,
        *,
        device: torch.device | str = "cpu",
        resume: bool = False,
    ) -> "Run":
        """Begin a run below ``out``, or with ``resume`` go on with the one that is there.

        Raises:
            InputError: the run exists and ``resume`` is off, or it has another recipe.
        """
        if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
            raise InputError(f"name of a run must do as a folder name, got {name!r}")
        folder = Path(out) / name / str(seed)
        here = environment(device)
        if not (folder / "config.json").exists():
            with _writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            _write_config(folder, name, recipe, seed, [here])
            return cls(folder)
        if not resume:
            require_free([folder])
        run = cls(folder)
        changed = differing_fields(run.recipe, recipe)
        if changed:
            fields = ", ".join(
                f"{field} {old!r} → {new!r}" for field, (old, new) in changed.items()
            )
            raise InputError(f"{folder} was begun with another recipe ({fields})")
        if here != run.environments[-1] and not summary(run).finished:
            before = run.environments[-1]
            fields = ", ".join(f"{key} {before.get(key)} → {here[key]}" for key in here
                               if before.get(key) != here[key])  # fmt: skip
            warnings.warn(f"{folder} goes on in another environment: {fields}", stacklevel=2)
            run.environments.append(here)
            _write_config(folder, run.name, run.recipe, run.seed, run.environments)
        return run

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from training this run; the end of this one frees it, too.

        Raises:
            InputError: another process trains it.
        """
        path = self.folder / "lock"
        with _writing(path):
            file = open(path, "w")  # noqa: SIM115 - closed below, where no error is of writing
        with file:
            try:
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise InputError(f"{self.folder} is being trained by another process") from error
            except OSError:  # a file system without locks
                pass
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def append(self, metrics: dict[str, Any]) -> None:
        """Add the metrics of an epoch, on disk when this returns. Call it before ``save``."""
        path = self.folder / "metrics.jsonl"
        line = (json.dumps(metrics) + "\n").encode()
        with _writing(path), open(path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # no half line
                raise

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of all epochs so far. A last line that was cut off is left out."""
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
        records = [_parse(line) for line in lines[:-1]]  # after the last newline: torn
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

    def rewind(self, epoch: int) -> None:
        """Keep the metrics of the epochs before ``epoch``, the one to go on with.

        Call it on every resume, with the number of epochs in the checkpoint, or 0 without one.
        """
        kept = [record for record in self.metrics() if record["epoch"] < epoch]
        if [record["epoch"] for record in kept] != list(range(epoch)):
            raise InputError(
                f"{self.folder / 'metrics.jsonl'} lacks epochs before {epoch}, where the "
                "checkpoint is"
            )
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_text(self.folder / "metrics.jsonl", text)

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint; until the new one is whole on disk, the old one stays.

        Args:
            state: what ``torch.load(weights_only=True)`` reads: tensors, numbers, strings in
                dictionaries and lists.
        """
        new = self.folder / "checkpoint.new.pt"
        with _writing(new, undo=True):
            with open(new, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if self._trusted and self._checkpoints[0].exists():
                os.replace(*self._checkpoints)
            os.replace(new, self._checkpoints[0])
            _sync_folder(self.folder)
        self._trusted = True

    def load(self, use: Callable[[dict[str, Any]], object] | None = None) -> dict[str, Any] | None:
        """The last good checkpoint on the CPU, or None if none was written.

        A damaged checkpoint is named in a warning and the one before it is used.

        Args:
            use: called with the checkpoint; whatever it raises, but an InputError, is damage.
        """
        damage = []
        for path in self._checkpoints:
            if not path.exists():
                continue
            try:
                state = _read_checkpoint(path)
                if use is not None:
                    use(state)
            except InputError:
                raise
            except Exception as error:  # a damaged file can fail in any way
                reason = (str(error) or type(error).__name__).splitlines()[0]
                damage.append(f"{path} is damaged ({reason})")
                self._trusted = False
                continue
            for message in damage:
                warnings.warn(f"{message}; going on from {path.name}", stacklevel=2)
            return state
        if damage:
            raise InputError("; ".join(damage) + "; no checkpoint is left to go on from")
        return None

    @property
    def _checkpoints(self) -> tuple[Path, Path]:
        return self.folder / "checkpoint.pt", self.folder / "checkpoint.previous.pt"


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    error: float | None
    """Test error, percent: mean over the last 10 epochs, or all if fewer. None before the first."""

    loss: float | None
    """Negative log likelihood on the test set, the same mean."""

    ece: float | None
    """Expected calibration error, a fraction, the same mean."""

    top5_error: float | None
    """Top-5 test error, percent, the same mean."""

    epochs: int
    """Epochs done."""

    finished: bool
    """Whether all epochs of the recipe are done."""

    seconds: float
    """Time of the epochs done."""


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
    """All runs below a folder, in the order of name and seed."""
    if not Path(out).is_dir():
        raise InputError(f"no folder {str(out)!r}")
    folders = [path.parent for path in Path(out).rglob("config.json")]
    runs = [Run(folder) for folder in folders if folder.name.lstrip("-").isdigit()]
    return sorted(runs, key=lambda run: (run.name, run.seed, run.folder))


def require_free(folders: Iterable[Path]) -> None:
    """Raise InputError if a run is in the way of a new one."""
    for folder in folders:
        if (folder / "config.json").exists():
            raise InputError(f"{folder} already holds a run: use --resume or another --out")


def export(run: Run, to: Path | str) -> Path:
    """Copy the records of a finished run, without its checkpoint, to ``to/<name>/<seed>/``."""
    result = summary(run)
    if not result.finished:
        raise InputError(
            f"{run.folder} is not finished: {result.epochs} of {run.recipe.epochs} epochs"
        )
    folder = Path(to) / run.name / str(run.seed)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "metrics.jsonl"):
            shutil.copyfile(run.folder / file, folder / file)
    return folder


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a number may depend on beside recipe and seed: versions, device and commit."""
    device = torch.device(device)
    name = platform.machine() or "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "isda": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "device": name,
        "commit": _commit(),
    }


@functools.cache
def _commit() -> str | None:
    """Commit of the checkout this file is tracked in, ``-dirty`` with changes.

    The environment variable ISDA_COMMIT overrules it, for a copy that git does not know.
    """
    if "ISDA_COMMIT" in os.environ:
        return os.environ["ISDA_COMMIT"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _parse(line: bytes) -> Any:
    """What a line of JSON says, or None if it is none."""
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return None


def _write_config(
    folder: Path, name: str, recipe: Recipe, seed: int, environments: list[dict[str, Any]]
) -> None:
    config = {
        "name": name,
        "seed": seed,
        "recipe": recipe.as_dict(),
        "environments": environments,
    }
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file beside its place and rename it: it is there whole, or as it was."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file in it to write to")
    new = path.with_name(path.name + ".new")
    with _writing(new, undo=True):
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        _sync_folder(path.parent)


@contextlib.contextmanager
def _writing(path: Path, *, undo: bool = False) -> Iterator[None]:
    """Turn a failed write into a RunError; with ``undo`` remove what was written of ``path``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch.save hides the OSError of a full disk
        if undo:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if cause is None:
            raise
        raise RunError(
            f"cannot write {path}: {cause.strerror or cause}; what was saved before is intact"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"wrong checksum of {bad}")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
