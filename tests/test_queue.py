"""Queues: lines in order, what is finished is skipped, stopped by the time limit or an error."""

import itertools
from pathlib import Path

import pytest

from isda.experiments.cli import TIME_UP, main
from isda.experiments.errors import RunError
from isda.experiments.queue import read_queue
from isda.experiments.records import export, load_runs, summary
from isda.experiments.training import loop
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder

QUICK = "--epochs 2 --batch-size 128 --hold-out 1200 --device cpu"
QUEUE = f"""
# two recipes of three runs, then a comparison that needs one more
train digits-resnet8-ce {QUICK} --seeds 0 1

isda train digits-resnet8-isda {QUICK}  # with the name of the command
compare {QUICK} --seeds 0 1
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my queue").write_text(QUEUE)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Method and seed of the runs that are passed to the training loop."""
    passed: list[tuple[str, int]] = []

    def recorded(plans: list[Plan], options: loop.Options) -> list[RunFolder]:
        passed.extend((plan.recipe.method, plan.seed) for plan in plans)
        return train(plans, options)

    monkeypatch.setattr(loop, "train", recorded)
    return passed


def contents(folder: str) -> dict[str, list[object]]:
    return {
        f"{run.name}/{run.seed}": [
            {key: value for key, value in line.items() if not key.endswith(("seconds", "_second"))}
            for line in run.metrics()
        ]
        for run in load_runs(folder)
    }


def test_in_order_and_only_what_is_missing(
    trained: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["queue", "my queue"]) == 0
    assert trained == [("ce", 0), ("ce", 1), ("isda", 0), ("isda", 1)]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:11] for line in lines if line.endswith("finished")] == [
        "my queue:3:", "my queue:5:", "my queue:6:"
    ]  # fmt: skip
    assert lines[-2].endswith("3 of 4 runs finished")
    trained.clear()
    assert main(["queue", "my queue"]) == 0
    assert trained == []


def test_records_count_if_the_recipe_is_the_same(trained: list[tuple[str, int]]) -> None:
    words = ["train", "digits-resnet8-ce", *QUICK.split(), "--seeds", "1", "--out", "other"]
    assert main(words) == 0
    trained.clear()
    export(load_runs("other")[0], "records")
    assert main(["queue", "my queue", "--results", "records"]) == 0
    assert trained == [("ce", 0), ("isda", 0), ("isda", 1)]
    path = next(Path("records").rglob("config.json"))
    path.write_text(path.read_text().replace('"momentum": 0.9', '"momentum": 0.8'))
    assert main(["queue", "my queue", "--results", "records"]) == 0
    assert trained[3:] == [("ce", 1)]


def test_time_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped again and again, the end is that of a call without a limit."""
    assert main(["queue", "my queue", "--out", "whole"]) == 0
    assert main(["queue", "my queue", "--minutes", "1e-6"]) == TIME_UP
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("isda: time limit of 1e-06 min reached in my queue:3 (train digits-")
    assert error.endswith("continue with: isda queue 'my queue' --minutes 1e-6")
    asked = itertools.count(1)  # before the first and after every epoch
    monkeypatch.setattr(loop.Deadline, "is_up", lambda *_: next(asked) % 2 == 0)
    codes = [main(["queue", "my queue", "--minutes", "60"]) for _ in range(8)]
    assert {*codes} == {TIME_UP, 0}
    assert sorted(codes, reverse=True) == codes
    assert contents("runs") == contents("whole")


def test_an_error_does_not_stop_the_lines_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(plans: list[Plan], options: loop.Options) -> list[RunFolder]:
        if plans[0].recipe.method == "ce":
            raise RunError("the training loss is nan")
        return train(plans, options)

    monkeypatch.setattr(loop, "train", failing)
    assert main(["queue", "my queue"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("isda: ")]
    assert errors[0] == "isda: my queue:3: the training loss is nan"
    assert errors[-1] == "isda: 2 of 3 lines failed: my queue:3, my queue:6"
    assert [summary(run).finished for run in load_runs("runs")] == [True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tran digits-resnet8-ce", "unknown command of a queue 'tran'; did you mean train"),
        ("report", "unknown command of a queue 'report'"),
        ("train digits-resnet9-ce", "unknown recipe"),
        ("train --epochs 0", "epochs must be >= 1, got 0"),
        ("search --seeds 0 0", "seeds must be different"),
        ("table 2", "training needs a cell"),
        ("table 2 --cell cifar100/resnet23", "unknown cell of Table 2"),
        ("train 'digits", "No closing quotation"),
        ("train --help", "--help does not go into a queue"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_trained(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong").write_text(f"{QUEUE}{line}\n")
    assert main(["queue", "wrong"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"isda: wrong:7: {message}")
    assert not Path("runs").exists()


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", "nowhere"]) == 2
    assert capsys.readouterr().err == "isda: nowhere: No such file or directory\n"


def test_a_file_that_is_not_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong").write_bytes(b"train \xff\n")
    assert main(["queue", "wrong"]) == 2
    assert capsys.readouterr().err.startswith("isda: wrong must be text in UTF-8: ")


def test_a_file_with_a_byte_order_mark(capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong").write_bytes("\ufefftrain --epochs 0\n".encode())
    assert main(["queue", "wrong"]) == 2
    assert capsys.readouterr().err.startswith("isda: wrong:1: epochs must be >= 1")


def test_every_line_of_the_evidence() -> None:
    """The queue at the root of the repository can be read."""
    assert read_queue(Path(__file__).parents[1] / "evidence.queue")
