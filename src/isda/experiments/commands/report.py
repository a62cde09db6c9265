"""``isda report``: all tables with our numbers, exported records, updated pages and figures."""

from dataclasses import dataclass
from pathlib import Path

from isda.experiments.commands.arguments import parse
from isda.experiments.cost_records import read_costs
from isda.experiments.errors import InputError
from isda.experiments.records import Run, default_folder, export, load_runs, summary
from isda.experiments.report.blocks import update_markdown
from isda.experiments.report.feature_tables import read_features
from isda.experiments.report.sides import distinct
from isda.experiments.report.tables import report_markdown
from isda.experiments.report.text import show

__all__ = ["Report", "run"]


@dataclass(frozen=True)
class Report:
    """Arguments of ``isda report``."""

    runs: Path | None = None
    """Folder of runs or run records; None: ./runs, or ./results if there are no runs."""

    export: Path | None = None
    """Copy the records of finished runs, without checkpoints, to this folder."""

    update: tuple[Path, ...] = ()
    """Markdown files in which to update the tables between <!-- runs:NAME --> marks."""

    page: Path | None = None
    """Write tables, comparisons and curves as one self-contained HTML page."""

    figures: Path | None = None
    """Draw error, NLL, calibration and the curve of lambda_0 as SVG files in this folder."""

    costs: tuple[Path, ...] = ()
    """CSV files written by isda cost, to show below Table 1."""

    pictures: tuple[Path, ...] = ()
    """Output folders of isda invert, neighbours or gan measure, to show at the end and between
    <!-- runs:FOLDER:pictures --> marks in updated files."""


def run(words: list[str]) -> None:
    """Show the tables, and write what is asked for."""
    given = parse(Report, "report", words)
    folder = given.runs or default_folder()
    if folder is None:
        raise InputError(
            "there are no records in runs or results: train something first, for example with "
            "isda compare, or give the folder of the records with --runs"
        )
    runs = distinct(load_runs(folder))
    costs = read_costs(given.costs)
    pictures = read_features(given.pictures)
    if given.export is not None:
        _export([one for one in runs if summary(one).finished], given.export)
    changed = {path: update_markdown(path, runs, costs, pictures) for path in given.update}
    show("\n\n".join([report_markdown(runs, costs), *(one.markdown for one in pictures)]))
    for path, is_new in changed.items():
        print(f"{path}: {'updated' if is_new else 'up to date'}")
    if given.page is not None:
        from isda.experiments.report.pages import write_report_page  # imports matplotlib

        write_report_page(given.page, runs, costs, pictures)
        print(given.page)
    if given.figures is not None:
        from isda.experiments.report.figures import write_figures  # imports matplotlib

        print(*write_figures(given.figures, runs), sep="\n")


def _export(runs: list[Run], folder: Path) -> None:
    """Copy records and print their folders; raises InputError if two are of the same run."""
    first: dict[tuple[str, int], Run] = {}
    for one in runs:
        twin = first.setdefault((one.name, one.seed), one)
        if twin is not one:
            raise InputError(f"{twin.folder} and {one.folder} have the same name and seed")
    for one in runs:
        print(export(one, folder))
