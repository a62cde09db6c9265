"""CSV files with a dataclass per line, and how their numbers are printed."""

import csv
import sys
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

__all__ = ["read_rows", "three_digits"]

T = TypeVar("T")


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """Read a CSV file as instances of a dataclass with fields of type str, int or float | None."""
    types = get_type_hints(kind)

    def parse(name: str, text: str) -> Any:
        if types[name] in (str, int):
            return types[name](text)
        return float(text) if text else None

    try:
        with path.open(newline="") as file:
            return [
                kind(**{name: parse(name, text) for name, text in line.items()})
                for line in csv.DictReader(file)
            ]
    except (KeyError, TypeError, ValueError):
        sys.exit(f"{path} is not a table of this script")


def three_digits(value: float | None) -> str:
    """Format with three significant digits and no exponent."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
