"""Measure every record of docs/speed.md on this machine's GPU.

    python benchmarks/gpu.py --out records

``compile`` fills torch's cache with all networks of the paper, several at a time, because compiling
them one by one takes longer than everything else. The other steps then measure; nothing else should
run on the machine. A step that was killed can be repeated; ``cost`` resumes.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from isda.experiments.networks import NETWORKS, create_network
from isda.experiments.training.step_cost import isda_recipe, usual_batch_size

STEPS = ("compile", "cost", "kernels", "convolutions", "train", "input")
DATA = {"cifar100": 32, "imagenet": 8}  # data set: steps per measurement
FOLDER = Path(__file__).parent
HIGH = (
    "128,100,64,full",
    "128,100,512,full",
    "128,100,640,full",
)  # shapes also measured with high precision


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV files")
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, help="steps to run (default: all)"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        choices=DATA,
        default=[*DATA],
        help="data sets whose networks are compiled and measured",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="networks to compile at the same time"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {given.jobs}")
    if not (given.dry_run or torch.cuda.is_available()):
        parser.error("needs a CUDA GPU; --dry-run prints the commands without one")
    for step in given.steps:
        commands = commands_of(step, given.out, given.data)
        if given.dry_run:
            print("\n".join(map(shlex.join, commands)))
            continue
        with ThreadPoolExecutor(given.jobs if step == "compile" else 1) as pool:
            codes = list(pool.map(run, commands))
        failed = [command for command, code in zip(commands, codes, strict=True) if code]
        if failed:
            sys.exit("failed: " + "; ".join(map(shlex.join, failed)))


def commands_of(step: str, out: Path, data: Collection[str] = DATA) -> list[list[str]]:
    """Commands of a step."""
    if step == "compile":
        names = [name for kind in data for name in networks(kind)]
        train = [sys.executable, str(FOLDER / "train.py")]
        return [[*train, *compile_flags(name)] for name in sorted(names, key=depth)[::-1]]
    if step == "cost":
        cost = [sys.executable, "-m", "isda", "cost", "--resume", "--networks"]
        return [
            [*cost, *networks(kind), "--steps", str(steps), "--out", str(out / f"cost_{kind}.csv")]
            for kind, steps in DATA.items()
            if kind in data
        ]
    measure = [sys.executable, str(FOLDER / f"{step}.py"), "--out", str(out / f"{step}.csv")]
    if step == "kernels":
        pieces = ("--pieces", "update and quadratic", "loss")
        return [
            [*measure, "--precision", "medium"],
            [*measure, "--precision", "high", "--shapes", *HIGH, *pieces],
        ]
    if step == "convolutions":
        return [measure]
    if step == "input":
        small = ["--images", "22000", "--classes", "100", "--size", "64", "--image-size", "64"]
        photos = ["--images", "4000", "--size", "500", "375", "--image-size", "224"]
        return [
            [*measure, *small, "--side-by-side", "1", "6", "--compare", "30"],
            [*measure, *photos, "--side-by-side", "1", "3"],
        ]
    timed = [*measure, "--epochs", "3", "--networks"]
    return [
        [*timed, "resnet32", "--side-by-side", "1", "6"],
        [*timed, "resnet110", "--side-by-side", "1", "4"],
        [*timed, "wide_resnet16_8", "wide_resnet28_10"],
    ]


def networks(data: str) -> list[str]:
    """Networks that the paper trains on a data set."""
    return [name for name in NETWORKS if isda_recipe(name).data == data]


def depth(name: str) -> int:
    """Number of parameter tensors, which predicts the time to compile."""
    with torch.device("meta"):
        return len(list(create_network(name, num_classes=2).parameters()))


def compile_flags(name: str) -> list[str]:
    """Flags for two steps of cross entropy with the batch size of ``isda cost``."""
    recipe = isda_recipe(name)
    batch = usual_batch_size(name, torch.device("cuda"))
    flags = ["--data", recipe.data, "--networks", name, "--methods", "ce", "--no-capture"]
    return [*flags, "--images", str(2 * batch), "--set", f"batch_size={batch}"]


def run(command: list[str]) -> int:
    """Run a command and return its exit code."""
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    main()
