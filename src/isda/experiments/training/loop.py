"""The training loop: one or more runs side by side, with exact resume.

A run that was killed resumes from its last checkpoint and ends with the same numbers as an
uninterrupted one: every random number is a function of seed and step, a checkpoint holds everything
that a step changes, and later metrics are truncated.
"""

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from isda import ISDALoss, distributed
from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.errors import InputError, RunError, as_input_error
from isda.experiments.records import summary
from isda.experiments.settings import Options
from isda.experiments.training.deadline import Deadline, time_up
from isda.experiments.training.device import choose_kernels, join_processes, keep_compiled_code
from isda.experiments.training.groups import Plan, groups, own_images, same_steps
from isda.experiments.training.lane import Lane
from isda.experiments.training.memory import out_of_memory
from isda.experiments.training.parallel import train_in_processes
from isda.experiments.training.run_folder import RunFolder, locked, require_free
from isda.experiments.training.side_by_side import SideBySide

__all__ = ["Plan", "train"]


def train(
    plans: Sequence[Plan], options: Options | None = None, *, progress: bool = True
) -> list[RunFolder]:
    """Train all plans and return their runs in the same order.

    Under ``torchrun`` all processes train every run together; only rank 0 writes and returns runs.

    Args:
        plans: runs to train.
        options: how to run the training.
        progress: show a progress bar.

    Raises:
        TimeUp: the time limit of the options ended before the runs; their checkpoints are written.
    """
    options = options or Options()
    if options.tensorboard:
        _summary_writer()
    deadline = Deadline(options)
    begun = False
    with (
        join_processes(options.device) as (device, rank, world),
        choose_kernels(options, device),
        keep_compiled_code(options.compile_cache),
        contextlib.ExitStack() as locks,
    ):
        if options.processes > 1 and device.type == "cpu" and world == 1 and len(plans) > 1:
            return train_in_processes(plans, options)
        finished = _finished(plans, options) if options.resume and world == 1 else {}
        runs = dict(finished)
        waiting = [number for number in range(len(plans)) if number not in finished]
        for group, data in groups(plans, waiting, options, device):
            lanes = [
                Lane(
                    plans[n].recipe,
                    plans[n].seed,
                    own_images(data, plans[n]),
                    device,
                    rank=rank,
                    world=world,
                )
                for n in group
            ]
            if not begun:
                with _together():
                    if rank == 0:
                        runs |= _begin(plans, waiting, lanes[0], options, locks)
                begun = True
            for lane, number in zip(lanes, group, strict=True):
                _restore(lane, runs.get(number))
            if deadline.is_up(_epoch_seconds(plans, group, runs)) and _unfinished(lanes):
                raise time_up(runs.values(), options)
            grouped = [runs.get(n) for n in group]
            if not _train_together(lanes, grouped, options, deadline, progress=progress):
                raise time_up(runs.values(), options)
    return [runs[number] for number in sorted(runs)]


def _finished(plans: Sequence[Plan], options: Options) -> dict[int, RunFolder]:
    """Finished runs, which need neither data nor a network; without those that look damaged."""
    found = {}
    for number, plan in enumerate(plans):
        if plan.recipe.data.startswith("imagefolder:"):
            continue  # the images may have changed
        folder = options.out / plan.name / str(plan.seed)
        with contextlib.suppress(InputError, OSError):  # reported when the run is resumed
            run = RunFolder(folder)
            if run.recipe != plan.recipe or not summary(run).finished:
                continue
            state = run.load(lambda state: state["epoch"])  # an exported record has none
            if state is None or state["epoch"] == plan.recipe.epochs:
                found[number] = run
    return found


def _begin(
    plans: Sequence[Plan],
    waiting: Sequence[int],
    lane: Lane,
    options: Options,
    locks: contextlib.ExitStack,
) -> dict[int, RunFolder]:
    """Create and lock the run folders; an input error leaves no folders behind."""
    _require_fit(lane)
    if not options.resume:
        require_free(options.out / plan.name / str(plan.seed) for plan in plans)
    for number in waiting:
        locks.enter_context(locked(options.out, plans[number].name, plans[number].seed))
    return {
        number: RunFolder.create(
            options.out,
            plans[number].name,
            plans[number].recipe,
            plans[number].seed,
            device=lane.device,
            resume=options.resume,
        )
        for number in waiting
    }


def _require_fit(lane: Lane) -> None:
    """Raise InputError if the network cannot take the images; changes nothing."""
    recipe, device = lane.recipe, lane.device
    shape = lane.data.image_shape
    images = torch.linspace(-1, 1, 2 * shape.numel(), device=device).view(2, *shape)
    lane.network.eval()
    with torch.no_grad():
        with as_input_error(f"{recipe.network} does not accept {shape[1]} x {shape[2]} images"):
            logits = lane.network(images)
        lane.network.check(images, logits)
    lane.network.train()
    if (lane.num_images - 1) % recipe.batch_size:
        return
    with (
        as_input_error(
            f"{recipe.network} cannot train on the last batch, a single image of "
            f"{lane.num_images}: choose a batch_size other than {recipe.batch_size}"
        ),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
    ):
        network = lane.create_network(recipe, lane.data, lane.seed)
        network.to(device).train()(images[:1])


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Stop all processes if one of them raises an InputError, which would leave others waiting."""
    failure = None
    try:
        yield
    except InputError as error:
        failure = error
    _, found = distributed.agree(0, failure is not None, None)
    if failure is not None:
        raise failure
    if found:
        raise InputError("another process has stopped: see its message")


def _unfinished(lanes: Sequence[Lane]) -> list[Lane]:
    return [lane for lane in lanes if lane.epoch < lane.recipe.epochs]


def _epoch_seconds(plans: Sequence[Plan], group: list[int], runs: dict[int, RunFolder]) -> float:
    """Time of an epoch of a group, by the last epoch of equal runs; 0 if there is none."""
    first = plans[group[0]].recipe
    equal = [run for n, run in runs.items() if same_steps(plans[n].recipe, first)]
    last = [run.metrics()[-1].get("seconds", 0.0) for run in equal if run.metrics()]
    return max(last, default=0.0) * len(group)


def _train_together(
    lanes: list[Lane],
    runs: Sequence[RunFolder | None],
    options: Options,
    deadline: Deadline,
    *,
    progress: bool,
) -> bool:
    """Train lanes to their last epoch; after a kill, lanes that are behind catch up first.

    Returns False if the time limit ended the training before.
    """
    by_lane = dict(zip(map(id, lanes), runs, strict=True))
    while unfinished := _unfinished(lanes):
        first = min(lane.epoch for lane in unfinished)
        together = [lane for lane in unfinished if lane.epoch == first]
        until = min(lane.epoch if lane.epoch > first else lane.recipe.epochs for lane in unfinished)
        with_runs = [by_lane[id(lane)] for lane in together]
        if _train_side_by_side(together, with_runs, until, options, deadline, progress=progress):
            return not _unfinished(lanes)
    return True


def _train_side_by_side(
    lanes: list[Lane],
    runs: Sequence[RunFolder | None],
    until: int,
    options: Options,
    deadline: Deadline,
    *,
    progress: bool,
) -> bool:
    """Train lanes until an epoch; returns whether the time limit is reached."""
    on_gpu = lanes[0].device.type == "cuda"
    runner = SideBySide(lanes, capture=options.capture and on_gpu and lanes[0].world == 1)
    writers = [_writer(run, options, lanes[0].epoch) for run in runs]
    saved, stopped = time.monotonic(), False
    for epoch in _progress(lanes, until, show=progress and runs[0] is not None):
        began = time.perf_counter()
        try:
            runner.train_epoch()
        except InputError:
            raise
        except ValueError as error:  # a CPU, where lanes train alone, raises at once
            raise _stopped(lanes[0], runs[0], str(error)) from error
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            advice = "out of memory: use a smaller --batch-size or --side-by-side"
            raise _stopped(lanes[0], runs[0], advice) from error
        results = runner.evaluate()
        seconds = (time.perf_counter() - began) / len(lanes)
        for lane, run, result in zip(lanes, runs, results, strict=True):
            _require_finite(lane, run, result)
            lane.epoch = epoch + 1
        stopped = deadline.is_up(time.perf_counter() - began)
        last = stopped or epoch + 1 == until
        save = last or time.monotonic() - saved > options.checkpoint_seconds
        for lane, run, result, writer in zip(lanes, runs, results, writers, strict=True):
            metrics = _metrics(lane, epoch, result, seconds, len(lanes))
            state = lane.state_dict() if save else None
            if run is not None:
                run.append(metrics)
                if state is not None:
                    run.save(state, last=last)
            if writer is not None:
                for key, value in metrics.items():
                    writer.add_scalar(key, value, epoch)
        if save:
            saved = time.monotonic()
        if stopped and epoch + 1 < until:
            break
    for writer in writers:
        if writer is not None:
            writer.close()
    return stopped


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
        "seconds": seconds,  # share of this run in the time of all runs side by side
        "images_per_second": lane.num_images / seconds,
        "side_by_side": side_by_side,
    }


def _require_finite(lane: Lane, run: RunFolder | None, result: list[float]) -> None:
    """Stop a run with a non-finite loss, before anything of this epoch is written."""
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
    saved = ""
    if run is not None:
        intact = run.has_checkpoint()
        saved = "; the last checkpoint is intact" if intact else "; there is no checkpoint"
    return RunError(
        f"{where}, epoch {lane.epoch + 1}: {reason} (learning rate {rate:g}, lambda_0 "
        f"{lane.recipe.lambda_0:g}){saved}"
    )


def _restore(lane: Lane, run: RunFolder | None) -> None:
    """Restore the last checkpoint of a run on every rank."""
    if run is not None:
        if run.load(lane.load_state_dict) is None:
            done = summary(run)
            if done.finished:  # an exported record has no checkpoint
                lane.epoch = lane.recipe.epochs
            elif done.epochs:
                warnings.warn(f"{run.folder} has no checkpoint: the run starts again", stacklevel=2)
        run.rewind(lane.epoch)
    if lane.world > 1:
        epoch = torch.tensor(lane.epoch, device=lane.device)
        distributed.broadcast([epoch, *lane.tensors()])
        lane.epoch = int(epoch)


def _progress(lanes: list[Lane], until: int, *, show: bool) -> Iterator[int]:
    """Epochs to train, with a progress bar; in a log file, a line every 30 seconds."""
    first = lanes[0].epoch
    seeds = " ".join(str(lane.seed) for lane in lanes)
    label = f"{lanes[0].recipe.data} {lanes[0].recipe.network}, seed {seeds}"
    if isinstance(lanes[0].data, DecodedImages):
        label += f", {lanes[0].data.place}"
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
    """TensorBoard writer, or None; epochs after the checkpoint are rewritten."""
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
