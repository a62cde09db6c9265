"""Checksums of a record: of config.json, and of every line of metrics.jsonl.

metrics.jsonl has a JSON object per epoch. Every line ends in a field ``check``: the first 16
hexadecimal digits of the SHA-256 of name, seed and recipe, of all lines before it, and of the line
itself up to that field. Lines without it, which earlier versions wrote, are unverified.
"""

import contextlib
import hashlib
import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashlib import _Hash as Checksum
else:
    Checksum = Any

__all__ = [
    "Checksum",
    "config_checksum",
    "first_checksum",
    "is_number",
    "is_object",
    "read_line",
    "require_metrics",
    "sealed",
]


def first_checksum(config: dict[str, Any]) -> Checksum:
    """Checksum before the first line, from the fields of config.json."""
    fields = [config[name] for name in ("name", "seed", "recipe")]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode())


def config_checksum(config: dict[str, Any]) -> str:
    """Checksum of the fields of config.json, without their field ``check``."""
    fields = {name: value for name, value in config.items() if name != "check"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def sealed(record: dict[str, Any], checksum: Checksum) -> bytes:
    """The line of an epoch, without a newline, and with its checksum as the last field.

    Args:
        record: metrics of the epoch.
        checksum: :func:`first_checksum`, updated with the bytes of all lines before this one.
    """
    body = json.dumps(record).encode().removesuffix(b"}")
    checksum = checksum.copy()
    checksum.update(body)
    return body + f', "check": "{checksum.hexdigest()[:16]}"}}'.encode()


def read_line(line: bytes, checksum: Checksum) -> tuple[Any, bool]:
    """The record of a line, and whether it has a checksum; raises ValueError if that is wrong.

    Updates ``checksum`` with the line and its newline.
    """
    found = _CHECK.search(line)
    body = line if found is None else line[: found.start()]
    checksum.update(body)
    if found is not None and (
        found.end() != len(line) or checksum.hexdigest()[:16] != found[1].decode()
    ):
        raise ValueError("does not match its checksum")
    checksum.update(line[len(body) :] + b"\n")
    record = _parse(line)
    if found is not None and isinstance(record, dict):
        del record["check"]
    return record, found is not None


def require_metrics(record: Any, epoch: int, epochs: int) -> None:
    """Raise ValueError unless a record can be that of an epoch.

    All values are finite numbers >= 0. Errors are percentages, the calibration error is a fraction;
    float32 arithmetic may exceed these limits by a rounding error.
    """
    if (
        not isinstance(record, dict)
        or not all(key.isidentifier() and is_number(value) for key, value in record.items())
        or type(record.get("epoch")) is not int
        or not record["epoch"] == epoch < epochs
        or "test_error" not in record
    ):
        raise ValueError(f"is not the record of epoch {epoch} of {epochs}")
    for key, value in record.items():
        if not -_ROUNDING <= value <= _LIMITS.get(key, math.inf) + _ROUNDING:
            expected = f"from 0 to {_LIMITS[key]}" if key in _LIMITS else ">= 0"
            raise ValueError(f"has {key} {value!r}, which must be {expected}")
        if key in _INTEGERS and type(value) is not int:
            raise ValueError(f"has {key} {value!r}, which must be an integer")


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number, not a boolean, and an integer fits into 64 bits."""
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and abs(value) < 2**63


def is_object(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    return isinstance(_parse(line), dict)


_CHECK = re.compile(rb', "check": "([0-9a-f]{16})"\}')
_LIMITS = {"test_error": 100, "test_top5_error": 100, "test_ece": 1}
_INTEGERS = ("epoch", "side_by_side")
_ROUNDING = 1e-4  # 100 · (1 − mean) in float32


def _parse(line: bytes) -> Any:
    """The value of a line of JSON, or None if it is not valid JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None
