"""Which runs train side by side, and on which images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from isda import distributed
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.data.decoding import ImageFiles
from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.data.folders import FolderImages
from isda.experiments.networks import outline
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.images import ImageStore, load_files
from isda.experiments.training.training_step import Lane
from isda.experiments.training.width import fastest_width

__all__ = [
    "MOST_SIDE_BY_SIDE",
    "Plan",
    "groups",
    "images_of_run",
    "load_images",
    "same_steps",
    "whole_seeds",
]


MOST_SIDE_BY_SIDE = 6
"""Number of runs side by side with which small networks are expected to train fastest."""


@dataclass(frozen=True)
class Plan:
    """A run to train: name, recipe and seed."""

    name: str
    recipe: Recipe
    seed: int

    def folder(self, out: Path) -> Path:
        """Folder of the run below ``out``."""
        return out / self.name / str(self.seed)


def groups(
    plans: Sequence[Plan],
    waiting: list[int],
    options: Options,
    device: torch.device,
    store: ImageStore,
) -> Iterator[list[int]]:
    """Indices of plans that train side by side; groups with the same images follow each other.

    The generator holds no images, so that ``store`` can free them before it loads the next ones.
    """
    while waiting:
        first = plans[waiting[0]].recipe
        same = [n for n in waiting if same_steps(plans[n].recipe, first)]
        waiting = [n for n in waiting if n not in same]
        if first.compile and device.type == "cuda":
            _forget_other_code(first)
        width = _side_by_side([plans[n] for n in same], options, device, store)
        for start in range(0, len(same), width):
            yield same[start : start + width]


def load_images(recipe: Recipe, options: Options) -> ImageArrays | FolderImages:
    """Data set of a recipe; held-out images take the place of the test images."""
    data = load_files(recipe, options)
    return data.hold_out(recipe.hold_out) if recipe.hold_out else data


def images_of_run(data: ImageArrays | DecodedImages, plan: Plan) -> ImageArrays | DecodedImages:
    """The images of a run; drawn with its seed if the recipe has ``images_per_class``."""
    recipe = plan.recipe
    if not recipe.images_per_class:
        return data
    if not isinstance(data, ImageArrays):
        return data.draw(recipe.images_per_class, seed=plan.seed)
    rest = recipe.data == "digits" and not recipe.hold_out
    return data.draw(recipe.images_per_class, seed=plan.seed, test_on_rest=rest)


def same_steps(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes have the same images, network and steps."""
    fields = ("data", "hold_out", "image_size", "test_crop", "interpolation", "mean", "std",
              "epochs", "batch_size", "network", "pretrained", "weights", "freeze", "precision",
              "channels_last", "images_per_class", "synthetic")  # fmt: skip
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def whole_seeds(plans: Sequence[Plan], width: int) -> int:
    """Number of runs side by side, at most ``width``, that does not separate the runs of a seed.

    Cross entropy and ISDA with the same seed then finish together, even if the time is up before
    other seeds begin. If there are more runs of one seed than ``width``, it is ``width``.
    """
    of_a_seed = sum(plan.seed == plans[0].seed for plan in plans)
    return width - width % of_a_seed if width > of_a_seed else width


def _side_by_side(
    plans: Sequence[Plan], options: Options, device: torch.device, store: ImageStore
) -> int:
    if device.type == "cpu" or distributed.world_size(None) > 1:
        return 1
    recipe = plans[0].recipe
    data = store.get(recipe, options, device)
    if isinstance(data.train_images, ImageFiles):  # decoding is slower than any network
        return 1
    if options.side_by_side:
        return options.side_by_side
    if recipe.freeze:
        return whole_seeds(plans, MOST_SIDE_BY_SIDE)
    channels, classes = data.image_shape[0], data.num_classes
    network = outline(recipe.network, num_classes=classes, in_channels=channels)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    expected = max(1, min(MOST_SIDE_BY_SIDE, 36_000_000 // parameters))

    def create_lanes(number: int) -> list[Lane]:
        return [Lane(plan.recipe, plan.seed, images_of_run(data, plan), device)
                for plan in plans[:number]]  # fmt: skip

    width = fastest_width(recipe, len(plans), expected, create_lanes, options, device)
    return whole_seeds(plans, width)


_compiled: Recipe | None = None  # recipe of the last runs whose network was compiled


def _forget_other_code(recipe: Recipe) -> None:
    """Discard compiled code of other networks, which would count towards the recompile limit."""
    global _compiled
    if _compiled is None or not same_steps(_compiled, recipe):
        torch.compiler.reset()
    _compiled = recipe
