"""Folders of small photographs: made, decoded, and trained on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from isda.experiments.data import folder_cache
from isda.experiments.data.arrays import load_data
from isda.experiments.data.folder_cache import DecodedImages, decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.data.resized_crop import PackedImages
from isda.experiments.settings import Recipe

__all__ = [
    "CPU",
    "PLACES",
    "RECIPE",
    "SIZE",
    "count_decoding",
    "decoded",
    "files_of",
    "image_of",
    "make_image",
    "make_photos",
]

SIZE = 16  # of the crops; images are stored with a shorter side of 18
CPU = torch.device("cpu")
PLACES = ("device", "memory", "disk", "off")
RECIPE = Recipe(
    data="imagefolder:photos", network="resnet8", epochs=2, batch_size=5, learning_rate=0.05,
    weight_decay=5e-4, lambda_0=1.0, image_size=SIZE,
)  # fmt: skip


def make_image(path: Path, shape: tuple[int, int], seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def make_photos(tmp_path: Path) -> Path:
    """Noise of different sizes: some are stored as they are, others are resized."""
    shapes = [(20, 30), (12, 17), (37, 25), (18, 18), (16, 60)]
    for part, number in (("train", 7), ("val", 3)):
        for c, name in enumerate(("cat", "dog", "owl")):
            for i in range(number):
                kind = "png" if i % 2 else "jpg"
                path = tmp_path / "photos" / part / name / f"{i}.{kind}"
                make_image(path, shapes[(i + c) % 5], 100 * c + i + 50 * (part == "val"))
    return tmp_path / "photos"


def files_of(path: Path, **options: object) -> FolderImages:
    data = load_data(f"imagefolder:{path}", **{"image_size": SIZE, "workers": 2} | options)
    assert isinstance(data, FolderImages)
    return data


def decoded(path: Path, cache: str = "memory", device: torch.device = CPU) -> DecodedImages:
    return decode_folder(files_of(path), cache=cache, device=device)


def image_of(data: DecodedImages, number: int) -> Tensor:
    """Stored training image (H, W, 3)."""
    images = data.train_images
    assert isinstance(images, PackedImages)
    height, width = images.size[number].tolist()
    first = int(images.offset[number])
    return images.pixels[first : first + height * width].view(height, width, 3)


def count_decoding(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    decode = folder_cache._decode

    def counting(*arguments: object) -> Iterator[Tensor]:
        calls.append("decoded")
        yield from decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(folder_cache, "_decode", counting)
    return calls
