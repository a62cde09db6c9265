"""Neighbours and inversion of runs on folders of images, which are prepared as test images are."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from photo_folders import make_image
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from isda.experiments.cli import main
from isda.experiments.errors import InputError
from isda.experiments.generators.pictures import write_grid
from isda.experiments.generators.trained_classifier import load_classifier
from isda.experiments.predictions import load_predictions
from isda.experiments.records import Run
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder

SIZE = 16
CLASSES = ("cat", "dog", "owl")
RECIPE = Recipe(
    data="imagefolder:photos", network="resnet8", method="isda", lambda_0=0.5, epochs=2,
    batch_size=5, learning_rate=0.05, weight_decay=0.0, image_size=SIZE,
    mean=(0.4, 0.5, 0.6), std=(0.3, 0.2, 0.25),
)  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven training images and three test images of each class; the folder is the current one."""
    monkeypatch.chdir(tmp_path)
    for part, number in (("train", 7), ("val", 3)):
        for place, name in enumerate(CLASSES):
            for i in range(number):
                shape = ((20, 30), (12, 17), (37, 25))[i % 3]
                make_image(tmp_path / "photos" / part / name / f"{i}.png", shape, 10 * place + i)
    return tmp_path / "photos"


def trained(recipe: Recipe, name: str = "isda", **options: object) -> Path:
    train([Plan(name, recipe, 3)], Options(device="cpu", **options), progress=False)  # type: ignore[arg-type]
    return Path("runs", name, "3")


def loaded(folder: Path, device: torch.device, **options: object):
    return load_classifier(folder, Options(**options), device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "counts"),
    [({}, (21, 9)), ({"images_per_class": 4}, (12, 9)), ({"hold_out": 6}, (15, 6)),
     ({"hold_out": 6, "images_per_class": 2, "interpolation": "bicubic"}, (6, 6))],
)  # fmt: skip
@pytest.mark.parametrize("cache", ["auto", "disk"])
def test_the_images_are_those_of_the_run(photos, device, changes, counts, cache) -> None:
    folder = trained(replace(RECIPE, **changes))
    classifier = loaded(folder, device, cache=cache)
    data, recorded = classifier.data, load_predictions(Run(folder))
    assert (len(data.train_target), len(data.test_target)) == counts
    assert data.test_target.tolist() == recorded.target.tolist()
    assert classifier.predictions(data.test_images).tolist() == recorded.prediction.tolist()

    # the training images of each class, resized and cropped by torchvision
    how = v2.InterpolationMode(changes.get("interpolation", "bilinear"))
    transform = v2.Compose([v2.PILToTensor(), v2.Resize(18, how), v2.CenterCrop(SIZE)])
    found = classifier.training_images(torch.arange(counts[0]))
    for place, name in enumerate(CLASSES):
        files = [Image.open(file) for file in sorted((photos / "train" / name).iterdir())]
        expected = [transform(file).tolist() for file in files]
        own = [image.tolist() for image in found[data.train_target == place]]
        assert len(own) == counts[0] // 3
        assert all(image in expected for image in own)
        assert len({str(image) for image in own}) == len(own)


def test_the_file_of_the_training_stays(photos, device) -> None:
    folder = trained(RECIPE, cache="disk")
    before = {*photos.glob(".isda-cache/*.bytes")}
    assert len(before) == 1
    loaded(folder, device, cache="disk")
    after = {*photos.glob(".isda-cache/*.bytes")}
    assert len(after) == 2
    assert after > before
    trained(RECIPE, "again", cache="disk")
    assert {*photos.glob(".isda-cache/*.bytes")} == after


def test_a_frozen_run_needs_no_file_of_weights(photos, device) -> None:
    weights = photos.parent / "weights.pt"
    torch.save(timm.create_model("test_resnet", num_classes=5).state_dict(), weights)
    recipe = replace(RECIPE, network="timm:test_resnet", pretrained=True, weights=str(weights),
                     freeze=True, image_size=32)  # fmt: skip
    folder = trained(recipe)
    weights.unlink()
    classifier = loaded(folder, device)
    recorded = load_predictions(Run(folder))
    predicted = classifier.predictions(classifier.data.test_images)
    assert predicted.tolist() == recorded.prediction.tolist()
    assert classifier.criterion is not None
    count, mean, _ = classifier.criterion.estimator.moments
    features = classifier.all_features(classifier.data.train_images)
    for place in range(3):
        own = features[classifier.data.train_target == place].mean(0)
        assert count[place] == 2 * 7
        torch.testing.assert_close(mean[place].to(own), own, rtol=1e-3, atol=1e-4)


def test_pictures_of_a_folder_on_the_command_line(photos, capsys) -> None:
    trained(RECIPE)
    trained(RECIPE.baseline(), "ce")
    words = ["neighbours", "runs/isda/3", "--samples", "4", "--draws", "2", "--eigenvectors", "1"]
    assert main([*words, "--device", "cpu"]) == 0
    assert json.loads(Path("pictures/neighbours.json").read_text())["images"] == 21
    assert Image.open("pictures/neighbours.png").size == (10 * 66 - 2 + 6 * 8, 4 * 66 - 2)
    words = ["invert", "runs/isda/3", "--start", "decoder", "--judge", "runs/ce/3", "--samples",
             "2", "--iterations", "4", "--decoder-steps", "12", "--restarts", "1"]  # fmt: skip
    assert main([*words, "--device", "cpu"]) == 0
    bars = capsys.readouterr().err
    assert all(f"{label}: 100%" in bars for label in ("decoder", "step I", "step II"))
    assert "4/4" in bars
    result = json.loads(Path("pictures/inversion.json").read_text())
    assert result["pictures"]["original"]["residual"] == 0
    assert main(["report", "--pictures", "pictures", "--page", "page.html"]) == 0
    assert Path("page.html").read_text().count("<img ") == 2
    capsys.readouterr()
    trained(replace(RECIPE, image_size=18), "larger")
    assert main([*words, "--device", "cpu", "--judge", "runs/larger/3"]) == 2
    message = "judge must take images of 3 x 16 x 16, like the classifier, got 3 x 18 x 18"
    assert message in capsys.readouterr().err


def test_unreadable_files_are_skipped_as_in_the_training(photos, capsys) -> None:
    (photos / "train" / "dog" / "2.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="skipped 1 image"):
        folder = trained(RECIPE, skip_unreadable=True)
    words = ["neighbours", str(folder), "--samples", "1", "--device", "cpu"]
    assert main(words) == 2
    assert "use --skip-unreadable" in capsys.readouterr().err
    assert main([*words, "--skip-unreadable"]) == 0
    assert "skipped 1 image under photos" in capsys.readouterr().err
    assert json.loads(Path("pictures/neighbours.json").read_text())["images"] == 20


def test_other_images_than_those_of_the_run_are_refused(photos, device) -> None:
    folder = trained(RECIPE)
    (photos / "train" / "dog" / "2.png").rename(photos / "train" / "dog" / "x.png")
    with pytest.raises(InputError, match=r"^runs/isda/3: .* sizes of files have changed: restore"):
        loaded(folder, device)
    (photos / "train" / "dog" / "x.png").unlink()
    with pytest.raises(InputError, match=r"has \[20, 9, 3\] .* was made with \[21, 9, 3\]"):
        loaded(folder, device)
    with pytest.raises(
        InputError, match=r"^runs/isda/3: neither .* 29 images of imagefolder:photos"
    ):
        loaded(folder, device, cache="off")
    photos.rename("elsewhere")
    with pytest.raises(InputError, match=r"^runs/isda/3: photos does not exist"):
        loaded(folder, device)


def own_network(num_classes: int, width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)
    )


def test_a_network_that_has_changed_is_one_line(photos, monkeypatch, capsys) -> None:
    module = types.ModuleType("own_networks")
    monkeypatch.setitem(sys.modules, "own_networks", module)
    module.small = own_network  # type: ignore[attr-defined]
    folder = trained(replace(RECIPE, network="own_networks:small"))
    words = ["neighbours", str(folder), "--samples", "2", "--device", "cpu"]
    assert main(words) == 0
    capsys.readouterr()
    module.small = lambda num_classes: own_network(num_classes, 9)  # type: ignore[attr-defined]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    expected = f"{folder}: the checkpoint does not fit own_networks:small: Error(s) in loading "
    assert line.startswith(f"isda: {expected}")
    assert "size mismatch for model.0.weight" in line


def test_a_checkpoint_with_damaged_statistics_is_one_line(photos, device) -> None:
    folder = trained(RECIPE)
    run = RunFolder(folder)
    state = run.load()
    assert state is not None
    state["criterion"]["estimator.covariance"].fill_(torch.nan)
    run.save(state)
    with pytest.raises(InputError, match=r"^runs/isda/3: .*covariance must be finite"):
        loaded(folder, device)


def test_large_images_are_reduced_in_a_grid(tmp_path: Path) -> None:
    rows = torch.zeros(2, 3, 3, 300, 200, dtype=torch.uint8)
    rows[1, 2, 0] = 255
    write_grid(tmp_path / "grid.png", rows, rules=(1,))
    with Image.open(tmp_path / "grid.png") as opened:
        pixels = np.asarray(opened).astype(int)
    height, width, gap = 128, 85, 2
    assert pixels.shape == (2 * height + gap, 3 * (width + gap) - gap + 4 * gap, 3)
    assert (pixels[-height:, -width:] == [255, 0, 0]).all()
    assert (pixels[:height, :width] == 0).all()
