"""Queues: lines in order, what is finished is skipped, stopped by the time limit or an error."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from command_line import contents

from isda.experiments.cli import TIME_UP, main
from isda.experiments.commands import queue
from isda.experiments.commands.queue_forecast import Speeds, state_size
from isda.experiments.commands.queue_lines import read_queue
from isda.experiments.errors import RunError
from isda.experiments.generators.synthetic_images import require_generators
from isda.experiments.recipes import get_recipe
from isda.experiments.records import export, load_runs, summary
from isda.experiments.settings import Options
from isda.experiments.training import images, loop
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.side_by_side import SideBySide

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
    assert error.startswith("isda: my queue:3 (train digits-")
    assert "): time limit of 1e-06 min reached, 0 of " in error
    assert error.endswith("continue with: isda queue 'my queue' --minutes 1e-6")
    asked = itertools.count(1)  # before the first and after every epoch
    monkeypatch.setattr(loop.Deadline, "is_up", lambda *_: next(asked) % 2 == 0)
    codes = [main(["queue", "my queue", "--minutes", "60"]) for _ in range(8)]
    assert {*codes} == {TIME_UP, 0}
    assert sorted(codes, reverse=True) == codes
    assert contents("runs") == contents("whole")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RunError("the training loss is nan"), "the training loss is nan"),
        (KeyError("an error in a network"), "KeyError: 'an error in a network'"),
    ],
)
def test_an_error_does_not_stop_the_lines_below(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(plans: list[Plan], options: loop.Options) -> list[RunFolder]:
        if plans[0].recipe.method == "ce":
            raise error
        return train(plans, options)

    monkeypatch.setattr(loop, "train", failing)
    assert main(["queue", "my queue"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("isda: ")]
    assert errors[0] == f"isda: my queue:3: {message}"
    assert errors[-1] == "isda: 2 of 3 lines failed: my queue:3, my queue:6"
    assert [summary(run).finished for run in load_runs("runs")] == [True]


def test_all_lines_share_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun: in a second group, ranks may read the addresses of the first and hang."""
    events: list[str] = []

    @contextlib.contextmanager
    def join(device: str) -> Iterator[tuple[str, int, int]]:
        events.append("join")
        yield device, 0, 2
        events.append("leave")

    monkeypatch.setattr(queue, "join_processes", join)
    monkeypatch.setattr(loop, "train", lambda plans, _: events.append("train") or [])
    assert main(["queue", "my queue"]) == 0
    assert events == ["join", "train", "train", "train", "leave"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tran digits-resnet8-ce", "unknown command of a queue 'tran'; did you mean train"),
        ("report", "unknown command of a queue 'report'"),
        ("train digits-resnet9-ce", "unknown recipe"),
        ("train --epochs 0", "epochs must be >= 1, got 0"),
        ("search --seeds 0 0", "seeds must be different"),
        ("search --final-seeds 0 0", "final_seeds must be different"),
        ("search --candidates 1 1", "candidates must be different"),
        ("search digits-resnet8-ce", "method must be isda to search for its lambda_0, got 'ce'"),
        ("compare --lambda-0 auto --candidates 1 1", "candidates must be different"),
        ("table 2", "training needs a cell"),
        ("table 2 --cell cifar100/resnet23", "unknown cell of Table 2"),
        ("train 'digits", "No closing quotation"),
        ("train --help", "--help cannot be used in a queue"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_trained(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong").write_text(f"{QUEUE}{line}\n")
    assert main(["queue", "wrong"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"isda: wrong:7: {message}")
    assert not Path("runs").exists()


def test_a_file_without_commands(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").write_text("# nothing yet\n\n")
    assert main(["queue", "empty"]) == 2
    assert capsys.readouterr().err == "isda: empty must have at least one command, found none\n"


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
    """The queue at the root of the repository can be read, and needs no trained generators."""
    lines = read_queue(Path(__file__).parents[3] / "evidence.queue", Options())
    plans = [line.task.plans() for line in lines]
    assert all(plans)
    require_generators((plan.recipe for line in plans for plan in line), Options())


def test_a_search_that_the_records_have_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has the records, but not the folder of the runs."""
    epochs: list[int] = []
    epoch = SideBySide.train_epoch
    monkeypatch.setattr(SideBySide, "train_epoch", lambda one: (epochs.append(1), epoch(one)))
    quick = QUICK.replace("--hold-out 1200", "--candidates 0.5 1")
    Path("choice").write_text(
        f"search {quick} --final-seeds 1\ncompare {quick} --seeds 0 --lambda-0 auto\n"
    )
    assert main(["queue", "choice", "--out", "first"]) == 0
    assert len(epochs) == 2 * (2 + 1 + 2 + 2)  # the second line needs seed 1 of both candidates
    for run in load_runs("first"):
        export(run, "records")
    epochs.clear()
    assert main(["queue", "choice", "--results", "records"]) == 0
    assert epochs == []
    first, again = (
        {path.name: path.read_bytes() for path in Path(folder).glob("*.json")}
        for folder in ("first", "runs")
    )
    assert len(first) == 2
    assert again == first


def test_lines_load_their_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = images.load_data

    def counting(spec: str, **options: Any) -> Any:
        loaded.append(spec)
        return load(spec, **options)

    monkeypatch.setattr(images, "load_data", counting)
    Path("my queue").write_text(f"{QUEUE}calibrate {QUICK} --methods ce --seeds 0 1\n")
    assert main(["queue", "my queue"]) == 0
    assert loaded == ["digits"]


def test_dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [
        f"train digits-resnet8-ce {QUICK} --seeds 0 1",
        "table 2 --cell cifar100/resnet110 --seeds 0",
        "table 2 --cell cifar100/resnet110 --seeds 0 1",
        f"search {QUICK} --candidates 0.5 1 --final-seeds 0 1",
        f"compare {QUICK} --lambda-0 auto --candidates 0.5 1 --seeds 0",
        "table 4 --cell cifar100/resnet110/cgan --seeds 0",
        "train cifar100-se_resnet110-ce",
        "train cifar100-resnet110-isda --out elsewhere",
        f"train cifar100-resnet110-isda --out {Path('elsewhere').resolve()}",
    ]
    Path("my queue").write_text("\n".join(lines))
    Path("results/benchmarks").mkdir(parents=True)
    Path("results/benchmarks/train.csv").write_text(
        "data,network,precision,images_per_second,device\n"
        "cifar100,resnet110,bf16,10000,slow\ncifar100,resnet110,bf16,25000,H200\n"
    )
    assert main(["train", *lines[0].split()[1:], "--out", "other"]) == 0
    export(load_runs("other")[0], "results")
    capsys.readouterr()
    assert main(["queue", "my queue", "--dry-run", "--minutes", "20"]) == 0
    text = capsys.readouterr().out
    rows = {row.split(":")[0]: row for row in text.splitlines()[2:11]}
    # 160 epochs of 50,000 images at the best speed; a run of an earlier line is counted once
    for number, left in {
        1: ["1", "of", "2", "2"],
        2: ["2", "of", "2", "320", "10.7"],
        3: ["2", "of", "4", "320", "10.7"],
        4: ["4", "of", "4", "8"],
        5: ["3", "of", "6", "6"],  # the search has three of them
        6: ["1", "of", "2", "160", "6.4"],  # every sixth image is synthetic
        7: ["1", "of", "1", "200", "?"],
        8: ["1", "of", "1", "160", "5.3"],  # line 2 has this run in another folder
        9: ["0", "of", "1", "0"],  # the folder of line 8
    }.items():
        words = rows[str(number)].split()
        place = words.index("of") - 1
        assert words[place : place + len(left)] == left, rows[str(number)]
    forecast = text.partition("my queue:6")[0]
    assert max(map(len, forecast.splitlines())) <= 80
    words = " ".join(forecast.split())
    assert "on slow, H200, " in words
    assert "20 minutes are enough for lines 1, 2; line 3 begins and is continued" in words
    assert "my queue:6 will fail: there is no generator in generators/cifar100-cgan/0" in text
    assert not Path("runs").exists()


def test_dry_run_of_a_line_whose_images_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """How many are held out depends on the images; the other lines are still counted."""
    line = "calibrate --data imagefolder:birds --network resnet8\n"
    Path("birds queue").write_text(f"{line}train digits-resnet8-ce {QUICK}\n")
    assert main(["queue", "birds queue", "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "all lines 1 2 ? " in text
    assert "birds queue:1 will fail: birds does not exist" in text


def test_dry_run_without_earlier_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", "my queue", "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "all lines 4 8 ? " in text
    assert "earlier runs, of which there are none, without start-up" in text


def test_speeds_of_own_runs_take_precedence() -> None:
    assert main(["train", "digits-resnet8-ce", *QUICK.split()]) == 0
    (run,) = load_runs("runs")
    Path("results/benchmarks").mkdir(parents=True)
    Path("results/benchmarks/train.csv").write_text(
        "data,network,precision,images_per_second,device\ndigits,resnet8,fp32,1e9,fast\n,,,,\n"
    )
    Path("results/benchmarks/train_other.csv").write_text("a,b\n1,2\n")  # another table
    whole = get_recipe("digits-resnet8-ce")
    assert Speeds([Path("results")]).seconds_per_epoch(whole) == pytest.approx(1437 / 1e9)
    speeds = [line["images_per_second"] for line in run.metrics()]
    both = Speeds([Path("results"), Path("runs"), Path("nowhere")])
    assert list(both.devices) == ["fast", run.environments[0]["device"]]
    left = 1437 - run.recipe.hold_out
    assert both.seconds_per_epoch(run.recipe) == pytest.approx(left / median(speeds))
    assert both.seconds_per_epoch(get_recipe("cifar10-resnet32-ce")) is None


@pytest.mark.parametrize("name", ["digits-resnet8-ce", "digits-resnet8-isda"])
def test_size_of_a_checkpoint(name: str) -> None:
    assert main(["train", name, *QUICK.split()]) == 0
    written = next(Path("runs").rglob("checkpoint.pt")).stat().st_size
    estimated = state_size(get_recipe(name))
    assert estimated is not None
    assert 0.9 < estimated / written < 1
