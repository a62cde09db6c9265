"""What a result may depend on apart from recipe and seed: versions, device and commit."""

import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from isda._version import __version__

__all__ = ["environment"]


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions of isda, torch, Python and CUDA, the name of the device, and the git commit."""
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
    """Commit of the checkout that tracks this file, with ``-dirty`` if there are changes.

    The environment variable ISDA_COMMIT overrides it, for a copy without a git repository.
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
