"""The command line, run in this process: output, files and error messages."""

import contextlib
import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image
from programs import PATIENCE

from isda import __version__
from isda.experiments import commands
from isda.experiments.cli import TIME_UP, main
from isda.experiments.commands import train
from isda.experiments.commands.arguments import _one_line
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.published import PUBLISHED
from isda.experiments.recipes import DEFAULT, RECIPES
from isda.experiments.records import Run, load_runs, summary
from isda.experiments.settings import Recipe
from isda_command import COMMANDS, USAGE

QUICK = ["--epochs", "2", "--batch-size", "128", "--hold-out", "1200"]  # for the digits


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Error message of a command, which must be one line, with exit code 2 and no folders."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.endswith("\n")
        *others, error = printed.err.splitlines()
        assert all(" training images, " in line for line in others)  # what was found in a folder
        assert error.startswith("isda: ")
        assert "Traceback" not in printed.err
        assert not Path("runs").exists()
        return error.removeprefix("isda: ")

    return run


def image_folder(path: Path, *, classes: int = 3, images: int = 10) -> Path:
    """Image files in which every class has its own colour."""
    for number in range(classes):
        folder = path / f"class{number}"
        folder.mkdir(parents=True)
        for i in range(images):
            colour = torch.tensor([40 + 60 * number, 200 - 60 * number, 90])
            pixels = (colour + torch.randint(-40, 41, (40, 48, 3))).clamp(0, 255)
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{i}.png")
    return path


# Input errors


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
        (["train", "--data", "imagefolder:x", "--network", "timm:resnet18.no"], "cannot be built"),
        (["train", "--network", "timm:resnet18.no"], "timm:resnet18.no cannot be built: "),
        (["train", "--hold-out", "1430"], "hold_out must leave training images of every class"),
        (["train", "--device", "tpu"], "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["train", "--epochs", "1"], "epochs must be >= 2 for lambda_0 0.5 to have an effect"),
        (["compare", "--epochs", "1"], "the first epoch is cross entropy; use more epochs, or"),
        (["search", "--epochs", "1"], "epochs must be >= 2 for lambda_0 1 to have an effect"),
        (["train", "--minutes", "0"], "minutes must be > 0, got 0.0"),
        (["train", "--side-by-side", "-2"], "side_by_side must be >= 0, got -2"),
        (["compare", "--data", "imagefolder:nowhere"], "nowhere does not exist"),
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
    command = [sys.executable, "-m", "isda.experiments.cli", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(PATIENCE) == 141  # the exit code of SIGPIPE in a shell
        assert process.stderr is not None
        assert not process.stderr.read()


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
    assert "classes without images that PIL reads: class3" in compare(gap)
    file = tmp_path / "file.txt"
    file.write_text("")
    assert "file.txt is not a folder" in compare(file)


def test_an_unwritable_place(refused: Callable[..., str]) -> None:
    Path("taken").write_text("")
    assert "cannot write taken" in refused("train", *QUICK, "--device", "cpu", "--out", "taken")


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("isda.experiments.training.loop.train", interrupt)
    assert main(["train"]) == 130
    printed = capsys.readouterr().err
    assert printed == "isda: interrupted; --resume continues from the last checkpoint\n"


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


@pytest.fixture(scope="module")
def printed() -> subprocess.CompletedProcess[str]:
    """What the commands that only print write to an ASCII terminal, and the modules they import."""
    code = """
import sys
from isda.experiments.cli import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0
print(*sys.modules, file=sys.stderr)
"""
    costs = "cost --table results/benchmarks/cost_cifar100_h200.csv"
    return subprocess.run(
        [sys.executable, "-c", code, "list", "report", "table 2", costs],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_printing_does_not_import_the_training_code(
    printed: subprocess.CompletedProcess[str],
) -> None:
    assert "cifar100-resnet32-isda" in printed.stdout
    loaded = set(printed.stderr.split())
    assert "isda.experiments.cli" in loaded
    slow = {"torchvision", "timm", "sklearn", "matplotlib", "jinja2"}
    own = {f"isda.experiments.{name}" for name in ("training", "networks", "losses", "data")}
    assert loaded & (slow | own) == set()


def test_ascii_terminal(printed: subprocess.CompletedProcess[str]) -> None:
    row = r"^cifar100-resnet32-isda +30.27 \? 0.34 +\S"
    assert re.search(row, printed.stdout, re.MULTILINE)


# Help


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for command in ("train", "compare", "list"):
        assert re.search(rf"^  {command} +\w", printed, flags=re.MULTILINE)
    for line in printed.splitlines():
        words = line.split()
        if words[:1] == ["isda"] and len(words) > 2 and not words[2].startswith("-"):
            assert words[2] in RECIPES  # the recipe in the examples exists


def test_help_fits_80_columns_and_shows_no_internal_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        with contextlib.suppress(SystemExit):
            assert main([command, "--help"]) == 0
        printed = capsys.readouterr().out
        assert f"usage: isda {command}" in printed
        assert max(map(len, printed.splitlines())) <= 80
        assert "--started-at" not in printed
    assert max(map(len, USAGE.splitlines())) <= 80
    assert DEFAULT in USAGE
    files = Path(commands.__file__).parent.glob("*.py")
    found = {file.stem for file in files if "\ndef run(" in file.read_text(encoding="utf-8")}
    assert found | {"gan", "invert", "neighbours"} == COMMANDS.keys()


def test_help_answers_before_torch_is_imported() -> None:
    code = "import sys, isda_command; isda_command.main(['--help']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == f"{USAGE}\nFalse\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torch-isda {__version__}\n"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    flags = set(re.findall(r"--[a-z0-9-]+", printed))
    fields = {f"--{name.replace('_', '-')}" for name in Recipe.__dataclass_fields__}
    assert fields <= flags
    assert {"--seeds", "--out", "--resume", "--device", "--data-root", "--download"} <= flags


def test_help_of_a_recipe_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "cifar100-wide_resnet28_10-isda", "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "isda train cifar100-wide_resnet28_10-isda" in printed
    assert "(default: 240)" in printed  # epochs
    assert "(default: 60 120 160 200)" in printed  # milestones


def test_list_shows_every_recipe_with_the_papers_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "-" in line}
    assert lines.keys() == RECIPES.keys()
    for name in RECIPES:
        assert (str(PUBLISHED[name]) if name in PUBLISHED else "–") in lines[name]
    assert sum(name in PUBLISHED for name in RECIPES) >= 70


# Training


def only_run(out: Path = Path("runs")) -> Run:
    (run,) = load_runs(out)
    return run


def test_images_that_do_not_fit(refused: Callable[..., str], tmp_path: Path) -> None:
    """Errors come before a folder is created."""
    photos = image_folder(tmp_path / "photos")
    flags = (
        "--data",
        f"imagefolder:{photos}",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--workers",
        "0",
    )
    message = refused(
        "train", *flags, "--network", "timm:vit_tiny_patch16_224", "--image-size", "32"
    )
    assert message.startswith("timm:vit_tiny_patch16_224 does not accept 32 x 32 images: ")
    message = refused(  # 24 images: 23 and 1
        "train", *flags, "--network", "timm:test_resnet", "--image-size", "32", "--batch-size", "23"
    )
    assert message.startswith(
        "timm:test_resnet cannot train on the last batch, a single image of 24: choose a "
        "batch_size other than 23: "
    )
    message = refused("train", *flags, "--network", "timm:efficientvit_m0")
    assert message.startswith("timm:efficientvit_m0 must end in a linear layer: ISDA needs")
    message = refused("train", *flags, "--network", "resnet8", "--augment", "cutout")
    assert message.startswith(f"augment must be empty for imagefolder:{photos}")
    assert message.endswith("got cutout")


def test_head_that_is_a_convolution(tmp_path: Path) -> None:
    photos = image_folder(tmp_path / "photos", images=5)
    command = ["train", "--data", f"imagefolder:{photos}", "--network", "timm:dla46_c"]
    command += ["--image-size", "64", "--epochs", "2", "--device", "cpu", "--workers", "0"]
    assert main(command) == 0
    assert summary(only_run()).finished


def test_existing_run_of_a_later_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """The run of an earlier seed is not started, either."""
    command = ["train", *QUICK, "--device", "cpu"]
    assert main([*command, "--seeds", "1"]) == 0
    assert main([*command, "--seeds", "0", "1"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert [run.seed for run in load_runs("runs")] == [1]


def test_resume_on_other_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    photos = image_folder(tmp_path / "photos", classes=2)
    command = ["train", "--data", f"imagefolder:{photos}", "--network", "timm:test_resnet"]
    command += ["--image-size", "32", "--epochs", "2", "--batch-size", "8", "--device", "cpu"]
    command += ["--workers", "0"]
    assert main(command) == 0
    image_folder(tmp_path / "more", classes=3)
    (tmp_path / "more" / "class2").rename(photos / "class2")
    capsys.readouterr()
    assert main([*command, "--resume"]) == 2
    printed = capsys.readouterr().err
    assert "/0: imagefolder:" in printed  # which run
    assert "but the checkpoint was made with [16, 4, 2]: restore the images" in printed
    assert "Traceback" not in printed


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


def test_overrides_reach_the_recipe_and_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lambda-0", "0.25", "--augment", "crop", "flip", "--schedule", "step"]
    flags += ["--milestones", "1", "2", "--seeds", "7", "--device", "cpu"]
    assert main(["train", *QUICK, *flags]) == 0
    run = only_run()
    assert run.recipe == replace(
        RECIPES["digits-resnet8-isda"], epochs=2, batch_size=128, hold_out=1200, lambda_0=0.25,
        augment=("crop", "flip"), schedule="step", milestones=(1, 2),
    )  # fmt: skip
    assert run.seed == 7
    assert run.name.startswith("digits-resnet8-isda+")
    changes = "augment=crop_flip epochs=2 batch_size=128 schedule=step milestones=1_2 lambda_0=0.25"
    assert set(run.name.split("+")[1:]) == {*changes.split(), "hold_out=1200"}
    error = summary(run).error
    printed = capsys.readouterr().out
    assert printed.startswith(f"{run.folder}: validation error {error:.2f} %, ")

    # the same command does not overwrite it, and with --resume has nothing to do
    assert main(["train", *QUICK, *flags]) == 2
    assert "already holds a run: use --resume" in capsys.readouterr().err
    before = (run.folder / "metrics.jsonl").read_bytes()
    assert main(["train", *QUICK, *flags, "--resume"]) == 0
    assert capsys.readouterr().out == printed
    assert (run.folder / "metrics.jsonl").read_bytes() == before


def test_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of runs, without training them; all are valid folder names."""
    planned = []
    monkeypatch.setattr(
        "isda.experiments.training.loop.train", lambda plans, options: planned.append(plans) or []
    )

    def names(*arguments: str) -> list[str]:
        assert main(list(arguments)) == 0, capsys.readouterr().err
        return [f"{plan.name}/{plan.seed}" for plan in planned[-1]]

    assert names("train") == ["digits-resnet8-isda/0"]
    assert names("train", "--seeds", "3", "1") == ["digits-resnet8-isda/3", "digits-resnet8-isda/1"]
    assert names("train", "cifar10-resnet32-ce") == ["cifar10-resnet32-ce/0"]
    assert names("train", "cifar100-resnet110-isda", "--lambda-0", "0.25") == [
        "cifar100-resnet110-isda+lambda_0=0.25/0"
    ]
    sides = ("digits-resnet8-ce", "digits-resnet8-isda")
    assert names("compare") == [f"{side}/{seed}" for seed in range(3) for side in sides]
    assert names("compare", "--seeds", "5", "--ema", "0.9") == [
        f"{side}+ema=0.9/5" for side in sides
    ]
    own = ("--data", "imagefolder:/photos/my birds", "--network", "timm:resnet18")
    assert names("train", *own) == ["my_birds-timm_resnet18-isda/0"]
    assert planned[-1][0].recipe.data == "imagefolder:/photos/my birds"
    names("train", "--data", "imagefolder:./photos//birds/", "--network", "timm:resnet18")
    assert planned[-1][0].recipe.data == "imagefolder:photos/birds"
    assert names("train", *own, "--lambda-0", "1") == ["my_birds-timm_resnet18-isda+lambda_0=1.0/0"]
    assert names("train", "--network", "resnet32") == ["digits-resnet32-isda/0"]
    assert names("train", "--method", "ce") == ["digits-resnet8-ce/0"]
    assert names("train", "--method=disturb_label") == ["digits-resnet8-disturb_label/0"]
    assert planned[-1][0].recipe.noise_rate == 0.05
    assert names("train", "cifar10-resnet32-isda", "--method", "focal") == [
        "cifar10-resnet32-isda+method=focal+lambda_0=0.0/0"
    ]
    assert names("train", "cifar10-resnet32-isda", "--data", "digits") == [
        "cifar10-resnet32-isda+data=digits/0"
    ]
    assert names("train", "cifar10-resnet110-dropout_isda", "--epochs", "3") == [
        "cifar10-resnet110-dropout_isda+epochs=3/0"
    ]
    assert names("compare", "cifar10-wide_resnet28_10-identity_isda", "--seeds", "0") == [
        f"cifar10-wide_resnet28_10-{method}/0" for method in ("ce", "identity_isda")
    ]
    # a folder with the name of a data set of the paper
    (name,) = names("train", "--data", "imagefolder:/data/imagenet", "--network", "resnet50")
    assert name.startswith("imagenet-resnet50-isda+data=imagefolder_data_imagenet+")
    assert name.endswith("/0")
    assert name.count("/") == 1


def table_of(printed: str) -> list[list[str]]:
    """Cells of the text table, without the rule."""
    rows = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    return [row for row in rows if len(row) > 1]


def cells_of(page: str) -> list[list[str]]:
    """Rows of all tables of the page."""
    rows = re.findall(r"<tr.*?>(.*?)</tr>", page, flags=re.DOTALL)
    return [
        [
            html.unescape(re.sub(r"<.*?>", "", cell)).strip()
            for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, flags=re.DOTALL)
        ]
        for row in rows
    ]


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
    found = cells_of(text)
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
    rows = [row for row in cells_of(page) if row[0] == "digits-resnet8-isda"]
    assert len(rows) == 1
    assert rows[0][3].replace("−", "-") == (
        f"{np.mean(errors[1]) - np.mean(errors[0]):+z.2f} "
        f"({interval.low:+z.2f} to {interval.high:+z.2f})"
    )
    spreads = (f"{np.mean(side):.2f} ± {np.std(side, ddof=1):.2f}" for side in errors)
    assert rows[0][5] == " → ".join(spreads)
    assert rows[0][6] == " → ".join(f"{np.mean(side):.3f}" for side in raw["test_loss"])
    assert rows[0][7] == " → ".join(f"{100 * np.mean(side):.2f}" for side in raw["test_ece"])
    assert all(cell in printed for cell in rows[0])


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        (["--network", "timm:botnet26t_256"], 256),
        (["--network=timm:cait_s24_384"], 384),
        (["--network", "timm:botnet26t_256", "--image-size", "224"], 224),
        (["--network", "resnet50"], 224),
        ([], 224),
    ],
)
def test_images_have_the_size_of_the_timm_model(flags: list[str], size: int) -> None:
    recipes = train.plan(["--data", "imagefolder:photos", *flags]).recipes
    ((name, recipe),) = recipes.items()
    assert recipe.image_size == size
    assert ("image_size" in name) == ("--image-size" in flags)


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


def test_a_bad_batch_is_one_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed training prints one line after its progress bar, and no traceback."""
    assert main(["train", *QUICK, "--learning-rate", "1e12", "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    last = printed.err.rstrip("\n").splitlines()[-1]
    assert last.startswith("isda: runs/digits-resnet8-isda+")
    assert "learning rate 1e+12" in last


def test_warnings_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", *QUICK, "--device", "cpu"]) == 0
    path = only_run().folder / "checkpoint.pt"
    path.with_name("checkpoint.previous.pt").write_bytes(path.read_bytes())
    path.write_bytes(b"damaged")
    capsys.readouterr()
    assert main(["train", *QUICK, "--device", "cpu", "--resume"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"isda: {path} is damaged")
