"""The command line: ``isda train | compare | search | table | report | cost | list``."""

import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isda._version import __version__
from isda.experiments.errors import InputError, unknown
from isda.experiments.recipes import DEFAULT, baseline_of, run_name

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a mistake of the user is one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without λ and ± shows the rest
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(_USAGE)
            return 0
        if arguments[0] == "--version":
            print(f"torch-isda {__version__}")
            return 0
        command, *rest = arguments
        if command not in _COMMANDS:
            raise unknown("command", command, _COMMANDS)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            _COMMANDS[command](rest)
        sys.stdout.flush()  # here, where a reader that is gone is no surprise
    except InputError as error:
        print(f"isda: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of a reader that has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        needed = "pip install -e '.[experiments]' installs all that isda needs"
        print(f"isda: no module {error.name}: {needed}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"isda: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("isda: stopped; --resume goes on from the last checkpoint, if any", file=sys.stderr)
        return 130
    return 0


def _train(arguments: list[str]) -> None:
    """Train a recipe, one run per seed."""
    from isda.experiments.arguments import Arguments, parse
    from isda.experiments.records import summary
    from isda.experiments.training.loop import Plan, train

    given, start, start_name = parse(
        Arguments, "train", arguments, description=_train.__doc__ or ""
    )
    name = run_name(given.recipe, start, start_name)
    for run in train([Plan(name, given.recipe, seed) for seed in given.seeds], given.options):
        result = summary(run)
        split = "validation" if given.recipe.hold_out else "test"
        print(f"{run.folder}: {split} error {result.error:.2f} %, {result.seconds:.0f} s")


def _compare(arguments: list[str]) -> None:
    """Train a recipe with cross entropy and with ISDA, and tell the difference over seeds."""
    from isda.experiments.arguments import Arguments, parse
    from isda.experiments.report.comparison import (
        comparison,
        comparison_table,
        write_comparison_page,
    )
    from isda.experiments.training.loop import Plan, train

    given, start, start_name = parse(
        Arguments,
        "compare",
        arguments,
        description=_compare.__doc__ or "",
        seeds=(0, 1, 2),
    )
    recipe = given.recipe
    if recipe.method != "isda":
        raise InputError(f"method must be isda to be compared with ce, got {recipe.method!r}")
    baseline_name = baseline_of(start_name) if start_name else None
    sides = {
        run_name(recipe.baseline(), start.baseline(), baseline_name): recipe.baseline(),
        run_name(recipe, start, start_name): recipe,
    }
    plans = [Plan(name, side, seed) for name, side in sides.items() for seed in given.seeds]
    runs = train(plans, given.options)
    if not runs:
        return  # a rank that does not write
    result = comparison(runs, *sides)
    page = given.options.out / f"{result.method.name}.html"
    write_comparison_page(page, result)
    print(f"{comparison_table(result)}\n{page}")


def _search(arguments: list[str]) -> None:
    """Choose λ₀ on images held out of training, then train on all of them and test."""
    from isda.experiments import search

    search.main(arguments)


def _report(arguments: list[str]) -> None:
    """Show the paper's tables with our numbers, keep records, and bring pages up to date."""
    from isda.experiments.report import report

    report.main(arguments)


def _table(arguments: list[str]) -> None:
    """Show a table of the paper with our numbers, or train what a cell of it needs."""
    from isda.experiments.report import tables

    tables.main(arguments)


def _cost(arguments: list[str]) -> None:
    """Show what ISDA adds to parameters, computation, time and memory of a step (Table 1)."""
    from isda.experiments import cost

    cost.main(arguments)


def _list(arguments: list[str]) -> None:
    """Show all recipes with the paper's test error and that of the records in a folder."""
    from isda.experiments.flags import parse_flags
    from isda.experiments.report.report import recipes_table
    from isda.experiments.report.tables import usual_folder

    @dataclass(frozen=True)
    class Listed:
        results: Path | None = None
        """Folder of run records; if not given runs, or else results."""

    given = parse_flags(Listed, arguments, prog="isda list", description=_list.__doc__)
    print(recipes_table(given.results or usual_folder()))


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "compare": _compare,
    "search": _search,
    "report": _report,
    "table": _table,
    "cost": _cost,
    "list": _list,
}

_USAGE = "\n".join(
    [
        "usage: isda COMMAND [RECIPE] [FLAGS]",
        "",
        *(f"  {name:8} {function.__doc__}" for name, function in _COMMANDS.items()),
        "",
        f"A recipe is <data>-<network>-<method>; without one it is {DEFAULT}, which needs no",
        "download and no GPU. `isda COMMAND --help` shows the flags.",
        "",
        "  isda train cifar100-resnet32-isda --seeds 0 1 2 --data-root data --download",
        "  isda compare --data imagefolder:photos --network timm:resnet18 --epochs 30",
    ]
)


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"isda: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
