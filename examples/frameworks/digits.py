"""scikit-learn's digits, shared by the examples: 1,797 images of 8 × 8 pixels, ten classes."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

__all__ = ["create_digits"]


def create_digits() -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8)
    return TensorDataset(images, torch.tensor(digits.target))
