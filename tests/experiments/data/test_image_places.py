"""Images of a run in every place: the same order and results, on all ranks, and resumed."""

import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import START_METHOD
from lanes import train
from photo_folders import CPU, PLACES, RECIPE, decoded, files_of, image_of
from programs import PATIENCE
from torch import Tensor

from isda.experiments.cli import main
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.data.decoding import ImageFiles
from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.errors import InputError
from isda.experiments.training.groups import Plan, images_of_run
from isda.experiments.training.training_step import Lane


def test_the_place_does_not_change_the_results(photos: Path, device: torch.device) -> None:
    lanes = {cache: Lane(RECIPE, 3, decoded(photos, cache, device), device) for cache in PLACES}
    results = {cache: train([lane]) for cache, lane in lanes.items()}
    assert lanes["off"].images.is_fed
    assert not lanes["device"].images.is_fed
    assert lanes["memory"].images.is_fed == lanes["disk"].images.is_fed == (device.type == "cuda")
    for cache in PLACES:
        assert results[cache] == results["device"], cache
        for one, other in zip(lanes[cache].tensors(), lanes["device"].tensors(), strict=True):
            assert torch.equal(one, other)
    # several runs, each with a feed of its own
    together = [Lane(RECIPE, seed, decoded(photos, "off"), CPU) for seed in (3, 4)]
    alone = Lane(RECIPE, 4, decoded(photos), CPU)
    pairs = train(together)
    assert [[row[1]] for row in pairs] == train([alone])
    for one, other in zip(together[1].tensors(), alone.tensors(), strict=True):
        assert torch.equal(one, other)


def test_every_seed_draws_its_own_images(photos: Path, device: torch.device) -> None:
    whole = decoded(photos, device=device)
    numbers = torch.arange(21, dtype=torch.uint8).view(21, 1, 1, 1)  # in place of images
    target = whole.train_target.cpu()
    arrays = ImageArrays("", numbers, target, numbers, target, (0.0,), (1.0,), whole.class_names)
    recipe = replace(RECIPE, images_per_class=4)
    results = []
    for cache in PLACES:
        data, lanes = decoded(photos, cache, device), []
        for seed in (3, 4):
            drawn = images_of_run(data, Plan("few", recipe, seed))
            kept = arrays.draw(4, seed=seed, test_on_rest=False)
            assert torch.equal(drawn.train_target.cpu(), kept.train_target)
            assert isinstance(drawn, DecodedImages)
            assert drawn.test_images is data.test_images
            chosen = kept.train_images.flatten().tolist()
            if isinstance(drawn.train_images, ImageFiles):
                files = files_of(photos).train_files
                assert drawn.train_images.files == tuple(files[i] for i in chosen)
            else:
                for place, number in enumerate(chosen):
                    assert torch.equal(image_of(drawn, place), image_of(data, number))
            lanes.append(Lane(recipe, seed, drawn, device))
        results.append(train(lanes))
    assert results == [results[0]] * len(PLACES)
    with pytest.raises(InputError, match="images_per_class must be between 1 and 7 for imagefold"):
        images_of_run(whole, Plan("few", replace(recipe, images_per_class=8), 0))


@pytest.mark.parametrize("cache", ["memory", "off"])
def test_ranks_divide_a_batch(cache: str, photos: Path) -> None:
    """The parts of the ranks are those of one process; the last of 21 images is a single one."""
    data = decoded(photos, cache)

    def batches(lane: Lane) -> list[tuple[Tensor, Tensor]]:
        lane.begin_epoch()
        found = []
        for number, size in enumerate(lane.images.batch_sizes()):
            lane.images.load()
            part = slice(size * lane.rank // lane.world, size * (lane.rank + 1) // lane.world)
            steps = torch.tensor(number)
            found.append(lane.images.batch(part, 5 * steps, steps)[:2])
        return [(images.clone(), target.clone()) for images, target in found]

    whole = batches(Lane(RECIPE, 0, decoded(photos), CPU))
    lanes = [Lane(RECIPE, 0, data, CPU) for _ in range(3)]
    parts = []
    for rank, lane in enumerate(lanes):
        lane.rank = lane.images.rank = rank
        lane.world = lane.images.world = 3
        parts.append(batches(lane))
    assert [len(target) for _, target in parts[0]] == [1, 1, 1, 1, 0]
    for number, (images, target) in enumerate(whole):
        assert torch.equal(torch.cat([part[number][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[number][1] for part in parts]), target)
    tested = [[target for _, target in lane.images.test_batches()] for lane in lanes]
    assert torch.equal(torch.cat([t for targets in tested for t in targets]), data.test_target)


@pytest.mark.parametrize("cache", ["disk", "off"])
def test_resumed_from_a_checkpoint(cache: str, photos: Path) -> None:
    """A killed run goes on with the same numbers, also with images from another place."""
    whole = Lane(RECIPE, 1, decoded(photos), CPU)
    expected = train([whole])
    first = Lane(RECIPE, 1, decoded(photos, cache), CPU)
    results = train([first], 1)
    first.begin_epoch()  # killed in the second epoch
    first.images.load()
    second = Lane(RECIPE, 1, decoded(photos, cache), CPU)
    buffer = io.BytesIO()
    first.epoch = 1
    state = first.state_dict()
    torch.save(state, buffer)
    second.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert results + train([second], 1) == expected
    for one, other in zip(second.tensors(), whole.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", ["name", "class", "size", "class names"])
def test_not_resumed_on_other_images(change: str, photos: Path) -> None:
    """As many images and classes as before, but not the same."""
    state = Lane(RECIPE, 1, decoded(photos), CPU).state_dict()
    copy = photos.parent / "copy"
    shutil.copytree(photos, copy)
    Lane(RECIPE, 1, decoded(copy), CPU).load_state_dict(state)
    cat, dog = (copy / "train" / name for name in ("cat", "dog"))
    if change == "name":
        (cat / "0.jpg").rename(cat / "00.jpg")
    elif change == "class":
        (cat / "0.jpg").rename(dog / "10.jpg")
        (dog / "2.jpg").rename(cat / "12.jpg")
    elif change == "size":
        shutil.copy(cat / "1.png", cat / "3.png")
    else:
        for part in ("train", "val"):  # the second class becomes the last one
            (copy / part / "dog").rename(copy / part / "zebra")
    with pytest.raises(InputError, match="names or sizes of files have changed: restore the"):
        Lane(RECIPE, 1, decoded(copy), CPU).load_state_dict(state)
    del state["images"]  # a checkpoint of version 0.2
    Lane(RECIPE, 1, decoded(copy), CPU).load_state_dict(state)


def train_and_die(number: int, words: list[str]) -> None:
    """Run a command that is killed before the next step after a number of them."""
    calls, step = itertools.count(), Lane.step

    def counted(lane: Lane, size: int) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        step(lane, size)

    Lane.step = counted  # this process is used for nothing else
    main(words)


def test_killed_and_resumed(photos: Path, tmp_path: Path) -> None:
    """Killed without a cache and resumed with one, a run ends with the same numbers."""
    command = ["train", "--network", "resnet8"]
    command += ["--data", f"imagefolder:{photos}", "--image-size", "16", "--batch-size", "5"]
    command += ["--epochs", "8", "--device", "cpu", "--checkpoint-seconds", "0"]

    def metrics(out: Path) -> list[dict[str, float]]:
        times = ("seconds", "images_per_second", "check")  # the checksum includes the times
        lines = [line for path in out.glob("*/0/metrics.jsonl") for line in path.open()]
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [{key: row[key] for key in row if key not in times} for row in rows]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = [*command, "--out", str(killed), "--cache", "off"]
    # batches of 5, 5, 5, 5 and 1: in the third step of the fourth epoch
    process = multiprocessing.get_context(START_METHOD).Process(
        target=train_and_die, args=(3 * 5 + 2, words)
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert len(metrics(killed)) == 3
    for flags in (
        ["--out", str(killed), "--cache", "disk", "--resume"],
        ["--out", str(whole), "--cache", "memory"],
    ):
        assert main([*command, *flags]) == 0
    assert len(metrics(whole)) == 8
    assert metrics(killed) == metrics(whole)
