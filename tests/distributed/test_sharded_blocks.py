"""Blocks of classes of sharded covariances, in one process that simulates the ranks."""

import copy
from typing import Any

import pytest
import reference
import torch
from ranks import close
from sharded_ranks import BLOCKS, DECAY, A

from isda import FullCovariance, ISDALoss, ShardedCovariance, distributed


@pytest.fixture
def shard(monkeypatch):
    """Creates the estimator of one rank of a simulated world."""

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
    """The contributions of all ranks, summed manually, on any device."""
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
        # relative to the largest value: the kernels split float32 into two bfloat16 (error 2⁻¹⁶)
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
    """The buffers of all ranks would take 10¹⁶ bytes."""
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
        ((4, 0), {}, "num_classes must be >= 1, got 0"),
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
