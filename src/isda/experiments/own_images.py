"""The default recipe for your own images, ``--data imagefolder:PATH``.

It depends on the network: whether it is pretrained, on which images, and whether it has layer norm.
"""

from dataclasses import asdict, replace
from typing import Any

import torch

from isda.experiments.networks import has_layer_norm, own_image_size, own_preprocessing
from isda.experiments.settings import Recipe

__all__ = ["OWN_IMAGES", "own_images_recipe"]

OWN_IMAGES = Recipe(
    data="imagefolder:PATH",
    network="timm:resnet18",
    epochs=90,
    batch_size=64,
    learning_rate=0.025,
    weight_decay=1e-4,
    lambda_0=0.5,
    channels_last=True,
)
"""Default recipe without pretrained weights."""

_FINE_TUNING: dict[str, Any] = {
    "pretrained": True,
    "epochs": 30,
    "learning_rate": 0.01,
    "warmup": 1,
}
_ADAMW: dict[str, Any] = {  # for transformers
    "optimizer": "adamw",
    "nesterov": False,
    "learning_rate": 5e-5,
    "head_rate": 10.0,
    "weight_decay": 0.05,
    "decay_all": False,
}
_FROZEN: dict[str, Any] = {
    **_ADAMW,
    "freeze": True,
    "epochs": 50,
    "batch_size": 256,
    "learning_rate": 1e-3,
    "head_rate": 1.0,
    "warmup": 0,
    "weight_decay": 0.01,
}


def own_images_recipe(
    network: str, weights: str, *, pretrained: bool, freeze: bool, device: str
) -> Recipe:
    """Default recipe for a network.

    Args:
        network: name of a network; if empty, the network of ``OWN_IMAGES``.
        weights: file with the pretrained weights; if empty, those of timm or torchvision.
        pretrained: start from pretrained weights.
        freeze: train only the head.
        device: as in the options; on a GPU the precision is bfloat16.
    """
    changes: dict[str, Any] = {}
    if pretrained:
        network = network or OWN_IMAGES.network
        known = own_preprocessing(network)
        changes |= _FINE_TUNING | (_ADAMW if has_layer_norm(network) else {})
        changes |= (_FROZEN if freeze else {}) | ({} if known is None else asdict(known))
        changes |= {"network": network, "weights": weights}
    elif network.startswith("timm:"):
        changes["image_size"] = own_image_size(network) or OWN_IMAGES.image_size
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        changes["precision"] = "bf16"
    return replace(OWN_IMAGES, **changes)
