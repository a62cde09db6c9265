"""Other models: ``torchvision:NAME``, and your own functions, ``MODULE:FUNCTION``.

A model must end in a linear layer. This layer is taken out of the model, which then returns the
features, and becomes the head of the network.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from isda.experiments.errors import InputError, reason, unknown
from isda.experiments.networks.network import Network
from isda.experiments.networks.pretrained import (
    Preprocessing,
    load_tensors,
    loaded,
    read_tensors,
)
from isda.experiments.networks.stochastic import optional_dropout, replace_random_layers
from isda.heads import find_head

__all__ = [
    "WrappedNetwork",
    "create_own",
    "create_torchvision",
    "own_function",
    "torchvision_preprocessing",
    "torchvision_weights",
]


class WrappedNetwork(Network):
    """A model that ends in a linear layer, with optional dropout before it.

    Active dropout and stochastic depth are replaced by the layers of
    :mod:`~isda.experiments.networks.stochastic`.

    Args:
        name: name of the model, for messages.
        model: the model.
        num_classes: number of classes C.
        drop_rate: dropout rate before the head.
        weights: file of pretrained weights.
        rename: function that changes the names of the tensors in the file.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        *,
        num_classes: int,
        drop_rate: float = 0.0,
        weights: Path | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        super().__init__()
        self.name = name
        head = _head(name, model, num_classes)
        replace_random_layers(model)
        self._path = next(path for path, part in model.named_modules() if part is head)
        if weights is not None:
            tensors = {rename(key): value for key, value in read_tensors(weights).items()}
            new, misfit = load_tensors(model, self._path, tensors)
            if misfit:
                new, still = load_tensors(model, self._path, _unwrapped(tensors, self._path))
                misfit = still and misfit
            if misfit:
                raise InputError(f"{weights} does not fit {name}: {misfit}")
            self.weights = loaded(weights, model, new)
        model.set_submodule(self._path, nn.Identity())
        self.model, self.head = model, head
        self.dropout = optional_dropout(drop_rate)

    def forward_features(self, x: Tensor) -> Tensor:
        features = self.model(x)
        if not isinstance(features, Tensor) or features.dim() != 2:
            shape = getattr(features, "shape", type(features).__name__)
            raise InputError(
                f"{self.name} must return logits (N, {self.num_classes}) in training, but the "
                f"features before them are {shape}"
            )
        return self.dropout(features)

    def check(self, images: Tensor, logits: Tensor) -> None:
        """Raise InputError unless the logits are the linear head applied to the features."""
        self.model.set_submodule(self._path, self.head)
        try:
            expected = self.model(images)
        finally:
            self.model.set_submodule(self._path, nn.Identity())
        if not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3):
            raise InputError(
                f"{self.name} must end in a linear layer: ISDA needs its weight and input, but it "
                "changes the logits afterwards"
            )

    def get_classifier(self) -> nn.Linear:
        return self.head


def create_torchvision(
    name: str, *, num_classes: int, drop_rate: float = 0.0, weights: Path | None = None
) -> Network:
    """A classifier of ``torchvision.models`` by name."""
    models = _torchvision(name)
    try:
        model = models.get_model(name, weights=None, num_classes=num_classes)
    except Exception as error:  # models raise different errors
        raise InputError(f"torchvision:{name} cannot be built: {reason(error)}") from error
    rename = _densenet_name if name.startswith("densenet") else str
    return WrappedNetwork(
        f"torchvision:{name}",
        model,
        num_classes=num_classes,
        drop_rate=drop_rate,
        weights=weights,
        rename=rename,
    )


def create_own(
    spec: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    drop_rate: float = 0.0,
    weights: Path | None = None,
) -> Network:
    """The model that the user's function returns.

    Args:
        spec: ``MODULE:FUNCTION``; the module may be in the current folder.
        num_classes: number of classes, which the function takes.
        in_channels: channels of the images; passed on if the function takes it.
        drop_rate: dropout rate before the head.
        weights: file of pretrained weights.
    """
    function = own_function(spec)
    takes = inspect.signature(function).parameters.values()
    accepted = any(one.name == "in_channels" or one.kind is one.VAR_KEYWORD for one in takes)
    options = {"in_channels": in_channels} if accepted else {}
    if not accepted and in_channels != 3:
        raise InputError(f"{spec} must take in_channels for images with {in_channels} channels")
    try:
        model = function(num_classes=num_classes, **options)
    except InputError:
        raise
    except Exception as error:  # of the user's code
        raise InputError(
            f"{spec}(num_classes={num_classes}) failed: {type(error).__name__}: {reason(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec} must return an nn.Module, got {type(model).__name__}")
    return WrappedNetwork(
        spec, model, num_classes=num_classes, drop_rate=drop_rate, weights=weights
    )


def own_function(spec: str) -> Callable[..., Any]:
    """The user's function ``MODULE:FUNCTION``; the module may be in the current folder."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise InputError(f"network must be MODULE:FUNCTION, got {spec!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as with python -m
    try:
        found = importlib.import_module(module)
    except Exception as error:  # of the user's code
        raise InputError(f"network {spec}: cannot import {module}: {reason(error)}") from error
    function = getattr(found, name, None)
    if not callable(function):
        known = [key for key, value in vars(found).items() if callable(value) and key[0] != "_"]
        raise unknown(f"function of {module}", name, known)
    result: Callable[..., Any] = function
    return result


def torchvision_weights(name: str) -> Any:
    """The default pretrained weights of a torchvision model: address and transforms."""
    return _torchvision(name).get_model_weights(name).DEFAULT


def torchvision_preprocessing(name: str) -> Preprocessing:
    """Preprocessing of the images that the default weights were trained on."""
    transforms = torchvision_weights(name).transforms()
    size = transforms.crop_size[0]
    return Preprocessing(
        image_size=size,
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        interpolation=transforms.interpolation.value,
        test_crop=min(1.0, size / transforms.resize_size[0]),
    )


def _torchvision(name: str) -> Any:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise unknown("torchvision model", name, known)
    return models


def _densenet_name(name: str) -> str:
    """Name of a tensor in files that were made with an early version of torch."""
    for part in ("norm", "conv"):
        for number in ("1", "2"):
            name = name.replace(f".{part}.{number}.", f".{part}{number}.")
    return name


def _unwrapped(tensors: dict[str, Tensor], head: str) -> dict[str, Tensor]:
    """Tensors of a WrappedNetwork, as in our checkpoints, with the names that the model has."""
    names = {"model.": "", "head.": f"{head}."}
    return {
        own + name.removeprefix(prefix): value
        for name, value in tensors.items()
        for prefix, own in names.items()
        if name.startswith(prefix)
    }


def _head(name: str, model: nn.Module, num_classes: int) -> nn.Linear:
    """The only nn.Linear with an output per class; of several, the one that attach would take."""
    if any(map(is_lazy, model.parameters())):
        raise InputError(f"{name} must not have lazy layers: set their numbers of inputs")
    if isinstance(model, nn.Linear):
        raise InputError(
            f"{name} must return a model that ends in an nn.Linear, got only that layer"
        )
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    fitting = [part for part in linear if part.out_features == num_classes]
    if len(fitting) == 1:
        return fitting[0]
    try:
        head = find_head(model)
    except ValueError as error:
        why = str(error).partition(";")[0]  # without arguments of attach
        raise InputError(f"{name} cannot be used: {why}") from error
    if not isinstance(head, nn.Linear):
        kind = type(head).__name__
        raise InputError(f"{name} must end in an nn.Linear, but ends in a {kind}")
    if head.out_features != num_classes:
        raise InputError(
            f"{name} must end in an nn.Linear with {num_classes} outputs, one per class, but ends "
            f"in one with {head.out_features}"
        )
    return head
