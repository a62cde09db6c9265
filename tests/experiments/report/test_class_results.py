"""Results by class and image, and the pages that show them."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from made_runs import CE, ISDA, make_run

from isda.experiments.cli import main
from isda.experiments.errors import InputError
from isda.experiments.predictions import Predictions, save_predictions
from isda.experiments.records import load_runs
from isda.experiments.report.classes import (
    changed_images,
    class_rows,
    compared_predictions,
    confused_rows,
)
from isda.experiments.report.comparison import advice, comparison, sentence
from isda.experiments.report.pages import write_comparison_page

NAMES = ("cat", '<b>"dog"</b>', "a|b\n$c$", "absent")


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
        assert "number of <code>--seeds</code> and continue with <code>--resume</code>." in text


def test_records_without_predictions_give_the_rest(compared: Path) -> None:
    page = compared / "page.html"
    (compared / ISDA / "1" / "predictions.npz").unlink()
    with pytest.raises(InputError, match=f"{ISDA}/1 has no predictions"):
        compared_predictions(comparison(load_runs(compared), CE, ISDA))
    write_comparison_page(page, comparison(load_runs(compared), CE, ISDA))
    text = page.read_text(encoding="utf-8")
    assert "No results by class and image: digits-resnet8-isda/1 has no predictions." in text
    assert "<h2>Training</h2>" in text
    (compared / ISDA / "1" / "predictions.npz").write_bytes(b"no archive")
    write_comparison_page(page, comparison(load_runs(compared), CE, ISDA))
    assert "predictions.npz is damaged" in page.read_text(encoding="utf-8")


def test_the_page_in_the_readme_is_that_of_the_records() -> None:
    """If this fails, take new screenshots, docs/figures/page-light.png and page-dark.png."""
    root = Path(__file__).parents[3]
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
