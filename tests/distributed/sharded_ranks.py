"""What every rank does in the tests of sharded covariances."""

import copy
from datetime import timedelta
from typing import Any

import reference
import torch
import torch.distributed as dist
from programs import PATIENCE
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isda
from isda import FullCovariance, ISDALoss, ShardedCovariance

__all__ = [
    "ASKED",
    "BLOCKS",
    "CLASSES",
    "DECAY",
    "SPLITS",
    "STRENGTH",
    "TARGETS",
    "A",
    "compiled",
    "deferred_bad_batch",
    "losses_of_samples",
    "make_batch",
    "make_model",
    "make_stream",
    "message_of",
    "quadratic_alone",
    "refusals",
    "resume",
    "statistics_of_classes",
    "train",
    "work",
]

SPLITS = {  # samples of each rank, in each of three steps
    "even": {2: [(4, 4)] * 3, 3: [(3, 3, 3)] * 3},
    "uneven": {2: [(5, 2), (1, 6), (3, 4)], 3: [(5, 1, 3), (2, 6, 1), (1, 2, 4)]},
    "empty": {2: [(0, 7), (4, 0), (2, 3)], 3: [(4, 0, 3), (0, 0, 5), (3, 3, 0)]},
    "nothing": {2: [(3, 2), (0, 0), (1, 4)], 3: [(3, 2, 1), (0, 0, 0), (2, 1, 2)]},
}
TARGETS = ["index", "ignore", "soft"]
CLASSES = [5, 2]  # blocks of 3 + 2 and 2 + 2 + 1 classes; of 1 + 1 and 1 + 1 + 0
A, DECAY, STRENGTH = 4, 0.7, 2.0
ASKED = {2: (6, 0), 3: (1, 4, 0)}  # targets of each rank in a call of quadratic
BLOCKS = {  # classes of each rank
    (5, 2): [[0, 1, 2], [3, 4]],
    (5, 3): [[0, 1], [2, 3], [4]],
    (4, 2): [[0, 1], [2, 3]],
    (4, 3): [[0, 1], [2], [3]],
    (2, 2): [[0], [1]],
    (2, 3): [[0], [1], []],
    (13, 4): [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]],
}


def make_model(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, A), nn.Tanh(), nn.Linear(A, classes))


def make_batch(samples: int, step: int, kind: str, classes: int) -> tuple[Tensor, Tensor]:
    """The batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 3, generator=generator)
    if kind == "soft":
        return x, torch.randn(samples, classes, generator=generator).softmax(1)
    target = torch.randint(classes, (samples,), generator=generator)
    if kind == "ignore":
        target[:2] = -100
    return x, target


def train(
    model: nn.Module,
    sizes: list[tuple[int, ...]],
    rank: int | None,
    kind: str,
    estimator: FullCovariance,
    **options: Any,
) -> dict[str, Any]:
    """Steps on this rank's part of the batches, or on whole batches if rank is None."""
    criterion = isda.attach(
        model, lambda_0=STRENGTH, ramp="constant", covariance=estimator, **options
    )
    record: dict[str, Any] = {"losses": [], "gradients": []}
    for step, parts in enumerate(sizes):
        x, target = make_batch(sum(parts), step, kind, estimator.num_classes)
        if rank is not None:
            x, target = x.split(parts)[rank], target.split(parts)[rank]
        model.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        record["losses"].append(loss.detach())
        record["gradients"].append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
    record["state"] = estimator.state_dict()
    criterion.remove()
    return record


def make_stream(world: int) -> list[tuple[tuple[int, ...], reference.Inputs, Tensor]]:
    """Samples of each rank, inputs of all ranks and a factor for every loss, in each step."""
    steps = []
    for step, parts in enumerate(SPLITS["uneven"][world]):
        inputs = reference.draw(sum(parts), 5, A, seed=step)
        steps.append((parts, inputs, torch.linspace(0.5, 2.0, sum(parts))))
    return steps


def losses_of_samples(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Without a model: the loss of every sample, gradients of features and of the head."""
    estimator = ShardedCovariance(A, 5, decay=DECAY)
    criterion = ISDALoss(
        A, 5, lambda_0=STRENGTH, ramp="constant", covariance=estimator, reduction="none"
    )
    record = []
    for parts, inputs, factor in make_stream(world):
        features = inputs.features.float().split(parts)[rank].requires_grad_()
        weight = inputs.weight.float().requires_grad_()
        bias = inputs.bias.float()
        losses = criterion(features, weight, inputs.target.split(parts)[rank], bias=bias)
        (losses * factor.split(parts)[rank]).sum().backward()
        record.append({"losses": losses.detach(), "features": features.grad, "weight": weight.grad})
    return record


def quadratic_alone(rank: int, world: int) -> dict[str, Tensor]:
    """A call of quadratic() with a different number of targets on every rank."""
    inputs = reference.draw(40, 13, 5, dtype=torch.float32)
    estimator = ShardedCovariance(5, 13)
    estimator.update(inputs.features, inputs.target)
    weight = inputs.weight.requires_grad_()
    asked = torch.arange(6)[: sum(ASKED[world])].split(ASKED[world])[rank]
    rows = estimator.quadratic(weight, inputs.target[asked])
    (rows * (1 + asked[:, None])).sum().backward()
    return {"rows": rows.detach(), "weight": weight.grad}


def statistics_of_classes() -> list[tuple[Tensor, Tensor]]:
    """Mean and covariance of every class, whichever rank holds it."""
    inputs = reference.draw(40, 5, A, dtype=torch.float32)
    estimator = ShardedCovariance(A, 5)
    estimator.update(inputs.features, inputs.target)
    return [(estimator.class_mean(c), estimator.class_covariance(c)) for c in range(5)]


def message_of(error: type[Exception], function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except error as caught:
        return str(caught)
    return ""


def resume(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Save, load and continue; then load the checkpoint of another rank."""

    def step(criterion: ISDALoss, seed: int) -> Tensor:
        inputs = reference.draw(6, 4, A, seed=seed, dtype=torch.float32)
        target = (inputs.target + rank) % 4
        return criterion(inputs.features + rank, inputs.weight, target)

    def create() -> ISDALoss:
        return ISDALoss(A, 4, total_steps=3, covariance=ShardedCovariance(A, 4))

    first, second = create(), create()
    step(first, 0)
    torch.save(first.state_dict(), f"{folder}/checkpoint{rank}.pt")
    dist.barrier()
    second.load_state_dict(torch.load(f"{folder}/checkpoint{rank}.pt", weights_only=True))
    losses = [step(criterion, 1) for criterion in (first, second)]
    before = copy.deepcopy(second.state_dict())
    other = torch.load(f"{folder}/checkpoint{(rank + 1) % world}.pt", weights_only=True)
    full = ISDALoss(A, 4, total_steps=3, covariance="full").state_dict()
    return {
        "losses": losses,
        "states": [first.state_dict(), before, second.state_dict()],
        "other": message_of(ValueError, second.load_state_dict, other),
        "full": message_of(ValueError, second.load_state_dict, full),
    }


def deferred_bad_batch(rank: int, world: int) -> dict[str, Any]:
    """A fault on the last rank with deferred errors, as on a GPU."""
    criterion = ISDALoss(A, 5, ramp="constant", covariance=ShardedCovariance(A, 5))
    inputs = reference.draw(4, 5, A, seed=rank, dtype=torch.float32)
    criterion(inputs.features, inputs.weight, inputs.target)
    before = [tensor.clone() for tensor in criterion.estimator.buffers()]
    is_compiling = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        features = inputs.features + (torch.inf if rank == world - 1 else 0.0)
        loss = criterion(features, inputs.weight, inputs.target)
    finally:
        torch.compiler.is_compiling = is_compiling
    message = message_of(ValueError, criterion.check)
    after = [*criterion.estimator.buffers()]
    return {"loss": loss, "message": message, "before": before, "after": after}


def compiled(rank: int, world: int, kind: str) -> dict[str, Any]:
    """A step that torch.compile splits into several graphs."""
    torch._dynamo.reset()
    model, estimator = DistributedDataParallel(make_model(5)), ShardedCovariance(A, 5)
    criterion = isda.attach(model, lambda_0=STRENGTH, ramp="constant", covariance=estimator)
    x, target = (t.chunk(world)[rank] for t in make_batch(4 * world, 0, kind, 5))
    logits = model(x)
    loss = torch.compile(criterion, backend="aot_eager")(logits, target)
    loss.backward()
    record = {
        "losses": [loss.detach()],
        "gradients": [[p.grad for p in model.parameters()]],
        "state": copy.deepcopy(estimator.state_dict()),
    }
    torch._dynamo.reset()
    whole = torch.compile(criterion, backend="aot_eager", fullgraph=True)
    refused = message_of(torch._dynamo.exc.Unsupported, whole, model(x), target)
    return {**record, "refused": refused}


def refusals(rank: int, world: int) -> dict[str, str]:
    """Error messages for arguments that several ranks do not support."""
    estimator = ShardedCovariance(A, 5)
    alone = dist.new_group([0])
    weight, part = torch.zeros(5, A), torch.zeros(3).long()
    return {
        "synchronize": message_of(
            ValueError, ISDALoss, A, 5, covariance=estimator, synchronize=False
        ),
        "group": message_of(ValueError, ISDALoss, A, 5, covariance=estimator, process_group=alone),
        "outside": message_of(ValueError, ShardedCovariance, A, 5, process_group=alone),
        "index": message_of(ValueError, estimator.quadratic, weight, part, part),
        "grow": message_of(ValueError, estimator.grow, 6),
        "repr": str(estimator),
    }


def work(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE),  # for ranks that would wait forever
    )
    results: dict[Any, Any] = {}
    for split, sizes in SPLITS.items():
        for kind in TARGETS:
            for classes in CLASSES:
                model = DistributedDataParallel(make_model(classes))
                estimator = ShardedCovariance(A, classes, decay=DECAY)
                results[split, kind, classes] = train(model, sizes[world], rank, kind, estimator)
    pair = dist.new_group([0, 1])
    if rank < 2:
        results["pair"] = train(
            DistributedDataParallel(make_model(5), process_group=pair),
            SPLITS["uneven"][2],
            rank,
            "index",
            ShardedCovariance(A, 5, decay=DECAY, process_group=pair),
            process_group=pair,
        )
    results["samples"] = losses_of_samples(rank, world)
    results["quadratic"] = quadratic_alone(rank, world)
    results["classes"] = statistics_of_classes()
    results["resume"] = resume(rank, world, folder)
    results["deferred"] = deferred_bad_batch(rank, world)
    results["refusals"] = refusals(rank, world)
    for kind in ("index", "soft"):
        if world == 2:
            results["compiled", kind] = compiled(rank, world, kind)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
