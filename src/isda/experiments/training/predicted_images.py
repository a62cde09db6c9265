"""Test images of a run: what it predicts for them, and thumbnails of some."""

import io
from collections.abc import Iterable

import numpy as np
from PIL import Image

from isda.experiments.data.arrays import ImageArrays
from isda.experiments.data.decoding import decode_image
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError
from isda.experiments.predictions import Predictions
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.groups import Plan, images_of_run, load_images
from isda.experiments.training.images import kept_images
from isda.experiments.training.training_step import Lane

__all__ = ["predictions_of", "thumbnails"]

_SIDE = 96  # pixels of a thumbnail


def predictions_of(lane: Lane) -> Predictions:
    """Predictions of a run after :meth:`Lane.evaluate`, in the order of the test images."""
    target, prediction, confidence, target_probability = lane.classified.cpu().numpy().T
    return Predictions(
        target=target.astype(np.int32),
        prediction=prediction.astype(np.int32),
        confidence=confidence,
        target_probability=target_probability,
        class_names=tuple(lane.data.class_names),
    )


def thumbnails(
    recipe: Recipe, seed: int, indices: Iterable[int], options: Options
) -> dict[int, bytes]:
    """Small PNG pictures of test images of a run, by index.

    Call it inside the :func:`kept_images` of the training, which knows the files that it used.
    """
    with kept_images() as store:
        images: ImageArrays | FolderImages | None = store.files(recipe, options)
    if isinstance(images, FolderImages) and recipe.hold_out:
        images = images.hold_out(recipe.hold_out)
    if images is None:
        if options.skip_unreadable:  # all files would have to be decoded to know the others
            raise InputError("they cannot be shown with both --skip-unreadable and --processes")
        images = load_images(recipe, options)
    if isinstance(images, FolderImages):
        decoded = {i: decode_image(images.test_files[i]).numpy() for i in indices}
        return {i: _png(Image.fromarray(pixels)) for i, pixels in decoded.items()}
    own = images_of_run(images, Plan("", recipe, seed))
    assert isinstance(own, ImageArrays)
    pixels = own.test_images.permute(0, 2, 3, 1).cpu().numpy()
    return {i: _png(Image.fromarray(pixels[i].squeeze())) for i in indices}


def _png(image: Image.Image) -> bytes:
    image.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
