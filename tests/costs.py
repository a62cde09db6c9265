"""What the tests of costs share: theory of a network, a stand-in for a machine, and its files."""

import csv
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from isda.experiments.cli import run as run_command
from isda.experiments.cost_records import (
    CASES,
    MeasuredCost,
    TheoreticalCost,
    cost_lines,
    write_costs,
)
from isda.experiments.theoretical_cost import theoretical_cost
from isda.experiments.training import step_cost
from isda.experiments.training.environment import environment

__all__ = ["Machine", "main", "measure", "read", "usual", "write"]

main = functools.partial(run_command, "cost")


@functools.cache
def usual(network: str) -> TheoreticalCost:
    return theoretical_cost(network)


class Machine:
    """Stand-in for a bench that slows down with every measurement and has limited memory."""

    def __init__(self, *, room: int = 3) -> None:
        self.clock, self.asked, self.room = 1.0, [], room

    def peak(self, case: str) -> int:
        self._require(case)
        return {"ce": 100, "diagonal": 101, "full": 300}[case] * 2**20

    def seconds(self, case: str) -> float:
        self._require(case)
        self.asked.append(case)
        self.clock *= 1.001
        return {"ce": 1.0, "diagonal": 1.05, "full": 1.5}[case] * self.clock

    def _require(self, case: str) -> None:
        if CASES.index(case) >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")


def measure(create: Callable[[], object], repeats: int = 5) -> list[MeasuredCost]:
    times, peaks = step_cost._take_turns(create, repeats)
    return step_cost._summary(times, peaks, batch_size=4, precision="fp32")


def write(
    path: Path, theory: list[TheoreticalCost], measured: dict[str, list[MeasuredCost]]
) -> None:
    write_costs(path, cost_lines(theory, measured, environment("cpu")))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
