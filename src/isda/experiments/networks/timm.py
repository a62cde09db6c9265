"""Any image model of timm, as ``timm:NAME``."""

import contextlib
from collections.abc import Iterator
from typing import Any

import timm
import timm.layers
import torch
from torch import Tensor, nn

from isda.experiments.errors import InputError, unknown
from isda.experiments.networks.network import Network
from isda.experiments.networks.stochastic import Dropout, DropPath

__all__ = ["TimmNetwork", "image_size"]


class TimmNetwork(Network):
    """An image model of timm, not pretrained; dropout, if any, in front of its linear head.

    A head that is a 1×1 convolution of pooled features becomes the linear layer that it equals.
    Dropout and stochastic depth, which some models switch on, become layers of our own, whose draws
    are a function of seed and step.
    """

    def __init__(
        self, name: str, *, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        if not timm.is_model(name):
            raise unknown("timm model", name, timm.list_models())
        self.name = name
        try:
            self.model: Any = timm.create_model(
                name, num_classes=num_classes, in_chans=in_channels, drop_rate=0.0
            )
        except Exception as error:  # models differ in what they take
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"timm:{name} cannot be built: {reason}") from error
        _own_random_layers(self.model)
        classifier = self.get_classifier()
        if isinstance(classifier, nn.Conv2d) and classifier.kernel_size == (1, 1):
            path = next(path for path, part in self.model.named_modules() if part is classifier)
            self.model.set_submodule(path, _linear(classifier))
        elif not isinstance(classifier, nn.Linear):
            kind = type(classifier).__name__
            raise InputError(
                f"timm:{name} must end in one nn.Linear or 1×1 nn.Conv2d, its head is a {kind}"
            )
        self.dropout = Dropout(drop_rate) if drop_rate else None

    def forward_features(self, x: Tensor) -> Tensor:
        features = self.model.forward_head(self.model.forward_features(x), pre_logits=True)
        return features if self.dropout is None else self.dropout(features)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except AssertionError as error:  # some models refuse a size without a word
            reason = str(error) or f"the model is made for size {image_size(self.name)}"
            raise ValueError(reason) from error

    def check(self, images: Tensor, logits: Tensor) -> None:
        """Refuse a model that does more than to hand its features to its head."""
        with _called(self.model) as by_timm:
            expected = self.model(images)
        with _called(self.model) as here:
            self(images)
        same = torch.allclose(expected, logits, rtol=1e-3, atol=1e-3)
        # a fresh batch normalisation in front of the head changes nothing, but is one layer more
        if not same or by_timm != here:
            raise InputError(
                f"timm:{self.name} must give what its linear head makes of its features, as ISDA "
                "takes for granted, but adds something to it"
            )

    def get_classifier(self) -> nn.Linear:
        return self.model.get_classifier()


def image_size(name: str) -> int | None:
    """Side of the images that a model is made for; None for a name that timm does not know."""
    try:
        configuration = timm.get_pretrained_cfg(name)
    except RuntimeError:  # the name of a model with another's tag
        return None
    return None if configuration is None else configuration.input_size[-1]


def _own_random_layers(model: nn.Module) -> None:
    """Replace the random layers of a model that do something."""
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Dropout) and layer.p:
            model.set_submodule(path, Dropout(layer.p))
        elif isinstance(layer, timm.layers.DropPath) and layer.drop_prob:
            model.set_submodule(path, DropPath(layer.drop_prob))


@contextlib.contextmanager
def _called(model: nn.Module) -> Iterator[set[str]]:
    """Names of the layers with parameters or statistics that are called meanwhile."""
    names: set[str] = set()
    with contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules():
            own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            if own and layer is not model:
                note = layer.register_forward_hook(lambda *_, name=name: names.add(name))
                hooks.callback(note.remove)
        yield names


class _PooledLinear(nn.Linear):
    """A linear layer that takes pooled features as they are, (N, A, 1, 1), too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


def _linear(conv: nn.Conv2d) -> nn.Linear:
    """The linear layer of (N, A) that a 1×1 convolution is for (N, A, 1, 1)."""
    weight = conv.weight.detach().flatten(1)
    linear = _PooledLinear(
        conv.in_channels, conv.out_channels, conv.bias is not None, weight.device
    )
    linear.weight = nn.Parameter(weight)
    if conv.bias is not None:
        linear.bias = nn.Parameter(conv.bias.detach())
    return linear
