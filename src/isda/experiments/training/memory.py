"""Memory of a training step: what fits, its peak, and detection of out-of-memory errors."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

__all__ = ["create_on", "host_memory", "is_out_of_memory", "peak_host_memory"]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain (as after a failed capture), means out of memory."""
    if error is None:
        return False
    text = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (
            isinstance(error, RuntimeError)
            and any(words in text for words in ("out of memory", "can't allocate memory"))
        )
        or is_out_of_memory(error.__context__)
    )


def create_on(device: torch.device, create: Callable[[], nn.Module], *, limit: float) -> nn.Module:
    """Create a module on a device.

    Args:
        device: device of the module; nothing is allocated on the host for a GPU.
        create: creates the module on the default device.
        limit: bytes that its buffers may take on the host. The system may promise more memory than
            it has, and end the process when it is used.

    Raises:
        MemoryError: it takes more than ``limit``.
        torch.OutOfMemoryError: it does not fit on the GPU.
    """
    if device.type == "cpu":
        with torch.device("meta"):
            size = sum(buffer.nbytes for buffer in create().buffers())
        if size > limit:
            raise MemoryError(f"{size} bytes of buffers")
    with device:
        return create()


def host_memory() -> float:
    """Memory of this machine in bytes; infinite if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf


def peak_host_memory(step: Callable[[], object]) -> int:
    """Peak number of bytes of the tensors that are allocated during a call.

    It is the sum of the allocations that torch's profiler records: exact, unlike the resident
    memory of the process, which may include freed memory, but without what other libraries
    allocate themselves.
    """
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    held: dict[int, int] = {}  # bytes by address
    now = peak = 0
    for change in sorted(changes, key=lambda event: event["ts"]):
        address, size = change["args"]["Addr"], change["args"]["Bytes"]
        if size > 0:
            held[address] = size
            now += size
        else:
            now -= held.pop(address, 0)  # 0: allocated before the call
        peak = max(peak, now)
    return peak


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Discard what torch's profiler writes to file descriptor 2."""
    usual = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(usual, 2)
        os.close(usual)
