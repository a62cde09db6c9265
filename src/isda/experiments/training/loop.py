"""The training loop: one or more runs side by side, with exact resume.

A run that was killed resumes from its last checkpoint and ends with the same numbers as an
uninterrupted one: every random number is a function of seed and step, a checkpoint holds everything
that a step changes, and metrics recorded after the checkpoint are dropped.
"""

import contextlib
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean

import torch

from isda.experiments.data.arrays import ImageArrays
from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.errors import InputError, RunError, TimeUp
from isda.experiments.generators.synthetic_images import generator_of, require_generators
from isda.experiments.settings import Options
from isda.experiments.training.deadline import Deadline, StartUp, time_up
from isda.experiments.training.device import choose_kernels, join_processes, keep_compiled_code
from isda.experiments.training.divergence import divergence_message, why_diverged
from isda.experiments.training.environment import environment
from isda.experiments.training.failures import Failures, free_memory, reason_of, together
from isda.experiments.training.groups import Plan, groups, images_of_run, same_steps, whole_seeds
from isda.experiments.training.images import ImageStore, kept_images
from isda.experiments.training.member import Member
from isda.experiments.training.memory import is_out_of_memory
from isda.experiments.training.parallel import train_in_processes
from isda.experiments.training.progress import label_of, show_epochs
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.start import create_folders, finished_runs, require_inputs
from isda.experiments.training.tensorboard import create_writer, require_tensorboard
from isda.experiments.training.training_step import Lane

__all__ = ["Plan", "train"]

# share of all epochs; runs are left out so many epochs before it would be too late
_RESERVE = 1 / 16


def train(
    plans: Sequence[Plan], options: Options | None = None, *, progress: bool = True
) -> list[RunFolder]:
    """Train all plans and return their runs in the same order.

    Under ``torchrun`` all processes train every run together; only rank 0 writes and returns runs.
    A run that fails does not stop the others. If several runs side by side run out of memory, they
    continue once with half as many.

    Args:
        plans: runs to train.
        options: how to run the training.
        progress: show a progress bar.

    Raises:
        TimeUp: the time limit was reached before the end; checkpoints are written.
        RunsFailed: some runs failed; holds the others, which are finished.
        WriteError: a file could not be written, which stops all runs.
    """
    options = options or Options()
    if options.tensorboard:
        require_tensorboard()
    with (
        join_processes(options.device) as (device, rank, world),
        choose_kernels(options, device),
        keep_compiled_code(options.compile_cache),
        kept_images() as images,
        contextlib.ExitStack() as locks,
    ):
        if options.processes > 1 and device.type == "cpu" and world == 1 and len(plans) > 1:
            return train_in_processes(plans, options, progress=progress)
        training = _Training(plans, options, device, rank, world, images, progress=progress)
        training.train(locks)
        done = [run for n, run in sorted(training.runs.items()) if n not in training.failures]
        training.failures.raise_if_any(done)
    return done


class _Training:
    """The runs of one call of :func:`train`."""

    def __init__(
        self,
        plans: Sequence[Plan],
        options: Options,
        device: torch.device,
        rank: int,
        world: int,
        images: ImageStore,
        *,
        progress: bool,
    ) -> None:
        self.plans, self.options, self.progress = plans, options, progress
        self.device, self.rank, self.world, self.images = device, rank, world, images
        self.deadline = Deadline(options)
        self.failures = Failures(len(plans))
        self.runs: dict[int, RunFolder] = {}  # by number of the plan, on rank 0
        # called once, when the first network has taken the images; then None
        self._create_folders: Callable[[Lane], dict[int, RunFolder]] | None = None
        self._width: int | None = None  # most runs side by side, after running out of memory
        self._left_out: set[int] = set()  # runs that cannot finish in time

    def train(self, locks: contextlib.ExitStack) -> None:
        """Train all plans; holds the locks of their folders in ``locks``."""
        if self.options.resume and self.world == 1:
            self.runs |= finished_runs(self.plans, self.options)
        waiting = [number for number in range(len(self.plans)) if number not in self.runs]
        require_inputs([self.plans[number] for number in waiting], self.options)
        require_generators((self.plans[number].recipe for number in waiting), self.options)
        self._create_folders = partial(create_folders, self.plans, waiting, self.options, locks)
        for group in groups(self.plans, waiting, self.options, self.device, self.images):
            left = group
            while left := [number for number in left if number not in self.failures]:
                part = left[: self._width]
                if self._train_part(part):
                    left = left[len(part) :]
        if self._left_out:
            raise time_up(self.runs.values(), self.options, early=True)

    def _train_part(self, part: list[int]) -> bool:
        """Train runs side by side; returns False to try again with fewer of them."""
        try:
            self._train_group(part)
            return True
        except (InputError, TimeUp):
            raise
        except Exception as error:  # of these runs
            if self.world > 1 or (len(self.plans) == 1 and not is_out_of_memory(error)):
                raise
            again = is_out_of_memory(error) and len(part) > 1 and self._width is None
            reason = "" if again else reason_of(error, side_by_side=len(part))
        free_memory()  # here, where the error no longer holds it
        if again:
            self._width = len(part) // 2
            warnings.warn(
                f"out of memory with {len(part)} runs side by side: continuing with {self._width}; "
                f"--side-by-side {self._width} does so from the start",
                stacklevel=2,
            )
            return False
        for number in part:
            if number not in self.failures:
                folder = self.plans[number].folder(self.options.out)
                self.failures.add(number, f"{folder}: {reason}")
        return True

    def _lane(self, plan: Plan, images: ImageArrays | DecodedImages) -> Lane:
        generator = generator_of(plan.recipe, images, self.options, self.device)
        return Lane(
            plan.recipe,
            plan.seed,
            images,
            self.device,
            rank=self.rank,
            world=self.world,
            generator=generator,
        )

    def _train_group(self, group: list[int]) -> None:
        start_up = StartUp()
        plans = [self.plans[number] for number in group]
        data = self.images.get(plans[0].recipe, self.options, self.device)
        lanes = [self._lane(plan, images_of_run(data, plan)) for plan in plans]
        if self._create_folders is not None:
            with together():
                if self.rank == 0:
                    self.runs |= self._create_folders(lanes[0])
            self._create_folders = None
        members = []
        for number, lane in zip(group, lanes, strict=True):
            member = Member(number, lane, self.runs.get(number))
            try:
                member.restore()
            except RunError as error:
                if error.fatal:
                    raise
                self.failures.add(number, str(error))
                continue
            members.append(member)
        needed = StartUp.longest + self._epoch_seconds(group)
        if self._unfinished(members) and self.deadline.is_up(needed):
            raise time_up(self.runs.values(), self.options)
        # after a kill, runs that are behind catch up first; whole runs begin with those ahead
        choose = max if self.options.whole_runs else min
        while unfinished := self._unfinished(members):
            first = choose(member.lane.epoch for member in unfinished)
            chosen = [member for member in unfinished if member.lane.epoch == first]
            ahead = [member.lane.epoch for member in unfinished if member.lane.epoch > first]
            until = min(ahead, default=plans[0].recipe.epochs)
            time_is_up = self._train_side_by_side(chosen, until, start_up)
            if time_is_up and self._unfinished(members):
                raise time_up(self.runs.values(), self.options)
            start_up = StartUp()

    def _unfinished(self, members: Sequence[Member]) -> list[Member]:
        return [
            member
            for member in members
            if member.number not in self.failures
            and member.number not in self._left_out
            and member.lane.epoch < member.lane.recipe.epochs
        ]

    def _leave_out(self, members: Sequence[Member], seconds: float) -> bool:
        """Leave runs to the next command if that lets the others side by side finish in time.

        The decision is postponed while training all runs for some more epochs would let as many of
        them finish, because epochs may become faster.

        Args:
            members: runs with the same number of epochs left.
            seconds: time of an epoch of all of them.

        Returns:
            Whether runs were left out.
        """
        lane = members[0].lane
        epochs = lane.recipe.epochs - lane.epoch
        plans = [self.plans[member.number] for member in members]
        reserve = min(epochs, math.ceil(_RESERVE * lane.recipe.epochs))
        finish = partial(self.deadline.number_that_finish, len(plans), seconds, epochs)
        number = whole_seeds(plans, finish())
        later = whole_seeds(plans, finish(together=reserve))
        if number in (0, len(plans)) or later >= number:
            return False
        self._left_out |= {member.number for member in members[number:]}
        warnings.warn(
            f"the remaining time is enough for {number} of {len(members)} runs side by side; "
            "the next command continues the others",
            stacklevel=2,
        )
        return True

    def _epoch_seconds(self, group: list[int]) -> float:
        """Time of an epoch of a group, from the last epoch of equal runs on this device; else 0."""
        first = self.plans[group[0]].recipe
        here = environment(self.device)["device"]
        equal = [run for n, run in self.runs.items() if same_steps(self.plans[n].recipe, first)
                 and all(place.get("device") == here for place in run.environments)]  # fmt: skip
        last = [run.metrics()[-1].get("seconds", 0.0) for run in equal if run.metrics()]
        return max(last, default=0.0) * len(group)

    def _train_side_by_side(self, members: list[Member], until: int, start_up: StartUp) -> bool:
        """Train runs until an epoch or a failure; returns whether the time limit is reached."""
        lanes = [member.lane for member in members]
        on_gpu = self.device.type == "cuda"
        runner = SideBySide(lanes, capture=self.options.capture and on_gpu and self.world == 1)
        writers = [create_writer(member.run, self.options, lanes[0].epoch) for member in members]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        saved, stopped = time.monotonic(), False
        recent: deque[float] = deque(maxlen=5)  # seconds of epochs, without the first
        first, show = lanes[0].epoch, self.progress and self.rank == 0
        note = "compiling" if on_gpu and lanes[0].recipe.compile else ""
        for epoch in show_epochs(first, until, label_of(lanes), note=note, show=show):
            began = time.perf_counter()
            results = self._train_epoch(runner, members)
            if results is None:
                break
            start_up.epoch_done()
            seconds = time.perf_counter() - began
            stopped = self.deadline.is_up(seconds)
            if epoch > first:
                recent.append(seconds)
            failed = any(member.number in self.failures for member in members)
            last = stopped or epoch + 1 == until
            if self.options.whole_runs and len(members) > 1 and recent and not (failed or last):
                last = self._leave_out(members, mean(recent))
            save = last or time.monotonic() - saved > self.options.checkpoint_seconds
            memory = runner.peak_memory()
            share = seconds / len(lanes)
            with together():
                for member, result, writer in zip(members, results, writers, strict=True):
                    if member.number not in self.failures:
                        metrics = member.metrics(epoch, result, share, len(lanes), memory)
                        member.write(metrics, writer, save=save, last=last)
            if save:
                saved = time.monotonic()
            if (failed or last) and epoch + 1 < until:
                break  # if runs have failed or are left out, the others go on without them
        for writer in writers:
            if writer is not None:
                writer.close()
        return stopped

    def _train_epoch(self, runner: SideBySide, members: list[Member]) -> list[list[float]] | None:
        """Train and evaluate for an epoch, and note which runs have diverged; None if all have."""
        try:
            runner.train_epoch()
        except InputError:
            raise
        except (ValueError, FloatingPointError) as error:  # on a CPU, where runs train alone
            self._add_diverged(members[0], str(error))
            return None
        results = runner.evaluate()
        for member, result in zip(members, results, strict=True):
            reason = why_diverged(member.lane, result)
            if reason is None:
                member.lane.epoch += 1
            else:  # before anything of this epoch is written
                self._add_diverged(member, reason)
        return results

    def _add_diverged(self, member: Member, reason: str) -> None:
        self.failures.add(member.number, divergence_message(member.lane, member.run, reason))
