"""Input errors: the command line shows them as one line, with exit code 2 and no traceback."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

__all__ = ["InputError", "RunError", "TimeUp", "as_input_error", "unknown"]


class InputError(ValueError):
    """Invalid argument, path or file; the message is shown to the user as it is."""


class RunError(InputError):
    """A run that cannot continue, or a file that cannot be written."""


class TimeUp(Exception):
    """The time limit of a command ended before its runs; their checkpoints are written."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Error for an unknown name, which suggests similar ones."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return InputError(f"unknown {kind} {name!r}{hint}")


@contextlib.contextmanager
def as_input_error(message: str) -> Iterator[None]:
    """Turn errors that a network raises for unsuitable images into an InputError."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{message}: {reason}") from error
