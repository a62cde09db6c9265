"""The optimizer of a run: SGD or AdamW, with learning rates and weight decay by group.

Learning rates are tensors, so that captured steps read the current rate. The state exists from the
start, so that the first step is like every other.
"""

import torch
from torch import Tensor, nn

from isda.experiments.networks import Network
from isda.experiments.settings import Recipe

__all__ = ["create_optimizer", "optimizer_state", "rates", "set_rates"]

_BETA_2 = 0.999


def create_optimizer(
    recipe: Recipe, network: Network, learning_rate: Tensor
) -> torch.optim.Optimizer:
    """Optimizer of a recipe for all parameters of a network.

    Args:
        recipe: recipe of the run.
        network: network to train.
        learning_rate: rate of the epoch, a tensor on the device of the network. Without warm-up,
            groups without a factor read it; see :func:`set_rates` for the others.
    """
    groups = _groups(recipe, network, learning_rate)
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            groups,
            lr=learning_rate,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        names = ["momentum_buffer"] if recipe.momentum else []
    else:
        optimizer = torch.optim.AdamW(
            groups,
            lr=learning_rate,
            betas=(recipe.momentum, _BETA_2),
            weight_decay=recipe.weight_decay,
            fused=True,
            capturable=learning_rate.is_cuda,
        )
        names = ["exp_avg", "exp_avg_sq"]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if recipe.optimizer == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({name: torch.zeros_like(parameter) for name in names})
    return optimizer


def set_rates(
    optimizer: torch.optim.Optimizer, learning_rate: Tensor, warmup: Tensor | None
) -> None:
    """Set the learning rate of every group for the next step; can be captured.

    Args:
        optimizer: from :func:`create_optimizer`.
        learning_rate: rate of the epoch.
        warmup: factor of all rates in this step; None: 1.
    """
    rate = learning_rate if warmup is None else learning_rate * warmup
    for group in optimizer.param_groups:
        if group["lr"] is not learning_rate:
            torch.mul(rate, group["factor"], out=group["lr"])


def rates(optimizer: torch.optim.Optimizer, learning_rate: Tensor) -> list[Tensor]:
    """Learning rates that :func:`set_rates` sets, which differ from the rate of the epoch."""
    found = [group["lr"] for group in optimizer.param_groups]
    return [rate for rate in found if rate is not learning_rate]


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of the state: momentum, or for AdamW step and moments, by parameter."""
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for value in optimizer.state[parameter].values()
    ]


def _groups(recipe: Recipe, network: Network, learning_rate: Tensor) -> list[dict[str, object]]:
    """Parameters by factor of the learning rate and by weight decay; one group if all are equal."""
    head = {id(parameter) for parameter in network.get_classifier().parameters()}
    parts: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in network.parameters():
        factor = recipe.head_rate if id(parameter) in head else 1.0
        decayed = recipe.decay_all or parameter.dim() > 1
        parts.setdefault((factor, recipe.weight_decay if decayed else 0.0), []).append(parameter)
    plain = not recipe.warmup
    return [
        {
            "params": parameters,
            "lr": learning_rate if plain and factor == 1 else torch.zeros_like(learning_rate),
            "factor": factor,
            "weight_decay": weight_decay,
        }
        for (factor, weight_decay), parameters in parts.items()
    ]
