"""The losses of Table 4 in training: state, attached, compiled, captured, on several ranks."""

import doctest
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from baseline_losses import (
    CRITERIA,
    PROGRESS,
    C,
    N,
    call,
    center,
    close,
    criteria,
    inputs,
    make_model,
)
from forks import START_METHOD
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import isda
from isda.experiments.losses import baselines
from isda.experiments.losses.baselines import FocalLoss, focal_loss


@pytest.mark.parametrize("name", ["disturb_label", "center"])
def test_state_round_trip(name, device):
    """A checkpoint in the middle: the rest of the training is the same, bit for bit."""
    x = inputs(device, samples=33)

    def train(criterion: nn.Module, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(float(call(criterion, x).detach()))
        return losses

    whole = train(CRITERIA[name]().to(device), 5)
    first, file = CRITERIA[name]().to(device), io.BytesIO()
    train(first, 3)
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = CRITERIA[name]()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    tolerance = 0 if device.type == "cpu" else 1e-6  # a GPU adds in any order
    assert train(resumed.to(device), 2) == pytest.approx(whole[3:], rel=tolerance, abs=0)


def test_losses_without_state():
    for name in ("ce", "focal", "lq", "large_margin"):
        assert not CRITERIA[name]().state_dict()
    assert list(CRITERIA["disturb_label"]().state_dict()) == ["step"]


@criteria
def test_attached_to_a_model(name, device):
    model, criterion = make_model().to(device), CRITERIA[name]().to(device)
    x, target = torch.randn(N, 4, device=device), torch.arange(N, device=device)
    features = model[:2](x)
    other = CRITERIA[name]().to(device)
    expected = other(features, model[2].weight, target, bias=model[2].bias, progress=PROGRESS)
    expected_grad = torch.autograd.grad(expected, model.parameters())
    attached = isda.attach(model, criterion)
    loss = attached(model(x), target, progress=PROGRESS)
    close(loss, expected, tolerance=1e-6)
    close(torch.autograd.grad(loss, model.parameters()), expected_grad, tolerance=1e-6)
    model.eval()
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = attached(model(x), target)
    close(loss, F.cross_entropy(model(x), target), tolerance=1e-6)


@pytest.mark.parametrize("criterion", [FocalLoss(alpha=1.0, gamma=0.0), center(0.0)])
def test_attached_to_a_model_with_ignored_labels(criterion, device):
    """In their limits the losses equal torch's cross entropy, also with ignored labels."""
    model, x = make_model().to(device), torch.randn(8, 4, device=device)
    target = torch.tensor([3, -100, -100, 1, 0, -100, 2, -100], device=device)
    attached = isda.attach(model, criterion.to(device))
    expected = F.cross_entropy(model(x), target)
    gradients = torch.autograd.grad(expected, model.parameters())
    loss = attached(model(x), target)
    close(loss, expected, tolerance=1e-6)
    close(torch.autograd.grad(loss, model.parameters()), gradients, tolerance=1e-6)


def test_code_of_the_page_runs():
    page = Path(__file__).parents[3] / "docs" / "baselines.md"
    model = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 100))
    names: dict[str, Any] = {"torch": torch, "model": model}
    names |= {"x": torch.randn(N, 4), "y": torch.arange(N)}
    parts = re.findall("```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(parts) == 1
    exec(parts[0], names)
    close(
        names["loss"].detach(),
        focal_loss(model(names["x"]), names["y"], alpha=0.5, gamma=1.0).mean().detach(),
        tolerance=1e-6,
    )


def test_docstrings_run():
    result = doctest.testmod(baselines, extraglobs={"isda": isda})
    assert result.attempted > 0
    assert result.failed == 0


@criteria
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_compiled(name, backend, device):
    """The second backend recomputes cheap operations in the backward pass, like inductor."""
    torch._dynamo.reset()
    criterion, eager = CRITERIA[name]().to(device), CRITERIA[name]().to(device)
    x = inputs(device, dtype=torch.float32)
    progress = torch.tensor(PROGRESS, device=device)
    step = torch.compile(
        lambda x: call(criterion, x, progress=progress), fullgraph=True, backend=backend
    )
    for _ in range(2):
        results = []
        for loss in (step(x), call(eager, x, progress=progress)):
            gradients = torch.autograd.grad(loss, [x.features, x.weight])
            results.append([loss.detach(), *gradients])
        close(*results, tolerance=1e-6)
    close(criterion.state_dict(), eager.state_dict())


@pytest.mark.gpu
@criteria
def test_captured_in_a_graph(name):
    """Forward and backward pass replay in a CUDA graph and update the state."""
    device = torch.device("cuda")
    criterion, eager = CRITERIA[name]().to(device), CRITERIA[name]().to(device)
    x = inputs(device, dtype=torch.float32)
    progress = torch.tensor(PROGRESS, device=device)

    def step(module: nn.Module) -> list[Tensor]:
        loss = call(module, x, progress=progress)
        tensors = [x.features, x.weight]
        return [loss.detach(), *torch.autograd.grad(loss, tensors)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for module in (criterion, eager):
            for _ in range(2):
                step(module)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(criterion)
    for _ in range(2):
        graph.replay()
        close(found, step(eager), tolerance=1e-5)
    close(criterion.state_dict(), eager.state_dict())


SPLITS = {"even": (4, 4), "uneven": (1, 6), "empty": (0, 5), "nothing": (0, 0), "ignored": (3, 5)}
COLLECTIVE = ["disturb_label", "center"]  # need more from other ranks than the number of samples


def train(model: nn.Module, name: str, parts: tuple[int, ...], rank: int | None) -> dict[str, Any]:
    """Two steps on a rank's part of the batches, or on all of them."""
    criterion = CRITERIA[name]()
    attached = isda.attach(model, criterion)
    record: dict[str, Any] = {"losses": [], "gradients": []}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sum(parts), 4, generator=generator)
        target = torch.randint(C, (sum(parts),), generator=generator)
        if parts == SPLITS["ignored"]:
            target[torch.tensor([0, 2, 4])] = -100  # two of three, one of five
        if rank is not None:
            x, target = x.split(parts)[rank], target.split(parts)[rank]
        model.zero_grad()
        loss = attached(model(x), target, progress=PROGRESS)
        loss.backward()
        record["losses"].append(loss.detach())
        record["gradients"].append([p.grad.clone() for p in model.parameters()])
    record["state"] = criterion.state_dict()
    attached.remove()
    return record


def compiled(name: str, rank: int) -> Tensor:
    criterion, x = CRITERIA[name](), inputs(torch.device("cpu"), samples=8)
    part = [tensor.detach().chunk(2)[rank] for tensor in (x.features, x.target)]
    step = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    return step(part[0], x.weight.detach(), part[1], bias=x.bias, progress=PROGRESS).detach()


def work(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    results: dict[Any, Any] = {}
    for name in CRITERIA:
        for split, parts in SPLITS.items():
            results[name, split] = train(DistributedDataParallel(make_model()), name, parts, rank)
    for name in COLLECTIVE:
        results[name, "compiled"] = compiled(name, rank)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(work, args=(str(folder),), nprocs=2, start_method=START_METHOD)
    return [torch.load(Path(folder, f"rank{rank}.pt")) for rank in range(2)]


@pytest.mark.ddp
@criteria
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_equal_one_process(ranks, name, split):
    """Mean loss, averaged gradients, state and disturbed labels are the same."""
    expected = train(make_model(), name, SPLITS[split], None)
    found = [record[name, split] for record in ranks]
    losses = torch.stack([torch.stack(record["losses"]) for record in found])
    # float32 sums in a different order
    close(losses.mean(0), torch.stack(expected["losses"]), tolerance=1e-5)
    for record in found:
        close(record["gradients"], expected["gradients"], tolerance=1e-5)
        close(record["state"], expected["state"], tolerance=1e-5)
        assert all(
            torch.equal(record["state"][key], found[0]["state"][key]) for key in record["state"]
        )


@pytest.mark.ddp
@pytest.mark.parametrize("name", COLLECTIVE)
def test_compiled_on_two_ranks(ranks, name):
    expected = call(CRITERIA[name](), inputs(torch.device("cpu"), samples=8))
    close(torch.stack([record[name, "compiled"] for record in ranks]).mean(), expected.detach())
