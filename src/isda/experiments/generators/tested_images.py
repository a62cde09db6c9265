"""The images of a run as used for testing: images of a folder are resized and centre-cropped."""

from dataclasses import replace

import torch
from torch import Tensor

from isda.experiments.data.arrays import ImageArrays, draw
from isda.experiments.data.folder_cache import decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError
from isda.experiments.settings import Options
from isda.experiments.training.groups import Plan, images_of_run
from isda.experiments.training.images import decode_readable, normalised

__all__ = ["load_tested_images"]


def load_tested_images(plan: Plan, options: Options, device: torch.device) -> ImageArrays:
    """Training and test images of a run; the targets are on the device, images of files need not.

    Args:
        plan: the run.
        options: where to find its data set.
        device: device of the network.
    """

    def prepare(data: ImageArrays | FolderImages) -> ImageArrays:
        if isinstance(data, FolderImages):
            return _center_crops(data, plan, options, device)
        held = plan.recipe.hold_out
        own = images_of_run(data.hold_out(held) if held else data, plan)
        assert isinstance(own, ImageArrays)
        return own.to(device)

    return normalised(decode_readable(plan.recipe, options, prepare)[1], plan.recipe)


def _center_crops(
    files: FolderImages, plan: Plan, options: Options, device: torch.device
) -> ImageArrays:
    """The images of a folder, all of them prepared as test images."""
    recipe, digest = plan.recipe, files.digest()
    if recipe.hold_out:
        files = files.hold_out(recipe.hold_out)
    target = files.train_target
    index = torch.arange(len(target))
    if recipe.images_per_class:
        number, name = recipe.images_per_class, files.name
        index, _ = draw(target, files.num_classes, number, seed=plan.seed, name=name)
    all_as_test = replace(
        files,
        train_files=(),
        train_target=target[:0],
        test_files=(*(files.train_files[i] for i in index.tolist()), *files.test_files),
        test_target=torch.cat([target[index], files.test_target]),
    )
    decoded = decode_folder(all_as_test, cache=options.cache, device=device)
    images, target = decoded.test_images, decoded.test_target
    if not isinstance(images, Tensor):
        raise InputError(
            f"neither memory nor disk has room for the {len(target)} images of {recipe.data}, "
            f"{recipe.image_size} x {recipe.image_size} pixels each"
        )
    return ImageArrays(
        name=files.name,
        train_images=images[: len(index)],
        train_target=target[: len(index)],
        test_images=images[len(index) :],
        test_target=target[len(index) :],
        mean=decoded.mean,
        std=decoded.std,
        class_names=files.class_names,
        digest=digest,
    )
