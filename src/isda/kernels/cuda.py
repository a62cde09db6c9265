"""The operations of ``plain.py`` as Triton kernels, and the fused cross entropy."""

from isda.kernels.covariance_update import update_
from isda.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from isda.kernels.products import empty_products, multiply, update_and_multiply_
from isda.kernels.screening import count_step, flag_overflow, screen
from isda.kernels.weight_gradient import quadratic_rows, weight_gradient

__all__ = [
    "count_step",
    "cross_entropy",
    "cross_entropy_backward",
    "empty_products",
    "flag_overflow",
    "multiply",
    "quadratic_rows",
    "screen",
    "update_",
    "update_and_multiply_",
    "weight_gradient",
]
