"""Parsing of arguments with tyro: a dataclass per command, whose fields are its flags."""

import contextlib
import io
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import tyro

from isda.experiments.errors import InputError
from isda.experiments.settings import Options
from isda_command import COMMANDS

__all__ = ["changed_options", "parse", "require_seeds"]

_Arguments = TypeVar("_Arguments")


def parse(kind: type[_Arguments], command: str, words: list[str], **options: Any) -> _Arguments:
    """Parse the arguments of a command.

    Args:
        kind: dataclass of the command's arguments.
        command: the command, for its help.
        words: words of the command line after the command.
        options: further options of ``tyro.cli``.

    Raises:
        InputError: a flag is unknown (the message suggests similar ones), or a value is invalid.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                kind,
                args=[_expanded(word) for word in words],
                prog=f"isda {command}",
                config=(tyro.conf.OmitArgPrefixes,),
                **{"description": COMMANDS[command.split()[0]], **options},
            )
    except SystemExit as end:
        if end.code == 0:  # --help
            raise
        raise InputError(_one_line(printed.getvalue())) from None


def require_seeds(argument: str, seeds: Sequence[int]) -> None:
    """Raise InputError unless there is at least one seed, and all are different 32-bit integers."""
    if not seeds or len({*seeds}) != len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**32:
        listed = " ".join(map(str, seeds)) or "none"
        raise InputError(f"{argument} must be different integers from 0 to 2³² - 1, got {listed}")


def changed_options(options: Options) -> dict[str, Any]:
    """The options that do not have their default."""
    values = {option.name: getattr(options, option.name) for option in fields(Options)}
    return {name: value for name, value in values.items() if value != getattr(Options, name)}


def _expanded(word: str) -> str:
    """Replace ~ by the home folder where no shell does: in a queue, and in --out=~/runs."""
    flag, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return flag + sign + os.path.expanduser(value)


def _one_line(box: str) -> str:
    """Condense tyro's boxed error message to one line, with the flags it suggests.

    On a terminal without box-drawing characters, the title is a part of its own.
    """
    framed = box.startswith("╭")
    text = re.sub(r"(?m)^[╭╰].*$", "", box).replace("│", " ")
    parts = re.split(r"(?m)^ *[─-]{3,} *$", text)
    _, message, *others = ["", *parts] if framed else parts
    near = []
    for part in others:
        if "Perhaps you meant" in part:
            near += re.findall(r"(?m)^ {6}(--[\w-]+)", part)  # not those in help texts
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    words = " ".join(message.split()).rstrip(".")
    return words[:1].lower() + words[1:] + hint
