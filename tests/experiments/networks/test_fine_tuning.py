"""Training of pretrained networks: records, resume, prepared images, and the commands."""

import hashlib
import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pretrained_runs
import pytest
import torch
from PIL import Image
from pretrained_runs import (
    CPU,
    RESNET,
    VIT,
    fine_tuned,
    frozen,
    model_of,
    planned,
    weights_of,
    without_times,
)
from safetensors.torch import save_file
from torchvision.transforms import v2

from isda.experiments.cli import main
from isda.experiments.data import folder_cache
from isda.experiments.data.arrays import load_data
from isda.experiments.errors import InputError, RunError
from isda.experiments.networks import create_network
from isda.experiments.networks.pretrained import read_tensors
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import images as images_module
from isda.experiments.training import loop
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import ImageStore
from isda.experiments.training.training_step import Lane

# fixtures
no_network, photos = pretrained_runs.no_network, pretrained_runs.photos


@pytest.mark.parametrize("kind", ["whole", "frozen"])
def test_a_run_says_what_it_started_from_and_resumes(
    kind: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(RESNET, tmp_path)
    recipe = (fine_tuned if kind == "whole" else frozen)(photos, weights)
    plan, options = Plan("photos", recipe, 0), Options(device="cpu", checkpoint_seconds=0)
    (whole,) = loop.train([plan], replace(options, out=tmp_path / "whole"), progress=False)
    assert "(SHA-256" in whole.pretrained
    assert whole.pretrained.endswith("tensors; not loaded: fc.weight, fc.bias")
    assert str(weights) in whole.pretrained
    rates = [line["learning_rate"] for line in whole.metrics()]
    assert rates == pytest.approx([recipe.learning_rate_at(e) for e in range(recipe.epochs)])

    class Crash(BaseException):
        pass

    step, steps = Lane.step, 0

    def crashing(self: Lane, size: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:  # in the second epoch
            raise Crash
        step(self, size)

    half = replace(options, out=tmp_path / "half")
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "step", crashing)
        with pytest.raises(Crash):
            loop.train([plan], half, progress=False)
    (resumed,) = loop.train([plan], half.changed(resume=True), progress=False)
    assert without_times(resumed) == without_times(whole)
    states = [run.load() for run in (whole, resumed)]
    for name, value in states[0]["network"].items():
        assert torch.equal(value, states[1]["network"][name])

    # the checkpoint is the whole network
    network = create_network(RESNET, num_classes=3)
    network.load_state_dict(states[0]["network"])
    moved = not torch.equal(network.state_dict()["model.conv1.0.weight"],
                            read_tensors(weights)["conv1.0.weight"])  # fmt: skip
    assert moved == (kind == "whole")


def test_images_are_prepared_as_the_recipe_says(photos: Path, tmp_path: Path) -> None:
    recipe = replace(fine_tuned(photos, weights_of(VIT, tmp_path), VIT, image_size=160), hold_out=0)
    data = ImageStore().get(recipe, Options(), CPU)
    transform = v2.Compose([
        v2.Resize(round(160 / 0.95), v2.InterpolationMode.BICUBIC, antialias=True),
        v2.CenterCrop(160),
    ])  # fmt: skip
    files = load_data(recipe.data, image_size=160).test_files
    images, _ = next(Lane(recipe, 0, data, CPU).images.test_batches())
    for file, found in zip(files, images, strict=True):
        pixels = transform(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1))
        torch.testing.assert_close(found, (pixels.float() / 255 - 0.5) / 0.5)


def test_mean_of_the_wrong_length(photos: Path) -> None:
    recipe = Recipe(data="digits", network="resnet8", epochs=1, batch_size=8, learning_rate=0.1,
                    weight_decay=0.0, mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    with pytest.raises(InputError, match="mean must have 1 values for digits"):
        ImageStore().get(recipe, Options(), CPU)
    one = ImageStore().get(replace(recipe, mean=(0.25,), std=(2.0,)), Options(), CPU)
    assert (one.mean, one.std) == ((0.25,), (2.0,))


@pytest.mark.parametrize("kind", ["whole", "frozen"])
def test_weights_that_have_changed_are_refused(kind: str, photos: Path, tmp_path: Path) -> None:
    weights = weights_of(RESNET, tmp_path)
    plan = Plan("photos", (fine_tuned if kind == "whole" else frozen)(photos, weights), 0)
    options = Options(device="cpu", out=tmp_path / "runs")
    loop.train([plan], options, progress=False)
    save_file(model_of(RESNET, seed=1).state_dict(), weights)
    with pytest.raises(RunError, match=r"photos.0 was started from weights .*: restore the file"):
        loop.train([plan], options.changed(resume=True), progress=False)


def test_images_that_do_not_fit_are_refused_before_there_are_folders(
    photos: Path, tmp_path: Path
) -> None:
    _, recipe = planned("--network", VIT, "--weights", str(weights_of(VIT, tmp_path)), "--freeze")
    recipe = replace(recipe, data=f"imagefolder:{photos}", image_size=30)
    with pytest.raises(InputError, match="timm:test_vit does not accept 30 x 30 images"):
        loop.train(
            [Plan("a", recipe, 0)], Options(device="cpu", out=tmp_path / "runs"), progress=False
        )
    assert not (tmp_path / "runs").exists()


def words(photos: Path, weights: Path, *more: str) -> list[str]:
    return ["--data", f"imagefolder:{photos}", "--network", RESNET, "--weights", str(weights),
            "--device", "cpu", "--epochs", "2", "--batch-size", "8", "--image-size", "32",
            *more]  # fmt: skip


def test_the_page_says_what_was_used(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = weights_of(RESNET, tmp_path), tmp_path / "runs"
    given = words(photos, weights, "--freeze", "--seeds", "0", "1", "--out", str(out))
    assert main(["compare", *given]) == 0, capsys.readouterr().err
    (page,) = out.glob("*.html")
    text = html.unescape(page.read_text())
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    assert f"{weights} (SHA-256 {digest}…)" in text
    assert "not loaded: fc.weight, fc.bias" in text
    for field in ("optimizer", "head_rate", "warmup", "freeze", "interpolation", "mean"):
        assert f"<code>{field}</code>" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "timm:resnet1"], "unknown timm model 'resnet1'"),
        (["--network", "torchvision:resnet"], "unknown torchvision model 'resnet'"),
        (["--network", "torch.nn:Linea"], "unknown function of torch.nn 'Linea'"),
        (["--network", "timm:test_resnet", "--pretrained"], "are not on this machine"),
        (["--network", "resnet50", "--drop-rate", "0.5"], "drop_rate of resnet50 must be 0"),
    ],
)
def test_a_wrong_network_is_refused_before_images_are_decoded(
    words: list[str],
    message: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(images_module, "decode_folder", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    options = ["--data", f"imagefolder:{photos}", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["compare", *options, *words]) == 2
    assert message in capsys.readouterr().err


def test_help_prints_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--data", "imagefolder:x", "--network", VIT, "--pretrained", "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag, default in (("optimizer", "adamw"), ("learning-rate", "5e-05"), ("mean", "0.5 0.5"),
                          ("interpolation", "bicubic"), ("head-rate", "10.0")):  # fmt: skip
        assert re.search(rf"--{flag} .*?\(default: {default}", printed), flag


@pytest.mark.parametrize("freeze", [False, True])
def test_a_search_decodes_its_images_once(
    freeze: bool,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []
    owner = images_module if freeze else folder_cache
    name = "_features" if freeze else "_decode"
    function = getattr(owner, name)

    def counting(*arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    monkeypatch.setattr(owner, name, counting)
    given = words(photos, weights_of(RESNET, tmp_path), "--out", str(tmp_path / "runs"), "--cache",
                  "memory", "--candidates", "0.1", "0.5", "--final-seeds", "0", "1",
                  *["--freeze"] * freeze)  # fmt: skip
    assert main(["search", *given]) == 0, capsys.readouterr().err
    assert calls == [name]
