"""The time limit of a command: ``--minutes``."""

import math
import time
from collections.abc import Collection

from isda import distributed
from isda.experiments.errors import TimeUp
from isda.experiments.records import Run, summary
from isda.experiments.settings import Options

__all__ = ["Deadline", "StartUp", "time_up"]

# share of the time of an epoch that does not depend on the number of runs side by side: four of six
# ResNet-110 need 0.70 of the time of six on an H200, which is 0.1
_FIXED = 0.2
_MARGIN = 1.05  # checkpoints, and epochs that take longer than the last ones


class Deadline:
    """The end of the time that a command may use.

    Args:
        options: options of the training, with the start of the command and its minutes.
    """

    def __init__(self, options: Options) -> None:
        self._limited = options.minutes is not None
        self._end = options.started_at + 60 * (options.minutes or math.inf)

    @property
    def seconds_left(self) -> float:
        """Time that is left; infinite without a limit."""
        return self._end - time.monotonic()

    def is_up(self, needed: float = 0.0) -> bool:
        """Whether less than ``needed`` seconds are left, on any rank; the same on all ranks."""
        if not self._limited:
            return False
        return bool(distributed.agree(0, self.seconds_left < needed, None)[1])

    def number_that_finish(
        self, number: int, seconds: float, epochs: int, *, together: int = 0
    ) -> int:
        """Largest number of runs side by side that can finish in time.

        Args:
            number: number of runs.
            seconds: time of an epoch of all these runs.
            epochs: epochs that are left.
            together: how many of these epochs all runs train before some are left out.
        """
        shared = together * seconds
        rest = _MARGIN * (epochs - together) * seconds
        if not self.is_up(shared + rest):
            return number
        for fewer in range(number - 1, 0, -1):
            share = _FIXED + (1 - _FIXED) * fewer / number
            if not self.is_up(shared + StartUp.longest + share * rest):
                return fewer
        return 0


class StartUp:
    """How much longer the first epoch of a group of runs takes than the others.

    Compiling and capturing may take a minute. The longest time seen in this process is assumed for
    the next group, so that no group is started whose first epoch would exceed the time limit.
    """

    longest = 0.0  # of this process, in seconds

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._epochs: list[float] = []  # ends

    def epoch_done(self) -> None:
        """Call it after every epoch."""
        self._epochs.append(time.monotonic())
        if len(self._epochs) == 2:
            first, second = self._epochs
            StartUp.longest = max(StartUp.longest, (first - self._began) - (second - first))


def time_up(runs: Collection[Run], options: Options, *, early: bool = False) -> TimeUp:
    """Error that says how many of the runs are finished.

    Args:
        runs: all runs.
        options: options of the training, with the time limit.
        early: some runs were left out, so that the others could finish in time.
    """
    done = sum(summary(run).finished for run in runs)
    number = f"{done} of {len(runs)} run{'s' * (len(runs) != 1)}"
    reason = "too short for the others" if early else "reached"
    return TimeUp(f"time limit of {options.minutes:g} min {reason}, {number} finished")
