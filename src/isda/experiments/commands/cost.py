"""``isda cost``: what ISDA adds to a training step, in theory, in time and in memory (Table 1)."""

from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from isda.experiments.commands.arguments import parse
from isda.experiments.cost_records import (
    MeasuredCost,
    cost_lines,
    cost_table,
    costs_markdown,
    measured_lines,
    write_costs,
)
from isda.experiments.errors import InputError
from isda.experiments.published import COST
from isda.experiments.report.text import show

__all__ = ["Cost", "run"]


@dataclass(frozen=True)
class Cost:
    """Arguments of ``isda cost``."""

    networks: tuple[str, ...] = tuple(COST)
    """Networks: built-in names, or timm:NAME."""

    measure: bool = True
    """Measure time and memory on this machine, in addition to the theoretical cost."""

    num_classes: int | None = None
    """Number of classes; None: 1000, or 100 for CIFAR networks."""

    image_size: int | None = None
    """Side of the images in pixels; None: 224, 32 for CIFAR networks, or the timm model's own."""

    batch_size: int | None = None
    """Images per step; None: 256, the recipe's for CIFAR networks, or 8 on a CPU."""

    steps: int | None = None
    """Steps per measurement; None: 20, or 2 on a CPU."""

    repeats: int = 5
    """Number of measurements of each case, interleaved; the median is reported."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    out: Path | None = None
    """CSV file to write."""

    resume: bool = False
    """Keep the existing measurements in the CSV file and add the missing ones."""

    table: tuple[Path, ...] = ()
    """Print these CSV files as a Markdown table instead of measuring."""


def run(words: list[str]) -> None:
    """Compute and measure the costs of networks, or print tables of such measurements."""
    given = parse(Cost, "cost", words)
    if given.table:
        print(costs_markdown(given.table))
    else:
        _measure(given)


def _measure(given: Cost) -> None:
    """Compute and measure the costs of networks, print them, and write them to a CSV file."""
    from isda.experiments.theoretical_cost import theoretical_cost  # this and the next are slow
    from isda.experiments.training import step_cost
    from isda.experiments.training.device import join_processes
    from isda.experiments.training.environment import environment

    if not given.networks:
        raise InputError("networks must name at least one network, got none")
    size = {"num_classes": given.num_classes, "image_size": given.image_size}
    with join_processes(given.device) as (device, _, world):
        if world > 1:
            raise InputError("isda cost runs in one process: start it without torchrun")
        here = environment(device)

        def setting(network: str) -> tuple[str, ...]:
            """The settings of a measurement, as they are in a cost record."""
            recipe = step_cost.isda_recipe(network)
            classes, (_, side, _) = step_cost.image_shape(recipe, *size.values())
            batch_size = given.batch_size
            if batch_size is None:
                batch_size = step_cost.usual_batch_size(network, device)
            return network, str(classes), str(side), str(batch_size), here["device"]

        networks = list(dict.fromkeys(given.networks))
        kept: list[dict[str, str]] = []
        if given.resume:
            if given.out is None:
                raise InputError("--resume needs --out, the CSV file to resume")
            kept = measured_lines(given.out) if given.out.exists() else []
            done = {tuple(line.get(name, "") for name in _SETTING) for line in kept}
            networks = [network for network in networks if setting(network) not in done]
        elif given.out is not None and given.out.is_file():
            raise InputError(f"{given.out} already exists: use --resume or a different --out")
        theory = [theoretical_cost(network, **size) for network in networks]
        measured: dict[str, list[MeasuredCost]] = {}

        def write() -> list[dict[str, str]]:
            lines = cost_lines(theory, measured, here)
            if given.out is not None:
                write_costs(given.out, [*kept, *lines])
            return lines

        lines = write()  # fails before measuring if it cannot
        for cost in tqdm(theory if given.measure else (), unit="network", disable=None):
            measured[cost.network] = step_cost.measured_cost(
                cost.network,
                device=device,
                batch_size=given.batch_size,
                steps=given.steps,
                repeats=given.repeats,
                **size,
            )
            lines = write()
    if measured:
        print(f"Measured on {here['device']}, torch {here['torch']}.\n")
    parts = [cost_table(lines)] if lines else []
    if kept and given.out is not None:
        parts.append(f"All of {given.out}:\n\n{costs_markdown([given.out])}")
    show("\n\n".join(parts))


_SETTING = ("network", "num_classes", "image_size", "batch_size", "device")
