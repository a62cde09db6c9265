"""Implicit semantic data augmentation (ISDA, NeurIPS 2019) for PyTorch: change one line, the loss.

>>> criterion = isda.attach(model, lambda_0=0.5, total_steps=10_000)  # was nn.CrossEntropyLoss()
>>> loss = criterion(model(x), y)
"""

from isda import functional, versions
from isda._version import __version__
from isda.attach import AttachedLoss, attach
from isda.covariance import (
    Covariance,
    DiagonalCovariance,
    Estimator,
    FullCovariance,
    IdentityCovariance,
    SharedCovariance,
)
from isda.distributed import ShardedCovariance
from isda.functional import monte_carlo_loss, sample
from isda.loss import ISDALoss
from isda.multilabel import ISDABCEWithLogitsLoss

if not versions.COMPILES:
    versions.run_eagerly(AttachedLoss, ISDALoss, ISDABCEWithLogitsLoss)

__all__ = [
    "AttachedLoss",
    "Covariance",
    "DiagonalCovariance",
    "Estimator",
    "FullCovariance",
    "ISDABCEWithLogitsLoss",
    "ISDALoss",
    "IdentityCovariance",
    "ShardedCovariance",
    "SharedCovariance",
    "__version__",
    "attach",
    "functional",
    "monte_carlo_loss",
    "sample",
]
