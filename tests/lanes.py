"""What the tests of the training step share: recipes, images, and the training of lanes."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import Tensor

from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.folders import FolderImages
from isda.experiments.settings import Recipe
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

__all__ = [
    "EVERYTHING",
    "FINE_TUNING",
    "NUMBER",
    "RECIPE",
    "SIZES",
    "assert_same_bits",
    "data",
    "deterministic",
    "fed_images",
    "full_precision",
    "image_files",
    "places",
    "scaled",
    "tiny_arrays",
    "train",
    "values",
]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic

RECIPE = Recipe(
    data="digits", network="resnet8", epochs=3, batch_size=32, learning_rate=0.05,
    weight_decay=5e-4, lambda_0=2.0,
)  # fmt: skip

EVERYTHING = replace(  # everything that may have state
    RECIPE, augment=("crop", "flip", "autoaugment", "cutout"), drop_rate=0.3, ema=0.9, ramp="step"
)
FINE_TUNING = replace(
    RECIPE, optimizer="adamw", nesterov=False, warmup=2, head_rate=5.0, decay_all=False
)

NUMBER = 77  # images: batches of 32, 32 and 13
SIZES = [32, 32, 13]


@pytest.fixture
def data(device: torch.device) -> ImageArrays:
    """Some of the digits, without duplicates."""
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    digits = replace(
        digits,
        train_images=digits.train_images[:NUMBER],
        train_target=digits.train_target[:NUMBER],
        test_images=digits.test_images[:101],
        test_target=digits.test_target[:101],
    )
    assert len(digits.train_images.unique(dim=0)) == NUMBER
    return digits.to(device)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic kernels on a GPU; those of the CPU always are."""
    torch.use_deterministic_algorithms(device.type == "cuda")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def image_files(tmp_path_factory: pytest.TempPathFactory) -> FolderImages:
    path = tmp_path_factory.mktemp("imagenet")
    for part, number in (("train", 3), ("val", 1)):
        for name in ("ant", "bee", "cow"):
            (path / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = torch.randint(0, 256, (40, 36, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(path / part / name / f"{i}.png")
    images = load_data("imagenet", root=path, image_size=33, workers=0)
    assert isinstance(images, FolderImages)
    return images


def tiny_arrays(channels: int, size: int, device: torch.device) -> ImageArrays:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        0, 256, (8, channels, size, size), dtype=torch.uint8, generator=generator
    )
    target = torch.tensor([0, 1, 2, 0, 1, 0, 2, 1])
    half = (0.5,) * channels
    return ImageArrays(
        "tiny", images[:5], target[:5], images[5:], target[5:], half, half, ("a", "b", "c")
    ).to(device)


def train(lanes: list[Lane], epochs: int = 2, *, capture: bool = False) -> list[list[list[float]]]:
    """Results of every epoch."""
    runner = SideBySide(lanes, capture=capture)
    results = []
    for _ in range(epochs):
        runner.train_epoch()
        results.append(runner.evaluate())
        for lane in lanes:
            lane.epoch += 1
    return results


def values(lane: Lane) -> list[Tensor]:
    """Copies of all tensors that a step changes."""
    return [tensor.detach().clone() for tensor in lane.tensors()]


def assert_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def scaled(data: ImageArrays, images: Tensor) -> Tensor:
    """Input of a network."""
    mean = torch.tensor(data.mean, device=images.device).view(-1, 1, 1)
    std = torch.tensor(data.std, device=images.device).view(-1, 1, 1)
    return (images.double() / 255 - mean) / std


def fed_images(lane: Lane) -> list[Tensor]:
    """List to which every step appends the input of its network."""
    batches: list[Tensor] = []
    model = lane._model

    def recorded(images: Tensor) -> tuple[Tensor, Tensor]:
        batches.append(images.clone())
        return model(images)

    lane._model = recorded
    return batches


def places(batch: Tensor, candidates: Tensor) -> list[int]:
    """Index of every image among candidates (N, C, H, W), up to rounding."""
    distance = torch.cdist(
        batch.double().flatten(1),
        candidates.double().flatten(1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    nearest = distance.min(1)
    assert (nearest.values < 1e-5).all()
    return nearest.indices.tolist()
