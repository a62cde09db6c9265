"""Input errors: the command line shows them as one line, with exit code 2 and no traceback."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isda.experiments.records import Run  # which imports this module

__all__ = [
    "InputError",
    "RunError",
    "RunLocked",
    "RunsFailed",
    "StoppedElsewhere",
    "TimeUp",
    "WriteError",
    "as_input_error",
    "few",
    "one_line",
    "reason",
    "unknown",
]


class InputError(ValueError):
    """Invalid argument, path or file; the message is shown to the user as it is."""

    fatal = True
    """Whether the other runs of the training cannot continue either."""


class RunLocked(InputError):
    """Another process is training the run."""


class RunError(InputError):
    """A run that cannot continue."""

    fatal = False


class WriteError(RunError):
    """A file that cannot be written."""

    fatal = True


class StoppedElsewhere(RunError):
    """Another process has stopped this training, and reports the reason."""

    def __init__(self, *, fatal: bool) -> None:
        super().__init__("another process has stopped: see its message")
        self.fatal = fatal


class RunsFailed(RunError):
    """Some runs of a training failed.

    Args:
        failures: what failed, and why.
        runs: the runs that are finished.
        total: number of runs.
    """

    def __init__(self, failures: Sequence[str], runs: "Sequence[Run]", total: int) -> None:
        text = "".join(f"\n  {failure}" for failure in failures)
        many = f"{len(failures)} of {total} runs failed:{text}"
        super().__init__(failures[0] if total == 1 else many)
        self.runs = list(runs)


class TimeUp(Exception):
    """The time limit of a command was reached before the end; checkpoints are written."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Error for an unknown name, which suggests similar ones, or all if they are few."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if not near and 0 < len(known) <= 8:
        hint = f"; choose from {', '.join(known)}"
    return InputError(f"unknown {kind} {name!r}{hint}")


def reason(error: Exception) -> str:
    """The message of an error in one line, without the file name, which callers put before it."""
    words = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    first, *rest = str(words).splitlines()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first  # a heading


def few(names: Sequence[str], limit: int = 5) -> str:
    """The first names in one line, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(one_line, names[:limit])) + more


def one_line(name: object) -> str:
    """A name in one line: line breaks and other control characters become escape sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(name))


@contextlib.contextmanager
def as_input_error(message: str) -> Iterator[None]:
    """Turn errors that a network raises for unsuitable images into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InputError(f"{message}: {reason(error)}") from error
