"""The images that runs train on: one data set at a time, decoded once."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from isda.experiments.data.arrays import ImageArrays, load_data, normalize
from isda.experiments.data.decoding import UnreadableFiles
from isda.experiments.data.features import FeatureArrays, batched
from isda.experiments.data.folder_cache import DecodedImages, center_crops, decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError, as_input_error, few, one_line
from isda.experiments.networks import Network, create_network, find_weights
from isda.experiments.networks.probe import Backbone
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.device import autocast_of, memory_format_of

__all__ = [
    "ImageStore",
    "Images",
    "data_size",
    "decode_readable",
    "kept_images",
    "load_files",
    "normalised",
    "require_fit",
    "require_same_images",
]

Images = ImageArrays | DecodedImages
_Decoded = TypeVar("_Decoded", bound=Images)

_kept: list["ImageStore"] = []  # of kept_images


class ImageStore:
    """Images of one data set at a time, on a device.

    A data set is loaded once: files that change later do not change the images of later runs. The
    next data set is loaded after the last one has been freed. Held-out images are taken from the
    decoded ones, so that files are not decoded again for another split.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._files: ImageArrays | FolderImages | None = None
        self._splits: dict[int, Images] = {}  # by hold_out: all images as 0, and the last split
        self.first: Any = None
        """Semaphore that the first of several processes acquires; only it prints the data set."""

    def get(self, recipe: Recipe, options: Options, device: torch.device) -> Images:
        """Images of a recipe, ready for training; unreadable files are skipped if requested."""
        key = _settings(recipe, options, device)
        if key != self._key:
            self._load(recipe, options, device)
            self._key = key
        return self._split_of(recipe)

    def files(self, recipe: Recipe, options: Options) -> FolderImages | None:
        """Files of a folder, without skipped ones; None if other images are loaded."""
        here = self._key[:2] == (recipe.data, options.data_root)
        return self._files if here and isinstance(self._files, FolderImages) else None

    def _load(self, recipe: Recipe, options: Options, device: torch.device) -> None:
        """Load all images of a data set."""
        self._key, self._files, self._splits = (), None, {}  # frees the memory of the last one
        self._files, self._splits[0] = decode_readable(
            recipe, options, lambda files: _decoded(recipe, files, options, device)
        )
        other = int(os.environ.get("RANK", 0)) > 0
        if not isinstance(self._files, FolderImages) or other:
            return
        if self.first is None or self.first.acquire(block=False):
            counts = len(self._files.train_target), len(self._files.test_target)
            tqdm.write(
                f"isda: {one_line(recipe.data)}: {self._files.num_classes} classes, {counts[0]} "
                f"training images, {counts[1]} test images ({self._files.test_source})",
                file=sys.stderr,
            )

    def _split_of(self, recipe: Recipe) -> Images:
        """The images of a recipe, taken from the loaded data set."""
        number, whole = recipe.hold_out, self._splits[0]
        if number not in self._splits:
            self._splits = {0: whole}  # frees the memory of the last split
            if isinstance(whole, ImageArrays):
                self._splits[number] = whole.hold_out(number)
            else:
                assert isinstance(self._files, FolderImages)
                self._splits[number] = whole.hold_out(number, self._files)
        images = self._splits[number]
        return images if recipe.freeze else normalised(images, recipe)


def decode_readable(
    recipe: Recipe,
    options: Options,
    decode: Callable[[ImageArrays | FolderImages], _Decoded],
) -> tuple[ImageArrays | FolderImages, _Decoded]:
    """Data set of a recipe without its split, and what ``decode`` makes of it.

    Files that it cannot decode are skipped if requested.
    """
    skipped: dict[str, str] = {}
    while True:
        files = load_files(recipe, options, skip=skipped)
        try:
            return files, decode(files)
        except UnreadableFiles as error:
            if not options.skip_unreadable:
                raise
            assert isinstance(files, FolderImages)
            skipped |= error.reasons  # the rest may be divided differently into the two sets
            images = f"{len(skipped)} image{'s' * (len(skipped) > 1)}"
            warnings.warn(
                f"skipped {images} under {one_line(files.path)} that cannot be decoded: "
                f"{few(list(skipped))}",
                stacklevel=2,
            )


def load_files(recipe: Recipe, options: Options, *, skip: Any = ()) -> ImageArrays | FolderImages:
    """Data set of a recipe without its split; image files are not decoded."""
    return load_data(
        recipe.data,
        root=options.data_root,
        download=options.download,
        skip=skip,
        image_size=recipe.image_size,
        workers=options.workers,
        interpolation=recipe.interpolation,
        test_crop=recipe.test_crop,
    )


@contextlib.contextmanager
def kept_images() -> Iterator[ImageStore]:
    """Store of a training; nested contexts share the store of the outermost one.

    It lets several trainings of one command, such as those of a search, decode their images once.
    """
    if _kept:
        yield _kept[0]
        return
    _kept.append(ImageStore())
    try:
        yield _kept[0]
    finally:
        _kept.clear()


def _settings(recipe: Recipe, options: Options, device: torch.device) -> tuple[object, ...]:
    """What the images of a data set, or their features, depend on, besides the files."""
    preparation = (recipe.image_size, recipe.interpolation, recipe.test_crop)
    settings = (recipe.data, options.data_root, device, options.cache, *preparation)
    if not recipe.freeze:
        return settings
    weights = find_weights(recipe.network, recipe.weights)
    network = (recipe.network, weights, weights.stat().st_mtime_ns)
    numerics = (recipe.precision, recipe.channels_last)
    return (*settings, *network, *numerics, recipe.mean, recipe.std)


def _decoded(
    recipe: Recipe, files: ImageArrays | FolderImages, options: Options, device: torch.device
) -> Images:
    """All images of a data set, or their features."""
    if recipe.freeze:
        return _features(recipe, files, options, device)
    if isinstance(files, ImageArrays):
        return files.to(device)
    check = _checks(recipe, options)
    return decode_folder(files, cache=options.cache, device=device, check=check)


def _checks(recipe: Recipe, options: Options) -> bool:
    """Whether to decode all files first, to find unreadable ones, if they are kept nowhere."""
    # decoding the 1.3 million files of ImageNet takes as long as an epoch
    return recipe.data != "imagenet" or options.skip_unreadable


def normalised(data: _Decoded, recipe: Recipe) -> _Decoded:
    """The images, with mean and standard deviation of the recipe."""
    if not recipe.mean:
        return data
    channels = data.image_shape[0]
    if len(recipe.mean) != channels:
        raise InputError(
            f"mean must have {channels} values for {recipe.data}, one per channel, "
            f"got {recipe.mean}"
        )
    return replace(data, mean=recipe.mean, std=recipe.std)


def data_size(data: Images) -> list[int]:
    """Numbers of training images, test images and classes, as in a checkpoint."""
    return [len(data.train_target), len(data.test_target), data.num_classes]


def require_same_images(data: Images, recipe: Recipe, state: dict[str, Any], advice: str) -> None:
    """Raise an InputError if the checkpoint ``state`` was made with other images."""
    if state["data"] != data_size(data):
        raise InputError(
            f"{recipe.data} has {data_size(data)} training images, test images and classes, but "
            f"the checkpoint was made with {state['data']}: {advice}"
        )
    if state.get("images", data.digest) != data.digest:
        raise InputError(
            f"{recipe.data} has as many images as the checkpoint was made with, but names or sizes "
            f"of files have changed: {advice}"
        )


@torch.no_grad()
def _features(
    recipe: Recipe, files: ImageArrays | FolderImages, options: Options, device: torch.device
) -> FeatureArrays:
    """Features of all images, prepared as for testing, by the frozen network of a recipe."""
    sources: list[Any]
    if isinstance(files, ImageArrays):
        data: Images = files
        sources = [files.train_images, files.test_images]
    else:
        check = _checks(recipe, options)
        data = decode_folder(files, cache="off", device=device, check=check)
        sources = [center_crops(files, part) for part in (files.train_files, files.test_files)]
    data = normalised(data, recipe)
    network = create_network(
        recipe.network,
        num_classes=data.num_classes,
        in_channels=data.image_shape[0],
        generator=torch.Generator().manual_seed(0),
        weights=find_weights(recipe.network, recipe.weights),
    )
    layout = memory_format_of(recipe)
    network.requires_grad_(False).eval().to(device).to(memory_format=layout)
    require_fit(network, recipe, data.image_shape, device)

    def features(images: Tensor) -> Tensor:
        scaled = normalize(images.to(device), data.mean, data.std).contiguous(memory_format=layout)
        with autocast_of(recipe, device):
            return network.forward_features(scaled).float()

    targets = (data.train_target, data.test_target)
    size = min(recipe.batch_size, 256)
    train, test = (
        batched(source, len(target), features, batch_size=size, label=f"features of {part} images")
        for source, target, part in zip(sources, targets, ("training", "test"), strict=True)
    )
    return FeatureArrays(
        name=data.name,
        train_images=train,
        train_target=data.train_target.to(device),
        test_images=test,
        test_target=data.test_target.to(device),
        mean=data.mean,
        std=data.std,
        class_names=tuple(data.class_names),
        digest=data.digest,
        backbone=Backbone.of(network),
    )


@torch.no_grad()
def require_fit(network: Network, recipe: Recipe, shape: torch.Size, device: torch.device) -> None:
    """Raise InputError if a network in eval mode cannot take images of a shape."""
    images = torch.linspace(-1, 1, 2 * shape.numel(), device=device).view(2, *shape)
    with _random_head(network):
        with as_input_error(f"{recipe.network} does not accept {shape[1]} x {shape[2]} images"):
            logits = network(images)
        network.check(images, logits)


@contextlib.contextmanager
def _random_head(network: Network) -> Iterator[None]:
    """Fill the head with random numbers: a new head is zero, so that all logits would be equal."""
    parameters = [*network.get_classifier().parameters()]
    before = [one.clone() for one in parameters]
    generator = torch.Generator().manual_seed(0)
    for one in parameters:
        one.copy_(torch.randn(one.shape, generator=generator) / one.shape[-1] ** 0.5)
    try:
        yield
    finally:
        for one, values in zip(parameters, before, strict=True):
            one.copy_(values)
