"""Entry point of the command ``isda``.

Importing torch takes seconds, so this module imports only the standard library: ``isda --help``
responds at once, and Ctrl-C during the imports ends the command without a traceback.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

__all__ = ["COMMANDS", "USAGE", "discard_output", "interruption", "main"]

COMMANDS = {
    "train": "Train a recipe, one run per seed.",
    "compare": "Train with cross entropy and with ISDA, and compare over seeds.",
    "search": "Choose λ₀ on held-out training images, then train on all and test.",
    "calibrate": "Fit a temperature on held-out images; compare NLL and ECE.",
    "table": "Show a table of the paper with our numbers, or train one cell.",
    "queue": "Train the runs listed in a file of commands; skip finished ones.",
    "report": "Show all tables with our numbers, export records, update pages.",
    "weights": "Write the weights of a finished run, with a model card.",
    "cost": "Measure what ISDA adds to a training step in time and memory.",
    "gan": "Train a GAN of Table 4, or measure its quality.",
    "invert": "Show augmented features as pictures made by a generator.",
    "neighbours": "Show the training images nearest to augmented features.",
    "list": "Show all recipes with the paper's test error and ours.",
}
"""Description of each command."""

USAGE = "\n".join(
    [
        "usage: isda COMMAND [RECIPE] [FLAGS]",
        "",
        *(f"  {name:10} {description}" for name, description in COMMANDS.items()),
        "",
        "A recipe is <data>-<network>-<method>. The default is",
        "digits-resnet8-isda, which needs no download and no GPU.",
        "`isda COMMAND RECIPE --help` lists the flags and their defaults.",
        "",
        "  isda train cifar100-resnet32-isda --seeds 0 1 2 --download",
        "  isda compare --data imagefolder:photos --network timm:resnet18 --pretrained",
    ]
)
"""The output of ``isda --help``."""


def discard_output() -> None:
    """Print nothing any more, not at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interruption(words: Sequence[str]) -> str:
    """The message after Ctrl-C: how to continue, if the command can."""
    if words[:1] == ["queue"]:
        return "isda: interrupted; repeat the command to continue"
    if words[:1] in (["report"], ["weights"], ["neighbours"], ["list"]) or "measure" in words[1:2]:
        return "isda: interrupted"
    return "isda: interrupted; --resume continues from the last checkpoint"


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see :func:`isda.experiments.cli.main`.

    Ctrl-C ends the process at once. This is safe, because every file is written under a temporary
    name and renamed, and runs resume from their checkpoints.
    """
    process = os.getpid()
    words = list(sys.argv[1:] if words is None else words)

    def interrupted(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not a forked process that reads images
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os.write(2, f"\n{interruption(words)}\n".encode())  # below the progress bar
        os._exit(128 + number)  # SystemExit could be caught by a module that is being imported

    signal.signal(signal.SIGINT, interrupted)
    if not words or words[0] in ("-h", "--help"):
        for stream in (sys.stdout, sys.stderr):
            getattr(stream, "reconfigure", lambda errors: None)(errors="replace")
        try:
            print(USAGE, flush=True)
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
            discard_output()
            return 141
        return 0
    from isda.experiments import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
