"""Weights as safetensors: the loaded network predicts what the run has recorded."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from isda.experiments.cli import main
from isda.experiments.data.arrays import load_data
from isda.experiments.data.folders import FolderImages
from isda.experiments.predictions import load_predictions
from isda.experiments.records import Run, export

WORDS = ["train", "--epochs", "2", "--batch-size", "128", "--device", "cpu", "--drop-rate", "0.2"]


@pytest.fixture(scope="module", params=[0.0, 0.9], ids=["last", "averaged"])
def run(request, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs")
    assert main([*WORDS, "--out", str(out), "--ema", str(request.param), "--seeds", "3"]) == 0
    (folder,) = (path.parent for path in out.rglob("checkpoint.pt"))
    return Run(folder)


@pytest.fixture
def card(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> str:
    monkeypatch.chdir(tmp_path)
    assert main(["weights", str(run.folder), "--out", "digits.safetensors"]) == 0
    assert capsys.readouterr().out.split() == ["digits.safetensors", "digits.md"]
    return Path("digits.md").read_text()


def test_the_code_of_the_card_gives_the_recorded_predictions(run: Run, card: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    data = load_data("digits")
    probabilities = names["predict"](data.test_images)  # type: ignore[operator]
    recorded = load_predictions(run)
    assert recorded is not None
    assert np.array_equal(probabilities.argmax(1).numpy(), recorded.prediction)
    torch.testing.assert_close(
        probabilities.max(1).values, torch.from_numpy(recorded.confidence), atol=1e-5, rtol=1e-5
    )
    wrong = 100 * (probabilities.argmax(1) != data.test_target).float().mean().item()
    assert f"| error, % | {wrong:.2f} |" in card


def test_a_network_for_photos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are prepared as the test images were: size, crop, interpolation, mean, deviation."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog")):
        for i in range(6):
            path = tmp_path / "photos" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 150, (50 + 9 * i, 60, 3)) + 100 * number
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), "vit.safetensors")
    words = "--data imagefolder:photos --network timm:test_vit --weights vit.safetensors --epochs 2"
    assert main(["train", *words.split(), "--device", "cpu", "--learning-rate", "1e-3"]) == 0
    (folder,) = (path.parent for path in Path("runs").rglob("checkpoint.pt"))
    assert main(["weights", str(folder), "--out", "photos.safetensors"]) == 0
    (code,) = re.findall(r"```python\n(.*?)```", Path("photos.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    recorded, data = load_predictions(Run(folder)), load_data("imagefolder:photos")
    assert recorded is not None
    assert isinstance(data, FolderImages)
    found = [names["predict"](names["prepare"](file)).max(1) for file in data.test_files]
    assert [int(one.indices) for one in found] == recorded.prediction.tolist()
    confidence = torch.cat([one.values for one in found])
    torch.testing.assert_close(
        confidence, torch.from_numpy(recorded.confidence), atol=1e-5, rtol=1e-5
    )


def test_header_and_card(run: Run, card: str) -> None:
    with safe_open("digits.safetensors", framework="pt") as file:
        header = file.metadata()
    assert json.loads(header["recipe"]) == run.recipe.as_dict()
    assert (header["network"], header["num_classes"], header["seed"]) == ("resnet8", "10", "3")
    assert json.loads(header["class_names"]) == [str(digit) for digit in range(10)]
    last = run.metrics()[-1]
    for value in (f"{last['test_loss']:.4f}", f"{last['test_ece']:.4f}"):
        assert f"| {value} |" in card
    assert card.count("averaged over the steps") == bool(run.recipe.ema)
    for words in (
        run.name,
        "seed 3",
        "ISDA (λ₀ = 0.5",
        run.environments[-1]["commit"] or "unknown",
    ):
        assert words in card


def test_refusals(run: Run, tmp_path: Path, capsys) -> None:
    record = export(run, tmp_path / "records")
    for folder, out, message in (
        (run.folder, "weights.pt", "out must be a file NAME.safetensors, got"),
        (run.folder, "nowhere/w.safetensors", "folder"),
        (record, "w.safetensors", f"{record} has no checkpoint"),
        (tmp_path, "w.safetensors", f"{tmp_path / 'config.json'} is not a run record"),
        (tmp_path / "none", "w.safetensors", f"folder {str(tmp_path / 'none')!r} does not exist"),
    ):
        assert main(["weights", str(folder), "--out", str(tmp_path / out)]) == 2
        assert capsys.readouterr().err.startswith(f"isda: {message}")
    lines = (record / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (record / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    assert main(["weights", str(record), "--out", str(tmp_path / "w.safetensors")]) == 2
    assert "is not finished: 1 of 2 epochs" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors"))
