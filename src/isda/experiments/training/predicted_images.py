"""Test images of a run: what it predicts for them, and thumbnails of some."""

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from isda.experiments.data.arrays import ImageArrays, rank_slice
from isda.experiments.data.folders import load_folder
from isda.experiments.predictions import Predictions
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.groups import Plan, load_images, own_images
from isda.experiments.training.lane import Lane

__all__ = ["predictions_of", "thumbnails"]

_SIDE = 96  # pixels of a thumbnail


def predictions_of(lane: Lane) -> Predictions:
    """Predictions of a run after :meth:`Lane.evaluate`, in the order of the test images."""
    rows = lane.classified.cpu()
    if lane.world > 1 and not isinstance(lane.data, ImageArrays):
        rows = rows[torch.argsort(_order_of_ranks(lane))]
    target, prediction, confidence, target_probability = rows.numpy().T
    return Predictions(
        target=target.astype(np.int32),
        prediction=prediction.astype(np.int32),
        confidence=confidence,
        target_probability=target_probability,
        class_names=tuple(lane.data.class_names),
    )


def _order_of_ranks(lane: Lane) -> torch.Tensor:
    """Indices of the test images, rank after rank: every rank reads a part of each batch."""
    number, size = len(lane.data.test_target), 2 * lane.recipe.batch_size
    batches = [range(first, min(first + size, number)) for first in range(0, number, size)]
    return torch.tensor(
        [i for rank in range(lane.world) for batch in batches
         for i in batch[rank_slice(len(batch), rank=rank, world=lane.world)]]
    )  # fmt: skip


def thumbnails(
    recipe: Recipe, seed: int, indices: Iterable[int], options: Options
) -> dict[int, bytes]:
    """Small PNG pictures of test images of a run, by index."""
    kind, _, path = recipe.data.partition(":")
    if kind == "imagefolder" and not options.skip_unreadable:
        data = load_folder(Path(path).expanduser(), name=recipe.data, check=False)  # was checked
        data = data.hold_out(recipe.hold_out) if recipe.hold_out else data
        return {i: _png(Image.open(data.test_files[i]).convert("RGB")) for i in indices}
    images = load_images(recipe, options)
    if not isinstance(images, ImageArrays):
        return {i: _png(Image.open(images.test_files[i]).convert("RGB")) for i in indices}
    images = own_images(images, Plan("", recipe, seed))
    assert isinstance(images, ImageArrays)
    pixels = images.test_images.permute(0, 2, 3, 1).cpu().numpy()
    return {i: _png(Image.fromarray(pixels[i].squeeze())) for i in indices}


def _png(image: Image.Image) -> bytes:
    image.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
