"""The command line: ``isda train``, ``compare`` and the other commands of :mod:`isda_command`."""

import errno
import io
import shlex
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from isda._version import __version__
from isda.experiments.errors import InputError, StoppedElsewhere, TimeUp, unknown
from isda_command import COMMANDS, USAGE, discard_output, interruption

__all__ = ["TIME_UP", "main", "run"]

TIME_UP = 75
"""Exit code if the time limit is reached before all runs are finished (EX_TEMPFAIL: try again)."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    An input error prints one line to stderr and returns 2; a time limit returns ``TIME_UP``.
    """
    words = list(sys.argv[1:] if words is None else words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals without λ and ±
    try:
        if not words or words[0] in ("-h", "--help"):
            print(USAGE)
        elif words[0] == "--version":
            print(f"torch-isda {__version__}")
        else:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning  # type: ignore[assignment]
                run(words[0], words[1:])
        print(end="", flush=True)  # raises BrokenPipeError here, not at exit
    except StoppedElsewhere:
        # another process says why and fails; torchrun would kill it at the first failed process
        return 0
    except InputError as error:
        print(f"isda: {error}", file=sys.stderr)
        return 2
    except TimeUp as error:
        resume = [] if words[0] == "queue" or "--resume" in words else ["--resume"]
        command = shlex.join(["isda", *words, *resume])
        print(f"isda: {error}; continue with: {command}", file=sys.stderr)
        return TIME_UP
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        discard_output()
        return 141
    except ModuleNotFoundError as error:
        needed = "install the extra: pip install -e '.[experiments]'"
        print(f"isda: no module named {error.name}; {needed}", file=sys.stderr)
        return 2
    except OSError as error:
        place = error.filename
        if place is None and error.errno == errno.ENOSPC:  # of stdout; files have a WriteError
            discard_output()
            place = "cannot print"
        if place is None:
            raise
        print(f"isda: {place}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interruption(words), file=sys.stderr)
        return 130
    return 0


def run(command: str, words: list[str]) -> None:
    """Run a command with its arguments; raises InputError for invalid input.

    Only the file of this command is imported: printing a table does not import the training code.
    """
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    file, function = (
        ("generators", command) if command in ("gan", "invert", "neighbours") else (command, "run")
    )
    getattr(import_module(f"isda.experiments.commands.{file}"), function)(words)


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"isda: {message}", file=sys.stderr)
