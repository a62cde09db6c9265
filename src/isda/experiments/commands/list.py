"""``isda list``: all recipes with the paper's test error and ours."""

from dataclasses import dataclass
from pathlib import Path

from isda.experiments.commands.arguments import parse
from isda.experiments.records import default_folder
from isda.experiments.report.tables import recipes_table
from isda.experiments.report.text import show

__all__ = ["List", "run"]


@dataclass(frozen=True)
class List:
    """Arguments of ``isda list``."""

    results: Path | None = None
    """Folder of run records; None: ./runs, or ./results if there are no runs."""


def run(words: list[str]) -> None:
    """Show the recipes."""
    given = parse(List, "list", words)
    show(recipes_table(given.results or default_folder()))
