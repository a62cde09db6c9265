"""Several ranks equal one process: loss, gradients and statistics, uneven and empty ranks included.

Every world is started once; its ranks run all the scenarios and leave their results in files. The
tests compare these with one process that sees the whole batch.
"""

import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import PATIENCE
from ranks import close, results_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isda
from isda import distributed

pytestmark = pytest.mark.ddp

STRUCTURES = ["full", "diagonal", "shared", "identity"]
SPLITS = {  # samples of each rank, in each of two steps
    "even": {2: [(4, 4), (4, 4)], 3: [(3, 3, 3), (3, 3, 3)]},
    "uneven": {2: [(5, 2), (1, 6)], 3: [(5, 1, 3), (2, 6, 1)]},
    "empty": {2: [(0, 7), (4, 0)], 3: [(4, 0, 3), (0, 0, 5)]},
    "nothing": {2: [(3, 2), (0, 0)], 3: [(3, 2, 1), (0, 0, 0)]},
}
TARGETS = ["index", "ignore", "soft"]
C, A = 5, 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, A), nn.Tanh(), nn.Linear(A, C))


def make_batch(samples: int, step: int, kind: str) -> tuple[Tensor, Tensor]:
    """The batch of all ranks; all ignored samples belong to the first ones."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 3, generator=generator)
    if kind == "soft":
        return x, torch.randn(samples, C, generator=generator).softmax(1)
    target = torch.randint(C, (samples,), generator=generator)
    if kind == "ignore":
        target[:2] = -100
    return x, target


def train(
    model: nn.Module, sizes: list[tuple[int, ...]], rank: int | None, kind: str, **options: Any
) -> dict[str, Any]:
    """Two steps on this rank's part of the batches, or on whole batches if rank is None."""
    criterion = isda.attach(model, lambda_0=2.0, ramp="constant", **options)
    record: dict[str, Any] = {"losses": [], "gradients": []}
    for step, parts in enumerate(sizes):
        x, target = make_batch(sum(parts), step, kind)
        if rank is not None:
            x, target = x.split(parts)[rank], target.split(parts)[rank]
        model.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        record["losses"].append(loss.detach())
        record["gradients"].append([p.grad.clone() for p in model.parameters()])
    record["state"] = criterion.state_dict()
    criterion.remove()
    return record


def message_of(error: type[Exception], function: Any, *args: Any) -> str:
    try:
        function(*args)
    except error as caught:
        return str(caught)
    return ""


def bad_batch(rank: int, world: int, fault: str) -> dict[str, Any]:
    """A fault on only the last rank: the errors and the state of every rank."""
    model = make_model()
    criterion = isda.attach(model, ramp="constant", lambda_0=2.0)
    x, target = make_batch(4, rank, "index")
    criterion(model(x), target)
    before = {name: tensor.clone() for name, tensor in criterion.state_dict().items()}
    bad_x, bad_target = x.clone(), target.clone()
    if rank == world - 1:
        if fault == "features":
            bad_x[1, 0] = torch.inf
            model[1] = nn.Identity()  # lets the infinite value through
        else:
            bad_target[2] = C
    message = message_of(ValueError, lambda: criterion(model(bad_x), bad_target))
    after = {name: tensor.clone() for name, tensor in criterion.state_dict().items()}
    model[1] = nn.Tanh()
    loss = criterion(model(x), target)
    return {"message": message, "before": before, "after": after, "next": loss.detach()}


def deferred_bad_batch(rank: int, world: int) -> dict[str, Any]:
    """The same with deferred errors, as in a compiled step or on a GPU."""
    is_compiling = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        criterion = isda.ISDALoss(A, C, ramp="constant")
        features, weight = torch.randn(4, A), torch.randn(C, A)
        target = make_batch(4, rank, "index")[1]
        criterion(features, weight, target)
        before = [tensor.clone() for tensor in criterion.buffers()]
        features[0] += torch.inf if rank == 0 else 0.0
        loss = criterion(features, weight, target)
        message = message_of(ValueError, criterion.check)
        return {"loss": loss, "message": message, "before": before, "after": [*criterion.buffers()]}
    finally:
        torch.compiler.is_compiling = is_compiling


def compiled(rank: int, world: int) -> dict[str, Any]:
    """Statistics and loss of a compiled step; all ranks have the same batch size."""
    model = make_model()
    criterion = isda.attach(model, ramp="constant", lambda_0=2.0, covariance="diagonal")
    step = torch.compile(
        lambda x, target: criterion(model(x), target), fullgraph=True, backend="aot_eager"
    )
    x, target = make_batch(4 * world, 0, "index")
    loss = step(x.chunk(world)[rank], target.chunk(world)[rank])
    return {"losses": [loss.detach()], "state": criterion.state_dict()}


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
        for structure in STRUCTURES:
            for kind in TARGETS:
                model = DistributedDataParallel(make_model())
                results[split, structure, kind] = train(
                    model, sizes[world], rank, kind, covariance=structure, decay=0.9
                )
    results["sum"] = train(
        DistributedDataParallel(make_model()),
        SPLITS["uneven"][world],
        rank,
        "index",
        reduction="sum",
    )
    results["alone"] = train(
        make_model(), SPLITS["uneven"][world], rank, "index", synchronize=False
    )
    pair = dist.new_group([0, 1])
    if rank < 2:
        results["pair"] = train(
            DistributedDataParallel(make_model(), process_group=pair),
            SPLITS["uneven"][2],
            rank,
            "index",
            process_group=pair,
        )
    for fault in ("features", "target"):
        results["bad", fault] = bad_batch(rank, world, fault)
    results["deferred"] = deferred_bad_batch(rank, world)
    if world == 2:
        results["compiled"] = compiled(rank, world)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> list[dict[Any, Any]]:
    """Results of every rank of a world."""
    return results_of(work, request.param, tmp_path_factory.mktemp("ranks"))


def assert_identical(states: list[dict[str, Tensor]]) -> None:
    for state in states[1:]:
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name]), name


def assert_equal_to_one_process(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Mean loss, averaged gradients and statistics; the latter bitwise equal on all ranks."""
    losses = torch.stack([torch.stack(record["losses"]) for record in found])
    close(losses.mean(0), torch.stack(expected["losses"]))
    for record in found:
        close(record["gradients"], expected["gradients"])
        close(record["state"], expected["state"])
    assert_identical([record["state"] for record in found])


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_equal_one_process(ranks, split, structure, kind):
    sizes = SPLITS[split][len(ranks)]
    expected = train(make_model(), sizes, None, kind, covariance=structure, decay=0.9)
    assert_equal_to_one_process([record[split, structure, kind] for record in ranks], expected)


def test_sum_is_of_this_rank(ranks):
    """A sum is not rescaled: each rank returns the sum over its own samples."""
    expected = train(make_model(), SPLITS["uneven"][len(ranks)], None, "index", reduction="sum")
    losses = torch.stack([torch.stack(record["sum"]["losses"]) for record in ranks])
    close(losses.sum(0), torch.stack(expected["losses"]))
    close(ranks[0]["sum"]["state"], expected["state"])


def test_a_rank_can_keep_to_itself(ranks):
    sizes = SPLITS["uneven"][len(ranks)]
    for rank, record in enumerate(ranks):
        expected = train(make_model(), sizes, rank, "index")
        close(record["alone"], expected)
    assert not torch.equal(
        ranks[0]["alone"]["state"]["criterion.estimator.count"],
        ranks[1]["alone"]["state"]["criterion.estimator.count"],
    )


def test_a_group_of_some_ranks(ranks):
    expected = train(make_model(), SPLITS["uneven"][2], None, "index")
    assert_equal_to_one_process([record["pair"] for record in ranks[:2]], expected)


@pytest.mark.parametrize(
    ("fault", "message"), [("features", "features must be finite"), ("target", "target must be in")]
)
def test_bad_batch_on_one_rank_is_refused_by_all(ranks, fault, message):
    for record in ranks:
        result = record["bad", fault]
        assert message in result["message"]
        assert_identical([result["before"], result["after"]])
        assert result["next"].isfinite()
    assert_identical([record["bad", fault]["after"] for record in ranks])


def test_bad_batch_on_one_rank_is_masked_by_all(ranks):
    for record in ranks:
        result = record["deferred"]
        assert result["loss"].isnan()
        assert "features must be finite" in result["message"]
        for before, after in zip(result["before"], result["after"], strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_compiled_step(ranks):
    model = make_model()
    criterion = isda.attach(model, ramp="constant", lambda_0=2.0, covariance="diagonal")
    x, target = make_batch(8, 0, "index")
    loss = criterion(model(x), target)
    close(torch.stack([record["compiled"]["losses"][0] for record in ranks]).mean(), loss.detach())
    for record in ranks:
        close(record["compiled"]["state"], criterion.state_dict())
    assert_identical([record["compiled"]["state"] for record in ranks])


def test_broadcast_of_rows_with_room_between_them(monkeypatch):
    """Padded covariances: NCCL accepts only contiguous tensors."""

    def broadcast(tensor: Tensor, group: Any = None, group_src: int = 0) -> None:
        assert tensor.is_contiguous()
        tensor.fill_(group_src + 7)

    monkeypatch.setattr(distributed, "world_size", lambda group: 2)
    monkeypatch.setattr(distributed.dist, "broadcast", broadcast)
    room = torch.zeros(2, 3, 16)
    dense = torch.zeros(4)
    distributed.broadcast([room[..., :3], dense])
    assert (room[..., :3] == 7).all()
    assert not room[..., 3:].any()
    assert (dense == 7).all()


def test_a_group_is_freed_when_it_is_destroyed(monkeypatch, tmp_path):
    """Otherwise its threads would survive and sometimes abort the process at exit."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    group = weakref.ref(dist.group.WORLD)
    monkeypatch.setattr(distributed, "world_size", lambda group: 2)
    assert distributed.agree(3, 1, None) == (3, 1)
    dist.destroy_process_group()
    assert group() is None


def test_a_group_of_gpus_has_one_of_their_hosts(monkeypatch):
    class Group:
        _device_types = (torch.device("cuda"),)

    host = dist.ProcessGroup(0, 1)
    made = []
    monkeypatch.setattr(distributed.dist, "get_process_group_ranks", lambda group: [0, 3])
    monkeypatch.setattr(
        distributed.dist,
        "new_group",
        lambda ranks, **options: made.append((ranks, options)) or host,
    )
    group: Any = Group()
    assert distributed._host_group(group) is distributed._host_group(group) is host
    assert made == [([0, 3], {"backend": "gloo", "use_local_synchronization": True})]
    known = len(distributed._host_groups)
    del group
    assert len(distributed._host_groups) == known - 1
