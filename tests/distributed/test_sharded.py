"""Sharded covariances equal those of one process: loss, gradients and statistics.

As in ``test_distributed.py``, every world is started once and its ranks leave their results in
files. What needs no exchange is tested in ``test_sharded_blocks.py``.
"""

from typing import Any

import pytest
import reference
import torch
from ranks import close, results_of
from sharded_ranks import (
    ASKED,
    BLOCKS,
    CLASSES,
    DECAY,
    SPLITS,
    STRENGTH,
    TARGETS,
    A,
    make_model,
    make_stream,
    train,
    work,
)
from torch import Tensor

from isda import FullCovariance


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> list[dict[Any, Any]]:
    """Results of every rank of a world."""
    return results_of(work, request.param, tmp_path_factory.mktemp("ranks"))


def close_to_reference(found: Tensor, expected: Tensor) -> None:
    # float32 against float64: some hundred roundings of 2⁻²⁴, and exponents up to about 20
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def assert_shard(state: dict[str, Tensor], full: dict[str, Tensor], block: list[int]) -> None:
    """A rank holds the statistics of the classes in its block, and no others."""
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
    """Loss and feature gradient of each sample on its rank; the head's gradient over all ranks."""
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
        for state in others:  # before and after the rejected checkpoint
            for name, tensor in expected.items():
                assert torch.equal(state[name], tensor), name


@pytest.mark.ddp
def test_checkpoint_of_another_rank_or_estimator_is_refused(ranks):
    """Of 4 classes, 2 ranks hold 2 each; of 3 ranks, the last two hold 1 each: equal shapes."""
    world = len(ranks)
    for rank, (record, block) in enumerate(zip(ranks, BLOCKS[4, world], strict=True)):
        place = f"rank {rank} of {world}, classes [{block[0]}, {block[-1] + 1})"
        other = BLOCKS[4, world][(rank + 1) % world]
        message = f"estimator.classes must be those of {place}, got {other}: each rank must"
        assert message in record["resume"]["other"]
        assert "checkpoint must contain" in record["resume"]["full"]
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
        assert "process_group must match that of the ShardedCovariance" in messages["group"]
        outside = "process_group must contain this rank"
        assert messages["outside"] == ("" if rank == 0 else outside)
        assert "covariance_index is not supported" in messages["index"]
        assert "grow is not supported" in messages["grow"]
        assert f"rank {rank} of {world}, classes [" in messages["repr"]
