"""Keys of the random layers of a network."""

import torch
from torch import Tensor, nn

from isda.experiments.data import counter_rng
from isda.experiments.networks import bind_keys, count_random_layers

__all__ = ["bind", "keys_of"]


def keys_of(network: nn.Module, number: int, device: torch.device | None = None) -> Tensor:
    """The keys of the layers in a step."""
    layers = torch.arange(count_random_layers(network), device=device)
    return counter_rng.fold(counter_rng.key(number, device=device), layers)


def bind(network: nn.Module, number: int, device: torch.device | None = None) -> Tensor:
    """Bind the keys of a step and return them."""
    keys = keys_of(network, number, device)
    bind_keys(network, keys)
    return keys
