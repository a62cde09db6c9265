"""The device of a benchmark, and the peak memory of a call on it."""

import argparse
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = [
    "extra_device_memory",
    "extra_host_memory",
    "limit_memory",
    "out_of_memory",
    "require_device",
    "use_device",
]


def require_device(parser: argparse.ArgumentParser, name: str) -> bool:
    """Select a device and return whether it is a GPU; exit with an error if it does not exist."""
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"--device must be cpu or cuda, got {name!r}")
    if device.type != "cuda":
        return False
    if (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {name} needs a GPU, and torch finds {torch.cuda.device_count()}")
    return use_device(name)


def use_device(name: str) -> bool:
    """Make a GPU the current device; return whether the device is a GPU."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device.type == "cuda"


def out_of_memory(error: Exception) -> bool:
    """Whether an error means out of memory; torch raises a RuntimeError for this."""
    words = ("allocate memory", "out of memory")  # on a CPU and on a GPU
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def extra_device_memory(step: Callable[[], object]) -> int:
    """Peak GPU memory of a call in bytes, minus what was allocated before it."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def extra_host_memory(step: Callable[[], object]) -> int:
    """Peak memory of this process in a call in bytes, minus what it held before it."""
    held = _process_memory("VmRSS")
    step()
    return max(_process_memory("VmHWM") - held, 0)


def limit_memory() -> None:
    """Make an allocation fail with an error before the machine runs out of memory."""
    if sys.platform == "linux":
        available = _kibibytes(Path("/proc/meminfo"), "MemAvailable") * 1024
        limit = _process_memory("VmSize") + int(0.9 * available)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _process_memory(name: str) -> int:
    """Memory of this process in bytes from ``/proc``: VmRSS is the current value, VmHWM the peak.

    ``ru_maxrss`` does not work on Linux, because a process inherits it from its parent.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _kibibytes(Path("/proc/self/status"), name) * 1024


def _kibibytes(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
