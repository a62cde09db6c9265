"""Accelerate: two epochs on digits. For several ranks, use ``accelerate launch``."""

import tempfile

import torch
from accelerate import Accelerator
from digits import create_digits
from torch import nn
from torch.utils.data import DataLoader

EPOCHS = 2


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(create_digits(), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        losses = []
        for images, target in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(images), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        accelerator.print(f"epoch {epoch + 1}: loss {mean.item():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
