"""A linear head on the features of a frozen network."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from isda.experiments.networks.network import Network
from isda.experiments.networks.pretrained import LoadedWeights
from isda.experiments.networks.stochastic import optional_dropout

__all__ = ["Backbone", "Probe"]


@dataclass(frozen=True, eq=False)
class Backbone:
    """The frozen network that computes the features; all runs share it."""

    tensors: dict[str, Tensor]  # of the network without its head, on the CPU
    head: str  # prefix of the names of the head's tensors
    bias: bool  # whether the head has a bias
    num_features: int
    weights: LoadedWeights | None

    @classmethod
    def of(cls, network: Network) -> "Backbone":
        """The backbone of a network."""
        classifier = network.get_classifier()
        head = next(name for name, part in network.named_modules() if part is classifier)
        tensors = {
            name: value.detach().cpu().contiguous()
            for name, value in network.state_dict().items()
            if not name.startswith(f"{head}.")
        }
        bias, weights = classifier.bias is not None, network.weights
        if weights is not None and not weights.new:  # a probe does not use the head of the file
            new = tuple(
                name.removeprefix("model.") for name in network.state_dict() if name not in tensors
            )
            weights = replace(weights, tensors=weights.tensors - len(new), new=new)
        return cls(tensors, head, bias, network.num_features, weights)

    def __deepcopy__(self, _: Any) -> "Backbone":
        return self  # it never changes


class Probe(Network):
    """Linear head that takes features (N, A) in place of images.

    Its state has the names and tensors of the whole network, so that a checkpoint can be used
    without the file of pretrained weights.

    Args:
        backbone: the frozen network.
        num_classes: number of classes C.
        drop_rate: dropout rate of the features.
    """

    def __init__(self, backbone: Backbone, *, num_classes: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.backbone = backbone
        self.weights = backbone.weights
        self.head = nn.Linear(backbone.num_features, num_classes, backbone.bias)
        self.dropout = optional_dropout(drop_rate)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.dropout(x)

    def get_classifier(self) -> nn.Linear:
        return self.head

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """State of the whole network."""
        prefix = self.backbone.head
        own = {f"{prefix}.{name}": value for name, value in self.head.state_dict().items()}
        return self.backbone.tensors | own

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load the head from the state of the whole network."""
        prefix = f"{self.backbone.head}."
        own = {name.removeprefix(prefix): value for name, value in state_dict.items()
               if name.startswith(prefix)}  # fmt: skip
        return self.head.load_state_dict(own)
