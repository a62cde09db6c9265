"""How many runs train fastest side by side: measured on the GPU, once per network.

Runs side by side share the GPU. Too few leave it idle, too many slow each other down, and the best
number depends on network and GPU. Therefore, before the first run of a network, a few steps are
timed with the expected number of runs, and with about two thirds and four thirds of it. The times
are kept in ``side_by_side.json``, in the folder of the compiled code or else of the runs.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from isda._version import __version__
from isda.experiments.errors import WriteError
from isda.experiments.files import read_bytes, write_json
from isda.experiments.metrics_lines import is_number
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.deadline import Deadline
from isda.experiments.training.failures import free_memory
from isda.experiments.training.memory import is_out_of_memory
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

__all__ = ["candidates", "choose_width", "fastest_width"]

_FILE = "side_by_side.json"
_FEWEST_STEPS = 40  # in an epoch, so that a measurement fits into it
_SHORTEST = 1800.0  # seconds left: measuring takes about a minute and saves a few percent
_EQUAL = 1.02  # times that differ by less are equal, and the smaller number needs less memory


def candidates(runs: int, expected: int) -> list[int]:
    """Numbers of runs to time, ascending.

    >>> candidates(10, 6), candidates(5, 6), candidates(10, 1)
    ([4, 6, 8], [4, 5], [1])

    Args:
        runs: number of runs that are to be trained.
        expected: number that is expected to be the fastest.
    """
    return sorted({max(1, min(runs, round(expected * share))) for share in (2 / 3, 1, 4 / 3)})


def choose_width(seconds: Mapping[int, float]) -> int:
    """The number of runs with the least time per run; the smallest of nearly equal ones.

    >>> choose_width({4: 0.0050, 6: 0.0066, 8: 0.0100})  # 1.25, 1.10 and 1.25 ms per run
    6

    Args:
        seconds: time of a step of all runs, by their number.
    """
    each = {number: value / number for number, value in seconds.items()}
    return min(number for number, value in each.items() if value <= _EQUAL * min(each.values()))


def fastest_width(
    recipe: Recipe,
    runs: int,
    expected: int,
    create_lanes: Callable[[int], Sequence[Lane]],
    options: Options,
    device: torch.device,
) -> int:
    """Number of runs side by side, from the measurements of earlier commands and new ones.

    Nothing is measured if all runs fit side by side, or if too little time is left for a
    measurement to pay off.

    Args:
        recipe: recipe of the first run.
        runs: number of runs that are to be trained.
        expected: number that is expected to be the fastest, used if nothing is known.
        create_lanes: creates some of the runs; their state is discarded.
        options: how to run the training.
        device: device of the runs.
    """
    folder = (options.compile_cache or options.out).expanduser()
    path, key = folder / _FILE, _key(recipe, device)
    known = _read(path)
    seconds = known.get(key, {})
    width = choose_width(seconds) if seconds else expected
    numbers = candidates(runs, expected)
    unknown = len(numbers) > 1 and max(seconds, default=0) < numbers[-1]
    if runs <= width or not unknown or Deadline(options).seconds_left < _SHORTEST:
        return min(runs, width)
    missing = [number for number in numbers if number not in seconds]
    measured = _measure(missing, recipe, create_lanes, options)
    if not measured:
        return min(runs, width)
    seconds = dict(sorted({**seconds, **measured}.items()))
    width = choose_width(seconds)
    each = ", ".join(f"{number}: {1000 * s / number:.2f}" for number, s in seconds.items())
    tqdm.write(
        f"isda: {recipe.network}, ms per step and run by number of runs side by side: {each}; "
        f"using {width}",
        file=sys.stderr,
    )
    with contextlib.suppress(WriteError, OSError):  # it can be measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, key: seconds})
    return min(runs, width)


def _measure(
    numbers: Sequence[int],
    recipe: Recipe,
    create_lanes: Callable[[int], Sequence[Lane]],
    options: Options,
) -> dict[int, float]:
    """Time of a step of all runs, by their number; without those that cannot be measured."""
    seconds: dict[int, float] = {}
    for number in numbers:
        try:
            lanes = list(create_lanes(number))
            if lanes[0].images.is_fed or lanes[0].num_images < _FEWEST_STEPS * recipe.batch_size:
                break
            runner = SideBySide(lanes, capture=options.capture)
            seconds[number] = runner.seconds_per_step(recipe.batch_size)
        except Exception as error:
            if not is_out_of_memory(error):  # the training says what is wrong
                return {}
            break  # more runs do not fit, either
        finally:
            lanes, runner = [], None  # type: ignore[assignment]
            free_memory()
    return seconds


def _read(path: Path) -> dict[str, dict[int, float]]:
    """Measurements of earlier commands; empty if there are none or the file is damaged."""
    known: dict[str, dict[int, float]] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        for key, seconds in json.loads(read_bytes(path, most=2**20)).items():
            known[key] = {int(number): value for number, value in seconds.items()}
            if not all(
                number > 0 and is_number(value) and value > 0
                for number, value in known[key].items()
            ):
                return {}
        return known
    return {}


def _key(recipe: Recipe, device: torch.device) -> str:
    """What the measurement depends on; the loss hardly changes it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    fields = ("network", "data", "image_size", "batch_size", "precision", "compile")
    parts = [name, *(getattr(recipe, field) for field in fields)]
    return " ".join(map(str, [*parts, torch.__version__, __version__]))
