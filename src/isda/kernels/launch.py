"""Sizes of grids and blocks, and matrix products with float32 results."""

import torch
from torch import Tensor

__all__ = ["batched_matmul", "blocks", "power_of_2", "round_up"]


def blocks(number: int, size: int) -> int:
    """Number of blocks of a size that hold a number of elements (faster than Triton's cdiv)."""
    return -(-number // size)


def round_up(number: int, size: int) -> int:
    """Least multiple of a size that is >= a number."""
    return blocks(number, size) * size


def power_of_2(number: int) -> int:
    """Least power of 2 that is >= a number and >= 1."""
    return 1 << max(number - 1, 0).bit_length()


def batched_matmul(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.bmm``; of bfloat16 factors the result is float32, unless ``out`` is bfloat16."""
    if not left.is_cuda:  # Triton's interpreter
        result = left.float() @ right.float()
        return result if out is None else out.copy_(result)
    if left.dtype == torch.float32 or (out is not None and out.dtype == left.dtype):
        return torch.bmm(left, right, out=out)
    return torch.bmm(left, right, torch.float32, out=out)
