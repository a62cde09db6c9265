"""The benchmark of the input pipeline measures every pipeline and prints what it has stored."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import FOLDER, RECORDS, load, table_of


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], None]:
    return load("input").main


def test_every_pipeline(
    main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "input.csv"
    flags = "--images 24 --classes 3 --size 40 30 --image-size 32 --network resnet8 --batch-size 8"
    flags += " --side-by-side 1 2 --epochs 1 --workers 1 --device cpu"
    main([*flags.split(), "--compare", "2", "--out", str(out)])
    printed = capsys.readouterr().out
    rows = list(csv.DictReader(out.open()))
    kept = [("disk", "1"), ("disk", "2"), ("memory", "1"), ("memory", "2")]
    kept += [("device", "1"), ("device", "2")]
    expected = [("torchvision", "1"), ("off", "1"), *kept, ("isda compare", "")]
    assert [(row["pipeline"], row["side_by_side"]) for row in rows] == expected
    *rows, compared = rows
    trained = 6 * 2 * 24  # images of all runs and epochs
    seconds, rate = float(compared["total_seconds"]), float(compared["trained_per_second"])
    assert (rate - 0.5) * (seconds - 0.05) <= trained <= (rate + 0.5) * (seconds + 0.05)  # rounded
    assert compared["network"] == "resnet8"
    for row in rows:
        assert float(row["batches_per_second"]) > 0
        assert float(row["trained_per_second"]) > 0
        assert (row["kept_mebibytes"] != "") == (row["pipeline"] not in ("torchvision", "off"))
    main(["--table", str(out)])
    table = capsys.readouterr().out.strip()
    assert table == "\n".join(printed.strip().splitlines()[-11:])


def test_columns_of_a_file_stay_the_same(
    main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Batches alone and training can be appended to one file."""
    out = tmp_path / "input.csv"
    flags = "--images 6 --classes 2 --size 20 --image-size 16 --network resnet8 --batch-size 3"
    flags += f" --pipelines memory --epochs 1 --workers 0 --device cpu --out {out}"
    main([*flags.split(), "--no-training"])
    main(flags.split())
    one, other = csv.DictReader(out.open())
    assert one["trained_per_second"] == ""
    assert float(other["trained_per_second"]) > 0
    assert one["commit"] == other["commit"]
    out.write_text("batches_per_second\n1\n")
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    assert "has other columns" in capsys.readouterr().err


@pytest.mark.parametrize("record", sorted(RECORDS.glob("input_*.csv")), ids=lambda path: path.stem)
def test_the_documentation_shows_the_records(
    record: Path, main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--table", str(record)])
    assert capsys.readouterr().out.strip() == table_of("docs/speed.md", record.stem)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--images 0", "--images must be >= 1"),
        ("--size 3 4 5", "--size must be one or two numbers"),
        ("--compare 1", "--compare must be >= 2"),
        ("--images 5 --classes 6", "--classes must be between 2 and the number of images"),
        ("--device cuda:99", "GPU 99 not found"),
        ("--table nowhere.csv", "cannot read nowhere.csv"),
        (f"--table {FOLDER / 'input.py'}", "is not a CSV file of this script"),
    ],
)
def test_mistakes(
    flags: str,
    message: str,
    main: Callable[[list[str]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", *flags.split()])
    assert message in capsys.readouterr().err
