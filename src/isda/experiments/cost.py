"""What ISDA adds to the cost of a training step (Table 1): in theory, in time and in memory.

The theoretical cost is 5·C·A, for C classes and A features, as a percentage of the multiply-adds of
the network's forward pass. This definition reproduces the paper's numbers, except for the
DenseNets. Time and memory are measured by :mod:`isda.experiments.training.step_cost`.
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from isda.experiments.arguments import CostArguments
from isda.experiments.cost_records import (
    MeasuredCost,
    TheoreticalCost,
    cost_lines,
    cost_table,
    costs_markdown,
    measured_lines,
    write_costs,
)
from isda.experiments.errors import InputError, as_input_error
from isda.experiments.networks import create_network
from isda.experiments.report.text import show
from isda.experiments.training.device import join_processes
from isda.experiments.training.environment import environment
from isda.experiments.training.step_cost import (
    image_shape,
    isda_recipe,
    measured_cost,
    usual_batch_size,
)

__all__ = ["multiply_adds", "show_costs", "theoretical_cost"]


def theoretical_cost(
    network: str, *, num_classes: int | None = None, image_size: int | None = None
) -> TheoreticalCost:
    """Parameters, multiply-adds and theoretical cost of ISDA, without running the network.

    Args:
        network: name of a network, or ``timm:NAME``.
        num_classes: number of classes; by default that of the network's data set in the paper.
        image_size: side of the images; by default that of the data set, or of the timm model.

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


def show_costs(given: CostArguments) -> None:
    """Compute and measure the costs of networks, print them, and write them to a CSV file."""
    if not given.networks:
        raise InputError("networks must name at least one network, got none")
    size = {"num_classes": given.num_classes, "image_size": given.image_size}
    with join_processes(given.device) as (device, _, world):
        if world > 1:
            raise InputError("isda cost runs in one process: start it without torchrun")
        networks = list(dict.fromkeys(given.networks))
        kept: list[dict[str, str]] = []
        if given.resume:
            if given.out is None:
                raise InputError("--resume needs --out, the CSV file to resume")
            kept = measured_lines(given.out) if given.out.exists() else []
            done = {tuple(line.get(name, "") for name in _SETTING) for line in kept}
            networks = [name for name in networks if _setting(name, given, device) not in done]
        elif given.out is not None and given.out.is_file():
            raise InputError(f"{given.out} already exists: use --resume or a different --out")
        here = environment(device)
        theory = [theoretical_cost(network, **size) for network in networks]
        measured: dict[str, list[MeasuredCost]] = {}
        lines = cost_lines(theory, measured, here)
        if given.out is not None:
            write_costs(given.out, [*kept, *lines])  # fails before measuring if it cannot
        for cost in tqdm(theory if given.measure else (), unit="network", disable=None):
            measured[cost.network] = measured_cost(
                cost.network,
                device=device,
                batch_size=given.batch_size,
                steps=given.steps,
                repeats=given.repeats,
                **size,
            )
            lines = cost_lines(theory, measured, here)
            if given.out is not None:
                write_costs(given.out, [*kept, *lines])
    if measured:
        print(f"Measured on {here['device']}, torch {here['torch']}.\n")
    parts = [cost_table(lines)] if lines else []
    if kept and given.out is not None:
        parts.append(f"All of {given.out}:\n\n{costs_markdown([given.out])}")
    show("\n\n".join(parts))


_SETTING = ("network", "num_classes", "image_size", "batch_size", "device")


def _setting(network: str, given: CostArguments, device: torch.device) -> tuple[str, ...]:
    """The settings of a measurement, as they are in a cost record."""
    classes, (_, side, _) = image_shape(isda_recipe(network), given.num_classes, given.image_size)
    batch_size = given.batch_size
    if batch_size is None:
        batch_size = usual_batch_size(network, device)
    return network, str(classes), str(side), str(batch_size), environment(device)["device"]
