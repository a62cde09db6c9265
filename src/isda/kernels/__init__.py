"""Triton kernels for CUDA, chosen automatically, with the results of the plain forms.

================  ==================================================================================
``batch``         which samples count, whether all are sound, and whether logits are theirs
``statistics``    class statistics of a batch (Eq. 9, 10 for variances, 11)
``covariances``   update of full covariances (Eq. 10)
``products``      products of Eq. 4 with full covariances, fused with their update
``rows``          quadratic term of the samples, gradient of the weights (Eq. 13)
``bound``         shifted logits and cross entropy (Eq. 4), forward and backward
================  ==================================================================================

Nothing waits for the host, no result depends on an order that changes from run to run (there are no
atomic additions), and absent classes cost one exit: a whole step can be captured in a CUDA graph.
The environment variable ``ISDA_TRITON=0`` turns all kernels off.
"""

import functools
import os

import torch
from torch import Tensor

try:
    import triton
except ImportError:  # a build of torch without Triton
    triton = None

__all__ = ["usable"]

if triton is not None:
    from isda.kernels.batch import differs, screen, tally
    from isda.kernels.bound import bound, bound_backward
    from isda.kernels.covariances import update
    from isda.kernels.products import empty_products, multiply, update_and_multiply
    from isda.kernels.rows import gather_rows, weight_gradient
    from isda.kernels.statistics import update_variances

    __all__ += [
        "bound",
        "bound_backward",
        "differs",
        "empty_products",
        "gather_rows",
        "multiply",
        "screen",
        "tally",
        "update",
        "update_and_multiply",
        "update_variances",
        "weight_gradient",
    ]


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can run on this tensor: on NVIDIA GPUs that multiply in bfloat16."""
    return (
        tensor.is_cuda
        and tensor.dtype != torch.float64
        and triton is not None
        and torch.version.hip is None
        and _switched_on(tensor.device.index)
    )


@torch.compiler.assume_constant_result
def _switched_on(device: int) -> bool:
    return os.environ.get("ISDA_TRITON", "1") != "0" and _capability(device) >= (8, 0)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
