"""What all launches share: sizes of grids and blocks, and kernels that begin early.

A loss is a dozen kernels of a few µs, one after the other. On Hopper and later GPUs, one is placed
while the one before ends, and waits for it there (programmatic dependent launch). Those that begin
a pass of the loss have kernels of others before them, which let nobody in early: they begin as
usual.
"""

import functools

import torch
import triton
import triton.language as tl

__all__ = ["blocks", "early", "enter", "leave", "power_of_2", "round_up"]


def blocks(number: int, size: int) -> int:
    """How many blocks of a size hold a number of things (faster than Triton's own)."""
    return -(-number // size)


def round_up(number: int, size: int) -> int:
    """Least multiple of a size that is not below a number."""
    return blocks(number, size) * size


def power_of_2(number: int) -> int:
    """Least power of 2 that is not below a number, nor below 1."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch on a device, of a kernel that calls :func:`enter` before all else."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"early": True, "launch_pdl": True}
    return {"early": False}


@triton.jit
def enter(early: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the end of the kernel before, and of all before that."""
    if early:
        tl.extra.cuda.gdc_wait()


@triton.jit
def leave(early: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the kernel after be placed.

    Near the end: it would else fill the multiprocessors that have nothing to do, and these alone.
    """
    if early:
        tl.extra.cuda.gdc_launch_dependents()
