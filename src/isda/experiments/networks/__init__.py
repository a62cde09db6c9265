"""The paper's networks by name (Section 5, Appendix B), and other models.

Other models are ``timm:NAME``, ``torchvision:NAME``, and ``MODULE:FUNCTION`` for your own.
"""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isda.experiments.errors import InputError, unknown
from isda.experiments.networks.network import Network, seeded
from isda.experiments.networks.pretrained import LoadedWeights, Preprocessing, find_weights
from isda.experiments.networks.stochastic import bind_keys, count_random_layers

__all__ = [
    "NETWORKS",
    "LoadedWeights",
    "Network",
    "bind_keys",
    "count_random_layers",
    "create_network",
    "find_weights",
    "has_layer_norm",
    "outline",
    "own_image_size",
    "own_preprocessing",
    "require_network",
]

NETWORKS = {
    "resnet8": "resnet",
    "resnet32": "resnet",
    "resnet110": "resnet",
    "se_resnet110": "resnet",
    "wide_resnet16_8": "wide_resnet",
    "wide_resnet28_10": "wide_resnet",
    "resnext29_8x64d": "resnext",
    "densenet_bc100_12": "densenet",
    "densenet_bc190_40": "densenet",
    "shake_shake26_2x32d": "shake_shake",
    "shake_shake26_2x112d": "shake_shake",
    "resnet50": "imagenet",
    "resnet101": "imagenet",
    "resnet152": "imagenet",
    "densenet121": "imagenet",
    "densenet265": "imagenet",
    "resnext50_32x4d": "imagenet",
    "resnext101_32x8d": "imagenet",
}
"""Names of the networks, and the module with the function of that name."""


def create_network(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    drop_rate: float = 0.0,
    generator: torch.Generator | None = None,
    weights: Path | None = None,
) -> Network:
    """Build a network by name.

    Args:
        name: a key of ``NETWORKS``, ``timm:NAME``, ``torchvision:NAME`` or ``MODULE:FUNCTION``.
        num_classes: number of classes C.
        in_channels: channels of the images; the ImageNet networks require 3.
        drop_rate: dropout rate; ResNeXt, Shake-Shake and the ImageNet ResNets have no dropout.
        generator: CPU generator of the initial weights; by default torch's global one.
        weights: file of pretrained weights, see :func:`find_weights`; ``network.weights`` tells
            what was loaded.

    Example:
        >>> network = create_network("resnet32", num_classes=100)
        >>> network(torch.zeros(2, 3, 32, 32)).shape, network.num_features
        (torch.Size([2, 100]), 64)
    """
    if num_classes < 1:
        raise InputError(f"num_classes must be >= 1, got {num_classes}")
    if in_channels < 1:
        raise InputError(f"in_channels must be >= 1, got {in_channels}")
    if not 0 <= drop_rate < 1:
        raise InputError(f"drop_rate must be in [0, 1), got {drop_rate}")
    builder = _builder(name)
    options: dict[str, Any] = {} if weights is None else {"weights": weights}
    accepted = inspect.signature(builder).parameters
    for option, value, default in (("in_channels", in_channels, 3), ("drop_rate", drop_rate, 0)):
        if option in accepted:
            options[option] = value
        elif value != default:
            raise InputError(f"{option} of {name} must be {default}, got {value}")

    seed = torch.randint(2**63 - 1, (), generator=generator, device="cpu").item()
    with seeded(int(seed)):
        return builder(num_classes=num_classes, **options)


def own_image_size(name: str) -> int | None:
    """Image size that a timm model was designed for; None for other networks."""
    if not name.startswith("timm:"):
        return None
    from isda.experiments.networks.timm_network import image_size  # slow to import

    return image_size(name.removeprefix("timm:"))


def own_preprocessing(name: str) -> Preprocessing | None:
    """Preprocessing that the pretrained weights expect; None if unknown."""
    kind, _, model = name.partition(":")
    if kind == "timm":
        from isda.experiments.networks.timm_network import preprocessing  # slow to import

        return preprocessing(model)
    if kind == "torchvision":
        from isda.experiments.networks.wrapped import torchvision_preprocessing  # slow to import

        return torchvision_preprocessing(model)
    return None


def has_layer_norm(name: str) -> bool:
    """Whether a network has layer norm or RMS norm, as transformers do."""
    kinds = {type(part) for part in outline(name, num_classes=2).modules()}
    return any(
        issubclass(kind, nn.LayerNorm) or "rmsnorm" in kind.__name__.lower() for kind in kinds
    )


def outline(name: str, **options: Any) -> Network:
    """A network for inspection, without values if possible; options as in create_network."""
    try:
        with torch.device("meta"):
            return create_network(name, **options)
    except Exception:  # it reads a value while it is built; other errors are raised below
        return create_network(name, **options)


def require_network(name: str, *, drop_rate: float = 0.0) -> None:
    """Raise InputError if there is no such network, without building one of your own."""
    kind, colon, _ = name.partition(":")
    if colon and kind not in ("timm", "torchvision"):
        from isda.experiments.networks.wrapped import own_function  # slow to import

        own_function(name)
    else:
        outline(name, num_classes=2, drop_rate=drop_rate)


def _builder(name: str) -> Callable[..., Network]:
    kind, colon, model = name.partition(":")
    if kind == "timm" and colon:
        from isda.experiments.networks.timm_network import TimmNetwork  # slow to import

        return partial(TimmNetwork, model)
    if colon:
        from isda.experiments.networks import wrapped  # slow to import

        if kind == "torchvision":
            return partial(wrapped.create_torchvision, model)
        return partial(wrapped.create_own, name)
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS)
    module = import_module(f"isda.experiments.networks.{NETWORKS[name]}")  # torchvision is slow
    builder: Callable[..., Network] = getattr(module, name)
    return builder
