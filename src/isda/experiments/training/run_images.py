"""The images of one run: their order, augmentation and batches, for training and for testing."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import (
    ImageArrays,
    normalize,
    rank_slice,
)
from isda.experiments.data.augmentation import Augmentation
from isda.experiments.data.batch_feed import BatchFeed
from isda.experiments.data.features import FeatureArrays
from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.data.resized_crop import (
    PackedImages,
    RandomResizedCrop,
    longest_side,
    taps_for,
)
from isda.experiments.errors import InputError
from isda.experiments.generators.synthetic_images import SyntheticImages
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.settings import Recipe
from isda.experiments.training.device import memory_format_of

__all__ = ["RunImages", "compile_once"]

_ORDER, _AUGMENT, _NETWORK = range(1, 4)  # key parts, one per use of random numbers
_TEST_BATCH = 1000  # of small images


class RunImages:
    """Batches of a run, which depend on seed, epoch and step alone.

    Args:
        recipe: recipe of the run.
        seed: seed of the order and of the augmentation.
        data: data set; arrays must be on the device, images of a folder need not.
        device: device of the run.
        rank: rank of this process among those that train the run together.
        world: number of these processes.
        compiled: whether to compile the preparation of a batch.
        random_layers: number of random layers of the network.
        generator: source of synthetic images, if the recipe has any.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        data: ImageArrays | DecodedImages,
        device: torch.device,
        *,
        rank: int,
        world: int,
        compiled: bool,
        random_layers: int = 0,
        generator: TrainedGenerator | None = None,
    ) -> None:
        self.recipe, self.data, self.device = recipe, data, device
        self.rank, self.world = rank, world
        images, target = data.train_images, data.train_target
        self._synthetic = None
        if generator is not None:
            assert isinstance(data, ImageArrays)
            self._synthetic = SyntheticImages(generator, data, recipe.synthetic)
            images, target = self._synthetic.images, self._synthetic.target
        self._source, self._target = images, target
        self.number = len(target)
        self.order_key = counter_rng.key(seed, _ORDER, device=device)
        self.augment_key = counter_rng.key(seed, _AUGMENT, device=device)
        self.network_key = counter_rng.key(seed, _NETWORK, device=device)
        self._random_layers = torch.arange(random_layers, device=device)
        self._order = torch.arange(self.number, device=device)
        self._augment = _create_augmentation(recipe, data)
        self._prepare = compile_once(_prepare) if compiled else _prepare
        self._normalize = partial(
            _normalize,
            mean=data.mean,
            std=data.std,
            dtype=torch.bfloat16 if recipe.precision == "bf16" else torch.float32,
            layout=memory_format_of(recipe),
        )
        if isinstance(data, FeatureArrays):
            self._normalize = partial(torch.Tensor.contiguous)
        self._feed: BatchFeed | None = None
        if isinstance(images, Tensor) or (
            isinstance(images, PackedImages) and images.pixels.device.type == device.type
        ):
            self._images: Tensor | PackedImages = images
        else:
            size = min(recipe.batch_size, self.number)
            self._feed = BatchFeed(images, target, batch_size=size, device=device)
            self._places = torch.arange(size, device=device)  # in the batch
            self._first = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def is_fed(self) -> bool:
        """Whether the images are not on the device: :meth:`load` must precede every step."""
        return self._feed is not None

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch, including a smaller last one."""
        return -(-self.number // self.recipe.batch_size)

    def batch_sizes(self) -> Iterator[int]:
        """Batch size of every step of an epoch, over all ranks; the last one may be smaller."""
        for step in range(self.steps_per_epoch):
            yield min(self.recipe.batch_size, self.number - step * self.recipe.batch_size)

    def begin_epoch(self, epoch: int) -> None:
        """Draw the order, and run the augmentation that is done once per epoch."""
        key = counter_rng.fold(self.order_key, epoch)
        if self._synthetic is None:
            self._order.copy_(counter_rng.permutation(self.number, key))
        else:
            self._order.copy_(self._synthetic.begin_epoch(key))
        if self._feed is not None:
            self._feed.begin(self._parts(self._order.tolist()))
        if isinstance(self._augment, Augmentation) and self._augment.epoch is not None:
            assert isinstance(self._source, Tensor)
            assert isinstance(self._images, Tensor)
            images = self._augment.epoch(self._source, counter_rng.fold(key, _AUGMENT))
            if self._images is self._source:
                self._images = images  # from now on an own copy, at a fixed address
            else:
                self._images.copy_(images)

    def load(self) -> None:
        """Copy the next batch to the device, if the images are not there."""
        if self._feed is not None:
            self._feed.load()

    def batch(self, part: slice, position: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images and target of ``part`` of the batch at ``position``, without synchronisation.

        The third result holds the keys of the network's random layers in this step.
        """
        source: tuple[Tensor | PackedImages, Tensor, Tensor, Tensor]
        if self._feed is None:
            source = (self._images, self._target, self._order, position)
        else:
            source = (self._feed.images, self._feed.target, self._places, self._first)
        return self._prepare(
            *source,
            steps,
            self.augment_key,
            self.network_key,
            self._random_layers,
            part=part,
            augment=self._augment,
            normalize=self._normalize,
        )

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Test images of this rank and their target; at least one batch, which may be empty."""
        data = self.data
        size = _TEST_BATCH
        if data.image_shape[-1] > 64:  # no more memory than a training step
            size = min(size, 2 * self.recipe.batch_size)
        mine = rank_slice(len(data.test_target), rank=self.rank, world=self.world)
        for first in range(mine.start, max(mine.stop, mine.start + 1), size):
            part = slice(first, min(first + size, mine.stop))
            yield self._normalize(data.test_images[part].to(self.device)), data.test_target[part]

    def _parts(self, order: list[int]) -> list[tuple[int, list[int]]]:
        """Part of this rank in each batch: place of its first image, and its images."""
        parts, first = [], 0
        for size in self.batch_sizes():
            part = rank_slice(size, rank=self.rank, world=self.world)
            parts.append((part.start, order[first + part.start : first + part.stop]))
            first += size
        return parts


@functools.cache
def compile_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function once for all runs.

    A network is an argument of the function, so that its weights are inputs of the compiled code,
    shared by all runs with the same architecture and batch size.
    """
    return torch.compile(function, dynamic=False, options=options or None)


def _create_augmentation(
    recipe: Recipe, data: ImageArrays | DecodedImages
) -> Augmentation | RandomResizedCrop:
    if isinstance(data, ImageArrays):
        return Augmentation(recipe.augment)
    if recipe.augment:
        raise InputError(
            f"augment must be empty for {recipe.data}, whose image files are always cropped and "
            f"flipped, got {' '.join(recipe.augment)}"
        )
    longest = longest_side(data.train_images.size)
    taps = taps_for(longest, data.image_size, data.interpolation)
    return RandomResizedCrop(data.image_size, taps, data.interpolation)


def _prepare(
    images: Tensor | PackedImages,
    target: Tensor,
    order: Tensor,
    position: Tensor,
    steps: Tensor,
    augment_key: Tensor,
    network_key: Tensor,
    random_layers: Tensor,
    *,
    part: slice,
    augment: Augmentation | RandomResizedCrop,
    normalize: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather, augment and normalise ``part`` of the batch at ``position``."""
    index = order[position + torch.arange(part.start, part.stop, device=order.device)]
    chosen: Any = images.take(index) if isinstance(images, PackedImages) else images[index]
    batch = augment.step(chosen, counter_rng.fold(augment_key, steps), start=part.start)
    layer_keys = counter_rng.fold(counter_rng.fold(network_key, steps), random_layers)
    return normalize(batch), target[index], layer_keys


def _normalize(
    images: Tensor,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> Tensor:
    return normalize(images, mean, std, dtype).contiguous(memory_format=layout)
