"""The lines of a queue: a text file with one command per line.

Every line starts with train, compare, search, calibrate or table; # starts a comment.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isda.experiments.commands import calibrate, compare, search, table, train
from isda.experiments.commands.arguments import changed_options
from isda.experiments.commands.task import Task
from isda.experiments.errors import InputError, unknown
from isda.experiments.settings import Options

__all__ = ["Line", "read_queue"]

_TASKS: dict[str, Callable[[list[str]], Task]] = {
    "train": train.plan,
    "compare": compare.plan,
    "search": search.plan,
    "calibrate": calibrate.plan,
    "table": table.plan,
}
"""What a line trains, by its command."""


@dataclass(frozen=True)
class Line:
    """A command of a queue."""

    place: str
    """File and number of the line, for messages."""

    text: str
    """The command."""

    task: Task
    """What to train."""

    @property
    def number(self) -> str:
        """Number of the line."""
        return self.place.rpartition(":")[2]

    @property
    def title(self) -> str:
        """Place and command."""
        return f"{self.place}: {self.text}"


def read_queue(path: Path, options: Options) -> list[Line]:
    """Read the commands of a file.

    Args:
        path: text file.
        options: how to run the training; options in a line take precedence.

    Raises:
        InputError: a line is not a valid command; the message names the line.
    """
    lines = []
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} must be text in UTF-8: {error}") from error
    for number, text in enumerate(content.splitlines(), 1):
        place = f"{path}:{number}"
        try:
            words = shlex.split(text, comments=True)
            words = words[1:] if words[:1] == ["isda"] else words
            if words:
                lines.append(Line(place, shlex.join(words), _task(words, options)))
        except ValueError as error:  # InputError, or a quote that is not closed
            raise InputError(f"{place}: {error}") from error
    if not lines:
        raise InputError(f"{path} must have at least one command, found none")
    return lines


def _task(words: list[str], options: Options) -> Task:
    """The task of a line; it always resumes, within the time limit of the command."""
    command, *rest = words
    if command not in _TASKS:
        raise unknown("command of a queue", command, _TASKS)
    try:
        task = _TASKS[command](rest)
    except SystemExit:
        raise InputError("--help cannot be used in a queue") from None
    own = changed_options(task.options) | {"resume": True, "minutes": options.minutes}
    return task.with_options(options.changed(**own))
