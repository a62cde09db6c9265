"""Records of costs: table, CSV file, resume, errors, and the command."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from costs import Machine, main, measure, read, usual, write
from shown_tables import markdown_cells

from isda.experiments.cost_records import (
    CASES,
    cost_lines,
    cost_table,
    costs_markdown,
    measured_lines,
)
from isda.experiments.errors import InputError
from isda.experiments.published import COST
from isda.experiments.training import step_cost
from isda.experiments.training.environment import environment


def test_table() -> None:
    theory = [usual(name) for name in ("resnet50", "densenet121", "resnet32")]
    lines = cost_table(cost_lines(theory, {}, {})).splitlines()
    assert re.split(" {2,}", lines[2]) == ["resnet50", "25.6", "4.09", "2048", "0.25 %", "0.25 %"]
    assert re.split(" {2,}", lines[3]) == ["densenet121", "8.0", "2.83", "1024", "0.18 %", "0.20 %"]
    assert len(re.split(" {2,}", lines[4])) == 5  # the paper prints no cost
    assert lines[-1].startswith("densenet121: the paper prints a different number")

    measured = {"resnet50": measure(lambda: Machine(room=2))}
    lines = cost_table(cost_lines(theory[:2], measured, {})).splitlines()
    cells = re.split(" {2,}", lines[2])[6:]
    assert cells == ["1005.01", "+5.11 %", "does not fit", "7.6 %", "100", "1"]
    assert lines[3].split()[-1] == "%"  # not measured
    assert "batch size 4 (fp32)" in lines[-3]

    lines = cost_table(cost_lines([usual(name) for name in COST], {}, {})).splitlines()
    assert lines[-2].startswith("densenet121, densenet265: the paper prints a different number")
    sizes = "resnet101, resnet152: the paper prints a different number of parameters, 44.6, 60.3 M"
    assert lines[-1] == sizes


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cost.csv"
    theory = [usual(name) for name in ("resnet50", "resnet32")]
    measured = measure(lambda: Machine(room=2))
    write(path, theory, {})
    assert len(read(path)) == 2
    write(path, theory, {"resnet50": measured})
    rows = read(path)
    assert [(row["network"], row["case"]) for row in rows] == [
        *(("resnet50", case) for case in CASES),
        ("resnet32", ""),
    ]
    for row, expected in zip(rows, measured, strict=False):
        assert int(row["multiply_adds"]) == theory[0].multiply_adds
        assert float(row["theoretical_percent"]) == theory[0].theoretical_percent
        assert (row["paper_theoretical_percent"], row["paper_wall_percent"]) == ("0.25", "7.6")
        assert row["note"] == expected.note
        assert row["torch"] == torch.__version__
        for name in ("milliseconds", "added_percent", "mebibytes", "added_mebibytes"):
            value = getattr(expected, name)
            assert row[name] == ("" if value is None else str(value))
    assert rows[3]["paper_wall_percent"] == rows[3]["milliseconds"] == ""


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    write(path, [usual("resnet50")], {"resnet50": measure(Machine)})
    before = path.read_text()
    with pytest.raises(InputError, match=r"cost\.csv already exists: use --resume"):
        main(["--networks", "resnet8", "--out", str(path)])
    assert path.read_text() == before


@pytest.mark.parametrize("crash_at", ["fsync", "replace"])
def test_a_full_disk_keeps_the_measurements(
    crash_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "cost.csv"
    write(path, [usual("resnet50")], {"resnet50": measure(Machine)})
    before = path.read_text()
    monkeypatch.setattr(os, crash_at, full)
    with pytest.raises(InputError, match="No space left") as caught:
        write(path, [usual("resnet32")], {})
    assert "earlier files are intact" in str(caught.value)
    assert path.read_text() == before
    assert [one.name for one in tmp_path.iterdir()] == ["cost.csv"]


def test_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Existing measurements are kept, and missing ones are added."""
    device = torch.device("cpu")
    path = tmp_path / "cost.csv"
    theory = [usual(name) for name in ("resnet50", "resnet8")]
    write(path, theory, {"resnet50": measure(Machine)})
    old = path.read_text().replace(torch.__version__, "1.0")
    path.write_text(old)
    words = ["--batch-size", "4", "--steps", "1", "--repeats", "1", "--device", device.type]
    main(["--networks", "resnet8", "resnet50", *words, "--out", str(path), "--resume"])
    lines = path.read_text().splitlines()
    assert lines[:4] == old.splitlines()[:4]
    assert [row["network"] for row in read(path)[3:]] == ["resnet8"] * 3
    assert read(path)[3]["torch"] == torch.__version__
    for change in (["--batch-size", "3"], ["--num-classes", "7"], ["--image-size", "9"]):
        main(["--networks", "resnet8", *words, *change, "--out", str(path), "--resume"])
        assert [row["network"] for row in read(path)[-6:]] == ["resnet8"] * 6
        assert path.read_text().splitlines()[: len(lines)] == lines
        lines = path.read_text().splitlines()
    assert len(lines) == 1 + 3 * 5
    path.write_text(path.read_text().replace(environment(device)["device"], "another machine"))
    main(["--networks", "resnet8", *words, "--out", str(path), "--resume"])
    assert len(read(path)) == 3 * 6
    capsys.readouterr()
    main(["--networks", "resnet8", *words, "--out", str(path), "--resume"])  # nothing left to do
    assert len(read(path)) == 3 * 6
    assert capsys.readouterr().out == f"All of {path}:\n\n{costs_markdown([path])}\n"
    with pytest.raises(InputError, match="--resume needs --out"):
        main(["--networks", "resnet8", "--resume"])


def test_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per measured network; the last measurement counts."""
    paths = [tmp_path / "old.csv", tmp_path / "new.csv"]
    theory = [usual(name) for name in ("resnet50", "resnet32")]
    old = {name.network: measure(Machine, repeats=1) for name in theory}
    write(paths[0], theory, old)
    new = {"resnet50": measure(lambda: Machine(room=2))}
    write(paths[1], theory, new)
    main(["--table", *map(str, paths)])
    lines = markdown_cells(capsys.readouterr().out)
    assert [line[0] for line in lines[2:]] == ["resnet50", "resnet32"]
    shares = [f"{row.added_percent:+.2f} %" for row in (new["resnet50"][1], *old["resnet32"][1:])]
    assert lines[2][4:] == [shares[0], "does not fit", "7.6 %", "1", ""]
    assert lines[3][4:] == [*shares[1:], "", "1", "200"]
    with pytest.raises(InputError, match="missing cannot be read: No such file"):
        main(["--table", "missing"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "a,b\n1,2\n", "is not a CSV file of isda cost: it has no column network"),
        (lambda text: "", "is not a CSV file of isda cost: it has no column network"),
        (lambda text: text.replace("milliseconds", "ms"), "it has no column milliseconds"),
        (lambda text: text.replace("resnet8,", "resnet9,", 1), "must have ce, diagonal, full for"),
        (lambda text: text.replace(",fp32,", ",fp32,x"), r"has milliseconds 'x\d+.* resnet8, ce$"),
        (lambda text: re.sub(",fp32,.*", "", text, count=1), "has milliseconds '' for resnet8, ce"),
        (lambda text: text.replace("\r\n", ",1,2\r\n").replace(",1,2", "", 1), "more cells than"),
        (lambda text: text.encode() + b"\xff", "cannot be read: 'utf-8' codec"),
        (lambda text: text + '"' + "x" * 200_000, "cannot be read: field larger"),
    ],
)
def test_invalid_files(change: Callable[[str], str | bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    theory = [usual("resnet8")]
    write(path, theory, {"resnet8": measure(Machine)})
    changed = change(path.read_bytes().decode())
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    for words in (["--table", str(path)], ["--out", str(path), "--resume"]):
        with pytest.raises(InputError, match=message) as caught:
            main(words)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


def test_file_without_measurements(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    for theory in ([], [usual("resnet8")]):
        write(path, theory, {})
        with pytest.raises(InputError, match=r"cost\.csv has no measurements"):
            main(["--table", str(path)])
    path.unlink()
    with pytest.raises(InputError, match=r"cost\.csv cannot be read: No such file or directory$"):
        measured_lines(path)


def test_resume_keeps_unknown_columns(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    theory = [usual("resnet8")]
    write(path, theory, {"resnet8": measure(Machine)})
    lines = path.read_text().splitlines()
    more = [line + end for line, end in zip(lines, (",weather", *[",fair"] * 3), strict=True)]
    path.write_text("\n".join(more))
    words = ["--networks", "resnet8", "--batch-size", "4", "--device", "cpu"]
    main([*words, "--out", str(path), "--resume"])
    assert path.read_text().splitlines() == more


def test_table_in_the_docs_matches_the_records() -> None:
    root = Path(__file__).parents[3]
    records = [
        root / f"results/benchmarks/cost_{name}_h200.csv" for name in ("cifar100", "imagenet")
    ]
    page = (root / "docs" / "speed.md").read_text()
    table = page.split("<!-- table:cost_h200 -->\n")[1].split("\n<!-- /table -->")[0]
    assert table == costs_markdown(records)


def test_command(tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.csv"
    words = ["--networks", "resnet8", "--batch-size", "4", "--steps", "1", "--repeats", "1"]
    main([*words, "--device", device.type, "--out", str(path)])
    assert [row["case"] for row in read(path)] == list(CASES)
    assert float(read(path)[0]["milliseconds"]) > 0
    shown = capsys.readouterr().out
    assert shown.startswith("Measured on ")
    assert "resnet8 " in shown

    main(["--no-measure", "--networks", "resnet8", "resnet32", "--num-classes", "10"])
    shown = capsys.readouterr().out
    assert "resnet32 " in shown
    assert "CE ms" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--networks resnet8 resnet5", "unknown network 'resnet5'"),
        ("--networks resnet8 --device tpu", "device must be auto, cpu, cuda or cuda:N"),
        ("--networks resnet8 --batch-size 1", "batch_size must be >= 2, got 1"),
        ("--networks resnet8 --steps 0", "steps must be >= 1, got 0"),
        ("--networks resnet8 --repeats 0", "repeats must be >= 1, got 0"),
        ("--networks resnet8 --out .", "is a folder: give the path of a file"),
    ],
)
def test_errors_of_the_command(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def never(*_: object) -> None:
        raise AssertionError("measured before the mistake was found")

    monkeypatch.setattr(step_cost, "_take_turns", never)
    with pytest.raises(InputError, match=message):
        main(words.split())
