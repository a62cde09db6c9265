"""Images as arrays: the digits, normalization, order of an epoch, held-out and drawn images."""

import pytest
import torch
import torchvision
from loaded_data import arrays_of
from torch import Tensor

from isda.experiments.data.arrays import (
    ImageArrays,
    normalize,
    rank_slice,
    split,
)
from isda.experiments.errors import InputError


def test_digits(device: torch.device) -> None:
    from sklearn.datasets import load_digits

    digits = arrays_of("digits").to(device)
    assert digits.train_images.device.type == device.type
    assert digits.train_images.shape == (1438, 1, 8, 8)
    assert digits.test_images.shape == (359, 1, 8, 8)
    assert digits.train_images.dtype == torch.uint8
    assert digits.num_classes == 10
    assert digits.class_names == tuple("0123456789")

    original = load_digits()
    pairs = {(i.tobytes(), int(t)) for i, t in zip(original.images, original.target, strict=True)}
    found = []
    for part in ("train", "test"):
        images = getattr(digits, f"{part}_images")[:, 0].cpu().double() * (16 / 255)
        target = getattr(digits, f"{part}_target").tolist()
        found += [(i.round().numpy().tobytes(), t) for i, t in zip(images, target, strict=True)]
    assert len(found) == 1797
    assert set(found) == pairs
    # every class in proportion: 80 % of each to within one image
    for c in range(10):
        total = int((original.target == c).sum())
        assert abs(int((digits.test_target == c).sum()) - total / 5) <= 1
    assert torch.equal(arrays_of("digits").test_images, digits.test_images.cpu())

    scaled = normalize(digits.train_images, digits.mean, digits.std)
    assert abs(scaled.mean().item()) < 1e-5
    assert abs(scaled.std().item() - 1) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalize(dtype: torch.dtype, device: torch.device) -> None:
    images = torch.randint(0, 256, (5, 3, 4, 7), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)
    result = normalize(images.to(device), mean, std, dtype)
    expected = torchvision.transforms.functional.normalize(images.double() / 255, mean, std)
    assert result.dtype == dtype
    # rounding to the dtype, and a few float32 operations before
    tolerance = torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(result.cpu().double(), expected, rtol=tolerance, atol=4 * 1.2e-7)


@pytest.mark.gpu
def test_normalize_is_captured_in_a_cuda_graph() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 7), dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = normalize(images, (0.1, 0.5, 0.7), (0.2, 0.3, 0.4))
    graph.replay()
    assert torch.equal(result, normalize(images, (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)))


@pytest.mark.parametrize("number", [0, 1, 5, 128])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_rank_slices_cover_the_batch(number: int, world: int) -> None:
    parts = [range(number)[rank_slice(number, rank=r, world=world)] for r in range(world)]
    assert [i for part in parts for i in part] == list(range(number))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_hold_out_of_cifar(device: torch.device) -> None:
    target = torch.arange(50_000)[torch.randperm(50_000)] % 100
    place = torch.arange(50_000)  # every image contains its index
    images = torch.stack((place % 256, place // 256), 1).to(torch.uint8)[:, :, None, None]
    data = ImageArrays(
        "cifar100",
        images,
        target,
        images[:7],
        target[:7],
        (0.0,),
        (1.0,),
        tuple(map(str, range(100))),
    ).to(device)
    held, again = data.hold_out(5000), data.hold_out(5000)

    def places(images: Tensor) -> list[int]:
        return (images[:, 0, 0, 0].long() + 256 * images[:, 1, 0, 0].long()).tolist()

    validation, rest = places(held.test_images), places(held.train_images)
    assert len(validation) == 5000
    assert sorted(validation + rest) == list(range(50_000))
    assert held.test_target.bincount().tolist() == [50] * 100
    assert held.train_target.bincount().tolist() == [450] * 100
    assert target[validation].tolist() == held.test_target.tolist()
    assert target[rest].tolist() == held.train_target.tolist()
    assert places(again.test_images) == validation


def test_split_in_proportion() -> None:
    target = torch.tensor([0] * 40 + [1] * 10 + [3] * 50)  # class 2 is absent
    kept, held = split(target, 20)
    assert target[held].bincount().tolist() == [8, 2, 0, 10]
    assert sorted(kept.tolist() + held.tolist()) == list(range(100))
    # one image more than equal parts: some class gives one more
    _, held = split(torch.arange(60) % 6, 13)
    assert sorted((held % 6).bincount().tolist()) == [2, 2, 2, 2, 2, 3]
    for number in (0, 100, -1):
        with pytest.raises(InputError, match=f"between 1 and 99, got {number}"):
            split(target, number)


@pytest.mark.parametrize("rest", [False, True])
def test_draw_of_images_per_class(rest: bool) -> None:
    """The same number of every class, by seed; no image is in both sets."""
    digits = arrays_of("digits")
    every = torch.cat((digits.train_images, digits.test_images)).flatten(1)
    drawn = [digits.draw(10, seed=seed, test_on_rest=rest) for seed in (0, 0, 1)]
    for one in drawn:
        assert torch.bincount(one.train_target).tolist() == [10] * 10
        images = torch.cat((one.train_images, one.test_images)).flatten(1)
        if rest:
            assert torch.equal(images.unique(dim=0), every.unique(dim=0))
            assert len(images) == len(every)
        else:
            assert one.test_images is digits.test_images
    assert torch.equal(drawn[0].train_images, drawn[1].train_images)
    assert not torch.equal(drawn[0].train_images, drawn[2].train_images)
    pool = (digits.train_images, digits.train_target)
    if rest:
        pool = tuple(
            map(torch.cat, zip(pool, (digits.test_images, digits.test_target), strict=True))
        )
    least = int(torch.bincount(pool[1]).min())
    largest = least - rest  # every class needs a test image
    assert len(digits.draw(largest, seed=0, test_on_rest=rest).train_target) == 10 * largest
    for wrong in (0, largest + 1):
        with pytest.raises(InputError, match=f"must be between 1 and {largest} for digits, got"):
            digits.draw(wrong, seed=0, test_on_rest=rest)


def test_images_keep_their_targets_in_a_draw() -> None:
    digits = arrays_of("digits")
    drawn = digits.draw(3, seed=5, test_on_rest=True)
    target = {image.numpy().tobytes(): int(label) for images, labels in (
        (digits.train_images, digits.train_target), (digits.test_images, digits.test_target),
    ) for image, label in zip(images, labels, strict=True)}  # fmt: skip
    for images, labels in (
        (drawn.train_images, drawn.train_target), (drawn.test_images, drawn.test_target)
    ):  # fmt: skip
        for image, label in zip(images, labels, strict=True):
            assert target[image.numpy().tobytes()] == label
