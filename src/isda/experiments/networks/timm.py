"""Any image model of timm, as ``timm:NAME``."""

from typing import Any

import timm
from torch import Tensor, nn

from isda.experiments.errors import InputError, unknown
from isda.experiments.networks.network import Network
from isda.experiments.networks.stochastic import Dropout

__all__ = ["TimmNetwork"]


class TimmNetwork(Network):
    """An image model of timm, not pretrained; dropout, if any, in front of its linear head.

    timm's own random layers, which some models switch on, draw from torch's global generator.
    """

    def __init__(
        self, name: str, *, num_classes: int, in_channels: int = 3, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        if not timm.is_model(name):
            raise unknown("timm model", name, timm.list_models())
        self.model: Any = timm.create_model(
            name, num_classes=num_classes, in_chans=in_channels, drop_rate=0.0
        )
        classifier = self.get_classifier()
        if not isinstance(classifier, nn.Linear):
            kind = type(classifier).__name__
            raise InputError(f"timm:{name} must end in one nn.Linear, its classifier is a {kind}")
        self.dropout = Dropout(drop_rate) if drop_rate else None

    def forward_features(self, x: Tensor) -> Tensor:
        features = self.model.forward_head(self.model.forward_features(x), pre_logits=True)
        return features if self.dropout is None else self.dropout(features)

    def get_classifier(self) -> nn.Linear:
        return self.model.get_classifier()
