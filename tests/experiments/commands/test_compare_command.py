"""``isda compare`` and the report, on digits and on images of one's own."""

import json
import re
from pathlib import Path

import command_line
import numpy as np
import pytest
import scipy.stats
from command_line import QUICK, image_folder
from shown_tables import Page

from isda.experiments.cli import main
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.records import load_runs, summary

elsewhere = command_line.elsewhere  # fixture


def table_of(printed: str) -> list[list[str]]:
    """Cells of the text table, without the rule."""
    rows = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    return [row for row in rows if len(row) > 1]


def test_compare_on_digits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seeds", "0", "1", "--device", "cpu", "--lambda-0", "1"]
    assert main(["compare", *QUICK, *flags]) == 0
    printed = capsys.readouterr().out
    runs = load_runs("runs")
    assert [(run.recipe.method, run.seed) for run in runs] == [
        ("ce", 0), ("ce", 1), ("isda", 0), ("isda", 1),
    ]  # fmt: skip
    errors = []
    for run in runs:  # from the files alone
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        errors.append(json.loads(lines[-1])["test_error"])
    baseline, method = sum(errors[:2]) / 2, sum(errors[2:]) / 2
    spreads = [abs(pair[0] - pair[1]) / 2**0.5 for pair in (errors[:2], errors[2:])]
    header, row = table_of(printed)[:2]
    assert row[0] == "validation error, %"
    assert row[1] == f"{baseline:.2f} ± {spreads[0]:.2f}"
    assert row[2] == f"{method:.2f} ± {spreads[1]:.2f}"
    assert row[3].replace("−", "-").startswith(f"{method - baseline:+.2f} (")
    assert f"{abs(method - baseline):.2f} points" in printed
    assert "The result of a run is its last epoch of 2." in printed

    page = Path(printed.splitlines()[-1])
    assert page.parent == Path("runs")
    assert page.name.startswith("digits-resnet8-isda+")
    assert page.suffix == ".html"
    text = page.read_text(encoding="utf-8")
    found = Page(text).rows
    for wanted in table_of(printed)[1:]:
        if wanted[0] in ("validation error, %", "NLL", "ECE, %", "seeds"):
            assert any(row[: len(wanted)] == wanted for row in found), wanted
    for seed, one, other in zip((0, 1), errors[:2], errors[2:], strict=True):
        assert any(row[:3] == [str(seed), f"{one:.2f}", f"{other:.2f}"] for row in found), seed
    assert len(header) >= 3


def test_report_of_the_digits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default recipes on some images: the page has the numbers of the raw records."""

    def some_digits(*_: object, **__: object) -> ImageArrays:
        digits = load_data("digits")
        assert isinstance(digits, ImageArrays)
        return digits.hold_out(1280)  # trains on 158, tests on 1280

    monkeypatch.setattr("isda.experiments.training.images.load_data", some_digits)
    assert main(["compare", "--seeds", "0", "1", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["report", "--page", "report.html"]) == 0
    printed = capsys.readouterr().out
    raw: dict[str, list[list[float]]] = {}  # by metric, of both methods, of both seeds
    for key in ("test_error", "test_loss", "test_ece"):
        for method in ("ce", "isda"):
            files = [Path(f"runs/digits-resnet8-{method}/{seed}/metrics.jsonl") for seed in (0, 1)]
            last = [file.read_text().splitlines()[-5:] for file in files]
            raw.setdefault(key, []).append(
                [float(np.mean([json.loads(line)[key] for line in lines])) for lines in last]
            )
    errors = raw["test_error"]
    interval = scipy.stats.ttest_rel(errors[1], errors[0]).confidence_interval(0.95)
    page = Path("report.html").read_text(encoding="utf-8")
    rows = [row for row in Page(page).rows if row[0] == "digits-resnet8-isda"]
    assert len(rows) == 1
    assert rows[0][2].replace("−", "-") == (
        f"{np.mean(errors[1]) - np.mean(errors[0]):+z.2f} "
        f"({interval.low:+z.2f} to {interval.high:+z.2f})"
    )
    spreads = (f"{np.mean(side):.2f} ± {np.std(side, ddof=1):.2f}" for side in errors)
    assert rows[0][4] == " → ".join(spreads)
    assert rows[0][5] == " → ".join(f"{np.mean(side):.3f}" for side in raw["test_loss"])
    assert rows[0][6] == " → ".join(f"{100 * np.mean(side):.2f}" for side in raw["test_ece"])
    assert all(cell in printed for cell in rows[0])


CHANGED = "+epochs=2+batch_size=16+image_size=32"


@pytest.mark.filterwarnings("error::UserWarning")
def test_compare_on_your_own_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    photos = image_folder(tmp_path / "photos")
    flags = ["--network", "timm:test_resnet", "--image-size", "32", "--epochs", "2"]
    flags += ["--batch-size", "16", "--seeds", "0", "1", "--device", "cpu", "--workers", "0"]
    assert main(["compare", "--data", f"imagefolder:{photos}", *flags]) == 0
    printed = capsys.readouterr().out
    runs = load_runs("runs")
    assert [(run.name, run.seed) for run in runs] == [
        (f"photos-timm_test_resnet-{method}{CHANGED}", seed)
        for method in ("ce", "isda")
        for seed in (0, 1)
    ]
    for run in runs:
        assert summary(run).finished
        assert run.recipe.network == "timm:test_resnet"
        # 24 images train, and 6 are held out for the test
        assert run.metrics()[0]["test_error"] * 6 / 100 == pytest.approx(
            round(run.metrics()[0]["test_error"] * 6 / 100), abs=1e-4
        )
    assert "test error, %" in printed
    assert (Path("runs") / f"photos-timm_test_resnet-isda{CHANGED}.html").exists()
