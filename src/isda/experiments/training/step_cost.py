"""A training step on the bench: time and memory with ISDA against cross entropy (Table 1).

One network is trained on random images as the training loop does it; only the criterion changes.
"""

import contextlib
import gc
import math
import os
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
from isda.experiments.training.lane import Lane
from isda.experiments.training.loop import choose_kernels
from isda.experiments.training.memory import peak_host_memory
from isda.experiments.training.side_by_side import SideBySide

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
"""Number of classes and shape of the images of each data set."""


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
    """Time and memory of a training step for each of ``CASES``.

    All cases train one network, compiled once, and differ in the criterion alone. They take turns,
    so that a machine that grows slower slows all of them alike. A step is captured on a GPU.

    Args:
        network: name of a network, or ``timm:NAME``.
        device: where to measure. On a CPU the step is in float32.
        num_classes: C; by default that of the data the paper trains the network on.
        image_size: side of the images; by default likewise, for timm's models their own.
        batch_size: images per step; by default the recipe's, but at most 256, on a CPU 8.
        steps: steps in a measurement; by default 20, on a CPU 2.
        repeats: measurements of each case.
    """
    on_gpu = device.type == "cuda"
    recipe = isda_recipe(network)
    num_classes, shape = image_shape(recipe, num_classes, image_size)
    if batch_size is None:
        batch_size = usual_batch_size(network, device)
    if steps is None:
        steps = 20 if on_gpu else 2
    for name, value, least in (
        ("batch_size", batch_size, 2),  # batch normalisation needs two
        ("steps", steps, 1),
        ("repeats", repeats, 1),
    ):
        if value < least:
            raise InputError(f"{name} must be >= {least}, got {value}")
    recipe = replace(
        recipe,
        batch_size=batch_size,
        learning_rate=1e-6,  # noise teaches nothing: the weights stay about where they are
        precision=recipe.precision if on_gpu else "fp32",
    )
    if on_gpu:
        torch.compiler.reset()  # what was compiled before counts against a limit
    with choose_kernels(Options(), device):
        data = random_images(
            steps * batch_size, num_classes=num_classes, shape=shape, device=device
        )
        times, peaks = _take_turns(partial(_Bench, recipe, data, device), repeats)
    return _summary(times, peaks, batch_size=batch_size, precision=recipe.precision)


def usual_batch_size(network: str, device: torch.device) -> int:
    """The recipe's batch size, but at most 256, on a CPU 8."""
    return min(isda_recipe(network).batch_size, 256 if device.type == "cuda" else 8)


def isda_recipe(network: str) -> Recipe:
    """The paper's training of a network with ISDA; of timm's models, that of ResNet-50."""
    if network.startswith("timm:"):
        return replace(get_recipe("imagenet-resnet50-isda"), network=network)
    for data in SHAPES:
        if f"{data}-{network}-isda" in RECIPES:
            return RECIPES[f"{data}-{network}-isda"]
    raise unknown("network", network, NETWORKS)


def image_shape(
    recipe: Recipe, num_classes: int | None, image_size: int | None
) -> tuple[int, tuple[int, int, int]]:
    """Number of classes and shape of the images: those given, else those of the recipe's data.

    The size may also be that of the network, if it has one of its own.
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
    test_number: int = 1,
) -> ImageArrays:
    """Images and classes drawn at random: speed does not depend on what they show."""

    def draw(count: int, part: int) -> tuple[Tensor, Tensor]:
        key = counter_rng.key(part, device=device)
        images = torch.empty(count, *shape, dtype=torch.uint8, device=device)
        for start in range(0, count, 100):  # a draw takes eight times the memory of the image
            chunk = images[start : start + 100]
            chunk.copy_(counter_rng.bits(tuple(chunk.shape), counter_rng.fold(key, start)) & 255)
        return images, counter_rng.integers((count,), key, high=num_classes)

    train_images, train_target = draw(number, 0)
    test_images, test_target = draw(test_number, 1)
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
    """A network in training, with a criterion for each case, and the steps of each captured.

    Args:
        recipe: training with ISDA.
        data: images on the device.
        device: where to train.
    """

    def __init__(self, recipe: Recipe, data: ImageArrays, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._on_gpu = device.type == "cuda"
        gc.collect()  # what is held from now on is counted
        self._held = torch.cuda.memory_allocated(device) if self._on_gpu else 0  # by the images
        self._lane = Lane(recipe.baseline(), 0, data, device)
        self._lane.epoch = recipe.epochs // 2  # where the strength is half of λ₀
        self._cases: dict[str, tuple[nn.Module, SideBySide]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        SideBySide([self._lane], capture=False).train_epoch()  # compiles, chooses kernels

    def peak(self, case: str) -> int:
        """Most bytes that the tensors of a step hold at a time, the images left out."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        with self._using(self._create_criterion(case)):
            if self._on_gpu:  # a replay allocates nothing: not captured
                SideBySide([self._lane], capture=False).train_epoch()
                return torch.cuda.max_memory_allocated(self._device) - self._held
            self._lane.begin_epoch()
            storages = [tensor.untyped_storage() for tensor in self._lane.tensors()]
            state = {storage.data_ptr(): storage.nbytes() for storage in storages}
            step = partial(self._lane.step, self._recipe.batch_size)
            return sum(state.values()) + peak_host_memory(step)

    def seconds(self, case: str) -> float:
        """Time of a step, mean over an epoch."""
        if case not in self._cases:
            criterion = self._create_criterion(case)
            company = SideBySide([self._lane], capture=self._on_gpu, pool=self._pool)
            with self._using(criterion):
                company.train_epoch()  # captures; a CPU takes the memory that zeros have not yet
            self._cases[case] = criterion, company
        criterion, company = self._cases[case]
        with self._using(criterion):
            self._synchronize()
            began = time.perf_counter()
            company.train_epoch()
            self._synchronize()
            return (time.perf_counter() - began) / len(list(self._lane.batch_sizes()))

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
        if not self._on_gpu:  # a system may promise more memory than it has
            with torch.device("meta"):
                size = sum(buffer.nbytes for buffer in create().buffers())
            if size > _host_memory() / 2:
                raise MemoryError(f"{size} bytes of statistics")
        with self._device:
            return create()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def _take_turns(
    create_bench: Callable[[], _Bench], repeats: int
) -> tuple[dict[str, list[float]], dict[str, int | None]]:
    """Seconds and peak bytes of the cases that fit into memory."""
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
    """Medians, and what each case adds to cross entropy."""
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
    """Result of a function, or None, with all that it held let go, if it ran out of memory."""
    try:
        return function()
    except Exception as error:
        if not _out_of_memory(error):
            raise
    gc.collect()  # not before the error is gone, which holds the function's tensors
    return None


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed, as where a capture broke off, is of memory."""
    if error is None:
        return False
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "DefaultCPUAllocator" in str(error)
        or _out_of_memory(error.__context__)
    )


def _host_memory() -> float:
    """Bytes of memory of this machine, infinite if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf
