"""Speed of the input pipeline for image folders, with the loader of torchvision beside it.

    python benchmarks/input.py --images 22000 --side-by-side 1 6 --compare 30 --out input.csv
    python benchmarks/input.py --images 4000 --size 500 375 --image-size 224 --out input.csv

writes JPEG files to a temporary folder and measures every pipeline: ``device``, ``memory``,
``disk`` and ``off`` are the values of ``--cache``; ``torchvision`` is ``ImageFolder``,
``RandomResizedCrop`` and ``DataLoader`` with as many worker processes as we have threads. Two rates
are given: of batches alone, ready on the device, and of training. torchvision's batches train the
same network one run at a time, in a plain loop. Times are of whole epochs, after one that starts,
compiles and captures. ``--compare 30`` adds the time of ``isda compare`` with 30 epochs and three
seeds, from its start to the page.
"""

import argparse
import dataclasses
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rows import read_lines, write_rows
from timing import seconds_of
from torch import Tensor

from isda.experiments.data.arrays import load_data
from isda.experiments.data.cache_file import CACHE_FOLDER
from isda.experiments.data.decoding import in_threads
from isda.experiments.data.folder_cache import DecodedImages, decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError
from isda.experiments.own_images import OWN_IMAGES
from isda.experiments.report.text import markdown_rows
from isda.experiments.settings import Recipe
from isda.experiments.training.device import join_processes
from isda.experiments.training.environment import environment
from isda.experiments.training.run_images import RunImages
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

PIPELINES = ("torchvision", "off", "disk", "memory", "device")
COLUMNS = {  # header of the Markdown table
    "pipeline": "pipeline",
    "side_by_side": "side by side",
    "images": "images",
    "pixels": "pixels",
    "image_size": "crops",
    "start_seconds": "s to decode",
    "kept_mebibytes": "MiB kept",
    "batches_per_second": "images/s, batches alone",
    "trained_per_second": "images/s, training",
    "total_seconds": "s in all",
}
COMPARED = 6  # runs of a comparison: three seeds of two methods


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--images", type=int, default=2000, help="training images")
    parser.add_argument("--size", type=int, nargs="+", default=[64], help="width, height of files")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--image-size", type=int, default=64, help="side of the crops")
    parser.add_argument("--network", default="timm:resnet18")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), choices=PIPELINES)
    parser.add_argument("--side-by-side", nargs="+", type=int, default=[1])
    parser.add_argument("--epochs", type=int, default=2, help="epochs to time; the fastest counts")
    parser.add_argument(
        "--compare", type=int, metavar="EPOCHS", help="also time isda compare with these epochs"
    )
    parser.add_argument("--no-training", action="store_true", help="measure batches alone")
    parser.add_argument("--workers", type=int, help="threads or processes (default: as isda)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    parser.add_argument("--table", type=Path, help="print a CSV file as a Markdown table and exit")
    arguments = parser.parse_args(words)
    for name in ("images", "size", "classes", "image_size", "batch_size", "side_by_side", "epochs"):
        value = getattr(arguments, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1")
    if arguments.compare is not None and arguments.compare < 2:
        parser.error("--compare must be >= 2: the first epoch of ISDA is cross entropy")
    if len(arguments.size) > 2:
        parser.error("--size must be one or two numbers")
    if not 2 <= arguments.classes <= arguments.images:
        parser.error("--classes must be between 2 and the number of images")
    try:
        if arguments.table:
            print(markdown(read_lines(arguments.table, "batches_per_second")))
            return
        with join_processes(arguments.device) as (device, _, _):
            arguments.device = str(device)
        with tempfile.TemporaryDirectory() as folder:
            run(arguments, Path(folder))
    except InputError as error:
        parser.error(str(error))


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure every pipeline."""
    torch.backends.cudnn.benchmark = True
    width, height = (arguments.size * 2)[:2]
    test = max(arguments.classes, arguments.images // 10)
    create_photos(folder / "train", arguments.images, arguments.classes, width, height)
    create_photos(folder / "val", test, arguments.classes, width, height)
    on_gpu = arguments.device.startswith("cuda")
    recipe = dataclasses.replace(
        OWN_IMAGES,
        data=f"imagefolder:{folder}",
        network=arguments.network,
        image_size=arguments.image_size,
        batch_size=arguments.batch_size,
        precision="bf16" if on_gpu else "fp32",
        compile=on_gpu,
    )
    data = load_data(recipe.data, image_size=arguments.image_size, workers=arguments.workers)
    assert isinstance(data, FolderImages)
    about = {
        "images": arguments.images,
        "pixels": f"{width} x {height}",
        "image_size": arguments.image_size,
        "network": arguments.network,
        "batch_size": arguments.batch_size,
        "precision": recipe.precision,
        "workers": data.workers,
        **{key: value or "" for key, value in environment(torch.device(arguments.device)).items()},
    }
    empty = dict.fromkeys(COLUMNS, "") | about
    if (
        arguments.out
        and arguments.out.exists()
        and [*read_lines(arguments.out, "batches_per_second")[0]] != [*empty]
    ):
        raise InputError(f"{arguments.out} has other columns: write to another file")
    rows = []
    for found in measurements(recipe, data, arguments):
        rows.append(empty | found)
        print(markdown(rows[-1:]).splitlines()[-1], flush=True)
        if arguments.out:
            write_rows(arguments.out, rows[-1:], append=True)
    print()
    print(markdown(rows))


def measurements(
    recipe: Recipe, data: FolderImages, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rates of every pipeline, and the time of a comparison."""
    device = torch.device(arguments.device)
    for pipeline in arguments.pipelines:
        if pipeline == "torchvision":
            yield {"pipeline": pipeline, **measure_torchvision(recipe, data, device, arguments)}
        else:
            for found in measure_ours(pipeline, recipe, data, device, arguments):
                yield {"pipeline": pipeline, **found}
    if arguments.compare:
        shutil.rmtree(data.path / CACHE_FOLDER, ignore_errors=True)  # decode again
        yield {"pipeline": "isda compare", **time_comparison(recipe, arguments)}


def measure_torchvision(
    recipe: Recipe, data: FolderImages, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Rates of the usual loader."""
    images, loader = len(data.train_files), create_loader(data, recipe, device)
    seconds = fastest(lambda: exhaust(move(loader, device)), arguments.epochs, device)
    found: dict[str, Any] = {"side_by_side": 1, "batches_per_second": round(images / seconds)}
    if not arguments.no_training:
        step = plain_step(recipe, data, device)

        def train() -> None:
            for batch in move(loader, device):
                step(*batch)

        found["trained_per_second"] = round(images / fastest(train, arguments.epochs, device))
    torch.compiler.reset()
    return found


def measure_ours(
    pipeline: str,
    recipe: Recipe,
    data: FolderImages,
    device: torch.device,
    arguments: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Rates of one of our pipelines, for every number of runs side by side."""
    images = len(data.train_files)
    began = time.perf_counter()
    decoded = decode_folder(data, cache=pipeline, device=device, check=False)
    found: dict[str, Any] = {}
    kept = sum(tensor.nbytes for tensor in kept_tensors(decoded))
    if kept:
        found["start_seconds"] = round(time.perf_counter() - began, 2)
        found["kept_mebibytes"] = round(kept / 2**20, 1)
    source = RunImages(recipe, 0, decoded, device, rank=0, world=1, compiled=recipe.compile)
    seconds = fastest(lambda: exhaust(batches_of(source)), arguments.epochs, device)
    found["batches_per_second"] = round(images / seconds)
    for number in arguments.side_by_side:
        if pipeline == "off" and number > 1:
            continue  # bound by decoding, whatever the number of runs
        if not arguments.no_training:
            lanes = [Lane(recipe, seed, decoded, device) for seed in range(number)]
            runner = SideBySide(lanes, capture=device.type == "cuda")
            seconds = fastest(runner.train_epoch, arguments.epochs, device)
            found["trained_per_second"] = round(number * images / seconds)
        yield {"side_by_side": number, **found}
        torch.compiler.reset()


def time_comparison(recipe: Recipe, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time of the command ``isda compare``, and the images of all its runs per second."""
    with tempfile.TemporaryDirectory() as out:
        flags = {
            "--data": recipe.data,
            "--network": recipe.network,
            "--image-size": recipe.image_size,
            "--batch-size": recipe.batch_size,
            "--epochs": arguments.compare,
            "--device": arguments.device,
            "--out": out,
        }
        if arguments.workers is not None:
            flags["--workers"] = arguments.workers
        words = [str(word) for flag in flags.items() for word in flag]
        began = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", "isda", "compare", *words], check=False)
        seconds = time.perf_counter() - began
    if code.returncode:
        raise InputError(f"isda compare has failed with code {code.returncode}")
    trained = COMPARED * arguments.compare * arguments.images
    return {"total_seconds": round(seconds, 1), "trained_per_second": round(trained / seconds)}


def create_photos(folder: Path, number: int, classes: int, width: int, height: int) -> None:
    """Write JPEG files with smooth shapes and some noise, as large as photos of this size."""

    def create(i: int) -> None:
        random = np.random.default_rng(i)
        coarse = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), 3)).astype(np.int16)
        noisy = smooth + random.integers(-8, 9, smooth.shape, dtype=np.int16)
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        image.save(folder / f"{i % classes:05}" / f"{i}.jpg", quality=90)

    for c in range(classes):
        (folder / f"{c:05}").mkdir(parents=True)
    for _ in in_threads(create, range(number), threads=8):
        pass


def create_loader(data: FolderImages, recipe: Recipe, device: torch.device) -> Any:
    """The usual loader of torchvision."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(recipe.image_size),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return torch.utils.data.DataLoader(
        ImageFolder(str(data.path / "train"), transform),
        batch_size=recipe.batch_size,
        shuffle=True,
        num_workers=data.workers,
        persistent_workers=data.workers > 0,
        pin_memory=device.type == "cuda",
    )


def move(loader: Any, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a loader on the device."""
    for images, target in loader:
        yield images.to(device, non_blocking=True), target.to(device, non_blocking=True)


def plain_step(
    recipe: Recipe, data: FolderImages, device: torch.device
) -> Callable[[Tensor, Tensor], None]:
    """A training step as it is usually written."""
    from isda.experiments.networks import create_network

    network = create_network(
        recipe.network, num_classes=data.num_classes, generator=torch.Generator().manual_seed(0)
    )
    network = network.to(device).to(memory_format=torch.channels_last)
    model = torch.compile(network, dynamic=False) if recipe.compile else network
    optimizer = torch.optim.SGD(
        network.parameters(), lr=recipe.learning_rate, momentum=0.9, fused=True
    )

    def step(images: Tensor, target: Tensor) -> None:
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss = torch.nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def batches_of(source: RunImages) -> Iterator[Tensor]:
    """Batches of an epoch, as a training step makes them."""
    source.begin_epoch(0)
    position = torch.zeros((), dtype=torch.int64, device=source.device)
    steps = torch.zeros_like(position)
    for size in source.batch_sizes():
        source.load()
        yield source.batch(slice(0, size), position, steps)[0]
        position += size
        steps += 1


def kept_tensors(data: DecodedImages) -> Iterator[Tensor]:
    """Tensors that hold the images."""
    if isinstance(data.test_images, Tensor):
        yield data.test_images
    if isinstance(data.train_images, tuple):
        yield from data.train_images


def exhaust(batches: Iterator[object]) -> None:
    """Take all batches."""
    for _ in batches:
        pass


def fastest(epoch: Callable[[], object], epochs: int, device: torch.device) -> float:
    """Seconds of the fastest epoch, after one that is not timed."""
    seconds = [seconds_of([epoch], device) for _ in range(epochs + 1)]
    return min(seconds[1:])


def markdown(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    cells = [[str(row.get(key, "")) for key in COLUMNS] for row in rows]
    return markdown_rows([*COLUMNS.values()], cells, pad=False)


if __name__ == "__main__":
    main()
