"""Commands that are wrong or stopped: one line that says why, an exit code, and no folders."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import command_line
import pytest
import torch
from command_line import QUICK, image_folder, only_run
from programs import PATIENCE

from isda.experiments import cli
from isda.experiments.cli import TIME_UP, main
from isda.experiments.commands.arguments import _one_line

# fixtures
elsewhere, refused = command_line.elsewhere, command_line.refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "unknown command 'tran'; did you mean train or gan or table?"),
        (["xyz"], "unknown command 'xyz'"),
        (["train", "cifar10-resnet23-isda"], "; did you mean cifar10-resnet32-isda"),
        (["compare", "digits"], "unknown recipe 'digits'"),
        (["train", "--network", "resnet9"], "unknown network 'resnet9'; did you mean resnet8"),
        (["train", "--network", "timm:resnet19"], "unknown timm model 'resnet19'; did"),
        (["train", "--data", "cifar11"], "unknown data set 'cifar11'; did you mean cifar10"),
        (["train", "--lambda-0", "-1"], "lambda_0 must be >= 0, got -1.0"),
        (["train", "--epochs", "0"], "epochs must be >= 1, got 0"),
        (["train", "--learning-rate", "nan"], "learning_rate must be > 0, got nan"),
        (["train", "--augment", "crop", "zoom"], "augment must be distinct names out of crop"),
        (["train", "--drop-rate", "1"], "drop_rate must be >= 0 and < 1, got 1.0"),
        (["train", "--hold-out", "5000"], "must be between 1 and 1437, got 5000"),
        (["train", "--seeds", "1", "2", "1"], "seeds must be different integers from 0 to"),
        (["train", "--seeds", "-1"], "seeds must be different integers from 0 to 2³² - 1, got -1"),
        (["train", "--seeds", "4294967296"], "seeds must be different"),
        (["train", "--seeds"], "seeds must be different integers from 0 to 2³² - 1, got none"),
        (["compare", "digits-resnet8-ce"], "method must be isda to compare it with ce, got 'ce'"),
        (["train", "cifar10-resnet32-isda"], "cifar10 not found: neither data/cifar10.npz nor"),
        (["train", "imagenet-resnet50-isda"], "imagenet needs --data-root"),
        (["train", "digits-resnet8-ce", "--method", "isda"], "lambda_0 must be > 0 to change"),
        (["train", "--data", "imagefolder:.", "--network", "timm:resnet18.no"], "cannot be built"),
        (["train", "--network", "timm:resnet18.no"], "timm:resnet18.no cannot be built: "),
        (["train", "--hold-out", "1430"], "hold_out must leave training images of every class"),
        (["train", "--device", "tpu"], "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["train", "--epochs", "1"], "epochs must be >= 2 for lambda_0 0.5 to have an effect"),
        (["compare", "--epochs", "1"], "the first epoch is cross entropy; use more epochs, or"),
        (["search", "--epochs", "1"], "epochs must be >= 2 for lambda_0 1 to have an effect"),
        (["train", "--minutes", "0"], "minutes must be > 0, got 0.0"),
        (["train", "--side-by-side", "-2"], "side_by_side must be >= 0, got -2"),
        (["compare", "--data", "imagefolder:nowhere"], "nowhere does not exist"),
        (  # before anything is downloaded
            ["compare", "--data", "imagefolder:nowhere", "--pretrained", "--download"],
            "nowhere does not exist",
        ),
        (["queue", "evidence.queue", "--no-resume"], "a queue always resumes its runs"),
        (["compare", "--data", "imagefolder:"], "imagefolder needs a path"),
    ],
)  # fmt: skip
def test_input_errors(arguments: list[str], message: str, refused: Callable[..., str]) -> None:
    assert message in refused(*arguments)


def test_missing_gpu(refused: Callable[..., str]) -> None:
    count = torch.cuda.device_count()
    name = f"cuda:{count}" if count else "cuda"
    message = refused("train", "--device", name)
    assert (
        message
        == f"GPU {count} not found, there are {count}: use --device cpu to run without a GPU"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--lambda", "1"],
            "unrecognized options: --lambda, 1; did you mean --lambda-0?",
        ),
        (
            ["train", "--channels", "1"],
            "unrecognized options: --channels, 1; did you mean --channels-last?",
        ),
        (  # not the flags in the help text of --cell
            ["table", "2", "--cel", "x"],
            "unrecognized options: --cel, x; did you mean --cell?",
        ),
        (
            ["train", "--epochs", "many"],
            "error parsing --epochs: invalid literal for int() with base 10: 'many'",
        ),
        (
            ["train", "--covariance", "ful"],
            "invalid choice 'ful' for argument '--covariance'. Expected one of ('full', "
            "'diagonal', 'shared', 'identity')",
        ),
        (["train", "--epochs"], "missing value for argument '--epochs'. Expected 1 values"),
        (["compare", "digits-resnet8-isda", "extra"], "unrecognized options: extra"),
        (["list", "--nothing"], "unrecognized options: --nothing"),
        (["report", "--nothing"], "unrecognized options: --nothing"),
        (["table", "two"], "error parsing INT: invalid literal for int() with base 10: 'two'"),
        (["cost", "--step", "1"], "unrecognized options: --step, 1; did you mean --steps?"),
    ],
)
def test_flags_that_do_not_exist(
    refused: Callable[..., str], arguments: list[str], message: str
) -> None:
    assert refused(*arguments) == message
    assert not Path("runs").exists()


def test_messages_in_boxes() -> None:
    """Messages as tyro prints them on a terminal with box-drawing characters."""
    box = """\
╭─ Unrecognized options ───────────────╮
│ Unrecognized options: --epocs, 3     │
│ ──────────────────────────────────── │
│ Perhaps you meant:                   │
│     --epochs INT                     │
│         Passes over the images.      │
│ ──────────────────────────────────── │
│ For full helptext, run isda --help   │
╰──────────────────────────────────────╯
"""
    assert _one_line(box) == "unrecognized options: --epocs, 3; did you mean --epochs?"


def test_broken_pipe() -> None:
    command = [sys.executable, "-m", "isda", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(PATIENCE) == 141  # the exit code of SIGPIPE in a shell
        assert process.stderr is not None
        assert not process.stderr.read()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_on_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "isda", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert done.stderr.startswith(b"isda: cannot print: ")


def test_folders_of_images(refused: Callable[..., str], tmp_path: Path) -> None:
    network = ("--network", "timm:test_resnet", "--image-size", "32", "--workers", "0")

    def compare(path: Path) -> str:
        return refused("compare", "--data", f"imagefolder:{path}", *network)

    (tmp_path / "empty").mkdir()
    assert "must have folders of two or more classes, got 0" in compare(tmp_path / "empty")
    single = image_folder(tmp_path / "single", classes=1)
    assert "must have folders of two or more classes, got 1" in compare(single)
    bad = image_folder(tmp_path / "bad")
    (bad / "class1" / "3.png").write_bytes(b"not an image")
    message = compare(bad)
    assert "1 of 30 images" in message
    assert "--skip-unreadable" in message
    assert str(bad / "class1" / "3.png") in message
    gap = image_folder(tmp_path / "gap")
    (gap / "class3").mkdir()
    assert "classes without images that PIL can read: class3" in compare(gap)
    file = tmp_path / "file.txt"
    file.write_text("")
    assert "file.txt is not a folder" in compare(file)


@pytest.mark.parametrize("command", ["train", "compare", "search"])
def test_time_limit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, *QUICK, "--device", "cpu", "--out", "my runs", "--minutes", "1e-5"]
    assert main(words) == TIME_UP == 75
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("isda: time limit of 1e-05 min reached, 0 of ")
    assert error.endswith(f"continue with: {shlex.join(['isda', *words, '--resume'])}")


def test_invalid_path(refused: Callable[..., str]) -> None:
    """All commands report it in the same way."""
    long = "a" * 300
    for command in (
        ["train", *QUICK, "--device", "cpu", "--out", long],
        ["report", "--runs", long],
    ):
        assert re.search("File name too long|does not exist", refused(*command))


def test_without_the_extra(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("isda.experiments.commands.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tyro", None)
    for command in ("train", "list"):
        message = refused(command)
        assert message.startswith("no module named tyro; install the extra: pip install -e")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", "[1, 2]\n", "line 1 is not the record of epoch 0"),
        ("metrics.jsonl", "{}\n", "line 1 is not the record of epoch 0"),
        ("metrics.jsonl", '{"epoch": 0, "test_error": "x"}\n', "line 1 is not the record"),
        ("config.json", "[]", "is not a run record"),
    ],
)
def test_invalid_records(
    capsys: pytest.CaptureFixture[str], file: str, text: str, message: str
) -> None:
    assert main(["train", *QUICK, "--device", "cpu"]) == 0
    (only_run().folder / file).write_text(text)
    capsys.readouterr()
    assert main(["report"]) == 0
    assert message in capsys.readouterr().out
    assert main(["train", *QUICK, "--device", "cpu", "--resume"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_report_to_missing_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["report", "--page", "nowhere/report.html"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("isda: cannot ")
    assert "nowhere" in printed
    assert main(["report", "--update", "nowhere.md"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "isda: cannot read nowhere.md: No such file or directory\n"
    assert printed.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "isda: interrupted; --resume continues from the last checkpoint"),
        (["gan", "train", "wgan"], "isda: interrupted; --resume continues"),
        (["queue", "my queue"], "isda: interrupted; repeat the command to continue"),
        (["gan", "measure", "gan"], "isda: interrupted\n"),
        (["neighbours", "run"], "isda: interrupted\n"),
    ],
)
def test_interrupted(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only commands with --resume say that it continues them."""

    def interrupted(command: str, words: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--device", "cpu", "--out"],
        ["search", "--device", "cpu", "--candidates", "0.5", "--out"],
        ["gan", "train", "cgan", "--data", "digits", "--device", "cpu", "--out"],
    ],
)
def test_a_file_in_place_of_the_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path of the file, and what to do, not the path of a lock in it."""
    (tmp_path / "file").touch()
    assert main([*words, str(tmp_path / "file")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"isda: {tmp_path / 'file'} is a file: give the path of a folder"
