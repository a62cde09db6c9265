"""A trained generator: images of given classes from latents."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError
from isda.experiments.generators.gan_folder import GanFolder
from isda.experiments.generators.gan_networks import Generator
from isda.experiments.generators.gan_settings import GanSettings
from isda.experiments.generators.gan_step import GanLane, draw_latent, to_bytes

__all__ = ["TrainedGenerator", "load_generator", "weights_digest"]

_BATCH = 1000  # images at a time


class TrainedGenerator(nn.Module):
    """The generator of a GAN, or those of all classes, in evaluation mode.

    Every image depends on its own latent and class alone.

    Args:
        settings: settings of the GAN.
        num_classes: number of classes C.
        image_shape: channels, height and width.
        networks: the generator, or one per class.
    """

    def __init__(
        self,
        settings: GanSettings,
        num_classes: int,
        image_shape: tuple[int, ...],
        networks: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.settings, self.num_classes, self.image_shape = settings, num_classes, image_shape
        self.networks = nn.ModuleList(networks)
        self.eval().requires_grad_(False)

    @classmethod
    def of_lanes(
        cls, settings: GanSettings, image_shape: tuple[int, ...], lanes: Sequence[GanLane]
    ) -> "TrainedGenerator":
        """The averaged generators of lanes; they share their weights with the lanes."""
        networks = [lane.average for lane in lanes]
        return cls(settings, lanes[0].num_classes, image_shape, networks)

    @property
    def digest(self) -> int:
        """See :func:`weights_digest`."""
        return weights_digest(self.networks)

    def state(self) -> dict[str, Any]:
        """Contents of ``generator.pt`` besides settings and epochs."""
        return {
            "num_classes": self.num_classes,
            "image_shape": [*self.image_shape],
            "networks": [network.state_dict() for network in self.networks],
        }

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def for_classes(self, classes: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Function from latents (N, noise + codes) to images in [-1, 1], image i of class i.

        The function can be captured: it copies nothing from the host.
        """
        label = torch.tensor(list(classes), dtype=torch.int64, device=self.device)
        if not self.settings.per_class:
            return lambda latent: self.networks[0](latent, label)
        order = label.argsort(stable=True)
        back = order.argsort()
        counts = torch.bincount(label, minlength=self.num_classes).tolist()

        def images(latent: Tensor) -> Tensor:
            parts = latent[order].split(counts)
            drawn = [network(part, label) for network, part in zip(self.networks, parts,
                     strict=True) if len(part)]  # fmt: skip
            return torch.cat(drawn)[back]

        return images

    @torch.no_grad()
    def draw(self, classes: Sequence[int], key: Tensor) -> Tensor:
        """Random uint8 images of given classes, which depend on the key alone."""
        parts = []
        for first in range(0, len(classes), _BATCH):
            part = classes[first : first + _BATCH]
            latent = draw_latent(len(part), counter_rng.fold(key, first), self.settings)
            parts.append(to_bytes(self.for_classes(part)(latent)))
        return torch.cat(parts)

    def require_fit(self, *, num_classes: int, image_shape: tuple[int, ...], other: str) -> None:
        """Raise InputError if the generator has other classes or images of another shape."""
        if self.num_classes != num_classes:
            raise InputError(
                f"the generator has {self.num_classes} classes ({self.settings.data}), {other} has "
                f"{num_classes}: use a generator of the same data set"
            )
        if self.image_shape != tuple(image_shape):
            own, its = (" x ".join(map(str, shape)) for shape in (self.image_shape, image_shape))
            raise InputError(
                f"the generator makes images of {own} ({self.settings.data}), {other} takes {its}: "
                "use a generator of the same data set"
            )


def load_generator(folder: Path | str, device: torch.device | str) -> TrainedGenerator:
    """The generator of a finished GAN; see :class:`GanFolder`."""
    found = GanFolder(folder)
    settings, networks = found.settings, []

    def restore(state: dict[str, Any]) -> None:
        labels = 0 if settings.per_class else state["num_classes"]
        for weights in state["networks"]:
            network = Generator(settings, labels, tuple(state["image_shape"]))
            network.load_state_dict(weights)
            networks.append(network.to(device))

    state = found.load("generator.pt", restore)
    if state is None or state["epoch"] != settings.epochs:
        raise InputError(
            f"{found.folder} has no generator.pt of its last epoch, {settings.epochs}: continue "
            f"with isda gan train {settings.gan} --resume"
        )
    return TrainedGenerator(settings, state["num_classes"], tuple(state["image_shape"]), networks)


def weights_digest(modules: Iterable[nn.Module]) -> int:
    """A number of 48 bits that changes with any weight or buffer."""
    digest = hashlib.sha256()
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return int.from_bytes(digest.digest()[:6], "big")
