"""timm models, as ``timm:NAME``."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from isda.experiments.errors import InputError, reason, unknown
from isda.experiments.networks.network import Network
from isda.experiments.networks.pretrained import (
    Preprocessing,
    load_tensors,
    loaded,
    read_tensors,
)
from isda.experiments.networks.stochastic import optional_dropout, replace_random_layers

__all__ = ["TimmNetwork", "image_size", "preprocessing", "pretrained_settings"]


class TimmNetwork(Network):
    """A timm model, with optional dropout before its linear head.

    A head that is a 1×1 convolution is replaced by the equivalent linear layer. Dropout and
    stochastic depth, which some models enable, are replaced by the layers of
    :mod:`~isda.experiments.networks.stochastic`.
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        weights: Path | None = None,
    ) -> None:
        super().__init__()
        if not timm.is_model(name):
            raise unknown("timm model", name, timm.list_models())
        self.name = name
        try:
            self.model: Any = timm.create_model(
                name, num_classes=num_classes, in_chans=in_channels, drop_rate=0.0
            )
        except Exception as error:  # models raise different errors
            raise InputError(f"timm:{name} cannot be built: {reason(error)}") from error
        classifier: Any = self.get_classifier()
        is_conv = isinstance(classifier, nn.Conv2d) and classifier.kernel_size == (1, 1)
        if not is_conv and not isinstance(classifier, nn.Linear):
            kind = type(classifier).__name__
            raise InputError(
                f"timm:{name} must end in an nn.Linear or a 1×1 nn.Conv2d, but ends in a {kind}"
            )
        path = next(path for path, part in self.model.named_modules() if part is classifier)
        if weights is not None:
            self._load(weights, path, in_channels)
        replace_random_layers(self.model)
        if is_conv:
            self.model.set_submodule(path, _linear(classifier))
        self.dropout = optional_dropout(drop_rate)

    def forward_features(self, x: Tensor) -> Tensor:
        features = self.model.forward_head(self.model.forward_features(x), pre_logits=True)
        return self.dropout(features)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except AssertionError as error:  # some models reject an image size without a message
            why = str(error) or f"the model was designed for size {image_size(self.name)}"
            raise ValueError(why) from error

    def check(self, images: Tensor, logits: Tensor) -> None:
        """Raise InputError unless the logits are the linear head applied to the features."""
        with _called(self.model) as by_timm:
            expected = self.model(images)
        with _called(self.model) as here:
            self(images)
        same = torch.allclose(expected, logits, rtol=1e-3, atol=1e-3)
        # an untrained batch norm before the head does not change the output, but is called
        if not same or by_timm != here:
            raise InputError(
                f"timm:{self.name} must end in a linear layer: ISDA needs its weight and input, "
                "but it changes the features or the logits in another way"
            )

    def get_classifier(self) -> nn.Linear:
        return self.model.get_classifier()

    def _load(self, weights: Path, head: str, in_channels: int) -> None:
        """Load a file with timm's names, or one that timm can convert to them."""
        tensors = read_tensors(weights)
        new, misfit = load_tensors(self.model, head, tensors)
        converted = self._converted(tensors, in_channels) if misfit else None
        if converted is not None:
            new, misfit = load_tensors(self.model, head, converted)
        if misfit:
            raise InputError(f"{weights} does not fit timm:{self.name}: {misfit}")
        self.weights = loaded(weights, self.model, new)

    def _converted(self, tensors: dict[str, Tensor], in_channels: int) -> dict[str, Tensor] | None:
        """Tensors of another code base with timm's names; None if timm cannot convert them."""
        found = pretrained_settings(self.name)
        if found is None or in_channels != 3:  # then timm would not say what it leaves out
            return None
        try:
            original = timm.create_model(
                self.name,
                pretrained=True,
                num_classes=found.num_classes,
                pretrained_cfg_overlay={"state_dict": dict(tensors), "label_offset": 0},
            )
        except Exception:  # the file is of another model
            return None
        result: dict[str, Tensor] = original.state_dict()
        return result


def pretrained_settings(name: str) -> Any:
    """What timm says about the pretrained weights of a name; None if it does not know the name."""
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:  # the tag belongs to another model
        return None


def image_size(name: str) -> int | None:
    """Image size that a model was designed for; None if timm does not know the name."""
    found = pretrained_settings(name)
    return None if found is None else found.input_size[-1]


def preprocessing(name: str) -> Preprocessing:
    """Preprocessing of the images that a model was pretrained on."""
    found = pretrained_settings(name) if timm.is_model(name) else None
    if found is None:
        raise unknown("timm model", name, [*timm.list_models(), *timm.list_pretrained()])
    side = found.input_size[-1]
    resized = math.floor(side / found.crop_pct)  # as timm's create_transform rounds it
    return Preprocessing(
        image_size=side,
        mean=tuple(found.mean),
        std=tuple(found.std),
        interpolation=found.interpolation,
        test_crop=min(1.0, side / resized),
    )


@contextlib.contextmanager
def _called(model: nn.Module) -> Iterator[set[str]]:
    """Record the names of the layers with parameters or buffers that are called."""
    names: set[str] = set()
    with contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules():
            own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            if own and layer is not model:
                note = layer.register_forward_hook(lambda *_, name=name: names.add(name))
                hooks.callback(note.remove)
        yield names


class _PooledLinear(nn.Linear):
    """Linear layer that also accepts pooled features of shape (N, A, 1, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


def _linear(conv: nn.Conv2d) -> nn.Linear:
    """Linear layer that is equivalent to a 1×1 convolution."""
    weight = conv.weight.detach().flatten(1)
    linear = _PooledLinear(
        conv.in_channels, conv.out_channels, conv.bias is not None, weight.device
    )
    linear.weight = nn.Parameter(weight)
    if conv.bias is not None:
        linear.bias = nn.Parameter(conv.bias.detach())
    return linear
