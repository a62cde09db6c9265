"""Sizes of grids and blocks: Triton's own functions for them take longer than a kernel does."""

__all__ = ["blocks", "power_of_2"]


def blocks(number: int, size: int) -> int:
    """How many blocks of a size hold a number of things."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """Least power of 2 that is not below a number, nor below 1."""
    return 1 << max(number - 1, 0).bit_length()
