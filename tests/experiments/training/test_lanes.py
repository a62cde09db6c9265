"""One run, a lane: a complete checkpoint, repeatable dropout, covariances that fit in memory."""

import contextlib
import io
import itertools
import math
from dataclasses import replace

import lanes
import pytest
import torch
from lanes import (
    EVERYTHING,
    FINE_TUNING,
    NUMBER,
    RECIPE,
    SIZES,
    assert_same_bits,
    tiny_arrays,
    train,
    values,
)
from torch import Tensor

from isda.experiments.data.arrays import ImageArrays
from isda.experiments.errors import InputError
from isda.experiments.networks.stochastic import Dropout
from isda.experiments.settings import Recipe
from isda.experiments.training import training_step
from isda.experiments.training.training_step import Lane

# fixtures
data, deterministic, full_precision = lanes.data, lanes.deterministic, lanes.full_precision


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "recipe",
    [RECIPE, EVERYTHING, replace(RECIPE.baseline(), momentum=0.0, nesterov=False), FINE_TUNING],
    ids=["isda", "everything", "no momentum", "fine-tuning"],
)
def test_a_checkpoint_is_complete(recipe: Recipe, data: ImageArrays, device: torch.device) -> None:
    lane = Lane(recipe, 3, data, device)
    train([lane], 1)
    file = io.BytesIO()
    torch.save(lane.state_dict(), file)
    file.seek(0)
    other = Lane(recipe, 3, data, device)
    with torch.no_grad():
        for tensor in other.tensors():
            # the overflow of a criterion is a number for a message
            if tensor.is_floating_point() and tensor is not other.criterion._buffers.get(
                "overflow"
            ):
                tensor.fill_(0.5)
        other.steps.fill_(1000)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.epoch == 1
    assert train([lane], 2) == train([other], 2)
    assert_same_bits(values(lane), values(other))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "recipe", [RECIPE, EVERYTHING, FINE_TUNING], ids=["isda", "everything", "fine-tuning"]
)
def test_tensors_are_all_that_a_step_changes(
    recipe: Recipe, data: ImageArrays, device: torch.device
) -> None:
    lane = Lane(recipe, 0, data, device)
    train([lane], 1)
    lane.begin_epoch()
    lane.step(SIZES[0])
    lane.optimizer.zero_grad(set_to_none=True)
    known = {tensor.data_ptr() for tensor in lane.tensors()}
    before = reachable(lane)
    start = values(lane)
    lane.step(SIZES[1])
    first = values(lane)
    lane.optimizer.zero_grad(set_to_none=True)
    after = reachable(lane)
    assert after.keys() == before.keys()
    changed = {path for path, value in before.items() if not same(value, after[path])}
    found = {path for path, value in after.items() if is_tensor(value) and value[0] in known}
    assert changed <= found
    assert len(changed) > len(lane.parameters)

    with torch.no_grad():
        for tensor, saved in zip(lane.tensors(), start, strict=True):
            tensor.copy_(saved)
    lane.step(SIZES[1])
    assert_same_bits(values(lane), first)


def reachable(root: object) -> dict[str, object]:
    """All tensors (address and copy), numbers and strings reachable from an object."""
    found: dict[str, object] = {}
    seen = set()

    def walk(path: str, value: object) -> None:
        if isinstance(value, Tensor):
            found[path] = (value.data_ptr(), value.detach().clone())
        elif value is None or isinstance(value, bool | int | float | str):
            found[path] = value
        elif id(value) not in seen:
            seen.add(id(value))
            parts: object = value
            if isinstance(value, list | tuple):
                parts = dict(enumerate(value))
            elif not isinstance(value, dict):
                parts = getattr(value, "__dict__", {})
            for number, (key, part) in enumerate(parts.items()):
                name = key if isinstance(key, str | int) else number
                walk(f"{path}.{name}", part)

    walk("lane", root)
    return found


def is_tensor(value: object) -> bool:
    return isinstance(value, tuple)


def same(one: object, other: object) -> bool:
    if is_tensor(one) and is_tensor(other):
        return one[0] == other[0] and torch.equal(one[1], other[1])
    return one == other


@pytest.mark.usefixtures("deterministic")
def test_dropout_is_drawn_by_seed_step_and_layer(data: ImageArrays, device: torch.device) -> None:
    recipe = replace(RECIPE, batch_size=NUMBER, drop_rate=0.5)
    runs = []
    for seed in (0, 0, 1):
        lane = Lane(recipe, seed, data, device)
        masks: list[Tensor] = []

        def record(layer: Dropout, inputs: tuple[Tensor], _: Tensor, masks: list = masks) -> None:
            if layer.training:
                masks.append(layer.forward(torch.ones_like(inputs[0][:, :16, :2, :2])))

        for module in lane.network.modules():
            if isinstance(module, Dropout):
                module.register_forward_hook(record)
        torch.manual_seed(len(runs))  # torch's generator is not used
        train([lane], 2)
        runs.append((lane, torch.stack(masks).flatten(1)))
    (first, masks), (again, repeated), (_, others) = runs
    assert_same_bits(values(first), values(again))
    assert torch.equal(masks, repeated)
    number = masks.shape[1]
    assert masks.shape[0] == 6  # three layers, two steps
    assert masks.unique().tolist() == [0, 2]
    # fair coins: six standard deviations of their mean, and of how often two series agree
    bound = 6 * 0.5 / math.sqrt(number)
    assert ((masks == 0).double().mean(1) - 0.5).abs().max() < bound
    for one, other in itertools.combinations([*masks, *others], 2):
        assert abs((one == other).double().mean() - 0.5) < bound


def test_covariances_that_do_not_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take more than 300 GiB."""
    monkeypatch.setattr(training_step, "host_memory", lambda: 2**37)  # some hosts have more
    images = tiny_arrays(3, 8, device)
    images = replace(images, class_names=tuple(map(str, range(200_000))))
    recipe = replace(RECIPE, network="wide_resnet28_10")
    message = (
        "full covariances of 200000 classes with 640 features do not fit in memory: use "
        "--covariance diagonal or shared"
    )
    with pytest.raises(InputError, match=message):
        Lane(recipe, 0, images, device)


def test_covariances_larger_than_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before they are allocated: the system may promise more than it has."""
    device = torch.device("cpu")
    images = tiny_arrays(3, 8, device)
    statistics = 4 * images.num_classes * 64 * 64  # bytes of the matrices
    for memory, fits in ((statistics, False), (2 * statistics, True)):
        monkeypatch.setattr(training_step, "host_memory", lambda memory=memory: memory)
        with contextlib.nullcontext() if fits else pytest.raises(InputError, match="do not fit"):
            Lane(RECIPE, 0, images, device)
