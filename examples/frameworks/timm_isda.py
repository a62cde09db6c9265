"""timm's training task with ISDA: two epochs on digits, with checkpoints as in ``train.py``."""

import tempfile

import timm
import torch
from digits import create_digits
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import resume_task_checkpoint
from timm.utils import CheckpointSaver
from torch.utils.data import DataLoader

from isda.integrations.timm import ISDATask

EPOCHS = 2


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    task = ISDATask(model, LabelSmoothingCrossEntropy(0.1), lambda_0=0.5)
    loader = DataLoader(create_digits(), batch_size=32, shuffle=True)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05)
    scheduler, num_epochs = create_scheduler_v2(optimizer, num_epochs=EPOCHS)
    task.total_steps = num_epochs * len(loader)

    with tempfile.TemporaryDirectory() as folder:
        saver = CheckpointSaver(model, optimizer, checkpoint_dir=folder, task=task)
        for epoch in range(num_epochs):
            losses = []
            for images, target in loader:
                result = task(images, target)
                optimizer.zero_grad()
                result["loss"].backward()
                optimizer.step()
                losses.append(result["loss"].item())
            scheduler.step(epoch + 1)
            loss = sum(losses) / len(losses)
            print(f"epoch {epoch + 1}: loss {loss:.3f}")
            saver.save_checkpoint(epoch, metric=-loss)
        resume_task_checkpoint(task, f"{folder}/last.pth.tar", optimizer)


if __name__ == "__main__":
    main()
