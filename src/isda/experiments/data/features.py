"""Features of images as a data set, for training a head on a frozen network."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isda.experiments.data.arrays import ImageArrays
from isda.experiments.data.decoding import ImageFiles, image_bar

__all__ = ["FeatureArrays", "batched"]


@dataclass(frozen=True, eq=False)
class FeatureArrays(ImageArrays):
    """Data set of features: ``train_images`` and ``test_images`` have shape (N, A)."""

    backbone: Any = None  # the frozen network, see isda.experiments.networks.probe


def batched(
    images: Tensor | ImageFiles,
    number: int,
    function: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    label: str,
) -> Tensor:
    """Results of a function of uint8 images (N, C, H, W), computed batch by batch.

    Meanwhile, a thread decodes the next batch of files.
    """
    parts = [slice(first, first + batch_size) for first in range(0, number, batch_size)]
    results = []
    with image_bar(label, number) as bar:
        for batch in _ahead(images, parts):
            results.append(function(batch))
            bar.update(len(batch))
    return torch.cat(results)


def _ahead(images: Tensor | ImageFiles, parts: list[slice]) -> Iterator[Tensor]:
    if isinstance(images, Tensor):
        yield from (images[part] for part in parts)
        return
    with ThreadPoolExecutor(1) as pool:
        following = [pool.submit(images.__getitem__, part) for part in parts[:2]]
        for number in range(len(parts)):
            batch = following.pop(0).result()
            if number + 2 < len(parts):
                following.append(pool.submit(images.__getitem__, parts[number + 2]))
            yield batch
