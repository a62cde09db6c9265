"""Time and memory of a training step with ISDA and with cross entropy (Table 1).

A network is trained on random images with the steps of the training loop; only the criterion
changes.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isda.experiments.cost_records import CASES, MeasuredCost
from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.errors import InputError, unknown
from isda.experiments.losses.baselines import create_criterion
from isda.experiments.networks import NETWORKS, own_image_size
from isda.experiments.recipes import RECIPES, get_recipe
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.device import choose_kernels
from isda.experiments.training.memory import (
    create_on,
    host_memory,
    is_out_of_memory,
    peak_host_memory,
)
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

__all__ = [
    "SHAPES",
    "image_shape",
    "isda_recipe",
    "measured_cost",
    "random_images",
    "usual_batch_size",
]

SHAPES: dict[str, tuple[int, tuple[int, int, int]]] = {
    "imagenet": (1000, (3, 224, 224)),
    "cifar100": (100, (3, 32, 32)),
    "cifar10": (10, (3, 32, 32)),
    "digits": (10, (1, 8, 8)),
}
"""Number of classes and image shape of every data set."""


def measured_cost(
    network: str,
    *,
    device: torch.device,
    num_classes: int | None = None,
    image_size: int | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    repeats: int = 5,
) -> list[MeasuredCost]:
    """Measure time and memory of a training step for each of ``CASES``.

    All cases share one network, which is compiled once, and differ only in the criterion. Their
    measurements are interleaved, so that a drift of the machine affects all of them equally. On a
    GPU the step is captured in a CUDA graph.

    Args:
        network: name of a network, or ``timm:NAME``.
        device: device to measure on. On a CPU the step uses float32.
        num_classes: number of classes; by default as in the network's data set in the paper.
        image_size: side of the images; by default as in that data set, or as for the timm model.
        batch_size: images per step; by default the recipe's, at most 256, and 8 on a CPU.
        steps: steps per measurement; by default 20, and 2 on a CPU.
        repeats: number of measurements of each case.
    """
    on_gpu = device.type == "cuda"
    recipe = isda_recipe(network)
    num_classes, shape = image_shape(recipe, num_classes, image_size)
    if batch_size is None:
        batch_size = usual_batch_size(network, device)
    if steps is None:
        steps = 20 if on_gpu else 2
    for name, value, least in (
        ("batch_size", batch_size, 2),  # batch norm needs two
        ("steps", steps, 1),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise InputError(f"{name} must be >= {least}, got {value}")
    recipe = replace(
        recipe,
        batch_size=batch_size,
        learning_rate=1e-6,  # keeps the weights about the same: random images have nothing to learn
        precision=recipe.precision if on_gpu else "fp32",
    )
    if on_gpu:
        torch.compiler.reset()  # earlier compilations count against the recompile limit
    with choose_kernels(Options(), device):
        data = random_images(
            steps * batch_size, num_classes=num_classes, shape=shape, device=device
        )
        times, peaks = _take_turns(partial(_Bench, recipe, data, device), repeats)
    return _summary(times, peaks, batch_size=batch_size, precision=recipe.precision)


def usual_batch_size(network: str, device: torch.device) -> int:
    """Default batch size: the recipe's, at most 256, and 8 on a CPU."""
    return min(isda_recipe(network).batch_size, 256 if device.type == "cuda" else 8)


def isda_recipe(network: str) -> Recipe:
    """ISDA recipe of a network; for timm models the recipe of ResNet-50."""
    if network.startswith("timm:"):
        return replace(get_recipe("imagenet-resnet50-isda"), network=network)
    for data in SHAPES:
        if f"{data}-{network}-isda" in RECIPES:
            return RECIPES[f"{data}-{network}-isda"]
    raise unknown("network", network, NETWORKS)


def image_shape(
    recipe: Recipe, num_classes: int | None, image_size: int | None
) -> tuple[int, tuple[int, int, int]]:
    """Number of classes and image shape; by default those of the recipe's data set.

    A timm model with a fixed image size overrides the size of the data set.
    """
    classes, (channels, side, _) = SHAPES[recipe.data]
    classes = classes if num_classes is None else num_classes
    side = (own_image_size(recipe.network) or side) if image_size is None else image_size
    if classes < 2:
        raise InputError(f"num_classes must be >= 2, got {classes}")
    if side < 1:
        raise InputError(f"image_size must be >= 1, got {side}")
    return classes, (channels, side, side)


def random_images(
    number: int,
    *,
    num_classes: int,
    shape: tuple[int, int, int],
    device: torch.device,
) -> ImageArrays:
    """Random images and targets: the speed does not depend on the content."""

    def draw(count: int, part: int) -> tuple[Tensor, Tensor]:
        key = counter_rng.key(part, device=device)
        images = torch.empty(count, *shape, dtype=torch.uint8, device=device)
        for start in range(0, count, 100):  # drawing takes eight times the memory of the images
            chunk = images[start : start + 100]
            chunk.copy_(counter_rng.bits(tuple(chunk.shape), counter_rng.fold(key, start)) & 255)
        return images, counter_rng.integers((count,), key, high=num_classes)

    train_images, train_target = draw(number, 0)
    test_images, test_target = draw(1, 1)
    return ImageArrays(
        name="random",
        train_images=train_images,
        train_target=train_target,
        test_images=test_images,
        test_target=test_target,
        mean=(0.5,) * shape[0],
        std=(0.25,) * shape[0],
        class_names=tuple(map(str, range(num_classes))),
    )


_NO_ROOM = "does not fit"
_T = TypeVar("_T")


class _Bench:
    """A network in training with one criterion, and captured steps, for each case.

    Args:
        recipe: ISDA recipe.
        data: images on the device.
        device: device to train on.
    """

    def __init__(self, recipe: Recipe, data: ImageArrays, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._on_gpu = device.type == "cuda"
        gc.collect()  # memory allocated from now on counts
        self._held = 0  # memory of the images
        if self._on_gpu:
            self._held = torch.cuda.memory_allocated(device)
        self._lane = Lane(recipe.baseline(), 0, data, device)
        self._lane.epoch = recipe.epochs // 2  # the strength is half of λ₀
        self._cases: dict[str, tuple[nn.Module, SideBySide]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        SideBySide([self._lane], capture=False).train_epoch()  # compile, select kernels

    def peak(self, case: str) -> int:
        """Peak memory of the tensors of a step, in bytes, without the images."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        with self._using(self._create_criterion(case)):
            if self._on_gpu:  # not captured, because a replay does not allocate
                SideBySide([self._lane], capture=False).train_epoch()
                return torch.cuda.max_memory_allocated(self._device) - self._held
            self._lane.begin_epoch()
            storages = [tensor.untyped_storage() for tensor in self._lane.tensors()]
            state = {storage.data_ptr(): storage.nbytes() for storage in storages}
            step = partial(self._lane.step, self._recipe.batch_size)
            return sum(state.values()) + peak_host_memory(step)

    def seconds(self, case: str) -> float:
        """Mean time of a step over an epoch."""
        if case not in self._cases:
            criterion = self._create_criterion(case)
            runner = SideBySide([self._lane], capture=self._on_gpu, pool=self._pool)
            with self._using(criterion):
                runner.train_epoch()  # capture; on a CPU, touch the memory of the statistics
            self._cases[case] = criterion, runner
        criterion, runner = self._cases[case]
        with self._using(criterion):
            self._synchronize()
            began = time.perf_counter()
            runner.train_epoch()
            self._synchronize()
            return (time.perf_counter() - began) / self._lane.images.steps_per_epoch

    @contextlib.contextmanager
    def _using(self, criterion: nn.Module) -> Iterator[None]:
        usual = self._lane.criterion
        self._lane.criterion = criterion
        try:
            yield
        finally:
            self._lane.criterion = usual
            self._lane.optimizer.zero_grad(set_to_none=True)

    def _create_criterion(self, case: str) -> nn.Module:
        changes: dict[str, Any] = {"covariance": case}
        recipe = self._recipe.baseline() if case == "ce" else replace(self._recipe, **changes)
        network = self._lane.network
        create = partial(
            create_criterion,
            recipe,
            num_features=network.num_features,
            num_classes=network.num_classes,
        )
        return create_on(self._device, create, limit=host_memory() / 2)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def _take_turns(
    create_bench: Callable[[], _Bench], repeats: int
) -> tuple[dict[str, list[float]], dict[str, int | None]]:
    """Seconds and peak bytes of the cases that fit in memory."""
    bench = _if_it_fits(create_bench)
    if bench is None:
        return {}, {}
    peaks = {case: _if_it_fits(partial(bench.peak, case)) for case in CASES}
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(repeats):
        for case in tuple(times):
            seconds = _if_it_fits(partial(bench.seconds, case))
            if seconds is None:
                del times[case]
            else:
                times[case].append(seconds)
    return times, peaks


def _summary(
    times: Mapping[str, Sequence[float]],
    peaks: Mapping[str, int | None],
    *,
    batch_size: int,
    precision: str,
) -> list[MeasuredCost]:
    """Medians, and the difference of each case to cross entropy."""
    rows = []
    for case in CASES:
        row = MeasuredCost(case, batch_size, precision)
        if case not in times or "ce" not in times:
            rows.append(replace(row, note=_NO_ROOM))
            continue
        median, baseline = statistics.median(times[case]), statistics.median(times["ce"])
        peak, least = peaks.get(case), peaks.get("ce")
        rows.append(
            replace(
                row,
                milliseconds=1000 * median,
                spread_percent=100 * max(abs(value / median - 1) for value in times[case]),
                added_percent=100 * (median / baseline - 1),
                mebibytes=None if peak is None else peak / 2**20,
                added_mebibytes=None if peak is None or least is None else (peak - least) / 2**20,
            )
        )
    return rows


def _if_it_fits(function: Callable[[], _T]) -> _T | None:
    """Result of a function, or None if it ran out of memory; then frees what it allocated."""
    try:
        return function()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # after the error is gone, which references the tensors
    return None
