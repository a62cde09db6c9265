"""The command line: ``isda train | compare | report | cost | list``.

To train is a recipe by name, with any of its fields changed by a flag, and how to train it.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from isda._version import __version__
from isda.experiments.errors import InputError, unknown
from isda.experiments.recipes import DEFAULT, Recipe, baseline_of, get_recipe, run_name
from isda.experiments.train import Options, Plan, train

__all__ = ["main"]


@dataclass(frozen=True)
class _Arguments:
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    """What is trained: the recipe, any field of which can be changed."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How it is trained."""

    seeds: tuple[int, ...] = (0,)
    """One run for each seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a mistake of the user is one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
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
    except InputError as error:
        print(f"isda: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("isda: stopped; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _train(arguments: list[str]) -> None:
    """Train a recipe, one run per seed."""
    from isda.experiments.runs import summary

    given, start, start_name = _parse("train", arguments, seeds=(0,))
    name = run_name(given.recipe, start, start_name)
    for run in train([Plan(name, given.recipe, seed) for seed in given.seeds], given.options):
        result = summary(run)
        print(f"{run.folder}: test error {result.error:.2f} %, {result.seconds:.0f} s")


def _compare(arguments: list[str]) -> None:
    """Train a recipe with cross entropy and with ISDA, and tell the difference over seeds."""
    from isda.experiments.report import comparison, comparison_table, write_comparison_page

    given, start, start_name = _parse("compare", arguments, seeds=(0, 1, 2))
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


def _report(arguments: list[str]) -> None:
    """Print the table of finished runs, keep their records, and bring Markdown files up to date."""
    from isda.experiments.report import markdown_table, update_markdown
    from isda.experiments.runs import export, load_runs, summary

    @dataclass(frozen=True)
    class Arguments:
        runs: Path = Path("runs")
        """Folder of runs or of run records."""

        export: Path | None = None
        """Copy the records of finished runs, without checkpoints, into this folder."""

        update: tuple[Path, ...] = ()
        """Markdown files whose tables, between <!-- runs:NAME --> marks, are made anew."""

    given = tyro.cli(Arguments, args=arguments, prog="isda report", description=_report.__doc__)
    runs = [run for run in load_runs(given.runs) if summary(run).finished]
    if given.export is not None:
        for run in runs:
            print(export(run, given.export))
    print(markdown_table(runs))
    for path in given.update:
        print(f"{path}: {'updated' if update_markdown(path, runs) else 'up to date'}")


def _cost(arguments: list[str]) -> None:
    """Show what ISDA adds to parameters, computation, time and memory of a step (Table 1)."""
    from isda.experiments import cost

    cost.main(arguments)


def _list(arguments: list[str]) -> None:
    """Show all recipes with the paper's test error and that of the records in a folder."""
    from isda.experiments.report import recipes_table

    @dataclass(frozen=True)
    class Arguments:
        results: Path = Path("results")
        """Folder of run records."""

    given = tyro.cli(Arguments, args=arguments, prog="isda list", description=_list.__doc__)
    print(recipes_table(given.results))


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "compare": _compare,
    "report": _report,
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

_OWN_IMAGES = Recipe(  # a start for images that no recipe is made for
    data="imagefolder:PATH",
    network="timm:resnet18",
    epochs=90,
    batch_size=64,
    learning_rate=0.025,
    weight_decay=1e-4,
    lambda_0=0.5,
    channels_last=True,
)


def _parse(
    command: str, arguments: list[str], *, seeds: tuple[int, ...]
) -> tuple[_Arguments, Recipe, str | None]:
    """What was asked for, the recipe it started from, and that recipe's name if one was given."""
    name = None
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        start = get_recipe(name)
    else:
        own = any("imagefolder:" in word for word in arguments)
        start = _OWN_IMAGES if own else get_recipe(DEFAULT)
    given = tyro.cli(
        _Arguments,
        args=arguments,
        default=_Arguments(start, Options(), seeds),
        prog=f"isda {command} {name or '[RECIPE]'}",
        description=_COMMANDS[command].__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    chosen = given.seeds
    if len({*chosen}) != len(chosen) or not chosen or not 0 <= min(chosen) <= max(chosen) < 2**32:
        listed = " ".join(map(str, chosen)) or "none"
        raise InputError(f"seeds must be different numbers from 0 to 2³² - 1, got {listed}")
    return given, start, name


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"isda: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
