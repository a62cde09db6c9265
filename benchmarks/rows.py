"""CSV files of the benchmarks: a row per line, and how its numbers are printed."""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from isda.experiments.errors import InputError

__all__ = ["read_lines", "read_rows", "three_digits", "write_rows"]

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


def read_lines(path: Path, *columns: str) -> list[dict[str, Any]]:
    """Read a CSV file that has some lines, and at least these columns."""
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not lines or not {*columns} <= lines[0].keys():
        raise InputError(f"{path} is not a CSV file of this script")
    return lines


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, append: bool = False) -> None:
    """Write a CSV file; with ``append``, keep the rows that it has."""
    new = not (append and path.exists())
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if new else "a", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def three_digits(value: float | None) -> str:
    """Format with three significant digits and no exponent."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
