"""Random resized crops of packed images: boxes and pixels are those of torchvision."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from isda.experiments.data import counter_rng
from isda.experiments.data.resized_crop import (
    PackedImages,
    RandomResizedCrop,
    longest_side,
    random_boxes,
    resized_crop,
    taps_for,
)

SIZES = [(20, 30), (31, 17), (1, 1), (1, 9), (40, 13), (24, 24), (64, 64), (90, 70), (50, 200)]


def images_of(sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Images (3, H, W) of noise, which shows every wrong pixel."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes
    ]


def packed(images: list[Tensor], device: torch.device) -> PackedImages:
    size = torch.tensor([image.shape[1:] for image in images])
    area = size.prod(1)
    pixels = torch.cat([image.permute(1, 2, 0).reshape(-1, 3) for image in images])
    return PackedImages(pixels, area.cumsum(0) - area, size).to(device)


class Answer:
    """Stands for ``torch.empty(1)``, whose ``uniform_`` gives the next of our random numbers."""

    def __init__(self, draws: Iterator[float]) -> None:
        self.draws = draws

    def uniform_(self, low: float, high: float) -> Tensor:
        low, high = float(low), float(high)
        return torch.tensor(low + (high - low) * next(self.draws), dtype=torch.float64)


def test_boxes_are_those_of_torchvision(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [*SIZES, (256, 341), (10, 500), (500, 10)] * 60
    key = counter_rng.key(5, device=device)
    boxes = random_boxes(torch.tensor(sizes, device=device), key).tolist()
    draws = counter_rng.uniform((len(sizes), 10, 2), counter_rng.fold(key, 0)).tolist()
    places = counter_rng.bits((len(sizes), 2), counter_rng.fold(key, 1)).tolist()
    transform = v2.RandomResizedCrop(8)
    transform._log_ratio = torch.tensor(transform.ratio, dtype=torch.float64).log()
    fallback = 0
    for size, box, draw, place in zip(sizes, boxes, draws, places, strict=True):
        numbers = iter([number for pair in draw for number in pair])
        corner = iter(place)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *_, numbers=numbers: Answer(numbers))
            patch.setattr(
                torch,
                "randint",
                lambda low, high, size, corner=corner: torch.tensor(next(corner) * high >> 32),
            )
            image = torch.zeros(3, *size)
            expected = transform.make_params([image])
        assert box == [expected[name] for name in ("top", "left", "height", "width")]
        fallback += next(corner, None) is not None
    assert 60 < fallback < len(sizes) // 2  # both branches


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("image_size", [7, 24, 64])
def test_pixels_are_those_of_torchvision(
    image_size: int, interpolation: str, device: torch.device
) -> None:
    mode = v2.InterpolationMode(interpolation)
    images = images_of(SIZES * 4)
    data = packed(images, device)
    boxes = random_boxes(data.size, counter_rng.key(1, device=device))
    flip = torch.arange(len(images), device=device) % 2 == 1
    taps = taps_for(longest_side(data.size), image_size, interpolation)
    result = resized_crop(
        data, boxes, flip, image_size=image_size, taps=taps, interpolation=interpolation
    )
    assert result.dtype == torch.uint8
    assert result.shape == (len(images), 3, image_size, image_size)
    exact = 0.0
    for number, (image, box) in enumerate(zip(images, boxes.tolist(), strict=True)):
        expected = v2.functional.resized_crop(image, *box, [image_size] * 2, mode, antialias=True)
        if number % 2:
            expected = v2.functional.horizontal_flip(expected)
        difference = (result[number].cpu().int() - expected.int()).abs()
        # torchvision rounds twice, and bicubic weights amplify the first rounding
        assert difference.max() <= (1 if interpolation == "bilinear" else 2)
        exact += (difference == 0).float().mean().item() / len(images)
        if interpolation == "bicubic":  # floating-point images are not clamped in between
            continue
        # without its rounding in between, up to the last bit of float32 before the only rounding
        floating = v2.functional.resized_crop(
            image.double(), *box, [image_size] * 2, antialias=True
        )
        floating = v2.functional.horizontal_flip(floating) if number % 2 else floating
        assert (result[number].cpu() - floating).abs().max() <= 0.5 + 1e-3
    assert exact > 0.7


def test_step_crops_the_boxes(device: torch.device) -> None:
    """On a CPU the pixels are exactly those of torchvision."""
    images = images_of(SIZES * 3)
    data, key = packed(images, device), counter_rng.key(7, device=device)
    result = RandomResizedCrop(24, taps_for(longest_side(data.size), 24)).step(data, key).cpu()
    boxes = random_boxes(data.size, counter_rng.fold(key, 0)).tolist()
    flip = counter_rng.integers((len(images),), counter_rng.fold(key, 1), high=2).tolist()
    assert 5 < sum(flip) < 22
    for image, box, mirror, found in zip(images, boxes, flip, result, strict=True):
        expected = v2.functional.resized_crop(image, *box, [24, 24], antialias=True)
        expected = v2.functional.horizontal_flip(expected) if mirror else expected
        assert (found.int() - expected.int()).abs().max() <= (device.type == "cuda")


def test_more_taps_change_nothing(device: torch.device) -> None:
    data = packed(images_of(SIZES), device)
    boxes = random_boxes(data.size, counter_rng.key(2, device=device))
    flip = torch.zeros(len(SIZES), dtype=torch.bool, device=device)
    taps = taps_for(longest_side(data.size), 24)
    few, many = (resized_crop(data, boxes, flip, image_size=24, taps=t) for t in (taps, taps + 3))
    assert torch.equal(few, many)


def test_longest_side() -> None:
    for size in (*SIZES, (256, 341), (10, 500)):
        sizes = torch.tensor([size]).expand(20_000, 2)
        longest = int(random_boxes(sizes, counter_rng.key(3))[:, 2:].max())
        assert longest <= longest_side(sizes[:1]) <= longest + 4
    assert taps_for(64, 64) == taps_for(10, 64) == 2
    assert taps_for(65, 64) == 3
    assert taps_for(343, 224) == 4


def test_an_image_depends_on_key_and_place_alone(device: torch.device) -> None:
    """Part of a batch, as on a rank, has the crops that it has in the whole batch."""
    data = packed(images_of(SIZES), device)
    crop = RandomResizedCrop(16, taps_for(longest_side(data.size), 16))
    key = counter_rng.key(4, device=device)
    whole = crop.step(data, key)
    part = torch.arange(3, 8, device=device)
    assert torch.equal(crop.step(data.take(part), key, start=3), whole[3:8])
    assert not torch.equal(crop.step(data.take(part), key), whole[3:8])
    again = crop.step(data, counter_rng.key(5, device=device))
    assert not torch.equal(again, whole)
    assert crop.step(data.take(part[:0]), key).shape == (0, 3, 16, 16)


def test_half_are_flipped(device: torch.device) -> None:
    ramp = torch.arange(32, dtype=torch.uint8).expand(3, 32, 32).contiguous()
    data = packed([ramp], device).take(torch.zeros(4000, dtype=torch.int64, device=device))
    result = RandomResizedCrop(8, 8).step(data, counter_rng.key(6, device=device)).int()
    falling = (result[:, 0, 0, 0] > result[:, 0, 0, -1]).float().mean().item()
    assert abs(falling - 0.5) < 5 * 0.5 / 4000**0.5


@pytest.mark.slow
def test_compiles_without_graph_breaks(device: torch.device) -> None:
    data = packed(images_of(SIZES), device)
    taps = taps_for(longest_side(data.size), 16)

    def step(data: PackedImages, index: Tensor, key: Tensor) -> Tensor:
        images = data.take(index)
        boxes = random_boxes(images.size, key)
        return resized_crop(images, boxes, boxes[:, 0] > 2, image_size=16, taps=taps)

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    index = torch.tensor([4, 1, 8, 8], device=device)
    for seed in range(2):
        key = counter_rng.key(seed, device=device)
        difference = (compiled(data, index, key).int() - step(data, index, key).int()).abs()
        assert difference.max() <= 1  # products and sums may be fused
        assert (difference == 0).float().mean() > 0.99


@pytest.mark.gpu
def test_is_captured_in_a_cuda_graph() -> None:
    device = torch.device("cuda")
    data, key = packed(images_of(SIZES), device), counter_rng.key(0, device=device)
    crop = RandomResizedCrop(16, taps_for(longest_side(data.size), 16))
    crop.step(data, key)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = crop.step(data, key)
    for seed in (4, 5):
        key.copy_(counter_rng.key(seed, device=device))
        graph.replay()
        assert torch.equal(result, crop.step(data, key))
