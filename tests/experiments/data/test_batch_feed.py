"""The feed of batches: images in their places, its thread, and files that change in training."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from lanes import train
from photo_folders import CPU, RECIPE, decoded, image_of, make_image
from torch import Tensor

from isda.experiments.data.batch_feed import BatchFeed
from isda.experiments.errors import InputError
from isda.experiments.training.training_step import Lane


def feed_of(photos: Path, cache: str, device: torch.device = CPU) -> BatchFeed:
    data = decoded(photos, cache)
    assert not isinstance(data.train_images, Tensor)
    return BatchFeed(data.train_images, data.train_target, batch_size=4, device=device)


BATCHES = [(0, [3, 1, 20]), (1, [5]), (0, []), (2, [7, 8]), (0, [0, 0, 19, 2]), (0, [11])]


@pytest.mark.parametrize("cache", ["memory", "disk", "off"])
def test_feed(cache: str, photos: Path, device: torch.device) -> None:
    data, feed = decoded(photos), feed_of(photos, cache, device)
    for _ in range(2):
        feed.begin(BATCHES)
        feed.load()
        feed.begin(BATCHES)  # the batches that have not been loaded do not appear later
        for start, numbers in BATCHES:
            feed.load()
            for place, number in enumerate(numbers, start):
                height, width = feed.images.size[place].tolist()
                first = int(feed.images.offset[place])
                pixels = feed.images.pixels[first : first + height * width].cpu()
                assert torch.equal(pixels.view(height, width, 3), image_of(data, number))
                assert feed.target[place] == data.train_target[number]


def test_the_thread_of_a_feed_ends_with_it(photos: Path) -> None:
    before = set(threading.enumerate())  # of which some may end meanwhile

    def started() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    feed = feed_of(photos, "off")
    feed.begin(BATCHES)
    feed.load()
    assert started()
    del feed
    gc.collect()
    assert not started()
    lane = Lane(RECIPE, 0, decoded(photos, "off"), CPU)
    lane.begin_epoch()
    lane.images.load()
    assert started()
    del lane
    gc.collect()
    assert not started()


@pytest.mark.parametrize("change", ["gone", "damaged", "another size"])
def test_an_image_that_changes_while_training(change: str, photos: Path) -> None:
    data = decoded(photos, "off")
    file = photos / "train" / "owl" / "1.png"
    if change == "gone":
        file.unlink()
    elif change == "damaged":
        file.write_bytes(b"no image")
    else:
        make_image(file, (5, 6), 0)
    with pytest.raises(InputError) as caught:
        train([Lane(RECIPE, 0, data, CPU)])
    assert str(caught.value).startswith(f"{file} cannot be read: ")
    assert "\n" not in str(caught.value)
    (photos / "val" / "cat" / "0.jpg").unlink()
    with pytest.raises(InputError, match=r"val/cat/0.jpg cannot be read: No such file"):
        next(Lane(RECIPE, 0, data, CPU).images.test_batches())
