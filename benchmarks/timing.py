"""Time of calls on a CPU or, captured in a CUDA graph, on a GPU."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

__all__ = ["Call", "is_gpu", "seconds_of", "seconds_per_call", "side_stream"]

Call = Callable[[], object]

LONG_ENOUGH = 0.02  # seconds of replays in a row
PATIENCE = 1.0  # seconds after which a slow case is not repeated further than three times


def seconds_per_call(calls: list[Call], device: str, *, repeat: int, capture: bool = True) -> float:
    """Median seconds per call over several series; on a GPU, each series replays a CUDA graph."""
    series = partial(seconds_of, calls, device)
    if is_gpu(device) and capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in calls:
                call()
        _replay(graph, 3)
        number = min(max(math.ceil(LONG_ENOUGH / _replay(graph, 1)), 1), 200)
        series = partial(_replay, graph, number)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < repeat and (len(times) < 3 or time.perf_counter() - began < PATIENCE):
        times.append(series())
    return statistics.median(times) / len(calls)


def side_stream(device: str) -> AbstractContextManager[object]:
    """A side stream, which can be captured; the backward pass runs on the same stream."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if is_gpu(device) else nullcontext()


def seconds_of(calls: Sequence[Call], device: str | torch.device) -> float:
    """Seconds until the device has finished all calls."""
    wait = torch.cuda.synchronize if is_gpu(device) else lambda: None
    wait()
    began = time.perf_counter()
    for call in calls:
        call()
    wait()
    return time.perf_counter() - began


def is_gpu(device: str | torch.device) -> bool:
    """Whether a device is a GPU."""
    return torch.device(device).type == "cuda"


def _replay(graph: torch.cuda.CUDAGraph, number: int) -> float:
    """Mean seconds per replay of a number of consecutive replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(number):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / number
