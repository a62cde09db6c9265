"""What all launches share: sizes of grids and blocks, and kernels that begin early.

On Hopper and later GPUs the programs of a kernel are placed while the kernel before it still runs,
and wait for its end, all of it: a dozen kernels of a few µs each, one after the other, would else
wait for one another's launch.
"""

import functools

import torch
import triton
import triton.language as tl

__all__ = ["blocks", "early", "enter", "power_of_2"]


def blocks(number: int, size: int) -> int:
    """How many blocks of a size hold a number of things (faster than Triton's own)."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """Least power of 2 that is not below a number, nor below 1."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch on a device; its kernel calls :func:`enter` before all else."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"early": True, "launch_pdl": True}
    return {"early": False}


@triton.jit
def enter(early: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be placed, and wait for the one before."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
