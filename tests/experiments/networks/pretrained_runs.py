"""What the tests of pretrained networks share: photos, files of weights, recipes."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from isda.experiments.commands import train
from isda.experiments.settings import Recipe

__all__ = [
    "CPU",
    "RESNET",
    "VIT",
    "fine_tuned",
    "frozen",
    "model_of",
    "no_network",
    "photos",
    "planned",
    "weights_of",
    "without_times",
]

CPU = torch.device("cpu")
RESNET, VIT = "timm:test_resnet", "timm:test_vit"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of images of several sizes that differ in colour."""
    folder, random = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for part, number in (("train", 6), ("val", 3)):
        for place, name in enumerate(("cat", "dog", "owl")):
            (folder / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = random.integers(0, 120, (40 + 7 * i, 60, 3)) + 100 * np.eye(3)[place]
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{i}.png")
    return folder


def model_of(network: str, num_classes: int = 1000, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model(network.removeprefix("timm:"), num_classes=num_classes)
    with torch.no_grad():
        for value in model.state_dict().values():  # so that no tensor keeps its initial value
            value.add_(0.02 * torch.rand(value.shape) if value.is_floating_point() else 3)
    return model


def weights_of(network: str, folder: Path, num_classes: int = 1000, seed: int = 0) -> Path:
    path = folder / f"{network[5:]}-{num_classes}-{seed}.safetensors"
    save_file(model_of(network, num_classes, seed).state_dict(), path)
    return path


def planned(*words: str) -> tuple[str, Recipe]:
    found = train.plan(["--data", "imagefolder:photos", "--device", "cpu", *words])
    ((name, recipe),) = found.recipes.items()
    return name, recipe


def fine_tuned(photos: Path, weights: Path, network: str = RESNET, **changes: Any) -> Recipe:
    _, recipe = planned("--network", network, "--weights", str(weights))
    return replace(
        recipe, data=f"imagefolder:{photos}",
        **({"epochs": 3, "batch_size": 8, "image_size": 32} | changes),
    )  # fmt: skip


def frozen(photos: Path, weights: Path, **changes: Any) -> Recipe:
    _, recipe = planned("--network", RESNET, "--weights", str(weights), "--freeze")
    fields = {"epochs": 4, "batch_size": 8, "image_size": 32} | changes
    return replace(recipe, data=f"imagefolder:{photos}", **fields)


def without_times(run: Any) -> list[dict[str, Any]]:
    times = ("seconds", "images_per_second")
    return [{k: v for k, v in line.items() if k not in times} for line in run.metrics()]
