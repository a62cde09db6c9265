"""Generator-based augmentation (Appendix B): synthetic images in a fixed share of every batch."""

from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.errors import InputError
from isda.experiments.generators.gan_folder import GanFolder
from isda.experiments.generators.trained_generator import TrainedGenerator, load_generator
from isda.experiments.settings import Options, Recipe

__all__ = ["SyntheticImages", "generator_of", "require_generators"]

_DRAW, _SHUFFLE = 1, 2  # key parts


class SyntheticImages:
    """Training images followed by synthetic ones, which are drawn anew for every epoch.

    Synthetic images take a share p of the places of an epoch, evenly spread: with 1/6, every sixth
    place. An epoch still has every real image once, so it has 1 / (1 - p) times as many
    steps. The classes of the synthetic images are balanced.

    Args:
        generator: source of the synthetic images.
        data: data set on the device.
        share: share of synthetic images in a batch, in (0, 1).

    Raises:
        InputError: no image would be synthetic, or none real.
    """

    def __init__(self, generator: TrainedGenerator, data: ImageArrays, share: float) -> None:
        exact = Fraction(share).limit_denominator(1000)
        self._generator, self._real = generator, len(data.train_target)
        number = 0 if exact == 1 else int(self._real * exact / (1 - exact))
        if number < 1:
            raise InputError(
                f"synthetic must be at most 0.999 and add an image or more to {self._real}, got "
                f"{share}"
            )
        self._classes = [index % data.num_classes for index in range(number)]
        device = data.train_images.device
        place = torch.arange(self._real + number, device=device)
        before, after = ((place + one) * exact.numerator // exact.denominator for one in range(2))
        self._is_synthetic = before < after
        self.images = torch.cat([data.train_images, data.train_images.new_zeros(
            (number, *data.image_shape))])  # fmt: skip
        self.target = torch.cat([data.train_target, torch.tensor(
            self._classes, dtype=torch.int64, device=device)])  # fmt: skip

    def __len__(self) -> int:
        return len(self.target)

    def begin_epoch(self, key: Tensor) -> Tensor:
        """Draw new synthetic images; returns the order of all images in the epoch."""
        self.images[self._real :] = self._generator.draw(
            self._classes, counter_rng.fold(key, _DRAW)
        )
        order = torch.empty_like(self.target)
        number = len(self) - self._real
        order[~self._is_synthetic] = counter_rng.permutation(self._real, key)
        shuffled = counter_rng.permutation(number, counter_rng.fold(key, _SHUFFLE))
        order[self._is_synthetic] = self._real + shuffled
        return order


def require_generators(recipes: Iterable[Recipe], options: Options) -> None:
    """Raise InputError if the generator of a recipe is missing, before anything is trained."""
    for recipe in recipes:
        if recipe.generator != "none":
            _folder(recipe, options)


def generator_of(
    recipe: Recipe, data: object, options: Options, device: torch.device
) -> TrainedGenerator | None:
    """The trained generator that a recipe asks for, which must fit the data set."""
    if recipe.generator == "none":
        return None
    if not isinstance(data, ImageArrays) or recipe.images_per_class:
        raise InputError(
            f"generator must be none for {recipe.data} with images_per_class "
            f"{recipe.images_per_class}: a GAN is trained on all images of digits or CIFAR"
        )
    generator = load_generator(_folder(recipe, options).folder, device)
    generator.require_fit(
        num_classes=data.num_classes, image_shape=tuple(data.image_shape), other=recipe.data
    )
    return generator


def _folder(recipe: Recipe, options: Options) -> GanFolder:
    place = options.generators / f"{recipe.data}-{recipe.generator}" / "0"
    command = f"isda gan train {recipe.generator} --data {recipe.data} --out {options.generators}"
    if recipe.hold_out:
        command += f" --hold-out {recipe.hold_out}"
    if not place.is_dir():
        raise InputError(f"there is no generator in {place}: train it with {command}")
    found = GanFolder(place)
    if found.settings.hold_out != recipe.hold_out:
        raise InputError(
            f"{place} was trained with hold_out {found.settings.hold_out}, not with "
            f"{recipe.hold_out}: give another folder with --generators, and {command}"
        )
    return found
