"""What the tests of the Triton kernels share: shapes and batches.

They run on a GPU, or on a CPU in Triton's interpreter: ``TRITON_INTERPRET=1 pytest
tests/test_kernels_statistics.py`` (Triton reads the variable when it is imported).
"""

import importlib.util
import os

import pytest
import reference
import torch
from torch import Tensor

from isda.functional import Moments

__all__ = ["DEVICE", "INTERPRETED", "SHAPES", "copy", "draw", "gpu", "precisions", "shapes"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
gpu = pytest.mark.gpu

# (N, C, A): below, at and above the kernels' blocks of 64 features, 16 samples and slots of
# classes; few and many samples of a class
SHAPES = [
    (7, 13, 5), (23, 3, 70), (40, 4, 130), (1, 3, 64), (0, 3, 5), (20, 40, 17), (5, 2, 1),
    (24, 12, 70),
]  # fmt: skip

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
precisions = pytest.mark.parametrize("precision", ["high", "medium"])


def draw(
    shape: tuple[int, int, int], *, seed: int = 0, device: str = DEVICE
) -> tuple[Moments, Tensor, Tensor, Tensor]:
    """Statistics as if of earlier batches, and a batch: features far from 0, some skipped."""
    samples, classes, width = shape
    x = reference.draw(samples, classes, width, seed=seed, dtype=torch.float32, device=device)
    target = x.target.clone()
    target[::5] = -1
    count = torch.arange(classes, device=device)  # class 0 has none yet
    if classes > 2:
        count[2] = 0  # and class 2 gets none now
    mean = x.weight.double() * (count > 0)[:, None]
    covariance = x.covariance * (count > 0)[:, None, None]
    weight = reference.draw(samples, classes, width, seed=seed + 9, dtype=torch.float32).weight
    return Moments(count, mean, covariance), x.features * 3 + 5, target, weight.to(device) + 2


def copy(moments: Moments) -> Moments:
    return Moments(*(tensor.clone() for tensor in moments))
