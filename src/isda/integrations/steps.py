"""Shared by the integrations: a check of the criterion, and its number of steps, one per batch."""

import weakref
from typing import Any

from isda.attach import AttachedLoss
from isda.criterion import Criterion

__all__ = ["count_batches", "has_total_steps", "require_isda", "set_total_steps"]

_derived: "weakref.WeakKeyDictionary[AttachedLoss, int]" = weakref.WeakKeyDictionary()


def has_total_steps(criterion: AttachedLoss) -> bool:
    """Whether the user has set ``total_steps``, not :func:`set_total_steps` of an earlier run."""
    total_steps = criterion.total_steps
    return total_steps is not None and total_steps != _derived.get(criterion)


def set_total_steps(criterion: AttachedLoss, total_steps: int) -> None:
    """Set ``total_steps`` to a number that the integration has derived."""
    criterion.total_steps = _derived[criterion] = total_steps


def count_batches(updates: int, batches_per_epoch: int | None, accumulation: int) -> int:
    """Number of batches of a training run with gradient accumulation.

    Args:
        updates: number of optimiser steps.
        batches_per_epoch: number of batches per epoch; None if unknown.
        accumulation: number of batches per optimiser step; the last one of an epoch may have fewer.

    Example:
        >>> count_batches(6, 10, 4)  # two epochs of 4 + 4 + 2 batches
        20
    """
    if batches_per_epoch is None:
        return updates * accumulation
    epochs, rest = divmod(updates, -(-batches_per_epoch // accumulation))
    return epochs * batches_per_epoch + min(rest * accumulation, batches_per_epoch)


def require_isda(criterion: Any) -> None:
    """Raise ValueError unless :func:`isda.attach` created the criterion with a loss of isda."""
    if not isinstance(criterion, AttachedLoss) or not isinstance(criterion.criterion, Criterion):
        raise ValueError(f"criterion must be created by isda.attach(model, …), got {criterion!r}")
