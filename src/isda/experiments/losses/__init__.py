"""The losses that ISDA is compared with (Table 4), called like :class:`isda.ISDALoss`."""

from isda.experiments.losses.baselines import (
    CenterLoss,
    CrossEntropyLoss,
    DisturbLabelLoss,
    FocalLoss,
    LabelSmoothingLoss,
    LqLoss,
    create_criterion,
)
from isda.experiments.losses.large_margin import LargeMarginLoss

__all__ = [
    "CenterLoss",
    "CrossEntropyLoss",
    "DisturbLabelLoss",
    "FocalLoss",
    "LabelSmoothingLoss",
    "LargeMarginLoss",
    "LqLoss",
    "create_criterion",
]
