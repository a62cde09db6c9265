"""The script for all GPU records: it covers every network, and its commands are valid."""

import csv
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import RECORDS, load, table_of

from isda.experiments.networks import NETWORKS

PAPER = {*NETWORKS} - {"resnet8"}
OUT = Path("records")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return load("gpu")


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_all_networks_are_compiled_the_deepest_first(gpu: ModuleType) -> None:
    found = gpu.commands_of("compile", OUT)
    names = [value(command, "--networks") for command in found]
    assert (len(names), {*names}) == (17, PAPER)
    assert names[0] == "densenet265"
    by_name = dict(zip(names, found, strict=True))
    assert value(by_name["resnet50"], "--set") == "batch_size=256"  # as in isda cost
    assert value(by_name["densenet_bc100_12"], "--set") == "batch_size=64"
    assert value(by_name["resnet32"], "--images") == "256"


def test_all_networks_are_measured(gpu: ModuleType) -> None:
    found = gpu.commands_of("cost", OUT)
    assert {word for command in found for word in command} >= PAPER
    assert [value(command, "--out") for command in found] == [
        "records/cost_cifar100.csv", "records/cost_imagenet.csv"
    ]  # fmt: skip
    assert all("--resume" in command for command in found)


def test_networks_of_some_data(gpu: ModuleType) -> None:
    assert gpu.commands_of("cost", OUT, ["imagenet"]) == gpu.commands_of("cost", OUT)[1:]
    names = [
        value(command, "--networks") for command in gpu.commands_of("compile", OUT, ["cifar100"])
    ]
    assert (len(names), names[0]) == (10, "densenet_bc190_40")


@pytest.mark.parametrize("step", ["kernels", "convolutions", "train", "input"])
def test_commands_are_valid(
    gpu: ModuleType,
    step: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parsers reject nothing but a wrong flag at the end."""
    python, script, *words = gpu.commands_of(step, OUT)[-1]
    assert python == sys.executable
    monkeypatch.syspath_prepend(str(Path(script).parent))
    with pytest.raises(SystemExit, match="2"):
        load(Path(script).stem).main([*words, "--wrong"])
    assert capsys.readouterr().err.strip().endswith("unrecognized arguments: --wrong")


def test_what_is_run(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(command: list[str]) -> int:
        ran.append(command)
        return int("records/train.csv" in command)

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--out", "records"])
    assert "needs a CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    gpu.main(["--out", "records", "--steps", "cost", "kernels", "--jobs", "3"])
    assert ran == gpu.commands_of("cost", OUT) + gpu.commands_of("kernels", OUT)
    with pytest.raises(SystemExit, match=r"failed: .*resnet32"):
        gpu.main(["--out", "records", "--steps", "train"])
    ran.clear()
    gpu.main(["--out", "records", "--steps", "train", "--dry-run"])
    assert capsys.readouterr().out.count("train.csv") == 3
    assert not ran


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_convolutions(tmp_path: Path) -> None:
    out = tmp_path / "convolutions.csv"
    load("convolutions").main(["--batch-size", "4", "--out", str(out)])
    rows = list(csv.DictReader(out.open()))
    assert [int(row["channels"]) for row in rows] == [16] * 3 + [32] * 3 + [64] * 3
    assert all(float(row["cudnn"]) > 0 and float(row["triton"]) > 0 for row in rows)


def test_convolutions_table_is_that_of_its_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load("convolutions").main(["--table", str(RECORDS / "convolutions_h200.csv")])
    assert capsys.readouterr().out.strip() == table_of("docs/speed.md", "convolutions_h200")


def test_convolutions_are_written_to_a_new_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not lost after the measurement."""
    script, out = load("convolutions"), tmp_path / "records" / "convolutions.csv"
    row = {"channels": 16, "size": 32, "result": "output", "cudnn": 20.25, "triton": 4.5}
    monkeypatch.setattr(script, "measure", lambda *_: [row])
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    script.main(["--out", str(out)])
    script.main(["--out", str(out)])  # replaces the file
    printed = capsys.readouterr().out
    script.main(["--table", str(out)])
    table = capsys.readouterr().out
    assert table.count("| 16 |") == 3
    assert printed == 2 * table
    with pytest.raises(SystemExit, match="2"):
        script.main(["--table", str(tmp_path / "nowhere.csv")])
    assert "cannot read" in capsys.readouterr().err
