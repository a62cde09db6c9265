"""The benchmarks as modules, which import each other as scripts do; their records and tables."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["FOLDER", "RECORDS", "ROOT", "load", "table_of"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
RECORDS = ROOT / "results" / "benchmarks"


def load(name: str) -> ModuleType:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def table_of(page: str, name: str) -> str:
    """A table that a page shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.split(f"<!-- table:{name} -->\n")[1].split("\n<!-- /table -->")[0]
