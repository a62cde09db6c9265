"""What the tests of data sets share: loading, error messages, and made-up CIFAR."""

import numpy as np
import pytest

from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.errors import InputError

__all__ = ["arrays_of", "cifar_arrays", "message_of"]


def arrays_of(spec: str, **options: object) -> ImageArrays:
    data = load_data(spec, **options)  # type: ignore[arg-type]
    assert isinstance(data, ImageArrays)
    return data


def message_of(spec: str, **options: object) -> str:
    """Error message of ``load_data``."""
    with pytest.raises(InputError) as caught:
        load_data(spec, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cifar_arrays(num_classes: int = 100) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "train_images": random.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8),
        "train_labels": random.integers(0, num_classes, 12),
        "test_images": random.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8),
        "test_labels": random.integers(0, num_classes, 5),
        "train_coarse_labels": random.integers(0, 20, 12),
    }
