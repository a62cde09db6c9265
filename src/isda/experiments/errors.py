"""What the user can get wrong: one line on the terminal, exit code 2, no traceback."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

__all__ = ["InputError", "RunError", "refusing", "unknown"]


class InputError(ValueError):
    """A mistake in a command, a path or a file; its message is shown as it is."""


class RunError(InputError):
    """A run that cannot go on or cannot be written; earlier files are intact."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Error for a name that does not exist, with the nearest names that do."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return InputError(f"unknown {kind} {name!r}{hint}")


@contextlib.contextmanager
def refusing(mistake: str) -> Iterator[None]:
    """Tell what a network raises when it is given images as a mistake of the user."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{mistake}: {reason}") from error
