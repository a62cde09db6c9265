"""Which runs train side by side, and on which images."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from isda import distributed
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.decoding import ImageFiles, UnreadableFiles, few, one_line
from isda.experiments.data.folder_cache import DecodedImages, decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.lane import Lane

__all__ = ["Plan", "groups", "load_images", "own_images", "same_steps"]


@dataclass(frozen=True)
class Plan:
    """A run to train: name, recipe and seed."""

    name: str
    recipe: Recipe
    seed: int


def groups(
    plans: Sequence[Plan], waiting: list[int], options: Options, device: torch.device
) -> Iterator[tuple[list[int], ImageArrays | DecodedImages]]:
    """Indices of the plans that train side by side, with their data; one data set at a time."""
    while waiting:
        first = plans[waiting[0]].recipe
        data = _on_device(first, options, device)
        same = [n for n in waiting if same_steps(plans[n].recipe, first)]
        waiting = [n for n in waiting if n not in same]
        width = _side_by_side(first, data, options, device)
        if first.compile and device.type == "cuda":
            torch.compiler.reset()  # other networks count against the recompile limit
        for start in range(0, len(same), width):
            yield same[start : start + width], data


def load_images(
    recipe: Recipe, options: Options, *, skip: Collection[str] = ()
) -> ImageArrays | FolderImages:
    """Data set of a recipe; held-out images take the place of the test images.

    Args:
        recipe: recipe of a run.
        options: where to find the data set.
        skip: image files to leave out.
    """
    data = load_data(
        recipe.data,
        root=options.data_root,
        download=options.download,
        skip=skip,
        image_size=recipe.image_size,
        workers=options.workers,
    )
    return data.hold_out(recipe.hold_out) if recipe.hold_out else data


def own_images(data: ImageArrays | DecodedImages, plan: Plan) -> ImageArrays | DecodedImages:
    """The images of a run: those drawn by its seed, if the recipe asks for it."""
    recipe = plan.recipe
    if not recipe.images_per_class:
        return data
    if not isinstance(data, ImageArrays):
        raise InputError(
            f"images_per_class must be 0 for {recipe.data}, whose images are files, "
            f"got {recipe.images_per_class}"
        )
    rest = recipe.data == "digits" and not recipe.hold_out
    return data.draw(recipe.images_per_class, seed=plan.seed, test_on_rest=rest)


def same_steps(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes have the same images, network and steps."""
    fields = ("data", "hold_out", "image_size", "epochs", "batch_size", "network",
              "images_per_class", "synthetic")  # fmt: skip
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _on_device(
    recipe: Recipe, options: Options, device: torch.device
) -> ImageArrays | DecodedImages:
    """Data set of a recipe, ready for training; unreadable files are skipped if so desired."""
    skipped: dict[str, str] = {}
    while True:
        data = load_images(recipe, options, skip=skipped)
        if isinstance(data, ImageArrays):
            return data.to(device)
        try:
            return decode_folder(
                data,
                cache=options.cache,
                device=device,
                # decoding the 1.3 million files of ImageNet takes as long as an epoch
                check=recipe.data != "imagenet" or options.skip_unreadable,
            )
        except UnreadableFiles as error:
            if not options.skip_unreadable:
                raise
            skipped |= error.reasons  # the rest may be divided differently into the two sets
            warnings.warn(
                f"skipped {len(skipped)} images under {one_line(data.path)} that cannot be "
                f"decoded: {few(list(skipped))}",
                stacklevel=2,
            )


def _side_by_side(
    recipe: Recipe, data: ImageArrays | DecodedImages, options: Options, device: torch.device
) -> int:
    if (
        device.type == "cpu"
        or isinstance(data.train_images, ImageFiles)  # decoding is slower than any network
        or distributed.world_size(None) > 1
    ):
        return 1
    if options.side_by_side:
        return options.side_by_side
    with torch.device("meta"):
        network = Lane.create_network(recipe, data, seed=0)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return max(1, min(6, 36_000_000 // parameters))
