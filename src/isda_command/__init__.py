"""The command ``isda``. A package of its own, so that ``isda --help`` does not import torch."""

import os
import sys

__all__ = ["COMMANDS", "USAGE", "main"]

COMMANDS = {
    "train": "Train a recipe, one run per seed.",
    "compare": "Train with cross entropy and with ISDA, and compare over seeds.",
    "search": "Choose λ₀ on held-out training images, then train on all and test.",
    "table": "Show a table of the paper with our numbers, or train a cell of it.",
    "queue": "Train what a file of commands needs, and skip what is finished.",
    "report": "Show all tables with our numbers, export records, update pages.",
    "cost": "Measure what ISDA adds to a training step in time and memory.",
    "list": "Show all recipes with the paper's test error and ours.",
}
"""What every command does."""

USAGE = "\n".join(
    [
        "usage: isda COMMAND [RECIPE] [FLAGS]",
        "",
        *(f"  {name:8} {text}" for name, text in COMMANDS.items()),
        "",
        "A recipe is <data>-<network>-<method>. The default is",
        "digits-resnet8-isda, which needs no download and no GPU.",
        "`isda COMMAND --help` lists the flags of a command.",
        "",
        "  isda train cifar100-resnet32-isda --seeds 0 1 2 --download",
        "  isda compare --data imagefolder:photos --network timm:resnet18",
    ]
)
"""Answer to ``isda --help``."""


def main() -> int:
    """Run a command and return its exit code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        try:
            print(USAGE.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return 0
    from isda.experiments.cli import main as run

    return run(words)
