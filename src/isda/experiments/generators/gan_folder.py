"""Folder of a GAN: ``OUT/<data>-<gan>/<seed>/`` with gan.json, checkpoint.pt and samples/.

The checkpoint holds everything, the losses of all epochs included, and is replaced as a whole: a
GAN whose training was killed continues from it exactly. At the end, ``generator.pt`` is written; it
holds only the averaged weights, which all other commands read. gan.json is not called config.json,
so that a report never takes a GAN for a run.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from isda.experiments.errors import InputError, reason
from isda.experiments.files import create_folder, read_bytes
from isda.experiments.generators.gan_settings import GanSettings
from isda.experiments.metrics_lines import config_checksum
from isda.experiments.training.environment import environment
from isda.experiments.training.run_folder import (
    read_checkpoint,
    replace_checkpoint,
    write_config,
)

__all__ = ["GanFolder"]


class GanFolder:
    """The files of a GAN.

    Args:
        folder: folder that holds gan.json.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / "gan.json"
        if not path.is_file():
            raise InputError(f"{self.folder} holds no GAN: {path.name} is missing")
        content = read_bytes(path, most=2**20)
        try:
            config = json.loads(content)
            self.settings = GanSettings(**config["settings"])
            self.seed = config["seed"]
            if type(self.seed) is not int:
                raise TypeError(f"seed {self.seed!r}")
            if config["check"] != config_checksum(config):
                raise ValueError("it differs from its checksum")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {error}") from error

    @classmethod
    def create(
        cls, folder: Path, settings: GanSettings, seed: int, device: torch.device, *, resume: bool
    ) -> "GanFolder":
        """Create the folder of a GAN, or open the existing one with ``resume``."""
        if not (folder / "gan.json").exists():
            if (folder / "checkpoint.pt").exists():
                raise InputError(
                    f"{folder} has checkpoint.pt but no gan.json: restore gan.json or use a "
                    "different --out"
                )
            create_folder(folder)
            config = {"settings": asdict(settings), "seed": seed}
            write_config(folder / "gan.json", {**config, "environment": environment(device)})
            return cls(folder)
        if not resume:
            raise InputError(f"{folder} already holds a GAN: use --resume or a different --out")
        found = cls(folder)
        before, now = asdict(found.settings), asdict(settings)
        changed = [f"{key} {before[key]!r} → {now[key]!r}" for key in now
                   if before[key] != now[key] and key != "epochs"]  # fmt: skip
        if changed:
            raise InputError(f"{folder} was started with other settings ({', '.join(changed)})")
        return found

    def change_epochs(self, epochs: int) -> None:
        """Change the number of epochs; the training of an epoch does not depend on it."""
        if epochs == self.settings.epochs:
            return
        path = self.folder / "gan.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["settings"]["epochs"] = epochs
        write_config(path, config)
        self.settings = replace(self.settings, epochs=epochs)

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write ``checkpoint.pt`` or ``generator.pt`` under a temporary name and rename it."""
        state = {**state, "settings": asdict(self.settings), "seed": self.seed}
        replace_checkpoint(self.folder / name, state)

    def load(
        self, name: str, use: Callable[[dict[str, Any]], object] | None = None
    ) -> dict[str, Any] | None:
        """``checkpoint.pt`` or ``generator.pt`` on the CPU; None if there is none.

        Args:
            name: name of the file.
            use: called with the contents; any exception but an InputError counts as damage.
        """
        path = self.folder / name
        if not path.exists():
            return None
        try:
            state = read_checkpoint(path)
            its = {**state["settings"], "epochs": self.settings.epochs}
            if its != asdict(self.settings) or state["seed"] != self.seed:
                raise InputError(
                    f"{path} is the {path.stem} of another GAN: restore the one of this GAN"
                )
            if use is not None:
                use(state)
        except InputError:
            raise
        except Exception as error:  # a damaged file can fail in any way
            rest = "train the GAN again"
            if name == "generator.pt" and (self.folder / "checkpoint.pt").exists():
                rest = f"isda gan train {self.settings.gan} --resume writes it again"
            raise InputError(f"{path} is damaged ({reason(error)}): {rest}") from error
        return state
