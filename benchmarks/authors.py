"""Your local copies of the authors' ``ISDA.py`` and ``ISDA_imagenet.py``."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

from torch import Tensor, nn

__all__ = ["peer_loss", "peer_structure"]


def peer_loss(path: Path, head: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """Loss of the authors' ``ISDA.py`` or ``ISDA_imagenet.py``, given features and target."""
    criterion = _load(path).ISDALoss(head.in_features, head.out_features)
    if "fc" in inspect.signature(criterion.forward).parameters:  # ISDA.py
        return lambda features, target: criterion(nn.Identity(), head, features, target, 0.25)[0]

    class Network(nn.Module):  # ISDA_imagenet.py takes a wrapped model that returns both
        module = SimpleNamespace(fc=head)

        def forward(self, x: Tensor, isda: bool) -> tuple[Tensor, Tensor]:
            return head(x), x

    return lambda features, target: criterion(Network(), features, target, 0.25)[0]


def peer_structure(path: Path) -> str:
    """Covariance structure used by one of the authors' files."""
    return "full" if _load(path).ISDALoss(2, 3).estimator.CoVariance.dim() == 3 else "diagonal"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
