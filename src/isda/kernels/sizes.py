"""Sizes of grids and blocks."""

__all__ = ["blocks", "power_of_2", "round_up"]


def blocks(number: int, size: int) -> int:
    """Number of blocks of a size that cover a number of elements (faster than Triton's cdiv)."""
    return -(-number // size)


def round_up(number: int, size: int) -> int:
    """Smallest multiple of a size that is >= a number."""
    return blocks(number, size) * size


def power_of_2(number: int) -> int:
    """Smallest power of 2 that is >= a number and >= 1."""
    return 1 << max(number - 1, 0).bit_length()
