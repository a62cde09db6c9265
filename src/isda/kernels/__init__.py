"""The implementations of the operators in ``isda/ops.py``.

``plain`` is plain torch with loops over the classes of the batch, and runs on any device. ``cuda``
collects the Triton kernels, one file each:

=====================  =============================================================================
``screening``          which samples are valid, step count, overflow of the loss
``class_statistics``   count, mean and variance of the classes of a batch (Eq. 9, 10, 11)
``covariance_update``  update of full covariances (Eq. 10)
``products``           products (W − w_c) Σ_c of Eq. 4, fused with the update
``split_weight``       the weights split into two bfloat16 terms, for tensor cores
``many_classes``       the same products for more than 256 classes, with cuBLAS
``weight_gradient``    quadratic term of each sample, and the gradient of the weights (Eq. 13)
``cross_entropy``      shifted logits and cross entropy (Eq. 4), forward and backward
=====================  =============================================================================

No kernel synchronises with the host or uses atomic additions (results are deterministic), and
programs for absent classes exit early, so a whole training step can be captured in a CUDA graph.
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["ProductTensors", "Products"]

ProductTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # Products for torch.library


class Products(NamedTuple):
    """The products of Eq. 4 for the classes of a batch: everything the loss and its gradient need.

    Each class of the batch has a slot; there are P = min(N, C) slots.
    """

    partial: Tensor  # (P, B, C) quadratic term of each slot as B terms to be summed
    product: Tensor  # (P, C, A) = (W − w_c) Σ_c of each slot, or W Σ_c if the next is not empty
    target_product: Tensor  # (P, A) = w_c Σ_c, or (0, A)
    slot: Tensor  # (C,) slot of each class, −1 for absent ones
    classes: Tensor  # (P,) class in each slot, −1 in unused ones
