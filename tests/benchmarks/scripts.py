"""The benchmarks as modules, which import each other as scripts do."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["FOLDER", "load"]

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
