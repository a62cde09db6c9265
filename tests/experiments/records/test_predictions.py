"""Predictions of a run: recorded metrics, damage, resume, two ranks, and pictures of images."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.folder_cache import decode_folder
from isda.experiments.data.folders import load_folder
from isda.experiments.errors import InputError
from isda.experiments.predictions import load_predictions
from isda.experiments.records import Run
from isda.experiments.report.classes import reliability
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.images import kept_images
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.metrics import classified
from isda.experiments.training.predicted_images import thumbnails
from isda.experiments.training.run_images import RunImages

RECIPE = Recipe(
    data="digits", network="resnet8", epochs=2, batch_size=128, learning_rate=0.05,
    weight_decay=5e-4, hold_out=1200, method="ce",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = Options(out=tmp_path_factory.mktemp("runs"), device="cpu")
    (run,) = train([Plan("run", RECIPE, 0)], options)
    return run


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(trained.folder, tmp_path / "run" / "0"))


def test_predictions_have_the_recorded_metrics(run: Run) -> None:
    found, last = load_predictions(run), run.metrics()[-1]
    assert found is not None
    data = load_data("digits")
    assert isinstance(data, ImageArrays)
    held = data.hold_out(1200)
    assert found.target.tolist() == held.test_target.tolist()
    assert found.class_names == held.class_names
    assert 100 * (found.prediction != found.target).mean() == pytest.approx(last["test_error"])
    assert -np.log(found.target_probability).mean() == pytest.approx(last["test_loss"], rel=1e-4)
    bins = reliability({0: found})
    ece = sum(share * abs(accuracy - confidence) for confidence, accuracy, share in bins)
    assert ece == pytest.approx(last["test_ece"], abs=1e-4)
    assert (run.folder / "predictions.npz").stat().st_size < 20_000  # 1,200 images


def test_classified() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    rows = classified(logits, torch.tensor([2, 0]))
    p = logits.softmax(1)
    torch.testing.assert_close(
        rows[0], torch.stack([torch.tensor(2.0), torch.tensor(1.0), p[0, 1], p[0, 2]])
    )
    torch.testing.assert_close(
        rows[1], torch.stack([torch.tensor(0.0), torch.tensor(0.0), p[1, 0], p[1, 0]])
    )


def rewrite(run: Run, **changes: object) -> None:
    path = run.folder / "predictions.npz"
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays |= {name: value for name, value in changes.items() if value is not None}
    for name, value in changes.items():
        if value is None:
            del arrays[name]
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(buffer.getvalue())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "target is not a file in the archive"),
        ({"target": np.zeros(3, np.int32)}, "different lengths"),
        ({"target": np.zeros((1200, 1), np.int32)}, r"target has type int32, shape \(1200, 1\)"),
        ({"prediction": np.zeros(1200)}, "prediction has type float64"),
        ({"prediction": np.full(1200, 10, np.int32)}, "classes that have no name"),
        ({"confidence": np.full(1200, np.nan)}, "probabilities are out of range"),
        ({"target_probability": np.full(1200, 1.5)}, "probabilities are out of range"),
        ({"class_names": np.array([object()] * 10)}, "allow_pickle=False"),
        ({"prediction": np.zeros(1200, np.int32)}, "but the last epoch recorded"),
    ],
)  # fmt: skip
def test_damage(changes: dict[str, object], message: str, run: Run) -> None:
    rewrite(run, **changes)
    with pytest.raises(InputError, match=rf"predictions.npz is damaged: .*{message}"):
        load_predictions(run)


def test_every_flipped_byte_is_found_or_harmless(run: Run) -> None:
    path = run.folder / "predictions.npz"
    content, before = path.read_bytes(), load_predictions(run)
    assert before is not None
    for place in np.random.default_rng(0).choice(len(content), 200, replace=False):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        try:
            found = load_predictions(run)
        except InputError:
            continue
        assert found is not None
        for name in ("target", "prediction", "confidence", "target_probability"):
            assert np.array_equal(getattr(found, name), getattr(before, name))
        assert found.class_names == before.class_names
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="is damaged"):
        load_predictions(run)


def test_resumed_runs_have_the_same_predictions(run: Run, tmp_path: Path) -> None:
    """Killed while the predictions were written, with the record of an earlier training."""
    content = (run.folder / "predictions.npz").read_bytes()
    (run.folder / "checkpoint.pt").unlink()
    (run.folder / "metrics.jsonl").write_bytes(b"")
    (run.folder / "predictions.npz").write_bytes(b"half")
    (run.folder / ".predictions.npz.0123.new").write_bytes(b"half")
    train([Plan("run", RECIPE, 0)], Options(out=tmp_path, device="cpu", resume=True))
    assert (run.folder / "predictions.npz").read_bytes() == content
    assert not list(run.folder.glob(".*.new"))


def test_order_of_two_ranks(tmp_path: Path) -> None:
    """The parts of the ranks, one after the other, are the test images in order."""
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "train" / name / "0.png")
        for number in range(6 if name == "a" else 5):
            value = 20 * (number + (6 if name == "b" else 0))
            Image.new("RGB", (4, 4), (value,) * 3).save(tmp_path / "val" / name / f"{number}.png")
    cpu = torch.device("cpu")
    data = decode_folder(load_folder(tmp_path, name="", image_size=4), cache="memory", device=cpu)
    recipe = replace(RECIPE, batch_size=2, augment=())
    parts = [RunImages(recipe, 0, data, cpu, rank=rank, world=2, compiled=False)
             for rank in range(2)]  # fmt: skip
    read = [images[:, 0, 0, 0] for part in parts for images, _ in part.test_batches()]
    brightness = torch.cat(read)
    assert (brightness.diff() > 0).all()
    assert len(brightness) == 11


def test_thumbnails(tmp_path: Path) -> None:
    options = Options()
    data = load_data("digits")
    assert isinstance(data, ImageArrays)
    recipe = replace(RECIPE, hold_out=0)
    found = thumbnails(recipe, 0, [3, 7], options)
    for index, content in found.items():
        pixels = np.asarray(Image.open(io.BytesIO(content)))
        assert np.array_equal(pixels, data.test_images[index, 0].numpy())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            Image.new("RGB", (300, 200), (number, 9, 9)).save(tmp_path / name / f"{number}.png")
    found = thumbnails(replace(recipe, data=f"imagefolder:{tmp_path}"), 0, [0], options)
    assert Image.open(io.BytesIO(found[0])).size == (96, 64)


def test_pictures_are_those_of_the_files_that_were_used(tmp_path: Path) -> None:
    """Also if files were skipped, or vanish after the training."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("RGB", (9, 9), (number, 9, 9)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "a" / "0.png").write_bytes(b"damaged")
    recipe = replace(RECIPE, hold_out=0, data=f"imagefolder:{tmp_path}", image_size=9)
    options = Options(skip_unreadable=True, workers=0)
    with pytest.raises(InputError, match="cannot be shown with both --skip-unreadable"):
        thumbnails(recipe, 0, [0], options)
    with kept_images() as store:
        with pytest.warns(UserWarning, match="skipped 1 image under"):
            store.get(recipe, options, torch.device("cpu"))
        for held_out in (0, 4):
            chosen = replace(recipe, hold_out=held_out)
            data = store.get(chosen, options, torch.device("cpu"))
            numbers = range(len(data.test_target))
            for number, content in thumbnails(chosen, 0, numbers, options).items():
                pixels = np.asarray(Image.open(io.BytesIO(content)))
                assert np.array_equal(pixels[0, 0], data.test_images[number, :, 0, 0])
        used = store.files(recipe, options)
        assert used is not None
        Path(used.test_files[0]).unlink()
        with pytest.raises(FileNotFoundError):
            thumbnails(recipe, 0, [0], options)
