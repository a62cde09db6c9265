"""One run and its training step, which never synchronises and can be captured as a whole.

A :class:`Lane` holds all state of a run. It draws random numbers from its own key, so it ends with
the same weights whether it trains alone or next to other runs.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isda import distributed
from isda.experiments.data.arrays import ImageArrays, rank_slice
from isda.experiments.data.features import FeatureArrays
from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.errors import InputError
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.losses.baselines import create_criterion
from isda.experiments.networks import (
    Network,
    bind_keys,
    count_random_layers,
    create_network,
    find_weights,
)
from isda.experiments.networks.batch_norm import synchronize_batch_norm
from isda.experiments.networks.network import seeded
from isda.experiments.networks.probe import Probe
from isda.experiments.settings import Recipe
from isda.experiments.training.device import autocast_of, memory_format_of
from isda.experiments.training.images import data_size, require_same_images
from isda.experiments.training.memory import create_on, host_memory, is_out_of_memory
from isda.experiments.training.metrics import classification_metrics, classified
from isda.experiments.training.optimizer import (
    create_optimizer,
    optimizer_state,
    rates,
    set_rates,
)
from isda.experiments.training.run_images import RunImages, compile_once

__all__ = ["Lane"]


class Lane:
    """Network, optimizer, criterion and position in the data of one run.

    Args:
        recipe: recipe of the run.
        seed: seed of initial weights, order of images, augmentation and dropout.
        data: data set; arrays must be on the device, images of a folder need not.
        device: device of the run.
        rank: rank of this process among those that train the run together.
        world: number of these processes.
        generator: source of synthetic images, if the recipe has any.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        data: ImageArrays | DecodedImages,
        device: torch.device,
        *,
        rank: int = 0,
        world: int = 1,
        generator: TrainedGenerator | None = None,
    ) -> None:
        self.recipe, self.seed, self.data, self.device = recipe, seed, data, device
        self.rank, self.world = rank, world
        self.generator_digest = 0 if generator is None else generator.digest
        self.epoch = 0  # epochs done
        self.network = self._create_network()
        random_layers = count_random_layers(self.network)
        self.images = RunImages(
            recipe,
            seed,
            data,
            device,
            rank=rank,
            world=world,
            compiled=self._compiled,
            random_layers=random_layers,
            generator=generator,
        )
        self.criterion = self._create_criterion()
        self.average = copy.deepcopy(self.network).requires_grad_(False) if recipe.ema else None

        self.learning_rate = torch.zeros((), device=device)
        self.progress = torch.zeros((), device=device)  # t/T of λ
        self.position = torch.zeros((), dtype=torch.int64, device=device)  # in the epoch's images
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # since the run started
        self.total_loss = torch.zeros((), device=device)  # summed over the images of the epoch
        self.layer_keys = torch.zeros(random_layers, dtype=torch.int64, device=device)
        self.results = torch.zeros(4, device=device)  # set by evaluate, and the next
        self.classified = torch.zeros(0, 4, device=device)
        bind_keys(self.network, self.layer_keys)

        self.parameters = list(self.network.parameters())
        self.optimizer = create_optimizer(recipe, self.network, self.learning_rate)
        self._model = self._create_model()
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)

    @staticmethod
    def create_network(recipe: Recipe, data: ImageArrays | DecodedImages, seed: int) -> Network:
        """Network of a recipe for a data set, with the initial weights of a seed."""
        if isinstance(data, FeatureArrays):
            with seeded(seed):
                classes, drop_rate = data.num_classes, recipe.drop_rate
                return Probe(data.backbone, num_classes=classes, drop_rate=drop_rate)
        weights = find_weights(recipe.network, recipe.weights) if recipe.pretrained else None
        return create_network(
            recipe.network,
            num_classes=data.num_classes,
            in_channels=data.image_shape[0],
            drop_rate=recipe.drop_rate,
            generator=torch.Generator().manual_seed(seed),
            weights=weights,
        )

    @property
    def num_images(self) -> int:
        """Number of training images."""
        return self.images.number

    def begin_epoch(self) -> None:
        """Set learning rate, λ and order, and run the augmentation that is done once per epoch."""
        self.learning_rate.fill_(self.recipe.learning_rate_at(self.epoch))
        self.progress.fill_(self.recipe.progress_at(self.epoch))
        self.position.zero_()
        self.total_loss.zero_()
        self.images.begin_epoch(self.epoch)

    def step(self, size: int) -> None:
        """One training step on the next ``size`` images of all ranks, without synchronisation."""
        part = rank_slice(size, rank=self.rank, world=self.world)
        if self.world > 1:
            bind_keys(self.network, self.layer_keys, offset=part.start)
        images, target, layer_keys = self.images.batch(part, self.position, self.steps)
        self.layer_keys.copy_(layer_keys)
        self.zero_grad()
        set_rates(self.optimizer, self.learning_rate, self._warmup_factor())
        with autocast_of(self.recipe, self.device):
            features, logits = self._model(images)
        head = self.network.get_classifier()
        progress = self.progress
        if self.recipe.ramp == "step":
            progress = self.steps / (self.recipe.epochs * self.images.steps_per_epoch)
        loss = self.criterion(
            features, head.weight, target, bias=head.bias, logits=logits, progress=progress
        )
        loss.backward()
        self.optimizer.step()
        if self.average is not None:
            self._update_average(self.average)
        self.total_loss.add_(loss.detach(), alpha=size)
        torch._foreach_add_([self.position, self.steps], [size, 1])

    def zero_grad(self) -> None:
        """Free the gradients; the next step allocates new ones."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def predict(self, images: RunImages) -> tuple[Tensor, Tensor]:
        """Logits and target of the test images of this rank.

        Shape:
            outputs (N, C) and (N,).
        """
        network = self.network if self.average is None else self.average
        network.eval()
        parts = []
        for batch, target in images.test_batches():
            with autocast_of(self.recipe, self.device):
                parts.append((network(batch).float(), target))
        network.train()
        logits, target = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return logits, target

    @torch.no_grad()
    def evaluate(self) -> None:
        """Write the :func:`classification_metrics` of the test images to ``results``."""
        logits, target = self.predict(self.images)
        if self.world > 1:
            size, _ = distributed.agree(len(target), 0, None)
            logits, target = distributed.gather_batch(logits, target, None, size=size)
            logits, target = logits[target >= 0], target[target >= 0]
        self.results.copy_(classification_metrics(logits, target))
        self.classified = classified(logits, target)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a step changes."""
        for module in (self.network, self.criterion, self.average):
            if module is not None:
                yield from module.parameters()
                yield from module.buffers()
        yield from optimizer_state(self.optimizer)
        yield from rates(self.optimizer, self.learning_rate)
        yield self.position
        yield self.steps
        yield self.total_loss
        yield self.layer_keys

    def state_dict(self) -> dict[str, Any]:
        """Contents of a checkpoint, which is written between two epochs."""
        state = {
            "epoch": self.epoch,
            "steps": self.steps,
            "data": data_size(self.data),
            "images": self.data.digest,
            "network": self.network.state_dict(),
            "criterion": self.criterion.state_dict(),
            "momentum": optimizer_state(self.optimizer),
            "generator": self.generator_digest,
        }
        return state if self.average is None else state | {"average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint in place.

        Raises:
            InputError: the data set or the generator has changed since the checkpoint.
        """
        require_same_images(
            self.data,
            self.recipe,
            state,
            "restore the images, or train in another folder with --out",
        )
        if state.get("generator", 0) != self.generator_digest:
            raise InputError(
                f"the {self.recipe.generator} is not the one that the checkpoint was made with: "
                "give the folder of the original one with --generators"
            )
        self.epoch = state["epoch"]
        self.steps.copy_(state["steps"])
        self.network.load_state_dict(state["network"])
        self.criterion.load_state_dict(state["criterion"])
        for buffer, saved in zip(optimizer_state(self.optimizer), state["momentum"], strict=True):
            buffer.copy_(saved)
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    @property
    def _compiled(self) -> bool:
        return self.recipe.compile and self.device.type == "cuda"

    def _create_network(self) -> Network:
        network = self.create_network(self.recipe, self.data, self.seed)
        if self.world > 1:
            synchronize_batch_norm(network, self.device)
        return network.to(self.device).to(memory_format=memory_format_of(self.recipe))

    def _create_criterion(self) -> nn.Module:
        features, classes = self.network.num_features, self.data.num_classes
        create = partial(
            create_criterion,
            self.recipe,
            num_features=features,
            num_classes=classes,
            seed=self.seed,
        )
        try:
            return create_on(self.device, create, limit=host_memory())
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"{self.recipe.covariance} covariances of {classes} classes with {features} "
                f"features do not fit in memory: use --covariance diagonal or shared"
            ) from error

    def _create_model(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        if self.world == 1:
            eager = partial(_features_and_logits, self.network)
            if not self._compiled:
                return eager
            # combine small kernels, such as the casts of the weights, into one
            compiled = partial(compile_once(_features_and_logits, combo_kernels=True), self.network)
            full = self.recipe.batch_size
            # compiling again for the last, smaller batch would cost more time than it saves
            return lambda images: compiled(images) if len(images) == full else eager(images)
        on_gpu = self.device.type == "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # no replacement in torch 2.11
            model = nn.parallel.DistributedDataParallel(
                _FeaturesAndLogits(self.network),
                device_ids=[self.device.index] if on_gpu else None,
                broadcast_buffers=False,
            )
        if not self._compiled:
            return model
        return torch.compile(model, dynamic=False, options={"combo_kernels": True})

    def _warmup_factor(self) -> Tensor | None:
        """Factor of the learning rate in this step, on the device; None without warm-up."""
        if not self.recipe.warmup:
            return None
        steps = self.recipe.warmup * self.images.steps_per_epoch
        return ((self.steps + 1) / steps).clamp(max=1)

    @torch.no_grad()
    def _update_average(self, average: nn.Module) -> None:
        averages: list[Tensor] = list(average.parameters())
        torch._foreach_lerp_(averages, tuple(self.parameters), 1 - self.recipe.ema)
        for buffer, current in zip(average.buffers(), self.network.buffers(), strict=True):
            if buffer.is_floating_point():
                buffer.lerp_(current, 1 - self.recipe.ema)
            else:
                buffer.copy_(current)


class _FeaturesAndLogits(nn.Module):
    """Network that returns what a criterion needs: features and logits."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return _features_and_logits(self.network, images)


def _features_and_logits(network: Network, images: Tensor) -> tuple[Tensor, Tensor]:
    features = network.forward_features(images)
    return features, network.get_classifier()(features)
