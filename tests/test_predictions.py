"""Predictions of a run: written, verified on reading, and what a page makes of them."""

import io
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from made_runs import CE, ISDA, make_run
from PIL import Image

from isda.experiments.cli import main
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.folder_cache import decode_folder
from isda.experiments.data.folders import load_folder
from isda.experiments.errors import InputError
from isda.experiments.predictions import Predictions, load_predictions, save_predictions
from isda.experiments.records import Run, load_runs
from isda.experiments.report.classes import (
    changed_images,
    class_rows,
    compared_predictions,
    confused_rows,
    reliability,
)
from isda.experiments.report.comparison import advice, comparison, comparison_rows, sentence
from isda.experiments.report.intervals import difference, seeds_needed
from isda.experiments.report.pages import write_comparison_page
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
NAMES = ("cat", '<b>"dog"</b>', "a|b\n$c$", "absent")


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


# By class and image


def random_predictions(seed: int, *, names: tuple[str, ...] = NAMES) -> Predictions:
    """60 images of three classes; every seed has the same images."""
    target = np.arange(60, dtype=np.int32) % 3
    noise = np.random.default_rng(seed)
    prediction = np.where(noise.random(60) < 0.3, noise.integers(0, 4, 60), target).astype(np.int32)
    confidence = noise.uniform(0.4, 1, 60).astype(np.float32)
    target_probability = np.where(prediction == target, confidence, 0.1).astype(np.float32)
    return Predictions(target, prediction, confidence, target_probability, names)


def with_predictions(out: Path, name: str, seed: int, predictions: Predictions) -> None:
    error = 100 * float(predictions.wrong.mean())
    run = make_run(out, name, seed, error, epochs=0)
    for epoch in range(run.recipe.epochs):
        run.append({"epoch": epoch, "test_error": error, "train_loss": 1.0, "seconds": 1.0})
    save_predictions(run, predictions)


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    out = tmp_path / "runs"
    for seed in range(3):
        with_predictions(out, CE, seed, random_predictions(seed))
        with_predictions(out, ISDA, seed, random_predictions(10 + seed))
    return out


def test_class_rows_and_confusions(compared: Path) -> None:
    given = compared_predictions(comparison(load_runs(compared), CE, ISDA))
    header, *rows = class_rows(given)
    assert header[0] == "class"
    assert len(rows) == 3  # no images of the fourth class
    changes = []
    for number, name in enumerate(("cat", '<b>"dog"</b>', "a|b\ufffd$c$")):
        errors = [
            [100 * np.mean([p != t for t, p in zip(one.target, one.prediction, strict=True)
                            if t == number]) for one in side.values()]
            for side in given.sides
        ]  # fmt: skip
        row = next(row for row in rows if row[0] == name)
        assert row[1:4] == ["20", f"{np.mean(errors[0]):.1f}", f"{np.mean(errors[1]):.1f}"]
        interval = scipy.stats.ttest_rel(errors[1], errors[0]).confidence_interval(0.95)
        change = np.mean(errors[1]) - np.mean(errors[0])
        text = f"{change:+.1f} ({interval.low:+.1f} to {interval.high:+.1f})"
        assert row[4] == text.replace("-", "−")
        changes.append((change, row))
    assert rows == [row for _, row in sorted(changes, key=lambda pair: pair[0])]

    counts = [Counter(), Counter()]
    for side, count in zip(given.sides, counts, strict=True):
        for one in side.values():
            for t, p in zip(one.target.tolist(), one.prediction.tolist(), strict=True):
                if t != p:
                    count[min(t, p), max(t, p)] += 1
    _, *rows = confused_rows(given)
    differences = {pair: (counts[1][pair] - counts[0][pair]) / 3 for pair in counts[0] | counts[1]}
    assert len(rows) == sum(value != 0 for value in differences.values())
    largest = max(differences.values(), key=abs)
    assert abs(float(rows[0][3].replace("−", "-"))) == pytest.approx(abs(largest), abs=0.06)
    for label, one, other, _ in rows:
        pair = tuple(given.class_names.index(name) for name in label.split(" ↔ "))
        assert [one, other] == [f"{count[pair] / 3:.1f}" for count in counts]


def test_changed_images(compared: Path) -> None:
    given = compared_predictions(comparison(load_runs(compared), CE, ISDA))
    better, worse = changed_images(given, limit=60)
    gained = sum(one.wrong.astype(int) for one in given.sides[0].values()) - sum(
        one.wrong.astype(int) for one in given.sides[1].values()
    )
    assert {one.index: one.gained for one in better} == {
        i: g for i, g in enumerate(gained) if g > 0
    }
    assert {one.index: one.gained for one in worse} == {i: g for i, g in enumerate(gained) if g < 0}
    assert [one.gained for one in better] == sorted((one.gained for one in better), reverse=True)
    for one in better:
        assert one.after == one.target != one.before
    for one in worse:
        assert one.before == one.target != one.after


def test_seeds_of_an_image_are_those_of_both_sides(compared: Path) -> None:
    """Seeds 0, 1, 2 and 0, 1, 5: an image changed in some of the two that both have."""
    shutil.rmtree(compared / ISDA / "2")
    with_predictions(compared, ISDA, 5, random_predictions(15))
    page = compared / "page.html"
    result = comparison(load_runs(compared), CE, ISDA)
    write_comparison_page(page, result, pictures=lambda _, own: dict.fromkeys(own, b""))
    assert {*re.findall(r"<small>\d of (\d) seeds", page.read_text())} == {"2"}


def test_names_are_escaped_on_the_page(compared: Path) -> None:
    page = compared / "page.html"
    picture = b"\x89PNG"
    write_comparison_page(
        page,
        comparison(load_runs(compared), CE, ISDA),
        pictures=lambda seed, indices: dict.fromkeys(indices, picture),
    )
    text = page.read_text(encoding="utf-8")
    assert "<b>&#34;dog" not in text
    assert '<b>"dog"' not in text
    assert "&lt;b&gt;&#34;dog&#34;&lt;/b&gt;" in text
    assert "a|b\ufffd$c$" in text
    assert "Only ISDA is right" in text
    assert text.count("data:image/png;base64,iVBORw==") == len(re.findall("<li>", text)) > 0
    for heading in ("By class", "Confused classes", "Reliability"):
        assert f"<h2>{heading}</h2>" in text


def test_size_of_the_tables_on_the_page(tmp_path: Path) -> None:
    """All classes are listed up to 1000 of them; the test images are counted."""
    for number, listed in ((12, 12), (40, 52), (1001, 12)):
        out = tmp_path / str(number)
        for name in (CE, ISDA):
            target = np.arange(2 * number, dtype=np.int32) % number
            with_predictions(out, name, 0, replace(
                random_predictions(0), target=target, prediction=(target + 1) % number,
                confidence=np.full(2 * number, 0.6, np.float32),
                target_probability=np.full(2 * number, 0.2, np.float32),
                class_names=tuple(f"class {c}" for c in range(number)),
            ))  # fmt: skip
        page = out / "page.html"
        write_comparison_page(page, comparison(load_runs(out), CE, ISDA))
        text = page.read_text(encoding="utf-8")
        assert f"{2 * number:,} test images of {number} classes." in text
        assert len(re.findall(r"<td>class \d+</td>", text)) == listed
        assert "continue with more <code>--seeds</code> and <code>--resume</code>." in text


@pytest.mark.parametrize(
    ("last", "cell"),
    [
        ({"side_by_side": 1}, "+100 %"),
        ({"side_by_side": 2, "peak_mib": 5.0}, "+100 %"),  # with runs of the same method
        ({"side_by_side": 6}, "both trained side by side"),
    ],
)
def test_time_of_runs_side_by_side(last: dict[str, float], cell: str, tmp_path: Path) -> None:
    """The time of runs of both methods side by side does not tell which of them takes longer."""
    for name, seconds in ((CE, 1.0), (ISDA, 2.0)):
        run = make_run(tmp_path, name, 0, 10.0, epochs=0)
        for epoch in range(run.recipe.epochs):
            run.append({"epoch": epoch, "test_error": 10.0, "train_loss": 1.0,
                        "seconds": seconds, **last})  # fmt: skip
    rows = comparison_rows(comparison(load_runs(tmp_path), CE, ISDA))
    assert next(row for row in rows if row[0] == "s / epoch") == ["s / epoch", "1.00", "2.00", cell]


def test_records_without_predictions_give_the_rest(compared: Path) -> None:
    page = compared / "page.html"
    (compared / ISDA / "1" / "predictions.npz").unlink()
    with pytest.raises(InputError, match=f"{ISDA}/1 has kept no predictions"):
        compared_predictions(comparison(load_runs(compared), CE, ISDA))
    write_comparison_page(page, comparison(load_runs(compared), CE, ISDA))
    text = page.read_text(encoding="utf-8")
    assert "No results by class and image: digits-resnet8-isda/1 has kept no predictions." in text
    assert "<h2>Training</h2>" in text
    (compared / ISDA / "1" / "predictions.npz").write_bytes(b"no archive")
    write_comparison_page(page, comparison(load_runs(compared), CE, ISDA))
    assert "predictions.npz is damaged" in page.read_text(encoding="utf-8")


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


def test_the_page_in_the_readme_is_that_of_the_records() -> None:
    """If this fails, take new screenshots, docs/figures/page-light.png and page-dark.png."""
    root = Path(__file__).parents[1]
    names = [
        f"digits-resnet8-{method}drop_rate=0.3+images_per_class=10"
        for method in ("ce+epochs=25+batch_size=10+", "isda+epochs=25+batch_size=10+lambda_0=1.0+")
    ]
    runs = [run for name in names for run in load_runs(root / "results" / name)]
    result = comparison(runs, *names)
    text = f"Should you use ISDA? {advice(result)[0]}. {sentence(result)}"
    assert f'src="docs/figures/page-light.png" width="690" alt="{text}"' in (
        root / "README.md"
    ).read_text(encoding="utf-8")


def test_compare_writes_a_page_with_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--epochs", "2", "--batch-size", "128", "--seeds", "0", "--device", "cpu"]
    assert main([*words, "--images-per-class", "10"]) == 0
    page = Path(capsys.readouterr().out.splitlines()[-1]).read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "Should you use ISDA? Too early to say." in page


def test_pictures_are_those_of_the_files_that_were_used(tmp_path: Path) -> None:
    """Also if files were skipped, or vanish after the training."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("RGB", (9, 9), (number, 9, 9)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "a" / "0.png").write_bytes(b"damaged")
    recipe = replace(RECIPE, hold_out=0, data=f"imagefolder:{tmp_path}", image_size=9)
    options = Options(skip_unreadable=True, workers=0)
    with pytest.raises(InputError, match="not shown with --skip-unreadable"):
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


# Advice


def test_advice_and_seeds_needed(tmp_path: Path) -> None:
    for seed, (one, other) in enumerate([(10.0, 9.0), (10.0, 8.8), (10.1, 9.0)]):
        make_run(tmp_path, CE, seed, one)
        make_run(tmp_path, ISDA, seed, other)
    assert advice(comparison(load_runs(tmp_path), CE, ISDA))[0] == "Yes"
    change = difference({0: 10.0, 1: 10.0, 2: 10.0}, {0: 9.9, 1: 9.5, 2: 10.05})
    needed = seeds_needed(change)
    assert needed is not None
    spread = np.std([-0.1, -0.5, 0.05], ddof=1)
    halves = [scipy.stats.t.ppf(0.975, n - 1) * spread / n**0.5 for n in (needed - 1, needed)]
    assert halves[0] >= abs(change.mean) > halves[1]
    assert seeds_needed(difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 1.01})) is None
