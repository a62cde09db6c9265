"""The command line: ``isda train``, ``compare`` and the other commands of :mod:`isda_command`.

Every command imports what it needs when it runs: printing a table does not import the training
code.
"""

import contextlib
import io
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial

from isda._version import __version__
from isda.experiments.errors import InputError, StoppedElsewhere, TimeUp, unknown
from isda.experiments.recipe_checks import require_seeds
from isda.experiments.records import Run, default_folder, export, load_runs, summary
from isda.experiments.report.text import show
from isda.experiments.settings import Options, Recipe
from isda_command import COMMANDS, USAGE

__all__ = ["TIME_UP", "main", "run"]

TIME_UP = 75
"""Exit code when ``--minutes`` are up before all runs are finished (EX_TEMPFAIL: try again)."""


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
        sys.stdout.flush()  # raises BrokenPipeError here, not at exit
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        needed = "install the extra: pip install -e '.[experiments]'"
        print(f"isda: no module named {error.name}; {needed}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"isda: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("isda: interrupted; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def run(command: str, words: list[str]) -> None:
    """Run a command with the words behind it; raises InputError for invalid input."""
    if command not in _FUNCTIONS:
        raise unknown("command", command, _FUNCTIONS)
    _FUNCTIONS[command](words)


def _train(words: list[str]) -> None:
    """Train a recipe, one run per seed."""
    from isda.experiments.plans import plan_train
    from isda.experiments.training.failures import finished_first
    from isda.experiments.training.loop import train

    planned = plan_train(words, description=COMMANDS["train"])
    with finished_first(train, planned.plans(), planned.options) as runs:
        for one in runs:
            result = summary(one)
            split = "validation" if one.recipe.hold_out else "test"
            print(f"{one.folder}: {split} error {result.error:.2f} %, {result.seconds:.0f} s")


def _compare(words: list[str]) -> None:
    """Train with cross entropy and with ISDA, and compare over seeds."""
    from isda.experiments.auto import choose_lambda_0
    from isda.experiments.plans import AutoComparison, plan_compare
    from isda.experiments.report.comparison import comparison, comparison_table
    from isda.experiments.training.device import join_processes
    from isda.experiments.training.failures import finished_first
    from isda.experiments.training.images import kept_images
    from isda.experiments.training.loop import train

    planned = plan_compare(words, description=COMMANDS["compare"])
    with contextlib.ExitStack() as stack:
        choice = None
        stack.enter_context(kept_images())  # for all trainings, and for the pictures
        if isinstance(planned, AutoComparison):
            stack.enter_context(join_processes(planned.options.device))  # for both trainings
            planned, choice = choose_lambda_0(planned)
        runs = stack.enter_context(finished_first(train, planned.plans(), planned.options))
        names = {run.name for run in runs}
        if not names >= planned.recipes.keys():
            return  # only rank 0 has the records; or all runs of a side have failed
        from isda.experiments.report.pages import write_comparison_page  # imports matplotlib

        result = comparison(runs, *planned.recipes)
        page = planned.options.out / f"{result.method.name}.html"
        pictures = partial(_pictures, result.method.recipe, planned.options)
        write_comparison_page(page, result, choice=choice, pictures=pictures)
        show(f"{comparison_table(result)}\n{page}")


def _pictures(recipe: Recipe, options: Options, seed: int, indices: list[int]) -> dict[int, bytes]:
    """Pictures of test images; none if they cannot be read."""
    from isda.experiments.training.predicted_images import thumbnails

    try:
        return thumbnails(recipe, seed, indices, options)
    except (OSError, ValueError, IndexError) as error:  # images that were moved or changed
        warnings.warn(f"no pictures on the page: {error}", stacklevel=2)
        return {}


def _search(words: list[str]) -> None:
    """Choose λ₀ on held-out training images, then train on all and test."""
    from isda.experiments.plans import plan_search
    from isda.experiments.search import search, search_table

    task = plan_search(words, description=COMMANDS["search"])
    result = search(**task.arguments(), options=task.options)
    if result is not None:
        show(f"{search_table(result)}\n{result.record}")


def _calibrate(words: list[str]) -> None:
    """Train without held-out images, fit a temperature on them, and compare NLL and ECE."""
    from isda.experiments.calibrate import calibrate
    from isda.experiments.calibration import calibration_text
    from isda.experiments.plans import plan_calibrate

    planned = plan_calibrate(words, description=COMMANDS["calibrate"])
    show(calibration_text(calibrate(planned, planned.options)))


def _table(words: list[str]) -> None:
    """Show a table of the paper with our numbers, or train one of its cells."""
    from isda.experiments.arguments import TableArguments, parse
    from isda.experiments.published import cell_recipes, get_table
    from isda.experiments.report.sides import create_sides, left_out_line
    from isda.experiments.report.tables import cell_results, section

    given = parse(TableArguments, "table", words, description=COMMANDS["table"])
    table = get_table(given.table)
    if not given.cell:
        if given != TableArguments(given.table, results=given.results):
            raise InputError("training needs a cell: isda table N --cell DATA/NETWORK")
        folder = given.results or default_folder()
        sides, left_out = create_sides([] if folder is None else load_runs(folder))
        show("\n\n".join([section(table, sides), *map(left_out_line, left_out.values())]))
        return
    if given.dry_run:
        require_seeds("seeds", given.seeds)
        for name in cell_recipes(given.table, *given.cell):
            print(shlex.join(["isda", "train", name, *given.train_flags()]))
        return
    from isda.experiments.plans import plan_cell
    from isda.experiments.training.loop import train

    planned = plan_cell(given)
    runs = train(planned.plans(), planned.options)
    if runs:  # only rank 0 has the records
        names = dict(zip(cell_recipes(given.table, *given.cell), planned.recipes, strict=True))
        show(cell_results(table, given.cell, names, runs))


def _queue(words: list[str]) -> None:
    """Train what a file of commands needs, line by line, and skip what is finished."""
    from isda.experiments.arguments import QueueArguments, parse
    from isda.experiments.queue import work_through

    work_through(parse(QueueArguments, "queue", words, description=COMMANDS["queue"]))


def _report(words: list[str]) -> None:
    """Show all tables with our numbers, export records, update pages."""
    from isda.experiments.arguments import ReportArguments, parse
    from isda.experiments.cost_records import cost_rows, read_costs
    from isda.experiments.report.blocks import update_markdown
    from isda.experiments.report.feature_tables import read_features
    from isda.experiments.report.sides import distinct
    from isda.experiments.report.tables import report_markdown

    given = parse(ReportArguments, "report", words, description=COMMANDS["report"])
    folder = given.runs or default_folder()
    if folder is None:
        raise InputError(
            "there are no records in runs or results: train something first, for example with "
            "isda compare, or give the folder of the records with --runs"
        )
    runs = distinct(load_runs(folder))
    measured = read_costs(given.costs) if given.costs else []
    costs = cost_rows(measured, "report") if measured else []
    finished = [one for one in runs if summary(one).finished]
    if given.export is not None:
        first: dict[tuple[str, int], Run] = {}
        for one in finished:
            twin = first.setdefault((one.name, one.seed), one)
            if twin is not one:
                raise InputError(f"{twin.folder} and {one.folder} have the same name and seed")
        for one in finished:
            print(export(one, given.export))
    pictures = read_features(given.pictures)
    show("\n\n".join([report_markdown(runs, costs), *(one.markdown for one in pictures)]))
    for path in given.update:
        print(f"{path}: {'updated' if update_markdown(path, runs, measured) else 'up to date'}")
    if given.figures is not None:
        from isda.experiments.report.figures import write_figures  # imports matplotlib

        print(*write_figures(given.figures, runs), sep="\n")
    if given.page is not None:
        from isda.experiments.report.pages import write_report_page  # imports matplotlib

        write_report_page(given.page, runs, costs, pictures)
        print(given.page)


def _weights(words: list[str]) -> None:
    """Write the weights of a finished run as safetensors, with a model card."""
    from isda.experiments.arguments import WeightsArguments, parse
    from isda.experiments.weights import export_weights

    given = parse(WeightsArguments, "weights", words, description=COMMANDS["weights"])
    print(*export_weights(given.run, given.out), sep="\n")


def _cost(words: list[str]) -> None:
    """Measure what ISDA adds to a training step in time and memory (Table 1)."""
    from isda.experiments.arguments import CostArguments, parse
    from isda.experiments.cost_records import costs_markdown

    given = parse(CostArguments, "cost", words, description=COMMANDS["cost"])
    if given.table:
        print(costs_markdown(given.table))
        return
    from isda.experiments.cost import show_costs

    show_costs(given)


def _gan(words: list[str]) -> None:
    """Train a GAN of Table 4, or measure one."""
    from isda.experiments.generators.commands import gan

    gan(words)


def _invert(words: list[str]) -> None:
    """Show augmented features as pictures of a generator (Appendix C)."""
    from isda.experiments.generators.commands import invert

    invert(words)


def _neighbours(words: list[str]) -> None:
    """Show the training images nearest to augmented features."""
    from isda.experiments.generators.commands import neighbours

    neighbours(words)


def _list(words: list[str]) -> None:
    """Show all recipes with the paper's test error and ours."""
    from isda.experiments.arguments import ListArguments, parse
    from isda.experiments.report.tables import recipes_table

    given = parse(ListArguments, "list", words, description=COMMANDS["list"])
    show(recipes_table(given.results or default_folder()))


_FUNCTIONS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "compare": _compare,
    "search": _search,
    "calibrate": _calibrate,
    "table": _table,
    "queue": _queue,
    "report": _report,
    "weights": _weights,
    "cost": _cost,
    "gan": _gan,
    "invert": _invert,
    "neighbours": _neighbours,
    "list": _list,
}


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"isda: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
