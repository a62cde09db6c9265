"""Accelerate: gradient accumulation, resuming, and two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from framework_ranks import A, C, on_two_ranks
from ranks import close
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isda


def train_accelerate(folder: Path, *, batch_size: int, accumulation: int) -> dict[str, Any]:
    from accelerate import Accelerator

    def create() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, A), nn.ReLU(), nn.Linear(A, C))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(32, 3, generator=generator), torch.randint(C, (32,), generator=generator)
        )
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        parts = accelerator.prepare(model, optimizer, DataLoader(data, batch_size))
        criterion = isda.attach(parts[0], lambda_0=2.0, total_steps=2 * len(parts[2]))
        accelerator.register_for_checkpointing(criterion)
        return accelerator, criterion, *parts

    accelerator, criterion, model, optimizer, loader = create()
    for epoch in range(2):
        if epoch == 1:  # simulate a restart
            accelerator.save_state(str(folder / "state"))
            accelerator.wait_for_everyone()
            accelerator, criterion, model, optimizer, loader = create()
            accelerator.load_state(str(folder / "state"))
        for x, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(criterion(model(x), target))
                optimizer.step()
                optimizer.zero_grad()
    weights = [p.detach() for p in model.parameters()]
    return {"weights": weights, "state": criterion.state_dict()}


@pytest.mark.ddp
def test_accelerate_on_two_ranks(tmp_path):
    pytest.importorskip("accelerate")
    whole = train_accelerate(tmp_path / "whole", batch_size=8, accumulation=2)
    assert whole["state"]["criterion.step"] == 8
    for ours in on_two_ranks(_train_accelerate_on_ranks, tmp_path / "ranks"):
        close(ours["weights"], whole["weights"])
        close(ours["state"], whole["state"])


def _train_accelerate_on_ranks(folder: Path) -> dict[str, Any]:
    return train_accelerate(folder, batch_size=4, accumulation=2)
