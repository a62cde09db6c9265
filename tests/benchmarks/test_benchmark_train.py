"""The training benchmark runs, and the tables in the documentation match the records."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_program
from scripts import FOLDER, RECORDS, ROOT, load, table_of

from isda.experiments.records import load_runs
from isda.experiments.report.blocks import update_markdown


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], None]:
    return load("train").main


@pytest.fixture
def run(
    main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Function that calls the script and returns its output."""

    def call(*words: str | Path) -> str:
        main([*map(str, words)])
        return capsys.readouterr().out

    return call


def test_both_methods_are_timed(run: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "speed.csv"
    flags = ("--data", "digits", "--networks", "resnet8", "--images", "48", "--device", "cpu")
    done = run_program(FOLDER / "train.py", *flags, "--set", "batch_size=16", "--out", out)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    rows = list(csv.DictReader(out.open()))
    assert [(row["method"], row["batch_size"]) for row in rows] == [("ce", "16"), ("isda", "16")]
    for row in rows:
        # time of the whole data set at the measured rate, both rounded
        seconds, rate = float(row["seconds_per_epoch"]), float(row["images_per_second"])
        assert (rate - 0.51) * (seconds - 5.1e-5) <= 1437 <= (rate + 0.51) * (seconds + 5.1e-5)
    assert run("--table", out).strip() == "\n".join(printed.strip().splitlines()[-4:])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "--device", "cpu"], "--profile needs a GPU, got --device cpu"),
        (["--networks", "resnet23"], "unknown recipe 'cifar100-resnet23-ce'; did you mean"),
        (["--set", "batch=3"], "unknown field of a recipe 'batch'; did you mean batch_size"),
        (["--set", "batch_size=few"], "batch_size=few: invalid value for the field batch_size"),
        (["--epochs", "0"], "--epochs must be >= 1"),
        (["--side-by-side", "2", "0"], "--side-by-side must be >= 1"),
        (["--device", "cuda:99"], "GPU 99 not found"),
        (["--table", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--table", str(RECORDS / "loss_cpu.csv")], "is not a CSV file of"),
    ],
)
def test_mistakes(
    main: Callable[[list[str]], None],
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", *flags])
    assert message in capsys.readouterr().err


def test_rows_are_compared_with_their_own_baseline(run: Callable[..., str], tmp_path: Path) -> None:
    """Rows of the same batch size, in any order."""
    row = {"data": "digits", "network": "resnet8", "side_by_side": 1, "precision": "fp32"}
    row |= {"captured": True, "device": "x", "images_per_second": 1, "tflops": 1}
    rows = [
        row | {"method": method, "batch_size": size, "seconds_per_epoch": seconds}
        for method, size, seconds in (("isda", 128, 1.02), ("ce", 128, 1.0), ("ce", 256, 0.5))
    ]
    with (tmp_path / "speed.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    added = [line.split("|")[-2].strip() for line in run("--table", file.name).splitlines()[2:]]
    assert added == ["+2.0 %", "", ""]


def test_speed_table_is_that_of_its_record(run: Callable[..., str]) -> None:
    shown = run("--table", RECORDS / "train_h200.csv").strip()
    assert shown == table_of("docs/speed.md", "train_h200")


def test_results_table_is_that_of_the_records(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", copy)
    assert not update_markdown(copy, load_runs(ROOT / "results"))
