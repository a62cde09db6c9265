"""Several runs side by side on one GPU, their steps captured in one CUDA graph.

A small network leaves a large GPU idle, so the steps of several lanes are captured on parallel
streams of one graph. A graph holds several steps in a row, because every launch of a graph and
every join of the streams costs time. On a CPU, and if a step cannot be captured, the same functions
run eagerly.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from isda import distributed
from isda.experiments.training.memory import is_out_of_memory
from isda.experiments.training.training_step import Lane

__all__ = ["CapturedSteps", "SideBySide", "graph_sizes"]

_STEPS = 8  # steps per graph
_TIMED = 4  # graphs whose time is measured


class _Steps(Protocol):
    """State that a step changes."""

    device: torch.device
    stream: Any  # of CUDA

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a step changes."""

    def zero_grad(self) -> None:
        """Free the gradients."""


_Lane = TypeVar("_Lane", bound=_Steps)


class CapturedSteps(Generic[_Lane]):
    """Functions of several lanes, captured in CUDA graphs with one stream per lane.

    Args:
        lanes: what the functions are called with.
        capture: capture the functions in CUDA graphs.
        pool: memory pool of the graphs, to share with graphs that never run at the same time.
    """

    def __init__(self, lanes: Sequence[_Lane], *, capture: bool, pool: Any = None) -> None:
        self.lanes = lanes
        self.capture = capture
        self._pool = pool
        self._graphs: dict[tuple[Callable[[_Lane], None], int], torch.cuda.CUDAGraph] = {}
        self._warm: set[Callable[[_Lane], None]] = set()

    def run(self, function: Callable[[_Lane], None], *, times: int = 1) -> None:
        """Call a function on every lane, several times in a row."""
        graph = self._graph(function, times) if self.capture else None
        if graph is not None:
            graph.replay()
            return
        for _ in range(times):
            for lane in self.lanes:
                function(lane)

    def _graph(self, function: Callable[[_Lane], None], times: int) -> torch.cuda.CUDAGraph | None:
        """The graph of the calls; None if they can never be captured."""
        if (function, times) not in self._graphs:
            if function not in self._warm:
                self._warm_up(function)
                self._warm.add(function)
            try:
                self._graphs[function, times] = self._record(function, times)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                warnings.warn(
                    f"the training step cannot be captured in a CUDA graph and runs without one, "
                    f"which is slower: {str(error).splitlines()[0]}",
                    stacklevel=2,
                )
                self.capture = False
                self._graphs.clear()
                for lane in self.lanes:
                    lane.zero_grad()  # gradients in the memory of the graph
                return None
        return self._graphs[function, times]

    def _warm_up(self, function: Callable[[_Lane], None]) -> None:
        """Compile, select kernels and allocate; restores the state of the lanes."""
        torch.cuda.synchronize()
        for lane in self.lanes:
            before = [tensor.detach().clone() for tensor in lane.tensors()]
            torch.cuda.synchronize()
            with torch.cuda.stream(lane.stream):
                for _ in range(3):
                    function(lane)
                    with torch.no_grad():  # every time: there are no images after the last batch
                        for tensor, saved in zip(lane.tensors(), before, strict=True):
                            tensor.copy_(saved)
            lane.zero_grad()
        torch.cuda.synchronize()

    def _record(self, function: Callable[[_Lane], None], times: int) -> torch.cuda.CUDAGraph:
        """Capture the calls of all lanes, each on its own stream."""
        graph = torch.cuda.CUDAGraph()
        # other threads, such as those of a data loader, may call CUDA during the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            main = torch.cuda.current_stream()
            # before any work: torch may use the stream of a lane for the capture as well
            for lane in self.lanes:
                lane.stream.wait_stream(main)
            for lane in self.lanes:
                with torch.cuda.stream(lane.stream):
                    for _ in range(times):
                        function(lane)
            for lane in self.lanes:
                main.wait_stream(lane.stream)
        return graph


class SideBySide(CapturedSteps[Lane]):
    """Lanes that take every step at the same time.

    Args:
        lanes: runs with the same data, batch size and number of epochs.
        capture: capture the steps of all lanes in CUDA graphs.
        pool: memory pool of the graphs, to share with graphs that never run at the same time.
    """

    def __init__(self, lanes: list[Lane], *, capture: bool, pool: Any = None) -> None:
        super().__init__(lanes, capture=capture, pool=pool)
        self._steps: dict[int, Callable[[Lane], None]] = {}  # by batch size

    def train_epoch(self) -> None:
        """Train every lane for one epoch."""
        for lane in self.lanes:
            lane.begin_epoch()
        fed = any(lane.images.is_fed for lane in self.lanes)
        for size, equal in itertools.groupby(self.lanes[0].images.batch_sizes()):
            number = len(list(equal))
            for times in [1] * number if fed else graph_sizes(number):
                for lane in self.lanes:
                    lane.images.load()
                self.run(self._step(size), times=times)

    def seconds_per_step(self, size: int) -> float:
        """Time of one step of all lanes, over some graphs after the first; trains the lanes."""
        for lane in self.lanes:
            lane.begin_epoch()
        self.run(self._step(size), times=_STEPS)  # capture
        began = self._clock()
        for _ in range(_TIMED):
            self.run(self._step(size), times=_STEPS)
        return (self._clock() - began) / (_TIMED * _STEPS)

    def evaluate(self) -> list[list[float]]:
        """Training loss of the epoch and ``Lane.results`` of every lane; synchronises."""
        test_images = self.lanes[0].data.test_images
        if isinstance(test_images, torch.Tensor) and test_images.is_cuda:
            self.run(Lane.evaluate)
        else:
            for lane in self.lanes:
                lane.evaluate()
        rows = []
        for lane in self.lanes:
            loss = distributed.sum_over_ranks(lane.total_loss.clone()) / lane.world
            rows.append(torch.cat([loss[None] / lane.num_images, lane.results]))
        return torch.stack(rows).tolist()

    def peak_memory(self) -> dict[str, float]:
        """Peak memory per lane of a GPU, as metrics, if all lanes use the same method."""
        device = self.lanes[0].device
        if device.type != "cuda" or len({lane.recipe.method for lane in self.lanes}) > 1:
            return {}
        return {"peak_mib": torch.cuda.max_memory_allocated(device) / 2**20 / len(self.lanes)}

    def _clock(self) -> float:
        if self.lanes[0].device.type == "cuda":
            torch.cuda.synchronize(self.lanes[0].device)
        return time.perf_counter()

    def _step(self, size: int) -> Callable[[Lane], None]:
        return self._steps.setdefault(size, partial(Lane.step, size=size))


def graph_sizes(steps: int) -> Iterator[int]:
    """Sizes of the graphs for so many equal steps in a row."""
    rows, rest = divmod(steps, _STEPS)
    yield from [_STEPS] * rows + [1] * rest
