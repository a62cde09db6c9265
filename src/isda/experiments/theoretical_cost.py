"""Theoretical cost that ISDA adds to a training step (Table 1).

It is 5·C·A, for C classes and A features, as a percentage of the multiply-adds of the network's
forward pass. This definition reproduces the paper's numbers, except for the DenseNets.
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from isda.experiments.cost_records import TheoreticalCost
from isda.experiments.errors import as_input_error
from isda.experiments.networks import create_network
from isda.experiments.training.step_cost import image_shape, isda_recipe

__all__ = ["multiply_adds", "theoretical_cost"]


def theoretical_cost(
    network: str, *, num_classes: int | None = None, image_size: int | None = None
) -> TheoreticalCost:
    """Parameters, multiply-adds and theoretical cost of ISDA, without running the network.

    Args:
        network: name of a network, or ``timm:NAME``.
        num_classes: number of classes; by default as in the network's data set in the paper.
        image_size: side of the images; by default as in that data set, or as for the timm model.

    Example:
        >>> cost = theoretical_cost("resnet50")
        >>> f"{cost.multiply_adds / 1e9:.1f} G, {cost.theoretical_percent:.2f} %"
        '4.1 G, 0.25 %'
    """
    num_classes, shape = image_shape(isda_recipe(network), num_classes, image_size)
    with torch.device("meta"):
        model = create_network(network, num_classes=num_classes, in_channels=shape[0])
    with as_input_error(f"{network} does not accept {shape[-1]} x {shape[-1]} images"):
        number = multiply_adds(model, shape)
    return TheoreticalCost(
        network,
        num_classes,
        shape[-1],
        model.num_features,
        sum(parameter.numel() for parameter in model.parameters()),
        number,
        100 * 5 * num_classes * model.num_features / number,
    )


def multiply_adds(network: nn.Module, shape: tuple[int, int, int]) -> int:
    """Multiply-adds of the forward pass of one image; a training step needs three times as many.

    Only shapes matter, so the network can be on the meta device. The backward pass is not counted,
    because torch counts grouped convolutions there as if they had one group.
    """
    device = next(network.parameters()).device
    images = torch.empty(2, *shape, device=device)  # batch norm needs two
    with FlopCounterMode(display=False) as counter:  # fails for some models under no_grad
        network(images)
    return counter.get_total_flops() // 2 // len(images)
