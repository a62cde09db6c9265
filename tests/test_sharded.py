"""Covariances spread over ranks equal those of one process: loss, gradients and statistics.

As in ``test_distributed.py``, every world is started once and its ranks leave their results in
files. What needs no exchange is tested in one process that plays the ranks one after another.
"""

import copy
from datetime import timedelta
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from programs import PATIENCE
from ranks import close, results_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isda
from isda import FullCovariance, ISDALoss, ShardedCovariance, distributed

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
    """Some steps on this rank's part of the batches, or on the whole of them if rank is None."""
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
    """A call of quadratic with another number of targets on every rank."""
    inputs = reference.draw(40, 13, 5, dtype=torch.float32)
    estimator = ShardedCovariance(5, 13)
    estimator.update(inputs.features, inputs.target)
    weight = inputs.weight.requires_grad_()
    asked = torch.arange(6)[: sum(ASKED[world])].split(ASKED[world])[rank]
    rows = estimator.quadratic(weight, inputs.target[asked])
    (rows * (1 + asked[:, None])).sum().backward()
    return {"rows": rows.detach(), "weight": weight.grad}


def statistics_of_classes() -> list[tuple[Tensor, Tensor]]:
    """Mean and covariance of every class, wherever it is held."""
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
    """Save, load what was saved and go on; then load what another rank saved."""

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
    """A fault on the last rank where the host does not look, as on a GPU."""
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
    """A step that torch.compile has broken into several graphs."""
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
    """Messages about arguments that do not fit several ranks."""
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
        timeout=timedelta(seconds=PATIENCE),  # for ranks that wait for each other in vain
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


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> list[dict[Any, Any]]:
    """Results of every rank of a world."""
    return results_of(work, request.param, tmp_path_factory.mktemp("ranks"))


def close_to_reference(found: Tensor, expected: Tensor) -> None:
    # float32 against float64: some hundred roundings of 2⁻²⁴, and exponents up to about 20
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def assert_shard(state: dict[str, Tensor], full: dict[str, Tensor], block: list[int]) -> None:
    """Statistics are those of the classes in the block, and of no others."""
    assert state["classes"].tolist() == block
    for name, tensor in full.items():
        assert state[name].dtype == tensor.dtype
        close(state[name], tensor[block])


def assert_equal_to_one_process(
    found: list[dict[str, Any]], expected: dict[str, Any], classes: int
) -> None:
    losses = torch.stack([torch.stack(record["losses"]) for record in found])
    close(losses.mean(0), torch.stack(expected["losses"]))
    for record, block in zip(found, BLOCKS[classes, len(found)], strict=True):
        close(record["gradients"], expected["gradients"])
        assert_shard(record["state"], expected["state"], block)


@pytest.mark.ddp
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_equal_one_process(ranks, split, kind, classes):
    sizes = SPLITS[split][len(ranks)]
    estimator = FullCovariance(A, classes, decay=DECAY)
    expected = train(make_model(classes), sizes, None, kind, estimator)
    found = [record[split, kind, classes] for record in ranks]
    assert_equal_to_one_process(found, expected, classes)


@pytest.mark.ddp
def test_a_group_of_some_ranks(ranks):
    estimator = FullCovariance(A, 5, decay=DECAY)
    expected = train(make_model(5), SPLITS["uneven"][2], None, "index", estimator)
    assert_equal_to_one_process([record["pair"] for record in ranks[:2]], expected, 5)


@pytest.mark.ddp
def test_every_sample_equals_naive_loops(ranks):
    """Loss and features of each sample on its rank; the head's gradient in all ranks together."""
    seen: list[tuple[Tensor, Tensor]] = []
    for step, (_, inputs, factor) in enumerate(make_stream(len(ranks))):
        seen.append((inputs.features, inputs.target))
        _, _, matrices = reference.decayed_moments(seen, 5, DECAY)
        features, weight = inputs.features.requires_grad_(), inputs.weight.requires_grad_()
        losses = reference.isda_losses(
            features, weight, inputs.target, matrices, strength=STRENGTH, bias=inputs.bias
        )
        (torch.stack(losses) * factor).sum().backward()
        found = [record["samples"][step] for record in ranks]
        close_to_reference(torch.cat([part["losses"] for part in found]), torch.stack(losses))
        close_to_reference(torch.cat([part["features"] for part in found]), features.grad)
        close_to_reference(torch.stack([part["weight"] for part in found]).sum(0), weight.grad)


@pytest.mark.ddp
def test_quadratic_of_other_targets_on_every_rank(ranks):
    inputs = reference.draw(40, 13, 5, dtype=torch.float32)
    _, _, matrices = reference.class_moments(inputs.features, inputs.target, 13)
    weight = inputs.weight.double().requires_grad_()
    number = sum(ASKED[len(ranks)])
    rows = reference.quadratic(weight, inputs.target[:number], matrices)
    (rows * (1 + torch.arange(number)[:, None])).sum().backward()
    assert rows.max() > 1  # these classes have several samples
    found = [record["quadratic"] for record in ranks]
    assert [len(part["rows"]) for part in found] == list(ASKED[len(ranks)])
    close_to_reference(torch.cat([part["rows"] for part in found]), rows)
    close_to_reference(torch.stack([part["weight"] for part in found]).sum(0), weight.grad)


@pytest.mark.ddp
def test_every_rank_can_read_the_statistics_of_every_class(ranks):
    inputs = reference.draw(40, 5, A)
    _, mean, covariance = reference.class_moments(inputs.features, inputs.target, 5)
    for record in ranks:
        for found, *expected in zip(record["classes"], mean, covariance, strict=True):
            for left, right in zip(found, expected, strict=True):
                close_to_reference(left, right)


@pytest.mark.ddp
def test_each_rank_resumes_from_its_own_checkpoint(ranks):
    for record in ranks:
        first, second = record["resume"]["losses"]
        assert torch.equal(first, second)
        expected, *others = record["resume"]["states"]
        assert expected["estimator.count"].sum() > 0
        for state in others:  # before and after what was refused
            for name, tensor in expected.items():
                assert torch.equal(state[name], tensor), name


@pytest.mark.ddp
def test_checkpoint_of_another_rank_or_estimator_is_refused(ranks):
    """Of 4 classes, 2 ranks hold 2 each; of 3 ranks the last two hold 1 each: the same shapes."""
    world = len(ranks)
    for rank, (record, block) in enumerate(zip(ranks, BLOCKS[4, world], strict=True)):
        place = f"rank {rank} of {world}, classes [{block[0]}, {block[-1] + 1})"
        other = BLOCKS[4, world][(rank + 1) % world]
        message = f"estimator.classes must be those of {place}, got {other}: each rank loads what"
        assert message in record["resume"]["other"]
        assert "checkpoint must hold" in record["resume"]["full"]
        assert "'classes'" in record["resume"]["full"]


@pytest.mark.ddp
def test_bad_batch_on_one_rank_is_masked_by_all(ranks):
    for record in ranks:
        result = record["deferred"]
        assert result["loss"].isnan()
        assert "features must be finite" in result["message"]
        assert result["before"][0].sum() > 0
        for before, after in zip(result["before"], result["after"], strict=True):
            assert torch.equal(before, after)


@pytest.mark.ddp
@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("kind", ["index", "soft"])
def test_compiled_criterion_breaks_the_graph(ranks, kind):
    model, estimator = make_model(5), FullCovariance(A, 5)
    expected = train(model, [(4, 4)], None, kind, estimator)
    found = [record["compiled", kind] for record in ranks]
    assert_equal_to_one_process(found, expected, 5)
    assert all("ShardedCovariance" in record["refused"] for record in found)


@pytest.mark.ddp
def test_what_does_not_fit_several_ranks_is_refused(ranks):
    world = len(ranks)
    for rank, record in enumerate(ranks):
        messages = record["refusals"]
        assert messages["synchronize"] == (
            "synchronize must be True for a ShardedCovariance, got False"
        )
        assert "process_group must have the ranks of the ShardedCovariance" in messages["group"]
        outside = "process_group must contain this rank"
        assert messages["outside"] == ("" if rank == 0 else outside)
        assert "covariance_index is not supported" in messages["index"]
        assert "grow is not supported" in messages["grow"]
        assert f"rank {rank} of {world}, classes [" in messages["repr"]


@pytest.fixture
def shard(monkeypatch):
    """Makes the estimator of one rank of a world that does not exist."""

    def create(rank: int, world: int, *args: Any, **options: Any) -> ShardedCovariance:
        with monkeypatch.context() as patch:
            patch.setattr(distributed, "rank", lambda group: rank)
            patch.setattr(distributed, "world_size", lambda group: world)
            return ShardedCovariance(*args, **options)

    return create


def test_a_class_out_of_range():
    for index in (-1, 5):
        with pytest.raises(IndexError, match=r"index must be in \[0, 5\)"):
            ShardedCovariance(A, 5).class_mean(index)


@pytest.mark.parametrize(("classes", "world"), BLOCKS)
def test_blocks_of_classes(shard, classes, world):
    for rank, block in enumerate(BLOCKS[classes, world]):
        estimator = shard(rank, world, 3, classes)
        assert estimator.classes.tolist() == block
        assert estimator.first_class == (block[0] if block else classes)
        assert estimator.num_classes == classes
        assert estimator.count.shape == (len(block),)
        assert estimator.mean.shape == (len(block), 3)
        assert estimator.covariance.shape == (len(block), 3, 3)
        assert not any(buffer.is_meta for buffer in estimator.buffers())


@pytest.mark.parametrize(("classes", "world"), BLOCKS)
@pytest.mark.parametrize("width", [5, 70])
def test_sum_of_ranks_played_by_one_process(shard, monkeypatch, device, classes, world, width):
    """Every rank's part, added by hand: the same code on every device."""
    size = 7
    inputs = reference.draw(size * world, classes, width, dtype=torch.float32, device=device)
    index = torch.where(torch.arange(size * world, device=device) % 5 == 3, -1, inputs.target)
    monkeypatch.setattr(distributed, "agree", lambda size, problem, group: (size, problem))
    monkeypatch.setattr(distributed, "gather_target", lambda target, group, size: index)
    monkeypatch.setattr(distributed._ScatterSum, "apply", lambda rows, group: rows)
    coefficient = torch.linspace(-1, 1, size, device=device)[:, None]
    outputs = []
    for estimators in (
        [FullCovariance(width, classes, decay=DECAY)],
        [shard(rank, world, width, classes, decay=DECAY) for rank in range(world)],
    ):
        weight, total = inputs.weight.clone().requires_grad_(), torch.zeros(())
        for estimator in estimators:
            estimator.to(device).update(inputs.features + 1, index)
            gap = -width % 16 if device.type == "cuda" else 0  # rows at multiples of 64 bytes
            assert estimator.covariance.stride(1) == width + gap
            estimator.update(inputs.features, index)
            rows = estimator.quadratic(weight, index[:size])
            (rows * coefficient).sum().backward()
            total = total + rows.detach().cpu()
        state = [
            torch.cat([getattr(estimator, name) for estimator in estimators])
            for name in ("count", "mean", "covariance")
        ]
        outputs.append([total, weight.grad.cpu(), *(tensor.cpu() for tensor in state)])
    for found, expected in zip(*reversed(outputs), strict=True):
        # of the largest value: the kernels split float32 into two bfloat16, with an error of 2⁻¹⁶
        tolerance = (1e-6 if device.type == "cpu" else 1e-4) * expected.abs().max()
        torch.testing.assert_close(found, expected, rtol=0, atol=float(tolerance))


@pytest.mark.parametrize(("rank", "world", "other"), [(0, 2, 3), (1, 2, 4), (1, 3, 2)])
def test_checkpoint_of_another_number_of_ranks_is_refused(shard, rank, world, other):
    state = shard(rank, other, A, 5).state_dict()
    estimator = shard(rank, world, A, 5)
    block = BLOCKS[5, world][rank]
    message = f"classes must be those of rank {rank} of {world}, classes [{block[0]}, "
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        estimator.load_state_dict(state)


def test_checkpoint_of_another_shape_is_refused(shard):
    state = shard(1, 2, A + 1, 5).state_dict()
    with pytest.raises(ValueError, match=r"mean must have shape \(2, 4\) .*got \(2, 5\)"):
        shard(1, 2, A, 5).load_state_dict(state)


def test_buffers_of_other_ranks_are_never_made(shard):
    """Those of all ranks would take 10¹⁶ bytes."""
    estimator = shard(1, 10**11, 50, 10**12 + 1)
    assert estimator.covariance.shape == (10, 50, 50)


def test_without_a_process_group_it_is_full_covariance():
    full, sharded = FullCovariance(A, 5, decay=DECAY), ShardedCovariance(A, 5, decay=DECAY)
    inputs = reference.draw(7, 5, A, dtype=torch.float32)
    losses, gradients = [], []
    for estimator in (full, sharded):
        criterion = ISDALoss(A, 5, ramp="constant", covariance=estimator, synchronize=False)
        weight = inputs.weight.clone().requires_grad_()
        loss = criterion(inputs.features, weight, inputs.target)
        loss.backward()
        losses.append(loss)
        gradients.append(weight.grad)
    assert torch.equal(*losses)
    assert torch.equal(*gradients)
    assert full.count.sum() == 7
    assert full.state_dict().keys() == sharded.state_dict().keys()
    for name, tensor in full.state_dict().items():
        assert torch.equal(sharded.state_dict()[name], tensor)
    rows = [estimator.quadratic(inputs.weight, torch.arange(5)) for estimator in (full, sharded)]
    assert torch.equal(*rows)
    ShardedCovariance(A, 5).load_state_dict(full.state_dict())


def test_without_a_process_group_it_compiles():
    criterion = ISDALoss(A, 5, ramp="constant", covariance=ShardedCovariance(A, 5))
    inputs = reference.draw(7, 5, A, dtype=torch.float32)
    expected = copy.deepcopy(criterion)(inputs.features, inputs.weight, inputs.target)
    step = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    close(step(inputs.features, inputs.weight, inputs.target), expected)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((0, 5), {}, "num_features must be >= 1, got 0"),
        ((4, 1), {}, "num_classes must be >= 2, got 1"),
        ((4, 5), {"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ((4, 5), {"precision": "low"}, "precision must be 'high' or 'medium', got 'low'"),
    ],
)
def test_arguments_are_checked(args, options, message):
    with pytest.raises(ValueError, match=message):
        ShardedCovariance(*args, **options)


def test_statistics_keep_their_precision(shard):
    estimator = shard(1, 2, A, 5).double().half()
    assert estimator.mean.dtype == torch.float64
    assert estimator.covariance.dtype == torch.float32
    assert estimator.count.dtype == estimator.classes.dtype == torch.int64
