"""What ISDA adds to the cost of a training step (Table 1): in theory, in time and in memory.

The theoretical cost is 5·C·A, for C classes and A features, in percent of the multiply-adds of the
network's forward pass: the definition that gives the paper's numbers, the DenseNets' apart. Time
and memory are measured in ``bench.py``.
"""

import csv
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from isda.experiments.errors import InputError, refusing
from isda.experiments.flags import parse_flags
from isda.experiments.networks import create_network
from isda.experiments.published import COST, PARAMETERS, Cost
from isda.experiments.report.comparison import text_table
from isda.experiments.training.environment import environment
from isda.experiments.training.loop import join_processes
from isda.experiments.training.step_cost import (
    CASES,
    MeasuredCost,
    image_shape,
    isda_recipe,
    measured_cost,
    usual_batch_size,
)

__all__ = [
    "TheoreticalCost",
    "cost_table",
    "costs_markdown",
    "main",
    "measured_lines",
    "multiply_adds",
    "theoretical_cost",
    "write_costs",
]


@dataclass(frozen=True)
class TheoreticalCost:
    """Size of a network, and ISDA's share in its arithmetic."""

    network: str
    num_classes: int
    image_size: int
    num_features: int
    parameters: int
    multiply_adds: int  # of the forward pass of one image
    theoretical_percent: float

    @property
    def paper(self) -> Cost | None:
        """The paper's numbers, which are for 1000 classes and images of 224×224."""
        usual = (self.num_classes, self.image_size) == (1000, 224)
        return COST.get(self.network) if usual else None


def theoretical_cost(
    network: str, *, num_classes: int | None = None, image_size: int | None = None
) -> TheoreticalCost:
    """Parameters, multiply-adds and the theoretical cost of ISDA, without any computation.

    Args:
        network: name of a network, or ``timm:NAME``.
        num_classes: C; by default that of the data the paper trains the network on.
        image_size: side of the images; by default likewise, for timm's models their own.

    Example:
        >>> cost = theoretical_cost("resnet50")
        >>> f"{cost.multiply_adds / 1e9:.1f} G, {cost.theoretical_percent:.2f} %"
        '4.1 G, 0.25 %'
    """
    num_classes, shape = image_shape(isda_recipe(network), num_classes, image_size)
    with torch.device("meta"):
        model = create_network(network, num_classes=num_classes, in_channels=shape[0])
    with refusing(f"{network} does not take images of size {shape[-1]}"):
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
    """Multiply-adds of the forward pass of one image; a training step takes three times as many.

    Only shapes matter: a network on the device meta will do. The backward pass is not counted,
    since torch counts that of grouped convolutions as if they were not grouped.
    """
    device = next(network.parameters()).device
    images = torch.empty(2, *shape, device=device)  # batch normalisation needs two
    with FlopCounterMode(display=False) as counter:  # which fails on some models under no_grad
        network(images)
    return counter.get_total_flops() // 2 // len(images)


def cost_table(
    theory: Sequence[TheoreticalCost], measured: Mapping[str, Sequence[MeasuredCost]]
) -> str:
    """Costs as text, the paper's beside ours.

    Args:
        theory: one for each line.
        measured: of some or all of these networks, by name.
    """
    header = ["network", "params M", "mult-adds G", "A", "theory %", "paper %"]
    if measured:
        header += ["CE ms", "+diagonal %", "paper +%", "+full %"]
        header += ["CE MiB", "+diagonal MiB", "+full MiB"]
    rows = []
    for cost in theory:
        row = [cost.network, f"{cost.parameters / 1e6:.1f}", f"{cost.multiply_adds / 1e9:.2f}"]
        row += [str(cost.num_features), f"{cost.theoretical_percent:.2f}"]
        row.append("–" if cost.paper is None else f"{cost.paper.theoretical:.2f}")
        if cost.network in measured:
            ce, diagonal, full = measured[cost.network]
            row += [_cell(ce, ce.milliseconds, ".1f"), _cell(diagonal, diagonal.added_percent)]
            row.append("–" if cost.paper is None else f"{cost.paper.wall:+.1f}")
            row.append(_cell(full, full.added_percent))
            row.append(_cell(ce, ce.mebibytes, ".0f"))
            row += [_cell(case, case.added_mebibytes, "+.0f") for case in (diagonal, full)]
        rows.append(row)
    return "\n".join([text_table(header, rows), *_notes(theory, measured)])


def write_costs(
    path: Path,
    theory: Sequence[TheoreticalCost],
    measured: Mapping[str, Sequence[MeasuredCost]],
    device: torch.device,
    kept: Sequence[Mapping[str, str]] = (),
) -> None:
    """Write costs as CSV: a line for each network and case, or for each network in theory alone.

    Args:
        path: CSV file, overwritten.
        theory: one for each network.
        measured: of some or all of these networks, by name.
        device: where they were measured.
        kept: lines of an earlier file, that go ahead as they are.
    """
    where = environment(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            names = (*_COLUMNS, *where, *itertools.chain.from_iterable(kept))
            writer = csv.DictWriter(file, list(dict.fromkeys(names)))
            writer.writeheader()
            writer.writerows(kept)
            for cost in theory:
                printed = (cost.paper.theoretical, cost.paper.wall) if cost.paper else (None, None)
                line = asdict(cost) | dict(zip(_PAPER, printed, strict=True)) | where
                for case in map(asdict, measured.get(cost.network, ())):
                    writer.writerow(line | case)
                if cost.network not in measured:
                    writer.writerow(line)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def costs_markdown(paths: Iterable[Path]) -> str:
    """Measured costs that have been written, as a Markdown table; of a network the last ones count.

    Args:
        paths: CSV files of :func:`write_costs`.
    """
    networks: dict[str, dict[str, dict[str, str]]] = {}
    for line in itertools.chain.from_iterable(map(measured_lines, paths)):
        networks.setdefault(line["network"], {})[line["case"]] = line
    header = ["network", "batch", "A", "CE ms", "+ diagonal", "+ full", "paper +"]
    header += ["+ diagonal MiB", "+ full MiB"]
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    for network, cases in networks.items():
        ce = cases["ce"]
        row = [network, ce["batch_size"], ce["num_features"]]
        row.append(ce["note"] or f"{float(ce['milliseconds']):.2f}")
        for case in CASES[1:]:
            line = cases[case]
            row.append(line["note"] or f"{float(line['added_percent']):+.2f} %")
        paper = ce["paper_wall_percent"]
        row.append(f"{float(paper):.1f} %" if paper else "")
        for case in CASES[1:]:
            mebibytes = cases[case]["added_mebibytes"]
            row.append(f"{float(mebibytes):.0f}" if mebibytes else "")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Arguments:
    networks: tuple[str, ...] = tuple(COST)
    """Networks by name, or timm:NAME."""

    measure: bool = True
    """Measure time and memory here, beside the theory."""

    num_classes: int | None = None
    """Number of classes; if not given 1000, for the CIFAR networks 100."""

    image_size: int | None = None
    """Side of the images; if not given 224, for the CIFAR networks 32, for timm's their own."""

    batch_size: int | None = None
    """Images per step; if not given 256, for the CIFAR networks their recipe's, on a CPU 8."""

    steps: int | None = None
    """Steps in a measurement; if not given 20, on a CPU 2."""

    repeats: int = 5
    """Measurements of cross entropy, diagonal and full, in turns; their medians count."""

    device: str = "auto"
    """Where to measure: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    out: Path | None = None
    """CSV file to write the numbers to."""

    resume: bool = False
    """Keep what the CSV file has, and measure what it lacks of these networks, sizes, device."""

    table: tuple[Path, ...] = ()
    """Measure nothing: print such CSV files as a Markdown table."""


def main(arguments: list[str]) -> None:
    """Show what ISDA adds to the cost of training, in theory and measured here."""
    given = parse_flags(_Arguments, arguments, prog="isda cost", description=main.__doc__)
    if given.table:
        for path in given.table:
            if not path.is_file():
                raise InputError(f"table must name CSV files, got {path}")
            if not measured_lines(path):
                raise InputError(f"{path} has no measurements")
        print(costs_markdown(given.table))
        return
    if not given.networks:
        raise InputError("networks must name at least one network")
    size = {"num_classes": given.num_classes, "image_size": given.image_size}
    with join_processes(given.device) as (device, _, world):
        if world > 1:
            raise InputError("isda cost measures one process: start it without torchrun")
        networks = list(dict.fromkeys(given.networks))
        kept = []
        if given.resume:
            if given.out is None:
                raise InputError("resume needs out, the CSV file to go on with")
            kept = measured_lines(given.out) if given.out.exists() else []
            done = {tuple(line.get(name, "") for name in _SETTING) for line in kept}
            networks = [name for name in networks if _setting(name, given, device) not in done]
        theory = [theoretical_cost(network, **size) for network in networks]
        measured: dict[str, list[MeasuredCost]] = {}
        if given.out is not None:
            write_costs(given.out, theory, measured, device, kept)  # or fail now, if it cannot
        for cost in tqdm(theory if given.measure else (), unit="network", disable=None):
            measured[cost.network] = measured_cost(
                cost.network,
                device=device,
                batch_size=given.batch_size,
                steps=given.steps,
                repeats=given.repeats,
                **size,
            )
            if given.out is not None:
                write_costs(given.out, theory, measured, device, kept)
        if measured:
            print(f"Measured on {environment(device)['device']}, torch {torch.__version__}.\n")
        parts = [cost_table(theory, measured)] if theory else []
        if kept and given.out is not None:
            parts.append(f"All of {given.out}:\n\n{costs_markdown([given.out])}")
        print("\n\n".join(parts))


_PAPER = ("paper_theoretical_percent", "paper_wall_percent")
_COLUMNS = (
    *(field.name for field in fields(TheoreticalCost)),
    *_PAPER,
    *(field.name for field in fields(MeasuredCost)),
)


_SETTING = ("network", "num_classes", "image_size", "batch_size", "device")


def _setting(network: str, given: _Arguments, device: torch.device) -> tuple[str, ...]:
    """What is asked for, as a file of :func:`write_costs` has it."""
    classes, (_, side, _) = image_shape(isda_recipe(network), given.num_classes, given.image_size)
    batch_size = given.batch_size
    if batch_size is None:
        batch_size = usual_batch_size(network, device)
    return network, str(classes), str(side), str(batch_size), environment(device)["device"]


def measured_lines(path: Path) -> list[dict[str, str]]:
    """Lines of a file of :func:`write_costs` that hold a measurement, or an error."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            lines = [line for line in reader if line.get("case")]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if missing:
        raise InputError(f"{path} must be a CSV file of isda cost, it has no column {missing[0]}")
    cases: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        cases.setdefault((line["network"], line.get("device", "")), set()).add(line["case"])
        numbers = [name for name in (*_PAPER, "added_mebibytes") if line[name]]
        numbers.append("theoretical_percent")
        numbers += [] if line["note"] else ["milliseconds", "added_percent"]
        bad = [name for name in numbers if not _is_number(line[name])]
        bad += [] if line["parameters"].isdecimal() else ["parameters"]
        if bad or "" in line:
            what = f"{bad[0]} {line[bad[0]]!r}" if bad else "more cells than columns"
            raise InputError(f"{path} has {what} for {line['network']}, {line['case']}")
    for (network, _), found in cases.items():
        if found != {*CASES}:
            raise InputError(
                f"{path} must have {', '.join(CASES)} for {network}, has {', '.join(sorted(found))}"
            )
    return lines


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _cell(row: MeasuredCost, value: float | None, digits: str = "+.1f") -> str:
    return row.note or ("–" if value is None else format(value, digits))


def _notes(
    theory: Iterable[TheoreticalCost], measured: Mapping[str, Sequence[MeasuredCost]]
) -> Iterator[str]:
    others = [
        cost.network
        for cost in theory
        if cost.paper is not None
        and f"{cost.theoretical_percent:.2f}" != f"{cost.paper.theoretical:.2f}"
    ]
    sizes = {
        cost.network: PARAMETERS[cost.network]
        for cost in theory
        if cost.paper is not None
        and f"{cost.parameters / 1e6:.1f}" != f"{PARAMETERS[cost.network]:.1f}"
    }
    yield "\ntheory: 5·C·A in percent of the multiply-adds of the forward pass"
    if others:
        yield f"{', '.join(others)}: the paper prints another number than this formula gives"
    if sizes:
        printed = ", ".join(f"{millions:.1f}" for millions in sizes.values())
        yield f"{', '.join(sizes)}: the paper prints another number of parameters, {printed} M"
    rows = [row for cases in measured.values() for row in cases]
    if rows:
        batch = ", ".join(dict.fromkeys(f"{row.batch_size} ({row.precision})" for row in rows))
        yield f"ms, MiB: of a training step, batch size {batch}; +: added to cross entropy (CE)"
    spreads = [row.spread_percent for row in rows if row.spread_percent is not None]
    if spreads:
        yield f"single repeats are up to {max(spreads):.1f} % away from the medians shown"
