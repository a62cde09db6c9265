"""Commands that train: names, overrides, one's own images, existing runs, what is printed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import command_line
import pytest
from command_line import QUICK, image_folder, only_run

from isda.experiments.cli import main
from isda.experiments.commands import train
from isda.experiments.recipes import RECIPES
from isda.experiments.records import load_runs, summary

# fixtures
elsewhere, refused = command_line.elsewhere, command_line.refused


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
        "timm:test_resnet cannot train on the last batch, which has only 1 of 24 images: choose a "
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


@pytest.mark.parametrize("words", [["--out=~/a=b"], ["--out", "~/a=b"]])
def test_home_folder(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces ~ after an equals sign or in a queue."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train.plan(words).options.out == tmp_path / "a=b"


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
