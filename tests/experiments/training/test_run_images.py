"""The images of a run: order and augmentation by seed and epoch, batches of training and test."""

from dataclasses import replace

import lanes
import pytest
import torch
from lanes import NUMBER, RECIPE, SIZES, assert_same_bits, fed_images, places, scaled, train, values
from torch.nn import functional as F

from isda.experiments.data.arrays import ImageArrays
from isda.experiments.training import run_images
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

data, full_precision = lanes.data, lanes.full_precision  # fixtures


def test_order_and_augmentation_by_seed_and_epoch(data: ImageArrays, device: torch.device) -> None:
    """Each cropped and flipped image is one of its 162 variants, which vary."""
    recipe = replace(RECIPE, augment=("crop", "flip"))
    padded = F.pad(data.train_images.float(), [4] * 4, mode="reflect").to(torch.uint8)
    variants = torch.stack(
        [
            crop.flip(3) if flip else crop
            for y in range(9)
            for x in range(9)
            for flip in (False, True)
            for crop in (padded[:, :, y : y + 8, x : x + 8],)
        ],
        1,
    )  # (N, 162, 1, 8, 8)
    lanes = {seed: Lane(recipe, seed, data, device) for seed in (0, 1)}
    again = Lane(recipe, 0, data, device)
    seen = {}
    for name, lane in {**lanes, "again": again}.items():
        batches = fed_images(lane)
        train([lane], 2)
        fed = torch.cat(batches)
        candidates = scaled(data, variants.flatten(0, 1))
        found = torch.tensor(places(fed, candidates)).view(2, NUMBER)
        # several offsets may give the same variant, but never that of another image
        for epoch in range(2):
            assert sorted((found[epoch] // 162).tolist()) == list(range(NUMBER))
        assert len((found % 162).unique()) > 50
        seen[name] = found
    assert torch.equal(seen[0], seen["again"])
    for one, other in ((seen[0][0], seen[0][1]), (seen[0][0], seen[1][0])):
        for part in (lambda f: f // 162, lambda f: (f % 162)[f.argsort()]):
            assert (part(one) == part(other)).float().mean() < 0.3


def test_batch_sizes_keep_the_partial_batch(data: ImageArrays, device: torch.device) -> None:
    for size, expected in ((32, SIZES), (77, [77]), (100, [77]), (76, [76, 1]), (11, [11] * 7)):
        assert list(
            Lane(replace(RECIPE, batch_size=size), 0, data, device).images.batch_sizes()
        ) == (expected)


def test_evaluation_in_several_batches(
    data: ImageArrays, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Lane(RECIPE, 0, data, device)
    (whole,) = train([lane], 1)[0]
    state = values(lane)
    monkeypatch.setattr(run_images, "_TEST_BATCH", 30)  # 30, 30, 30, 11
    (parts,) = SideBySide([lane], capture=False).evaluate()
    # the same sums in a different order
    assert parts == pytest.approx(whole, rel=1e-4)
    assert_same_bits(values(lane), state)
