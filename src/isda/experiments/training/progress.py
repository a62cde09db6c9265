"""The progress bar of a training."""

import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tqdm import tqdm

from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.training.training_step import Lane

__all__ = ["label_of", "show_epochs", "show_progress"]


def show_epochs(
    first: int, until: int, label: str, *, note: str = "", show: bool = True
) -> Iterator[int]:
    """Epochs to train, with a progress bar.

    A note says what the first epoch does besides training, such as compiling. It then does not
    count for the remaining time.
    """
    with show_progress(until, label, "epoch", first=first, show=show) as bar:
        if note:
            bar.set_postfix_str(note)
        for epoch in range(first, until):
            yield epoch
            bar.set_postfix_str("", refresh=False)
            if note and epoch == first:  # its time predicts nothing
                bar.unpause()
                bar.n = bar.initial = bar.last_print_n = first + 1
                bar.refresh()
            else:
                bar.update()


def show_progress(
    total: int, label: str, unit: str, *, first: int = 0, show: bool = True
) -> "tqdm[NoReturn]":
    """A progress bar; in a log file, a line every 30 seconds."""
    interactive = sys.stderr.isatty()
    return tqdm(
        initial=first,
        total=total,
        desc=label,
        unit=unit,
        disable=not show,
        mininterval=0.5 if interactive else 30,
        dynamic_ncols=interactive,
    )


def label_of(lanes: Sequence[Lane]) -> str:
    """Data set, network, methods and seeds of runs side by side."""
    methods: dict[str, list[str]] = {}
    for lane in lanes:
        methods.setdefault(lane.recipe.method, []).append(str(lane.seed))
    runs = ", ".join(f"{method} seed {' '.join(seeds)}" for method, seeds in methods.items())
    recipe = lanes[0].recipe
    label = f"{recipe.data_name} {recipe.network}, {runs}"
    if isinstance(lanes[0].data, DecodedImages):
        label += f", {lanes[0].data.place}"
    return label
