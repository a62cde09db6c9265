"""The time limit of a command: ``--minutes``."""

import math
import time
from collections.abc import Collection

from isda import distributed
from isda.experiments.errors import TimeUp
from isda.experiments.records import Run, summary
from isda.experiments.settings import Options

__all__ = ["Deadline", "time_up"]


class Deadline:
    """The end of the time that a command may use.

    Args:
        options: options of the training, with the start of the command and its minutes.
    """

    def __init__(self, options: Options) -> None:
        self._limited = options.minutes is not None
        self._end = options.started_at + 60 * (options.minutes or math.inf)

    def is_up(self, needed: float = 0.0) -> bool:
        """Whether less than ``needed`` seconds are left, on any rank; the same on all ranks."""
        if not self._limited:
            return False
        up = time.monotonic() + needed > self._end
        return bool(distributed.agree(0, up, None)[1])


def time_up(runs: Collection[Run], options: Options) -> TimeUp:
    """Error that says how many of the runs are finished."""
    done = sum(summary(run).finished for run in runs)
    number = f"{done} of {len(runs)} run{'s' * (len(runs) != 1)}"
    return TimeUp(f"time limit of {options.minutes:g} min reached, {number} finished")
