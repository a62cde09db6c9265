"""The one loop: runs of recipes, side by side where they fit, exact to resume.

Killed at any moment, a run goes on from its last checkpoint and ends with the numbers of the
uninterrupted run: every random number is a function of the seed and the step, a checkpoint holds
all that a step changes, and the metrics behind it are cut off.
"""

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from isda import ISDALoss, distributed
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError, RunError
from isda.experiments.records import summary
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.lane import Lane
from isda.experiments.training.run_folder import RunFolder, require_free
from isda.experiments.training.side_by_side import SideBySide

__all__ = ["Plan", "choose_kernels", "join_processes", "load_images", "train"]


@dataclass(frozen=True)
class Plan:
    """One run to do: a recipe under a name, with a seed."""

    name: str
    recipe: Recipe
    seed: int


def train(plans: Sequence[Plan], options: Options | None = None) -> list[RunFolder]:
    """Train every plan and return the runs in the order of the plans.

    Under ``torchrun`` all processes train each run together; rank 0 writes.
    """
    options = options or Options()
    if options.tensorboard:
        _summary_writer()
    begun, runs = False, dict[int, RunFolder]()
    with (
        join_processes(options.device) as (device, rank, world),
        choose_kernels(options, device),
        contextlib.ExitStack() as held,
    ):
        for group, data in _groups(plans, options, device):
            lanes = [
                Lane(plans[n].recipe, plans[n].seed, data, device, rank=rank, world=world)
                for n in group
            ]
            if not begun:
                with _together():
                    runs = _begin(plans, lanes[0], options, held) if rank == 0 else {}
                begun = True
            for lane, number in zip(lanes, group, strict=True):
                _restore(lane, runs.get(number))
            _train_together(lanes, [runs.get(number) for number in group], options)
    return [runs[number] for number in sorted(runs)]


def _begin(
    plans: Sequence[Plan], lane: Lane, options: Options, held: contextlib.ExitStack
) -> dict[int, RunFolder]:
    """Runs of the plans, held for this process; a mistake leaves no folders behind."""
    lane.require_fit()
    if not options.resume:
        require_free(options.out / plan.name / str(plan.seed) for plan in plans)
    runs = {
        number: RunFolder.create(
            options.out,
            plan.name,
            plan.recipe,
            plan.seed,
            device=lane.device,
            resume=options.resume,
        )
        for number, plan in enumerate(plans)
    }
    for run in runs.values():
        held.enter_context(run.lock())
    return runs


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Let a mistake that one process finds end all of them, which else would wait for it."""
    mistake = None
    try:
        yield
    except InputError as error:
        mistake = error
    _, found = distributed.agree(0, mistake is not None, None)
    if mistake is not None:
        raise mistake
    if found:
        raise InputError("another process of this training has stopped: see its message")


def load_images(recipe: Recipe, options: Options) -> ImageArrays | FolderImages:
    """Data of a recipe, in memory or on disk; what it holds out is the test part."""
    data = load_data(
        recipe.data,
        root=options.data_root,
        download=options.download,
        skip_unreadable=options.skip_unreadable,
        image_size=recipe.image_size,
        workers=options.workers,
    )
    return data.hold_out(recipe.hold_out) if recipe.hold_out else data


def _train_together(lanes: list[Lane], runs: Sequence[RunFolder | None], options: Options) -> None:
    """Train lanes to their last epoch; those that lag behind after a kill catch up first."""
    by_lane = dict(zip(map(id, lanes), runs, strict=True))
    while unfinished := [lane for lane in lanes if lane.epoch < lane.recipe.epochs]:
        first = min(lane.epoch for lane in unfinished)
        together = [lane for lane in unfinished if lane.epoch == first]
        until = min(lane.epoch if lane.epoch > first else lane.recipe.epochs for lane in unfinished)
        _train_company(together, [by_lane[id(lane)] for lane in together], until, options)


def _train_company(
    lanes: list[Lane], runs: Sequence[RunFolder | None], until: int, options: Options
) -> None:
    on_gpu = lanes[0].device.type == "cuda"
    company = SideBySide(lanes, capture=options.capture and on_gpu and lanes[0].world == 1)
    writers = [_writer(run, options, lanes[0].epoch) for run in runs]
    saved = time.monotonic()
    for epoch in _progress(lanes, until, show=runs[0] is not None):
        began = time.perf_counter()
        try:
            company.train_epoch()
        except InputError:
            raise
        except ValueError as error:  # on a CPU, where runs train alone, bad features raise at once
            raise _stopped(lanes[0], runs[0], str(error)) from error
        results = company.evaluate()
        seconds = (time.perf_counter() - began) / len(lanes)
        for lane, run, result in zip(lanes, runs, results, strict=True):
            _require_finite(lane, run, result)
            lane.epoch = epoch + 1
        last = epoch + 1 == until
        save = last or time.monotonic() - saved > options.checkpoint_seconds
        for lane, run, result, writer in zip(lanes, runs, results, writers, strict=True):
            metrics = _metrics(lane, epoch, result, seconds, len(lanes))
            state = lane.state_dict() if save else None
            if run is not None:
                run.append(metrics)
                if state is not None:
                    run.save(state)
            if writer is not None:
                for key, value in metrics.items():
                    writer.add_scalar(key, value, epoch)
        if save:
            saved = time.monotonic()
    for writer in writers:
        if writer is not None:
            writer.close()


def _metrics(
    lane: Lane, epoch: int, result: list[float], seconds: float, side_by_side: int
) -> dict[str, Any]:
    recipe = lane.recipe
    loss, error, test_loss, calibration, top5_error = result
    return {
        "epoch": epoch,
        "learning_rate": recipe.learning_rate_at(epoch),
        "strength": recipe.lambda_0 * recipe.progress_at(epoch),
        "train_loss": loss,
        "test_error": error,
        "test_loss": test_loss,
        "test_ece": calibration,
        "test_top5_error": top5_error,
        "seconds": seconds,  # the run's share of the time of all side by side
        "images_per_second": lane.num_images / seconds,
        "side_by_side": side_by_side,
    }


def _require_finite(lane: Lane, run: RunFolder | None, result: list[float]) -> None:
    """End a run whose losses are not numbers; nothing of this epoch has been written yet."""
    try:
        if isinstance(lane.criterion, ISDALoss):
            lane.criterion.check()
    except ValueError as error:
        raise _stopped(lane, run, str(error)) from error
    train_loss, _, test_loss, *_ = result
    for name, loss in (("training", train_loss), ("test", test_loss)):
        if not math.isfinite(loss):
            raise _stopped(lane, run, f"the {name} loss is {loss}")


def _stopped(lane: Lane, run: RunFolder | None, reason: str) -> RunError:
    where = f"seed {lane.seed}" if run is None else str(run.folder)
    rate = lane.recipe.learning_rate_at(lane.epoch)
    saved = "the last checkpoint is as it was" if lane.epoch else "nothing was saved"
    return RunError(
        f"{where}, epoch {lane.epoch + 1}: {reason} (learning rate {rate:g}, lambda_0 "
        f"{lane.recipe.lambda_0:g}); {saved}"
    )


def _restore(lane: Lane, run: RunFolder | None) -> None:
    """Bring a lane to the run's last checkpoint, on every rank."""
    if run is not None:
        if run.load(lane.load_state_dict) is None:
            done = summary(run)
            if done.finished:  # a record that was kept without its checkpoint
                lane.epoch = lane.recipe.epochs
            elif done.epochs:
                warnings.warn(f"{run.folder} has no checkpoint: it begins anew", stacklevel=2)
        run.rewind(lane.epoch)
    if lane.world > 1:
        epoch = torch.tensor(lane.epoch, device=lane.device)
        distributed.broadcast([epoch, *lane.tensors()])
        lane.epoch = int(epoch)


def _groups(
    plans: Sequence[Plan], options: Options, device: torch.device
) -> Iterator[tuple[list[int], ImageArrays | FolderImages]]:
    """Numbers of the plans that train side by side, with their data; one data set at a time."""
    waiting = list(range(len(plans)))
    while waiting:
        first = plans[waiting[0]].recipe
        data = load_images(first, options)
        if isinstance(data, ImageArrays):
            data = data.to(device)
        same = [n for n in waiting if _same_steps(plans[n].recipe, first)]
        waiting = [n for n in waiting if n not in same]
        width = _side_by_side(first, data, options, device)
        for start in range(0, len(same), width):
            yield same[start : start + width], data


def _same_steps(one: Recipe, other: Recipe) -> bool:
    fields = ("data", "hold_out", "image_size", "epochs", "batch_size", "network")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _side_by_side(
    recipe: Recipe, data: ImageArrays | FolderImages, options: Options, device: torch.device
) -> int:
    if (
        device.type == "cpu"
        or not isinstance(data, ImageArrays)
        or distributed.world_size(None) > 1
    ):
        return 1
    if options.side_by_side:
        return options.side_by_side
    with torch.device("meta"):
        network = Lane.create_network(recipe, data, seed=0)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return max(1, min(6, 36_000_000 // parameters))


@contextlib.contextmanager
def join_processes(name: str) -> Iterator[tuple[torch.device, int, int]]:
    """Device, rank and world of this process; joins the group that torchrun started."""
    ranked = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local = int(os.environ.get("LOCAL_RANK", 0)) if ranked else 0
        index = local if device.index is None else device.index
        if index >= count:
            raise InputError(f"no GPU {index} here: {count} found; --device cpu trains without one")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if not ranked:
        yield device, 0, 1
        return
    if dist.is_initialized():  # by a caller that trains more than once
        yield device, dist.get_rank(), dist.get_world_size()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield device, dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def choose_kernels(options: Options, device: torch.device) -> Iterator[None]:
    """Fast kernels or deterministic ones, for the time of the training."""
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(options.deterministic and device.type == "cuda")
    torch.backends.cudnn.benchmark = not options.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def _progress(lanes: list[Lane], until: int, *, show: bool) -> Iterator[int]:
    """Epochs to train, with a bar that tells the time left; in a log, a line now and then."""
    first = lanes[0].epoch
    seeds = " ".join(str(lane.seed) for lane in lanes)
    label = f"{lanes[0].recipe.data} {lanes[0].recipe.network}, seed {seeds}"
    interactive = sys.stderr.isatty()
    bar = tqdm(
        range(first, until),
        initial=first,
        total=until,
        desc=label,
        unit="epoch",
        disable=not show,
        mininterval=0.5 if interactive else 30,
        dynamic_ncols=interactive,
    )
    yield from bar


def _writer(run: RunFolder | None, options: Options, epoch: int) -> Any:
    """What writes for TensorBoard, or None; epochs behind a checkpoint are shown once."""
    if run is None or not options.tensorboard:
        return None
    return _summary_writer()(str(run.folder), purge_step=epoch)


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "--tensorboard needs the package tensorboard: pip install -e '.[tensorboard]'"
        ) from error
    return SummaryWriter
