"""FSDP2: a sharded model trains like a single process, whichever group its head belongs to."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import close, results_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import isda

pytestmark = pytest.mark.ddp

C, A, WORLD = 5, 4, 2
WAYS = ["root", "own group", "own group, no bias", "resharded root"]


def make(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(A, C, bias=way != "own group, no bias")
    return nn.Sequential(nn.Linear(3, A), nn.Tanh(), head)


def train(model: nn.Module, rank: int | None) -> dict[str, Any]:
    criterion = isda.attach(model, lambda_0=2.0, ramp="constant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 3, generator=generator)
        target = torch.randint(C, (7,), generator=generator)
        if rank is not None:  # uneven batches
            x, target = x.split((4, 3))[rank], target.split((4, 3))[rank]
        loss = criterion(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "losses": torch.stack(losses),
        "weights": [p.detach() for p in weights],
        "state": criterion.state_dict(),
    }


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    record = {}
    for way in WAYS:
        model = make(way)
        if way.startswith("own group"):
            fully_shard(model[-1], mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True if "reshard" in way else None)
        record[way] = train(model, rank)
    torch.save(record, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[dict[str, Any]]:
    return results_of(work, WORLD, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("way", WAYS)
def test_sharded_model_equals_one_process(way, records):
    expected = train(make(way), None)
    ours = [record[way] for record in records]
    close(sum(each["losses"] for each in ours) / WORLD, expected["losses"])
    for each in ours:
        close(each["weights"], expected["weights"])
        close(each["state"], expected["state"])
