"""timm: its task and training script, losses, checkpoints, and two ranks."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_ranks import A, C, on_two_ranks
from programs import PATIENCE
from ranks import close
from torch import nn


def create_task(**options: Any) -> Any:
    from timm.loss import LabelSmoothingCrossEntropy

    from isda.integrations.timm import ISDATask

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, A), nn.ReLU(), nn.Linear(A, C))
    task = ISDATask(model, LabelSmoothingCrossEntropy(0.1), verbose=False, lambda_0=2.0, **options)
    task.total_steps = 6
    return task


def run_task(task: Any, steps: range, part: slice = slice(None)) -> list[torch.Tensor]:
    module = task.get_trainable_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, generator=generator)
        target = torch.randint(C, (8,), generator=generator)
        loss = task(x[part], target[part])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.update_ema(step)
        losses.append(loss.detach())
    return losses


def test_timm_task_keeps_the_smoothing_and_resumes(tmp_path):
    pytest.importorskip("timm")
    from timm.task import (
        ClassificationTask,
        load_task_ema_checkpoint,
        resume_task_checkpoint,
    )
    from timm.utils import CheckpointSaver

    whole = create_task()
    assert whole.criterion.criterion.label_smoothing == 0.1
    expected = run_task(whole, range(6))
    half = create_task()
    half.setup_ema(decay=0.9)
    run_task(half, range(3))
    saver = CheckpointSaver(
        half.trainable_module,
        torch.optim.SGD(half.trainable_module.parameters(), lr=0.5),
        checkpoint_dir=str(tmp_path),
        task=half,
    )
    saver.save_checkpoint(0, metric=1.0)
    resumed = create_task()
    resume_task_checkpoint(resumed, str(tmp_path / "last.pth.tar"))
    resumed.setup_ema(decay=0.9)
    load_task_ema_checkpoint(resumed, str(tmp_path / "last.pth.tar"))
    close(run_task(resumed, range(3, 6)), expected[3:])
    close(resumed.get_task_state(), whole.get_task_state())
    assert resumed.total_steps == 6
    assert not resumed.get_task_state(ema=True)
    plain = ClassificationTask(create_task().trainable_module, nn.CrossEntropyLoss())
    CheckpointSaver(
        plain.trainable_module, saver.optimizer, checkpoint_dir=str(tmp_path), task=plain
    ).save_checkpoint(0, metric=1.0)
    with pytest.raises(ValueError, match="--initial-checkpoint"):
        resume_task_checkpoint(create_task(), str(tmp_path / "last.pth.tar"))


def test_timm_losses(caplog):
    timm_loss = pytest.importorskip("timm.loss")
    from isda.integrations.timm import ISDATask

    model, weight = nn.Linear(3, C), torch.rand(C)
    with caplog.at_level("INFO", logger="isda.integrations.timm"):
        task = ISDATask(model, nn.CrossEntropyLoss(), dtype=torch.float16, device="meta")
        assert "ISDATask: ISDALoss(" in caplog.text
        caplog.clear()
        assert (task.dtype, task.device) == (torch.float16, "meta")
        task = ISDATask(model, nn.CrossEntropyLoss(weight, label_smoothing=0.2), verbose=False)
        assert not caplog.text
    torch.testing.assert_close(task.criterion.criterion.weight, weight)
    assert task.criterion.criterion.label_smoothing == 0.2
    task = ISDATask(model, timm_loss.SoftTargetCrossEntropy(), verbose=False, ramp="constant")
    assert task(torch.randn(5, 3), torch.randn(5, C).softmax(1))["loss"].isfinite()
    with pytest.raises(ValueError, match="got BinaryCrossEntropy: train without --bce-loss"):
        ISDATask(model, timm_loss.BinaryCrossEntropy(), verbose=False)


TIMM_SCRIPT = os.environ.get("ISDA_TIMM_TRAIN")  # train.py of timm, which its package leaves out


@pytest.mark.skipif(not TIMM_SCRIPT, reason="ISDA_TIMM_TRAIN is not set")
def test_timm_training_script(tmp_path):
    """timm's own train.py with the changes of docs/frameworks.md: train, save, resume."""
    script = Path(str(TIMM_SCRIPT)).read_text()
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    removed = [line[1:] for line in diff if line.startswith("-")]
    added = [line[1:] for line in diff if line.startswith("+")]
    assert (len(removed), len(added)) == (1, 3)
    script = script.replace("import yaml\n", f"import yaml\n{added[0]}\n", 1)
    assert script.count(removed[0]) == 1
    script = script.replace(removed[0], added[1])
    anchor = "    start_epoch = 0\n"
    assert script.count(anchor) == 1
    script = script.replace(anchor, f"{added[2]}\n{anchor}")
    (tmp_path / "train.py").write_text(script)
    torchvision = pytest.importorskip("torchvision")
    for split, number in (("train", 8), ("val", 4)):
        for label in range(2):
            folder = tmp_path / "data" / split / str(label)
            folder.mkdir(parents=True)
            for i in range(number):
                image = torch.randint(128, (3, 32, 32), dtype=torch.uint8) + 100 * label
                torchvision.io.write_png(image, str(folder / f"{i}.png"))
    command = [sys.executable, "train.py", "--data-dir", "data", "--model", "test_resnet"]
    command += ["--num-classes", "2", "--input-size", "3", "32", "32", "-b", "4", "-vb", "4"]
    command += ["--device", "cpu", "--workers", "0", "--model-ema", "--smoothing", "0.1"]
    command += ["--no-prefetcher", "--output", "out", "--warmup-epochs", "0", "--sched", "step"]
    command += ["--cooldown-epochs", "0"]

    def run(*options: str) -> dict[str, Any]:
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        name = options[options.index("--experiment") + 1]
        file = tmp_path / "out" / name / "last.pth.tar"
        with torch.serialization.safe_globals([argparse.Namespace]):
            state: dict[str, Any] = torch.load(file, weights_only=True)["task_state"]
        return state

    first = run("--epochs", "1", "--experiment", "first")
    assert first["criterion.step"] == 4
    checkpoint = "out/first/last.pth.tar"
    second = run("--epochs", "3", "--experiment", "second", "--resume", checkpoint)
    assert second["criterion.step"] == 12  # and not 8
    assert second["criterion.estimator.count"].sum() == 48


@pytest.mark.ddp
def test_timm_task_on_two_ranks(tmp_path):
    pytest.importorskip("timm")
    whole = create_task()
    run_task(whole, range(4))
    weights = [p.detach() for p in whole.trainable_module.parameters()]
    for ours in on_two_ranks(_run_task_on_ranks, tmp_path):
        close(ours["weights"], weights)
        close(ours["state"], whole.get_task_state())


def _run_task_on_ranks(folder: Path) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    task = create_task()
    task.prepare_distributed()
    rank = torch.distributed.get_rank()
    run_task(task, range(4), slice(4 * rank, 4 * rank + 4))
    weights = [p.detach() for p in task.get_trainable_module().parameters()]
    return {"weights": weights, "state": task.get_task_state()}
