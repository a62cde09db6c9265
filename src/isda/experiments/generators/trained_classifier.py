"""A trained classifier with its ISDA statistics, and moves of its features."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from isda import Covariance, ISDALoss
from isda.experiments.data.arrays import ImageArrays, normalize
from isda.experiments.errors import InputError, as_input_error
from isda.experiments.generators.tested_images import load_tested_images
from isda.experiments.generators.trained_generator import weights_digest
from isda.experiments.losses.baselines import create_criterion
from isda.experiments.networks import Network
from isda.experiments.settings import Options, Recipe
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import require_same_images
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.training_step import Lane

__all__ = ["TrainedClassifier", "load_classifier"]

_PIXELS = 2**22  # at a time


@dataclass(frozen=True, eq=False)
class TrainedClassifier:
    """A network in evaluation mode, in float32, with the data set that it was trained on."""

    folder: Path
    recipe: Recipe
    network: Network
    data: ImageArrays
    criterion: ISDALoss | None
    """Holds the ISDA statistics; None if the run was trained with another loss."""

    @property
    def device(self) -> torch.device:
        """Device of the network and of the targets."""
        return self.data.train_target.device

    @property
    def digest(self) -> int:
        """A number that changes with any weight and any of the statistics."""
        return weights_digest([self.network, *([self.criterion] if self.criterion else [])])

    def training_images(self, index: Tensor) -> Tensor:
        """The uint8 training images that an index of any shape asks for, on the device."""
        images = self.data.train_images
        return images[index.to(images.device)].to(self.device)

    def features(self, images: Tensor) -> Tensor:
        """Features (N, A) of uint8 images, or of images in [-1, 1] with gradients."""
        pixels = images if images.dtype == torch.uint8 else (images + 1) * 127.5
        return self.network.forward_features(normalize(pixels, self.data.mean, self.data.std))

    @torch.no_grad()
    def all_features(self, images: Tensor) -> Tensor:
        """Features of many uint8 images on any device, computed batch by batch."""
        size = max(1, _PIXELS // images[0, 0].numel())
        return torch.cat([self.features(part.to(self.device)) for part in images.split(size)])

    @torch.no_grad()
    def predictions(self, images: Tensor) -> Tensor:
        """Predicted class of uint8 images."""
        return self.network.get_classifier()(self.all_features(images)).argmax(1)

    def class_covariance(self, index: int) -> Tensor:
        """Covariance Σ (A, A) of a class, in float64."""
        assert self.criterion is not None
        assert isinstance(self.criterion.estimator, Covariance)
        covariance = self.criterion.estimator.class_covariance(index)
        return covariance.to(self.device).double()


def load_classifier(
    folder: Path | str, options: Options, device: torch.device, *, statistics: bool = True
) -> TrainedClassifier:
    """Load a finished run with its checkpoint.

    Args:
        folder: folder of the run.
        options: where to find its data set.
        device: device of network and data.
        statistics: whether ISDA statistics are needed.
    """
    run = RunFolder(folder)
    recipe = run.recipe
    if statistics and recipe.method != "isda":
        raise InputError(
            f"{run.folder} was trained with {recipe.method} and has no ISDA statistics: give a run "
            "with method isda"
        )
    state = run.load_finished()
    try:
        own = load_tested_images(Plan(run.name, recipe, run.seed), options, device)
        require_same_images(own, recipe, state, "restore the images, or train the run again")
    except InputError as error:
        raise InputError(f"{run.folder}: {error}") from error
    # the checkpoint has all weights, including those of a frozen network
    untrained = replace(recipe, pretrained=False, weights="", freeze=False)
    network = Lane.create_network(untrained, own, run.seed)
    criterion = None
    with as_input_error(f"{run.folder}: the checkpoint does not fit {recipe.network}"):
        network.load_state_dict(state["average" if recipe.ema else "network"])
    if recipe.method == "isda":
        size, classes = network.num_features, own.num_classes
        created = create_criterion(recipe, num_features=size, num_classes=classes)
        with as_input_error(f"{run.folder}: the checkpoint has no valid ISDA statistics"):
            created.load_state_dict(state["criterion"])
        assert isinstance(created, ISDALoss)
        criterion = created
    network.to(device).eval().requires_grad_(False)
    return TrainedClassifier(run.folder, recipe, network, own, criterion)
