"""Run folders: ``OUT/<recipe>/<seed>/`` with config.json, metrics.jsonl and checkpoint.pt.

A run can be killed at any time and resumes from its last valid checkpoint. Files are written to a
temporary name and renamed. Metrics are appended line by line before the checkpoint that includes
them, and truncated to the checkpoint on resume.
"""

import contextlib
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from isda.experiments.errors import InputError
from isda.experiments.files import sync_folder, write_text, writing
from isda.experiments.records import Run, summary
from isda.experiments.settings import Recipe, differing_fields
from isda.experiments.training.environment import environment

__all__ = ["RunFolder", "require_free"]


class RunFolder(Run):
    """A run that is being trained: its record, its checkpoints and its lock.

    Args:
        folder: folder that holds config.json.
    """

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self._trusted = True  # whether checkpoint.pt may replace checkpoint.previous.pt

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
    ) -> Self:
        """Create the folder of a run below ``out``, or open the existing one with ``resume``.

        Raises:
            InputError: the run exists and ``resume`` is off, or it has a different recipe.
        """
        if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
            raise InputError(f"name of a run must be a valid folder name, got {name!r}")
        folder = Path(out) / name / str(seed)
        here = environment(device)
        if not (folder / "config.json").exists():
            with writing(folder):
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
            raise InputError(f"{folder} was started with a different recipe ({fields})")
        if here != run.environments[-1] and not summary(run).finished:
            before = run.environments[-1]
            fields = ", ".join(f"{key} {before.get(key)} → {here[key]}" for key in here
                               if before.get(key) != here[key])  # fmt: skip
            warnings.warn(f"{folder} resumes in a different environment: {fields}", stacklevel=2)
            run.environments.append(here)
            _write_config(folder, run.name, run.recipe, run.seed, run.environments)
        return run

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock, which the system also releases if this process dies.

        Raises:
            InputError: another process is training the run.
        """
        path = self.folder / "lock"
        with writing(path):
            file = open(path, "w")  # noqa: SIM115 - closed below, outside of ``writing``
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
        """Append the metrics of an epoch and flush them to disk. Call it before ``save``."""
        path = self.folder / "metrics.jsonl"
        line = (json.dumps(metrics) + "\n").encode()
        with writing(path), open(path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)  # no partial line
                raise

    def rewind(self, epoch: int) -> None:
        """Drop the metrics of ``epoch`` and later ones.

        Call it on every resume, with the number of epochs in the checkpoint, or 0 without one.
        """
        kept = [record for record in self.metrics() if record["epoch"] < epoch]
        if [record["epoch"] for record in kept] != list(range(epoch)):
            raise InputError(
                f"{self.folder / 'metrics.jsonl'} lacks epochs before {epoch}, the epoch of the "
                "checkpoint"
            )
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_text(self.folder / "metrics.jsonl", text)

    def save(self, state: dict[str, Any], *, last: bool = False) -> None:
        """Write a checkpoint; the previous one stays until the new one is complete on disk.

        Args:
            state: anything that ``torch.load(weights_only=True)`` can read: tensors, numbers and
                strings in dictionaries and lists.
            last: whether the training ends or pauses here: leave only this checkpoint.
        """
        new = self.folder / "checkpoint.new.pt"
        with writing(new, undo=True):
            with open(new, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if self._trusted and self._checkpoints[0].exists():
                os.replace(*self._checkpoints)
            os.replace(new, self._checkpoints[0])
            sync_folder(self.folder)
            if last:
                self._checkpoints[1].unlink(missing_ok=True)
        self._trusted = True

    def load(self, use: Callable[[dict[str, Any]], object] | None = None) -> dict[str, Any] | None:
        """Load the last valid checkpoint on the CPU; None if there is none.

        If the last checkpoint is damaged, warn and load the one before it.

        Args:
            use: called with the checkpoint; any exception but an InputError counts as damage.
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
                warnings.warn(f"{message}; resuming from {path.name}", stacklevel=2)
            return state
        if damage:
            raise InputError("; ".join(damage) + "; there is no other checkpoint to resume from")
        return None

    @property
    def _checkpoints(self) -> tuple[Path, Path]:
        return self.folder / "checkpoint.pt", self.folder / "checkpoint.previous.pt"


def require_free(folders: Iterable[Path]) -> None:
    """Raise InputError if one of the folders already holds a run."""
    for folder in folders:
        if (folder / "config.json").exists():
            raise InputError(f"{folder} already holds a run: use --resume or a different --out")


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


def _read_checkpoint(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"wrong checksum of {bad}")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
