"""What ISDA adds to the cost of a training step (Table 1): in theory, in time and in memory.

The theoretical cost is the paper's: 5·C·A, for the variances of a class and the margins of C
logits over A features, in percent of the multiply-adds of the network's forward pass. Time and
memory are measured on random images in the step of the training loop, ISDA with diagonal and with
full covariances against cross entropy.
"""

import contextlib
import csv
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from isda.experiments import draws
from isda.experiments.baselines import create_criterion
from isda.experiments.data import ImageArrays
from isda.experiments.errors import InputError, unknown
from isda.experiments.networks import NETWORKS, create_network
from isda.experiments.published import COST, Cost
from isda.experiments.recipes import RECIPES, Recipe, get_recipe
from isda.experiments.report import _text_table
from isda.experiments.runs import environment
from isda.experiments.step import Company, Lane
from isda.experiments.train import Options, _kernels, _processes

__all__ = [
    "CASES",
    "SHAPES",
    "MeasuredCost",
    "TheoreticalCost",
    "cost_table",
    "flops_per_image",
    "main",
    "measured_cost",
    "random_images",
    "theoretical_cost",
    "write_costs",
]

SHAPES: dict[str, tuple[int, tuple[int, int, int]]] = {
    "imagenet": (1000, (3, 224, 224)),
    "cifar100": (100, (3, 32, 32)),
    "cifar10": (10, (3, 32, 32)),
    "digits": (10, (1, 8, 8)),
}
"""Number of classes and shape of the images of each data set."""

CASES = ("ce", "diagonal", "full")
"""What is measured: cross entropy, and ISDA with each structure of the covariance."""

_NO_ROOM = "does not fit"
_T = TypeVar("_T")


@dataclass(frozen=True)
class TheoreticalCost:
    """Size of a network, and ISDA's share in its arithmetic."""

    network: str
    num_classes: int
    image_size: int
    num_features: int
    parameters: int
    multiply_adds: int  # of the forward pass of one image
    theoretical_percent: float

    @property
    def paper(self) -> Cost | None:
        """The paper's numbers, which are for 1000 classes and images of 224×224."""
        usual = (self.num_classes, self.image_size) == (1000, 224)
        return COST.get(self.network) if usual else None


@dataclass(frozen=True)
class MeasuredCost:
    """Time and memory of a training step, one of ``CASES``; None where nothing was measured."""

    case: str
    batch_size: int
    precision: str
    milliseconds: float | None = None  # of a step, median of the repeats
    spread_percent: float | None = None  # largest distance of a repeat from the median
    added_percent: float | None = None  # time in addition to that of cross entropy
    mebibytes: float | None = None  # peak on the GPU, without the images
    added_mebibytes: float | None = None
    note: str = ""  # why there are no numbers


def theoretical_cost(
    network: str, *, num_classes: int | None = None, image_size: int | None = None
) -> TheoreticalCost:
    """Parameters, multiply-adds and the theoretical cost of ISDA, without any computation.

    Args:
        network: name of a network, or ``timm:NAME``.
        num_classes: C; by default that of the data the paper trains the network on.
        image_size: side of the images; by default likewise.

    Example:
        >>> cost = theoretical_cost("resnet50")
        >>> f"{cost.multiply_adds / 1e9:.1f} G, {cost.theoretical_percent:.2f} %"
        '4.1 G, 0.25 %'
    """
    num_classes, shape = _shape(_recipe(network), num_classes, image_size)
    with torch.device("meta"):
        model = create_network(network, num_classes=num_classes, in_channels=shape[0])
    try:
        multiply_adds = flops_per_image(model, shape, backward=False) // 2
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{network} does not take images of size {shape[-1]}: {reason}") from error
    return TheoreticalCost(
        network,
        num_classes,
        shape[-1],
        model.num_features,
        sum(parameter.numel() for parameter in model.parameters()),
        multiply_adds,
        100 * 5 * num_classes * model.num_features / multiply_adds,
    )


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
        device: where to measure. On a CPU the step is in float32, and its memory is not measured.
        num_classes: C; by default that of the data the paper trains the network on.
        image_size: side of the images; by default likewise.
        batch_size: images per step; by default the recipe's, but at most 256, on a CPU 8.
        steps: steps in a measurement; by default 20, on a CPU 2.
        repeats: measurements of each case.
    """
    on_gpu = device.type == "cuda"
    recipe = _recipe(network)
    num_classes, shape = _shape(recipe, num_classes, image_size)
    if batch_size is None:
        batch_size = min(recipe.batch_size, 256 if on_gpu else 8)
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
    with _kernels(Options(), device):
        data = random_images(
            steps * batch_size, num_classes=num_classes, shape=shape, device=device
        )
        times, peaks = _take_turns(partial(_Bench, recipe, data, device), repeats)
    return _summary(times, peaks, batch_size=batch_size, precision=recipe.precision)


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
        key = draws.key(part, device=device)
        images = torch.empty(count, *shape, dtype=torch.uint8, device=device)
        for start in range(0, count, 100):  # a draw takes eight times the memory of the image
            chunk = images[start : start + 100]
            chunk.copy_(draws.bits(tuple(chunk.shape), draws.fold(key, start)) & 255)
        return images, draws.integers((count,), key, high=num_classes)

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


def flops_per_image(
    network: nn.Module, shape: tuple[int, int, int], *, backward: bool = True
) -> int:
    """Floating-point operations of the forward pass of one image, and of the backward pass.

    A multiply-add is two of them. Only shapes matter: a network on the device meta will do.
    """
    device = next(network.parameters()).device
    images = torch.empty(2, *shape, device=device)  # batch normalisation needs two
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = network(images)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() // len(images)


def cost_table(
    theory: Sequence[TheoreticalCost], measured: Mapping[str, Sequence[MeasuredCost]]
) -> str:
    """Costs as text, the paper's beside ours.

    Args:
        theory: one for each line.
        measured: of some or all of these networks, by name.
    """
    header = ["network", "params M", "mult-adds G", "A", "theory %", "paper %"]
    if measured:
        header += ["CE ms", "+diagonal %", "paper +%", "+full %"]
        header += ["CE MiB", "+diagonal MiB", "+full MiB"]
    rows = []
    for cost in theory:
        row = [cost.network, f"{cost.parameters / 1e6:.1f}", f"{cost.multiply_adds / 1e9:.2f}"]
        row += [str(cost.num_features), f"{cost.theoretical_percent:.2f}"]
        row.append("–" if cost.paper is None else f"{cost.paper.theoretical:.2f}")
        if cost.network in measured:
            ce, diagonal, full = measured[cost.network]
            row += [_cell(ce, ce.milliseconds, ".1f"), _cell(diagonal, diagonal.added_percent)]
            row.append("–" if cost.paper is None else f"{cost.paper.wall:+.1f}")
            row.append(_cell(full, full.added_percent))
            row.append(_cell(ce, ce.mebibytes, ".0f"))
            row += [_cell(case, case.added_mebibytes, "+.0f") for case in (diagonal, full)]
        rows.append(row)
    return "\n".join([_text_table(header, rows), *_notes(theory, measured)])


def write_costs(
    path: Path,
    theory: Sequence[TheoreticalCost],
    measured: Mapping[str, Sequence[MeasuredCost]],
    device: torch.device,
) -> None:
    """Write costs as CSV: a line for each network and case, or for each network in theory alone."""
    paper = ("paper_theoretical_percent", "paper_wall_percent")
    where = environment(device)
    names = [field.name for kind in (TheoreticalCost, MeasuredCost) for field in fields(kind)]
    names[names.index("case") : names.index("case")] = paper
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*names, *where])
            writer.writeheader()
            for cost in theory:
                printed = (cost.paper.theoretical, cost.paper.wall) if cost.paper else (None, None)
                line = asdict(cost) | dict(zip(paper, printed, strict=True)) | where
                for case in map(asdict, measured.get(cost.network, ())):
                    writer.writerow(line | case)
                if cost.network not in measured:
                    writer.writerow(line)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Arguments:
    networks: tuple[str, ...] = tuple(COST)
    """Networks by name, or timm:NAME."""

    measure: bool = True
    """Measure time and memory here, beside the theory."""

    num_classes: int | None = None
    """Number of classes (default: 1000; 100 for the CIFAR networks)."""

    image_size: int | None = None
    """Side of the images (default: 224; 32 for the CIFAR networks)."""

    batch_size: int | None = None
    """Images per step (default: 256, for the CIFAR networks their recipe's; on a CPU 8)."""

    steps: int | None = None
    """Steps in a measurement (default: 20; on a CPU 2)."""

    repeats: int = 5
    """Measurements of cross entropy, diagonal and full, in turns; their medians count."""

    device: str = "auto"
    """Where to measure: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    out: Path | None = None
    """CSV file to write the numbers to."""


def main(arguments: list[str]) -> None:
    """Show what ISDA adds to the cost of training, in theory and measured here."""
    given = tyro.cli(_Arguments, args=arguments, prog="isda cost", description=main.__doc__)
    if not given.networks:
        raise InputError("networks must name at least one network")
    size = {"num_classes": given.num_classes, "image_size": given.image_size}
    with _processes(given.device) as (device, _, world):
        if world > 1:
            raise InputError("isda cost measures one process: start it without torchrun")
        theory = [theoretical_cost(network, **size) for network in dict.fromkeys(given.networks)]
        measured: dict[str, list[MeasuredCost]] = {}
        if given.out is not None:
            write_costs(given.out, theory, measured, device)  # what cannot be written fails now
        for cost in tqdm(theory if given.measure else (), unit="network", disable=None):
            measured[cost.network] = measured_cost(
                cost.network,
                device=device,
                batch_size=given.batch_size,
                steps=given.steps,
                repeats=given.repeats,
                **size,
            )
            if given.out is not None:
                write_costs(given.out, theory, measured, device)
        if measured:
            print(f"Measured on {environment(device)['device']}, torch {torch.__version__}.\n")
        print(cost_table(theory, measured))


class _Bench:
    """A network in training, whose criterion is exchanged for each measurement.

    Args:
        recipe: training with ISDA.
        data: images on the device.
        device: where to train.
    """

    def __init__(self, recipe: Recipe, data: ImageArrays, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._on_gpu = device.type == "cuda"
        self._held = torch.cuda.memory_allocated(device) if self._on_gpu else 0  # by the images
        self._lane = Lane(recipe.baseline(), 0, data, device)
        self._lane.epoch = recipe.epochs // 2  # where the strength is half of λ₀
        self._company(capture=False).train_epoch()  # compiles, chooses kernels

    def peak(self, case: str) -> int | None:
        """Most bytes that a step holds on a GPU at a time, the images left out."""
        if not self._on_gpu:
            return None
        torch.cuda.reset_peak_memory_stats(self._device)
        with self._criterion(case):  # not captured: the replay of a step allocates nothing
            self._company(capture=False).train_epoch()
        return torch.cuda.max_memory_allocated(self._device) - self._held

    def seconds(self, case: str) -> float:
        """Time of a step, mean over an epoch."""
        with self._criterion(case):
            company = self._company(capture=self._on_gpu)
            company.train_epoch()  # captures; on a CPU, takes the memory that zeros have not yet
            self._synchronize()
            began = time.perf_counter()
            company.train_epoch()
            self._synchronize()
            return (time.perf_counter() - began) / len(list(self._lane.batch_sizes()))

    def _company(self, *, capture: bool) -> Company:
        return Company([self._lane], capture=capture)

    @contextlib.contextmanager
    def _criterion(self, case: str) -> Iterator[None]:
        usual = self._lane.criterion
        self._lane.criterion = self._create_criterion(case)
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
    medians = {case: statistics.median(values) for case, values in times.items()}
    sizes = {case: peak / 2**20 for case, peak in peaks.items() if peak is not None}
    rows = []
    for case in CASES:
        row = MeasuredCost(case, batch_size, precision)
        if case not in medians:
            rows.append(replace(row, note=_NO_ROOM))
            continue
        median, size = medians[case], sizes.get(case)
        rows.append(
            replace(
                row,
                milliseconds=1000 * median,
                spread_percent=100 * max(abs(value / median - 1) for value in times[case]),
                added_percent=100 * (median / medians["ce"] - 1),
                mebibytes=size,
                added_mebibytes=None if size is None else size - sizes["ce"],
            )
        )
    return rows


def _if_it_fits(function: Callable[[], _T]) -> _T | None:
    """Result of a function, or None if it ran out of memory; leaves no garbage behind."""
    try:
        return function()
    except Exception as error:
        if not _out_of_memory(error):
            raise
        return None
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


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


def _recipe(network: str) -> Recipe:
    """The paper's training of a network with ISDA; of timm's models, that of ResNet-50."""
    if network.startswith("timm:"):
        return replace(get_recipe("imagenet-resnet50-isda"), network=network)
    for data in SHAPES:
        if f"{data}-{network}-isda" in RECIPES:
            return RECIPES[f"{data}-{network}-isda"]
    raise unknown("network", network, NETWORKS)


def _shape(
    recipe: Recipe, num_classes: int | None, image_size: int | None
) -> tuple[int, tuple[int, int, int]]:
    """Number of classes and shape of the images: those given, else those of the recipe's data."""
    classes, (channels, side, _) = SHAPES[recipe.data]
    classes = classes if num_classes is None else num_classes
    side = side if image_size is None else image_size
    if classes < 2:
        raise InputError(f"num_classes must be >= 2, got {classes}")
    if side < 1:
        raise InputError(f"image_size must be >= 1, got {side}")
    return classes, (channels, side, side)


def _cell(row: MeasuredCost, value: float | None, digits: str = "+.1f") -> str:
    return row.note or ("–" if value is None else format(value, digits))


def _notes(
    theory: Iterable[TheoreticalCost], measured: Mapping[str, Sequence[MeasuredCost]]
) -> Iterator[str]:
    others = [
        cost.network
        for cost in theory
        if cost.paper is not None
        and f"{cost.theoretical_percent:.2f}" != f"{cost.paper.theoretical:.2f}"
    ]
    yield "\ntheory: 5·C·A in percent of the multiply-adds of the forward pass"
    if others:
        yield f"{', '.join(others)}: the paper prints another number than this formula gives"
    rows = [row for cases in measured.values() for row in cases]
    if rows:
        sizes = ", ".join(dict.fromkeys(f"{row.batch_size} ({row.precision})" for row in rows))
        yield f"ms, MiB: of a training step, batch size {sizes}; +: added to cross entropy (CE)"
    spreads = [row.spread_percent for row in rows if row.spread_percent is not None]
    if spreads:
        yield f"single repeats are up to {max(spreads):.1f} % away from the medians shown"
