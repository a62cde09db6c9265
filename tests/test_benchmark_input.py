"""The benchmark of the input pipeline measures every pipeline and prints what it has stored."""

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "input.py"


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], None]:
    spec = importlib.util.spec_from_file_location("benchmark_input", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_every_pipeline(
    main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "input.csv"
    flags = "--images 24 --classes 3 --size 40 30 --image-size 32 --network resnet8 --batch-size 8"
    flags += " --side-by-side 1 2 --epochs 1 --workers 1 --device cpu"
    main([*flags.split(), "--out", str(out)])
    printed = capsys.readouterr().out
    rows = list(csv.DictReader(out.open()))
    kept = [("disk", "1"), ("disk", "2"), ("memory", "1"), ("memory", "2")]
    kept += [("device", "1"), ("device", "2")]
    expected = [("torchvision", "1"), ("off", "1"), *kept]
    assert [(row["pipeline"], row["side_by_side"]) for row in rows] == expected
    for row in rows:
        assert float(row["batches_per_second"]) > 0
        assert float(row["trained_per_second"]) > 0
        assert (row["kept_mebibytes"] != "") == (row["pipeline"] not in ("torchvision", "off"))
    main(["--table", str(out)])
    table = capsys.readouterr().out.strip()
    assert table == "\n".join(printed.strip().splitlines()[-10:])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--images 0", "--images must be >= 1"),
        ("--size 3 4 5", "--size must be one or two numbers"),
        ("--images 5 --classes 6", "--classes must be between 2 and the number of images"),
        ("--device cuda:99", "GPU 99 not found"),
        ("--table nowhere.csv", "cannot read nowhere.csv"),
        (f"--table {SCRIPT}", "is not a CSV file of this script"),
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
