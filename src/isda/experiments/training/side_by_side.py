"""Several runs side by side on one GPU, their steps captured in one CUDA graph.

A small network leaves a large GPU idle, so the steps of several lanes are captured on parallel
streams of one graph. A graph holds several steps in a row, because every launch of a graph and
every join of the streams costs time. On a CPU, and if a step cannot be captured, the same functions
run eagerly.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from isda import distributed
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.data.folders import FolderImages
from isda.experiments.training.lane import Lane

__all__ = ["SideBySide"]

_STEPS = 8  # steps per graph


class SideBySide:
    """Lanes that take every step at the same time.

    Args:
        lanes: runs with the same data, batch size and number of epochs.
        capture: capture the steps of all lanes in CUDA graphs.
        pool: memory pool of the graphs, to share with graphs that never run at the same time.
    """

    def __init__(self, lanes: list[Lane], *, capture: bool, pool: Any = None) -> None:
        self.lanes = lanes
        self.capture = capture
        self._pool = pool
        self._graphs: dict[tuple[Callable[[Lane], None], int], torch.cuda.CUDAGraph] = {}
        self._steps: dict[int, Callable[[Lane], None]] = {}  # by batch size

    def train_epoch(self) -> None:
        """Train every lane for one epoch."""
        for lane in self.lanes:
            lane.begin_epoch()
        if isinstance(self.lanes[0].data, ImageArrays):
            for size, equal in itertools.groupby(self.lanes[0].batch_sizes()):
                rows, rest = divmod(len(list(equal)), _STEPS)
                for _ in range(rows):
                    self._run(self._step(size), times=_STEPS)
                for _ in range(rest):
                    self._run(self._step(size))
            return
        batches = [
            lane.data.train_batches(
                batch_size=lane.recipe.batch_size,
                seed=lane.seed,
                epoch=lane.epoch,
                rank=lane.rank,
                world=lane.world,
            )
            for lane in self.lanes
            if isinstance(lane.data, FolderImages)
        ]
        for size, *loaded in zip(self.lanes[0].batch_sizes(), *batches, strict=True):
            for lane, (images, target) in zip(self.lanes, loaded, strict=True):
                lane.load(images, target)
            self._run(self._step(size))

    def evaluate(self) -> list[list[float]]:
        """Training loss of the epoch and ``Lane.results`` of every lane; synchronises."""
        if isinstance(self.lanes[0].data, ImageArrays):
            self._run(Lane.evaluate)
        else:
            for lane in self.lanes:
                lane.evaluate()
        rows = []
        for lane in self.lanes:
            loss = distributed.sum_over_ranks(lane.total_loss.clone()) / lane.world
            rows.append(torch.cat([loss[None] / lane.num_images, lane.results]))
        return torch.stack(rows).tolist()

    def _step(self, size: int) -> Callable[[Lane], None]:
        return self._steps.setdefault(size, partial(Lane.step, size=size))

    def _run(self, function: Callable[[Lane], None], *, times: int = 1) -> None:
        """Call a function on every lane, several times in a row."""
        if not self.capture:
            for _ in range(times):
                for lane in self.lanes:
                    function(lane)
            return
        if (function, times) not in self._graphs:
            self._graphs[function, times] = self._record(function, times)
        self._graphs[function, times].replay()

    def _record(self, function: Callable[[Lane], None], times: int) -> torch.cuda.CUDAGraph:
        """Capture the calls of all lanes, each on its own stream; restore state after warm-up."""
        torch.cuda.synchronize()
        for lane in self.lanes:
            before = [tensor.detach().clone() for tensor in lane.tensors()]
            torch.cuda.synchronize()
            with torch.cuda.stream(lane.stream):
                for _ in range(3):  # compile, select kernels, allocate
                    function(lane)
                    with torch.no_grad():  # every time: there are no images after the last batch
                        for tensor, saved in zip(lane.tensors(), before, strict=True):
                            tensor.copy_(saved)
            lane.zero_grad()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            main = torch.cuda.current_stream()
            for lane in self.lanes:
                lane.stream.wait_stream(main)
                with torch.cuda.stream(lane.stream):
                    for _ in range(times):
                        function(lane)
            for lane in self.lanes:
                main.wait_stream(lane.stream)
        return graph
