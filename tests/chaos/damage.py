"""Random damage to files: what disks, editors, other programs and people do to them."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

__all__ = ["FOREIGN", "damage_bytes", "damage_file", "damage_json"]

FOREIGN: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**9, 10**400, -(10**400), float("nan"), float("inf"), -5.57,
    500, "", "0", "x", "../../evil", "/evil", "..", "a/b", "\ud800", "\0", "\n", [], [1], {},
    {"epoch": 0}, [[[[]]]],
)  # fmt: skip
"""Values that may stand anywhere in a JSON file."""


def damage_file(path: Path, generator: random.Random, other: Path) -> str:
    """Damage a file of a record and return what was done.

    Args:
        path: file to damage.
        generator: source of random numbers.
        other: the same file of another record.
    """
    kinds = ("bytes", "json", "whole") if path.suffix != ".pt" else ("bytes",)
    kind = generator.choices(kinds, (6, 4, 1)[: len(kinds)])[0]
    if kind == "whole":
        kind = generator.choice(["deleted", "folder", "of another record", "nested", "foreign"])
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "of another record":
            shutil.copyfile(other, path)
        elif kind == "nested":
            path.write_text(generator.choice(["[", '{"a":']) * 50_000 + "\n")
        elif kind == "foreign":
            path.write_text(json.dumps(generator.choice(FOREIGN)) + "\n")
        return kind
    content = path.read_bytes()
    changed, done = (damage_bytes if kind == "bytes" else damage_json)(content, generator)
    path.write_bytes(changed)
    return done


def damage_bytes(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    """Flip, cut, repeat, insert or erase bytes, wherever they are; return also what was done."""
    where, length = generator.randrange(len(content)), generator.randrange(1, 400)
    end = where + length
    kind = generator.choice(["flip", "flip", "flip", "flips", "cut", "drop", "repeat", "insert",
                             "zero", "swap"])  # fmt: skip
    if kind in ("flip", "flips"):
        changed = bytearray(content)
        for _ in range(1 if kind == "flip" else generator.randrange(2, 9)):
            changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        return bytes(changed), kind
    if kind == "swap":
        lines = content.splitlines(keepends=True)
        one, other = (generator.randrange(len(lines)) for _ in range(2))
        lines[one], lines[other] = lines[other], lines[one]
        return b"".join(lines), f"swap of lines {one} and {other}"
    return {
        "cut": content[:where],
        "drop": content[:where] + content[end:],
        "repeat": content[:end] + content[where:],
        "insert": content[:where] + generator.randbytes(length) + content[where:],
        "zero": content[:where] + bytes(len(content[where:end])) + content[end:],
    }[kind], f"{kind} at {where}, length {length}"


def damage_json(content: bytes, generator: random.Random) -> tuple[bytes, str]:
    """Replace, delete or add a value somewhere in a JSON document or in one line of several."""
    try:
        documents, indent = [json.loads(content)], 2
    except ValueError:
        documents, indent = [json.loads(line) for line in content.splitlines()], None
    here: Any = generator.choice(documents)
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = generator.choice(keys)
        if not isinstance(here[key], dict | list) or not here[key] or generator.random() < 0.2:
            break
        here = here[key]
    kind = generator.choice(["replace", "replace", "delete", "add"])
    value = generator.choice(FOREIGN)
    if kind == "delete":
        del here[key]
    elif kind == "replace" or isinstance(here, list):
        here[key] = value
    else:
        here["another"] = value
    text = "".join(json.dumps(document, indent=indent) + "\n" for document in documents)
    return text.encode(), f"{kind} {key!r} by {value!r:.40}"
