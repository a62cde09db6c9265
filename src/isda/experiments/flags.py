"""Flags of the commands, read by tyro; a mistake is one line, as all others are."""

import contextlib
import io
import re
from typing import Any, TypeVar

import tyro

from isda.experiments.errors import InputError

__all__ = ["parse_flags"]

_Given = TypeVar("_Given")


def parse_flags(kind: type[_Given], arguments: list[str], **options: Any) -> _Given:
    """What the flags say, as an object of that kind; ``options`` are those of ``tyro.cli``.

    Raises:
        InputError: a flag that is not known, with those that are similar, or a value that is none.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, args=arguments, **options)
    except SystemExit as end:
        if end.code == 0:  # help was asked for
            raise
        raise InputError(_one_line(printed.getvalue())) from None


def _one_line(box: str) -> str:
    """The message in a box of tyro's: its first part, and the flags that it thinks were meant.

    Where the terminal has no characters for boxes, the title is a part of its own.
    """
    framed = box.startswith("╭")
    text = re.sub(r"(?m)^[╭╰].*$", "", box).replace("│", " ")
    parts = [part.split() for part in re.split(r"(?m)^ *[─-]{3,} *$", text)]
    _, message, *others = [[], *parts] if framed else parts
    near = [word.strip(",") for part in others if part[:1] == ["Perhaps"]
            for word in part if word.startswith("--")]  # fmt: skip
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    words = " ".join(message).rstrip(".")
    return words[:1].lower() + words[1:] + hint
