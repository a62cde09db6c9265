"""The ImageNet networks of Table 1, built from torchvision's classes.

torchvision's ResNets have the stride in the 3×3 convolution, as in the authors' code. Parameters
keep torchvision's names, except that the linear layer is ``head``.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from torchvision.models.resnet import Bottleneck

from isda.experiments.networks.network import Network, initialise_convolutions
from isda.experiments.networks.stochastic import Dropout

__all__ = [
    "densenet121",
    "densenet265",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
]


def resnet50(*, num_classes: int) -> Network:
    """ResNet-50: 25.6 M parameters, A = 2048."""
    return _ResNet(Bottleneck, [3, 4, 6, 3], num_classes=num_classes)


def resnet101(*, num_classes: int) -> Network:
    """ResNet-101: 44.5 M parameters (the paper prints 44.6), A = 2048."""
    return _ResNet(Bottleneck, [3, 4, 23, 3], num_classes=num_classes)


def resnet152(*, num_classes: int) -> Network:
    """ResNet-152: 60.2 M parameters (the paper prints 60.3), A = 2048."""
    return _ResNet(Bottleneck, [3, 8, 36, 3], num_classes=num_classes)


def resnext50_32x4d(*, num_classes: int) -> Network:
    """ResNeXt-50, 32x4d: 25.0 M parameters, A = 2048."""
    groups = {"groups": 32, "width_per_group": 4}
    return _ResNet(Bottleneck, [3, 4, 6, 3], num_classes=num_classes, **groups)


def resnext101_32x8d(*, num_classes: int) -> Network:
    """ResNeXt-101, 32x8d: 88.8 M parameters, A = 2048."""
    groups = {"groups": 32, "width_per_group": 8}
    return _ResNet(Bottleneck, [3, 4, 23, 3], num_classes=num_classes, **groups)


def densenet121(*, num_classes: int, drop_rate: float = 0.0) -> Network:
    """DenseNet-BC-121: 8.0 M parameters, A = 1024."""
    return _DenseNet(32, (6, 12, 24, 16), 64, num_classes=num_classes, drop_rate=drop_rate)


def densenet265(*, num_classes: int, drop_rate: float = 0.0) -> Network:
    """DenseNet-BC-265: 33.3 M parameters, A = 2688."""
    return _DenseNet(32, (6, 12, 64, 48), 64, num_classes=num_classes, drop_rate=drop_rate)


class _Torchvision(Network):
    head: nn.Linear

    def _take_head(self, name: str) -> None:
        self.head = cast(nn.Linear, self.get_submodule(name))
        self.add_module(name, nn.Identity())  # so that torchvision's forward returns the features

    def get_classifier(self) -> nn.Linear:
        return self.head


class _ResNet(_Torchvision, models.ResNet):
    def __init__(self, *args: Any, **options: Any) -> None:
        models.ResNet.__init__(self, *args, **options)
        self._take_head("fc")

    def forward_features(self, x: Tensor) -> Tensor:
        return models.ResNet.forward(self, x)


class _DenseNet(_Torchvision, models.DenseNet):
    def __init__(self, *args: Any, drop_rate: float, **options: Any) -> None:
        models.DenseNet.__init__(self, *args, **options)
        self._take_head("classifier")
        self.head.reset_parameters()
        initialise_convolutions(self)  # fan-out as in the authors' code; torchvision uses fan-in
        if drop_rate:
            for layer in [module for module in self.modules() if hasattr(module, "conv2")]:
                layer.dropout = Dropout(drop_rate)
                layer.register_forward_hook(_drop)

    def forward_features(self, x: Tensor) -> Tensor:
        # torchvision's blocks concatenate all earlier outputs in every layer, which gives the same
        # result, but makes torch.compile take twice as long for DenseNet-265
        for part in self.get_submodule("features").children():
            if isinstance(part, nn.ModuleDict):  # a dense block
                for layer in part.values():
                    x = torch.cat((x, layer(x)), 1)
            else:
                x = part(x)
        return F.adaptive_avg_pool2d(F.relu(x, inplace=True), 1).flatten(1)


def _drop(layer: Any, args: Any, output: Tensor) -> Tensor:
    return layer.dropout(output)
