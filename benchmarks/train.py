"""Speed of training: seconds per epoch, images/s, TFLOP/s and peak memory of CE and ISDA.

    python benchmarks/train.py --networks resnet32 wide_resnet28_10 --side-by-side 1 6

runs the training steps of the recipes ``<data>-<network>-ce`` and ``-isda`` on random images that
are on the device, like CIFAR. It times whole epochs, after one that compiles and captures. Seconds
are per run: the time of all runs side by side, divided by their number.

    python benchmarks/train.py --networks resnet110 --images 1024 --profile

prints the functions that the time of the start-up goes to, and the kernels of a training step and
of an evaluation.
"""

import argparse
import contextlib
import cProfile
import dataclasses
import io
import pstats
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import read_lines, write_rows
from timing import seconds_of

from isda.experiments.errors import InputError, unknown
from isda.experiments.recipes import get_recipe
from isda.experiments.report.text import markdown_rows
from isda.experiments.settings import Recipe
from isda.experiments.theoretical_cost import multiply_adds
from isda.experiments.training.device import join_processes
from isda.experiments.training.environment import environment
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.step_cost import SHAPES, random_images
from isda.experiments.training.training_step import Lane

KERNELS = {  # kind of a kernel: pattern of its name, the first that matches
    "ISDA": r"_class_statistics|_covariance|_multiply|_cross_entropy|_split|_screen|_weight_grad",
    "optimizer": r"multi_tensor|FusedSgd",
    "batch norm, activations": r"^triton_",
    "convolutions": r"cudnn|conv|xmma|wgrad|dgrad|fprop|implicit|cutlass|gemm|nvjet|nchw|nhwc",
}
EPOCH_IMAGES = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000, "imagenet": 1_281_167}
COLUMNS = {  # header of the Markdown table
    "network": "network",
    "method": "method",
    "side_by_side": "side by side",
    "batch_size": "batch",
    "seconds_per_epoch": "s/epoch per run",
    "images_per_second": "images/s, all runs",
    "tflops": "TFLOP/s, all runs",
    "peak_mebibytes": "peak MiB, all runs",
    "added_percent": "added to CE",
}


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="cifar100", choices=list(SHAPES))
    parser.add_argument("--networks", nargs="+", default=["resnet32"])
    parser.add_argument("--methods", nargs="+", default=["ce", "isda"])
    parser.add_argument("--side-by-side", nargs="+", type=int, default=[1])
    parser.add_argument("--images", type=int, help="images per epoch (default: all)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs to time; the fastest counts")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="change fields of the recipe"
    )
    parser.add_argument("--no-capture", action="store_true")
    parser.add_argument(
        "--profile", action="store_true", help="print what start-up and epochs spend their time on"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--table", type=Path, help="print a CSV file as a Markdown table and exit")
    arguments = parser.parse_args(words)
    for name in ("epochs", "images", "side_by_side"):
        value = getattr(arguments, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1")
    try:
        if arguments.table:
            print(markdown(read_lines(arguments.table, "method", "seconds_per_epoch")))
            return
        with join_processes(arguments.device) as (device, _, _):
            arguments.device = str(device)
        if arguments.profile and device.type != "cuda":
            raise InputError(f"--profile needs a GPU, got --device {device}")
        run(arguments)
    except InputError as error:
        parser.error(str(error))


def run(arguments: argparse.Namespace) -> None:
    """Measure every combination of network, number of runs and method."""
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    for network in arguments.networks:
        for number in arguments.side_by_side:
            for method in arguments.methods:
                recipe = get_recipe(f"{arguments.data}-{network}-{method}")
                recipe = dataclasses.replace(recipe, **changes(recipe, arguments.set))
                try:
                    row = measure(recipe, number, arguments)
                except torch.OutOfMemoryError as error:
                    print(f"{network} {method} x{number}: {error}", file=sys.stderr)
                    continue
                finally:
                    torch._dynamo.reset()
                    if arguments.device.startswith("cuda"):
                        torch.cuda.empty_cache()
                rows.append(row)
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
                if arguments.out:
                    write_rows(arguments.out, [row], append=True)
    print()
    print(markdown(rows))


def measure(recipe: Recipe, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure an epoch of ``number`` runs side by side."""
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    num_classes, shape = SHAPES[recipe.data]
    images = arguments.images or EPOCH_IMAGES[recipe.data]
    data = random_images(images, num_classes=num_classes, shape=shape, device=device)
    with torch.device("meta"):
        flops = 6 * multiply_adds(Lane.create_network(recipe, data, seed=0), shape)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    lanes = [Lane(recipe, seed, data, device) for seed in range(number)]
    runner = SideBySide(lanes, capture=on_gpu and not arguments.no_capture)
    began = time.perf_counter()
    with cProfile.Profile() if arguments.profile else contextlib.nullcontext() as profiler:
        runner.train_epoch()
        runner.evaluate()
    start_up = time.perf_counter() - began
    if profiler is not None:
        print(function_times(profiler))
    seconds = min(seconds_of([runner.train_epoch], device) for _ in range(arguments.epochs))
    if arguments.profile:
        steps = len(list(lanes[0].images.batch_sizes()))
        print(kernel_times("training step", runner.train_epoch, steps * number))
        print(kernel_times("evaluation", runner.evaluate, number))
    per_second = number * images / seconds
    return {
        "data": recipe.data,
        "network": recipe.network,
        "method": recipe.method,
        "side_by_side": number,
        "batch_size": recipe.batch_size,
        "precision": recipe.precision,
        "captured": runner.capture,
        "timed_images": images,
        "seconds_per_epoch": round(EPOCH_IMAGES[recipe.data] / per_second, 4),
        "images_per_second": round(per_second),
        "tflops": round(per_second * flops / 1e12, 1),
        "peak_mebibytes": round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else "",
        "start_up_seconds": round(start_up, 1),
        **{key: value or "" for key, value in environment(device).items()},
    }


def function_times(profiler: cProfile.Profile) -> str:
    """Host time of the functions that took longest, those that they call included."""
    lines = io.StringIO()
    pstats.Stats(profiler, stream=lines).sort_stats("cumulative").print_stats(80)
    return lines.getvalue().strip()


def kernel_times(label: str, function: Callable[[], object], calls: int) -> str:
    """GPU time of a function by kind of kernel and of its most expensive kernels.

    Times are per call of ``calls``. Their sum exceeds the elapsed time if kernels overlap, and is
    below it by the time that the GPU waits.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiler.events():
        kind = next((k for k, name in KERNELS.items() if re.search(name, event.name)), "other")
        kinds[kind] += event.device_time
        kernels[event.name] += event.device_time
        counts[event.name] += 1
    total = kinds.total()
    lines = [f"{label}: {elapsed / calls * 1e3:.3f} ms, kernels {total / calls / 1e3:.3f} ms"]
    for kind, time_ in kinds.most_common():
        lines.append(f"{time_ / total:8.1%} {time_ / calls / 1e3:9.3f} ms  {kind}")
    for name, time_ in kernels.most_common(16):
        count = counts[name]
        lines.append(
            f"{time_ / total:8.1%} {count / calls:8.1f} x {time_ / count:.1f} us  {name[:90]}"
        )
    return "\n".join(lines)


def changes(recipe: Recipe, settings: list[str]) -> dict[str, Any]:
    """Changed fields of the recipe from ``FIELD=VALUE``."""
    result: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if not hasattr(recipe, name):
            raise unknown("field of a recipe", name, recipe.as_dict())
        kind = type(getattr(recipe, name))
        try:
            result[name] = text == "True" if kind is bool else kind(text)
        except ValueError as error:
            raise InputError(f"{setting}: invalid value for the field {name}: {error}") from error
    return result


def case(row: dict[str, Any]) -> tuple[str, ...]:
    """Settings that two rows must share to be compared."""
    keys = ("data", "network", "side_by_side", "batch_size", "precision", "captured", "device")
    return tuple(str(row[key]) for key in keys)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, with the time that ISDA adds to cross entropy."""
    baseline = {case(row): row for row in rows if row["method"] == "ce"}
    cells = []
    for row in rows:
        added = ""
        if row["method"] != "ce" and case(row) in baseline:
            of_ce = float(baseline[case(row)]["seconds_per_epoch"])
            added = f"{100 * (float(row['seconds_per_epoch']) / of_ce - 1):+.1f} %"
        cells.append([str({**row, "added_percent": added}.get(key, "")) for key in COLUMNS])
    return markdown_rows([*COLUMNS.values()], cells, left=(0, 1), pad=False)


if __name__ == "__main__":
    main()
