"""FSDP2: two epochs on digits. Two ranks: ``torchrun --nproc-per-node 2``."""

import os

import torch
import torch.distributed as dist
from digits import create_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 2


def main() -> None:
    if "RANK" not in os.environ:  # a world of one rank
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model[-1], mesh=mesh)  # the final layer may have a group of its own
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = create_digits()
    sampler: DistributedSampler[int] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # another order
        losses = []
        for images, target in loader:
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
