"""Run folders: ``OUT/<recipe>/<seed>/`` with config.json, metrics.jsonl and checkpoint.pt.

A run can be killed at any time and resumes from its last valid checkpoint. Files are written under
a temporary name and renamed. Metrics are appended line by line, before the checkpoint that includes
them is written, and truncated to the checkpoint on resume.
"""

import contextlib
import os
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch

from isda.experiments.errors import InputError, RunError, reason
from isda.experiments.files import create_folder, sync_folder, write_bytes, write_json, writing
from isda.experiments.metrics_lines import config_checksum, require_metrics, sealed
from isda.experiments.networks import LoadedWeights
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.records import Run, read_recipe, require_name, summary
from isda.experiments.settings import Recipe
from isda.experiments.training.environment import environment

__all__ = [
    "FILES",
    "RunFolder",
    "read_checkpoint",
    "replace_checkpoint",
    "require_free",
    "write_config",
]


FILES = (
    "config.json",
    "metrics.jsonl",
    "predictions.npz",
    "checkpoint.pt",
    "checkpoint.previous.pt",
)
"""Names of the files of a run."""


class RunFolder(Run):
    """A run that is being trained: its record and its checkpoints.

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

        Hold its lock, see :mod:`isda.experiments.training.locks`, if another process may train the
        same run.

        Raises:
            InputError: the run exists and ``resume`` is off, or it has a different recipe.
        """
        require_name(name)
        folder = Path(out) / name / str(seed)
        here = environment(device)
        if not resume or not (folder / "config.json").exists():
            require_free([folder])
            create_folder(folder)
            config = {"name": name, "seed": seed, "recipe": recipe.as_dict()}
            write_config(folder / "config.json", {**config, "environments": [here]})
            return cls(folder)
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
            config = {**run._config, "environments": run.environments}
            write_config(folder / "config.json", config)
        return run

    def record_weights(self, weights: LoadedWeights | None) -> None:
        """Record the pretrained weights in config.json.

        Raises:
            InputError: the run was started from other weights.
        """
        if weights is None:
            return
        before = self._config.get("weights")
        if before is None:
            self._config["weights"] = weights.as_dict()
            write_config(self.folder / "config.json", self._config)
        elif before["sha256"] != weights.sha256:
            raise InputError(
                f"{self.folder} was started from weights with SHA-256 {before['sha256']}, but "
                f"{weights.file} has {weights.sha256}: restore the file"
            )

    def append(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of an epoch and flush them to disk. Call it before ``save``."""
        path = self.folder / "metrics.jsonl"
        before = self._lines()
        try:
            require_metrics(metrics, len(before), self.recipe.epochs)
        except ValueError as error:
            raise RunError(f"{self.folder}: the next line of the metrics {error}") from error
        checksum = self.checksum()
        checksum.update(b"".join(before))
        line = sealed(metrics, checksum) + b"\n"
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
        path = self.folder / "metrics.jsonl"
        if len(self.metrics()) < epoch:
            raise InputError(
                f"{path} lacks epochs before {epoch}, the epoch of the checkpoint: restore it from "
                "a copy, or delete the folder to train the run again"
            )
        kept = b"".join(self._lines()[:epoch])
        if not path.exists() or path.stat().st_size != len(kept):
            write_bytes(path, kept)

    def _lines(self) -> list[bytes]:
        """Complete lines of the metrics, with their newlines."""
        path = self.folder / "metrics.jsonl"
        content = path.read_bytes() if path.exists() else b""
        return [line + b"\n" for line in content.split(b"\n")[:-1]]

    def save(self, state: dict[str, Any], *, last: bool = False) -> None:
        """Write a checkpoint; the previous one stays until the new one is complete on disk.

        Args:
            state: anything that ``torch.load(weights_only=True)`` can read: tensors, numbers and
                strings in dictionaries and lists; ``epoch`` is the number of epochs done. Recipe
                and seed are added.
            last: whether the training ends or pauses here: leave only this checkpoint.
        """
        state = {**state, "recipe": self.recipe.as_dict(), "seed": self.seed}
        new = self.folder / "checkpoint.new.pt"
        with writing(new, temporary=new, keep=self._checkpoints):
            write_checkpoint(new, state)
            if self._trusted and self._checkpoints[0].exists():
                os.replace(*self._checkpoints)
            os.replace(new, self._checkpoints[0])
            sync_folder(self.folder)
            if last:
                self._checkpoints[1].unlink(missing_ok=True)
        self._trusted = True

    def load(self, use: Callable[[dict[str, Any]], object] | None = None) -> dict[str, Any] | None:
        """Load the last valid checkpoint on the CPU; None if there is none.

        If the last checkpoint is damaged, warn and load the one before it. Recipe, seed and epoch
        are checked before anything else is used.

        Args:
            use: called with the checkpoint; any exception but an InputError counts as damage.
        """
        damage = []
        for path in self._checkpoints:
            if not path.exists():
                continue
            try:
                state = read_checkpoint(path)
                self._require_own(path, state)
                if use is not None:
                    use(state)
            except InputError:
                raise
            except Exception as error:  # a damaged file can fail in any way
                damage.append(f"{path} is damaged ({reason(error)})")
                self._trusted = False
                continue
            for message in damage:
                warnings.warn(f"{message}; resuming from {path.name}", stacklevel=2)
            return state
        if damage:
            raise InputError("; ".join(damage) + "; there is no other checkpoint to resume from")
        return None

    def load_finished(
        self, use: Callable[[dict[str, Any]], object] | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint of the last epoch, as :meth:`load` does.

        Raises:
            InputError: the run is not finished, or it has no checkpoint.
        """

        def use_all(state: dict[str, Any]) -> None:
            parts = {"network", "criterion", "data", *(["average"] if self.recipe.ema else [])}
            if parts - state.keys():
                raise ValueError(f"it has no {min(parts - state.keys())}")
            if use is not None:
                use(state)

        state = self.load(use_all)
        if state is None:
            raise InputError(
                f"{self.folder} has no checkpoint, like an exported record: copy the whole folder "
                "of the run, or train it again"
            )
        if state["epoch"] < self.recipe.epochs:
            raise InputError(
                f"{self.folder} is not finished: {state['epoch']} of {self.recipe.epochs} epochs; "
                "--resume continues it"
            )
        return state

    def has_checkpoint(self) -> bool:
        """Whether there is a valid checkpoint of this run; reads it."""
        with warnings.catch_warnings(), contextlib.suppress(InputError):
            warnings.simplefilter("ignore")
            return RunFolder(self.folder).load() is not None
        return False

    def _require_own(self, path: Path, state: dict[str, Any]) -> None:
        """Raise ValueError for a damaged checkpoint, InputError for one of another run."""
        missing = [key for key in ("recipe", "seed", "epoch") if key not in state]
        if missing:
            raise ValueError(f"it does not name its {missing[0]}")
        epoch, seed = state["epoch"], state["seed"]
        if type(epoch) is not int or not 0 <= epoch <= self.recipe.epochs:
            raise ValueError(f"epoch must be from 0 to {self.recipe.epochs}, got {epoch!r:.40}")
        try:
            recipe = read_recipe(state["recipe"])
        except InputError as error:
            raise ValueError(f"recipe: {error}") from error
        changed = [f"{key} {one!r} → {other!r}" for key, (one, other)
                   in differing_fields(recipe, self.recipe).items()]  # fmt: skip
        if type(seed) is not int or seed != self.seed:
            changed.append(f"seed {seed!r:.40} → {self.seed}")
        if changed:
            raise InputError(
                f"{path} is the checkpoint of another run ({', '.join(changed)}): restore the "
                "one of this run, or delete it"
            )

    @property
    def _checkpoints(self) -> tuple[Path, Path]:
        return self.folder / "checkpoint.pt", self.folder / "checkpoint.previous.pt"


def require_free(folders: Iterable[Path]) -> None:
    """Raise InputError if one of the folders already holds a run, or the remains of one."""
    for folder in folders:
        if (folder / "config.json").exists():
            raise InputError(f"{folder} already holds a run: use --resume or a different --out")
        for name in FILES:
            if (folder / name).exists():
                raise InputError(
                    f"{folder} has {name} but no config.json: restore config.json or use a "
                    "different --out"
                )


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write the config of a run or a GAN, with its checksum."""
    write_json(path, {**config, "check": config_checksum(config)})


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint and flush it to disk."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def replace_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint under a temporary name and rename it into place."""
    new = path.with_suffix(".new.pt")
    with writing(path, temporary=new):
        write_checkpoint(new, state)
        os.replace(new, path)
        sync_folder(path.parent)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint on the CPU after comparing the checksums in the file."""
    if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for ever
        raise InputError(f"{path} is not a file")
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"wrong checksum of {bad}")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    return state
