"""Command-line arguments of every command, read by tyro.

A recipe by name gives the defaults, and every field of it is a flag.
"""

import argparse
import contextlib
import io
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from isda.experiments.errors import InputError
from isda.experiments.published import COST
from isda.experiments.recipe_checks import require_seeds
from isda.experiments.recipes import (
    DEFAULT,
    OWN_IMAGES,
    fine_tuning,
    flags,
    get_recipe,
    with_method,
)
from isda.experiments.settings import METHODS, Options, Recipe

__all__ = [
    "CalibrateArguments",
    "CompareArguments",
    "CostArguments",
    "ListArguments",
    "QueueArguments",
    "ReportArguments",
    "SearchArguments",
    "TableArguments",
    "TrainArguments",
    "WeightsArguments",
    "parse",
    "parse_recipe",
]

_Arguments = TypeVar("_Arguments")
_TrainArguments = TypeVar("_TrainArguments", bound="TrainArguments")


@dataclass(frozen=True)
class TrainArguments:
    """Arguments of ``isda train``."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    """What to train: a recipe, any field of which can be changed."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How to run the training."""

    seeds: tuple[int, ...] = (0,)
    """One run per seed."""


@dataclass(frozen=True)
class CompareArguments(TrainArguments):
    """Arguments of ``isda compare``."""

    candidates: tuple[float, ...] | None = None
    """Values to try with --lambda-0 auto; None: 0.1 0.25 0.5 0.75 1, for imagenet 1 2.5 5 7.5 10.
    Without --hold-out, a tenth of the training images is held out for it (imagenet: 50,000)."""


@dataclass(frozen=True)
class SearchArguments(TrainArguments):
    """Arguments of ``isda search``."""

    candidates: tuple[float, ...] | None = None
    """Values of lambda_0 to try; None: 0.1 0.25 0.5 0.75 1, for imagenet 1 2.5 5 7.5 10.
    Without --hold-out, a tenth of the training images is held out (imagenet: 50,000)."""

    final_seeds: tuple[int, ...] = (0, 1, 2)
    """One final run on all training images per seed."""

    with_baseline: bool = False
    """Also train plain cross entropy on the same split, for comparison."""


@dataclass(frozen=True)
class CalibrateArguments(TrainArguments):
    """Arguments of ``isda calibrate``."""

    methods: tuple[str, ...] = ("ce", "label_smoothing", "isda")
    """Losses to train side by side. Without --hold-out, a tenth of the training images is held out
    (imagenet: 50,000), and the temperature is fitted on them."""


@dataclass(frozen=True)
class TableArguments:
    """Arguments of ``isda table``."""

    table: tyro.conf.Positional[int]
    """Number of the table, 1 to 5."""

    cell: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Train what a cell needs: DATA/NETWORK, or DATA/NETWORK/METHOD for one method; several cells
    by several --cell."""

    results: Path | None = None
    """Folder of run records to show, without --cell; None: runs, else results."""

    dry_run: bool = False
    """Print the commands that would train the cell, and exit."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each recipe per seed."""

    epochs: int | None = None
    """Epochs; None: as in the recipes."""

    batch_size: int | None = None
    """Batch size; None: as in the recipes."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How to run the training."""

    def change(self, recipe: Recipe) -> Recipe:
        """The recipe with the epochs and the batch size given here."""
        return replace(
            recipe,
            epochs=recipe.epochs if self.epochs is None else self.epochs,
            batch_size=recipe.batch_size if self.batch_size is None else self.batch_size,
        )

    def train_flags(self) -> list[str]:
        """The same settings as flags of ``isda train``."""
        changed = {name: getattr(self, name) for name in ("epochs", "batch_size")}
        changed = {name: value for name, value in changed.items() if value is not None}
        options = {option.name: getattr(self.options, option.name) for option in fields(Options)
                   if getattr(self.options, option.name) != option.default}  # fmt: skip
        return flags({"seeds": self.seeds, **changed, **options})


@dataclass(frozen=True)
class QueueArguments:
    """Arguments of ``isda queue``."""

    file: tyro.conf.Positional[Path]
    """Text file with one command per line: train, compare, search, calibrate or table."""

    results: Path = Path("results")
    """Folder of run records: runs that it has finished are skipped."""

    dry_run: bool = False
    """Print what is left to train and about how long it takes, and exit; with --minutes also what
    fits into them."""

    engine: Literal["local", "ray"] = "local"
    """local: in this process, line by line. ray: on all GPUs of a Ray cluster, one worker each, or
    in --processes workers on CPUs."""

    address: str | None = None
    """Address of a Ray cluster, such as auto or HOST:6379; None: an instance on this machine, with
    all its GPUs."""

    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)
    """How to run the training; options in a line take precedence. Runs are always resumed."""


@dataclass(frozen=True)
class ReportArguments:
    """Arguments of ``isda report``."""

    runs: Path | None = None
    """Folder of runs or run records; None: runs, else results."""

    export: Path | None = None
    """Copy the records of finished runs, without checkpoints, to this folder."""

    update: tuple[Path, ...] = ()
    """Markdown files whose tables between <!-- runs:NAME --> marks are to be updated."""

    page: Path | None = None
    """Write tables, comparisons and curves as one self-contained HTML page."""

    figures: Path | None = None
    """Draw error, NLL and calibration, and the curve of lambda_0, as SVG files in this folder."""

    costs: tuple[Path, ...] = ()
    """CSV files written by isda cost, to show below Table 1."""

    pictures: tuple[Path, ...] = ()
    """Folders that isda invert, neighbours or gan measure has written to, to show at the end."""


@dataclass(frozen=True)
class WeightsArguments:
    """Arguments of ``isda weights``."""

    run: tyro.conf.Positional[Path]
    """Folder of a finished run with its checkpoint: OUT/<recipe>/<seed>."""

    out: Path
    """File to write, NAME.safetensors; the model card is NAME.md."""


@dataclass(frozen=True)
class CostArguments:
    """Arguments of ``isda cost``."""

    networks: tuple[str, ...] = tuple(COST)
    """Networks by name, or timm:NAME."""

    measure: bool = True
    """Measure time and memory on this machine, next to the theoretical cost."""

    num_classes: int | None = None
    """Number of classes; None: 1000, for CIFAR networks 100."""

    image_size: int | None = None
    """Side of the images; None: 224, for CIFAR networks 32, for timm models their own."""

    batch_size: int | None = None
    """Images per step; None: 256, for CIFAR networks as in their recipe, on a CPU 8."""

    steps: int | None = None
    """Steps per measurement; None: 20, on a CPU 2."""

    repeats: int = 5
    """Measurements of each case, interleaved; the median counts."""

    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""

    out: Path | None = None
    """CSV file to write."""

    resume: bool = False
    """Keep the measurements in the CSV file and add the missing ones."""

    table: tuple[Path, ...] = ()
    """Measure nothing: print these CSV files as a Markdown table."""


@dataclass(frozen=True)
class ListArguments:
    """Arguments of ``isda list``."""

    results: Path | None = None
    """Folder of run records; None: runs, else results."""


def parse(
    kind: type[_Arguments], command: str, words: list[str], *, description: str, **options: Any
) -> _Arguments:
    """Parse the words behind a command.

    Args:
        kind: dataclass of the command's arguments.
        command: name of the command, for its help.
        words: words of the command line behind the command.
        description: what the command does, for its help.
        options: further options of ``tyro.cli``.

    Raises:
        InputError: unknown flag, with similar ones, or invalid value.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                kind,
                args=words,
                prog=f"isda {command}",
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
                **options,
            )
    except SystemExit as end:
        if end.code == 0:  # --help
            raise
        raise InputError(_one_line(printed.getvalue())) from None


def parse_recipe(
    kind: type[_TrainArguments],
    command: str,
    words: list[str],
    *,
    description: str,
    **defaults: Any,
) -> tuple[_TrainArguments, Recipe, str | None]:
    """Parse the words behind a command that trains; a recipe's name may come first.

    Args:
        kind: dataclass of the command's arguments.
        command: name of the command, for its help.
        words: words of the command line behind the command.
        description: what the command does, for its help.
        defaults: defaults of fields of ``kind`` other than the recipe.

    Returns:
        The arguments, the recipe before its fields were changed, and its name if one was given.
    """
    name = None
    if words and not words[0].startswith("-"):
        name, *words = words
    start, default = _start(name, words)
    given = parse(
        kind,
        f"{command} {name or '[RECIPE]'}",
        words,
        description=description,
        default=kind(default, **defaults),
    )
    require_seeds("seeds", given.seeds)
    switched = given.recipe.method == "isda" != start.method
    if switched and not given.recipe.lambda_0 and command != "search":
        raise InputError(
            f"lambda_0 must be > 0 to change the method from {start.method} to isda: set --lambda-0"
        )
    return given, start, name


def _start(name: str | None, words: list[str]) -> tuple[Recipe, Recipe]:
    """The recipe to start from, and the defaults of the flags: that recipe with ``--method``."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--data", "--network", "--method", "--weights", "--device"):
        scan.add_argument(flag, nargs="?", default="")
    for flag in ("--pretrained", "--freeze"):
        scan.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
    found, _ = scan.parse_known_args(words)
    if name is None and (found.data or "").startswith("imagefolder:"):
        start = _own_images(found)
    else:
        start = get_recipe(DEFAULT if name is None else name)
    if found.method not in METHODS or found.method == "isda":
        return start, start
    changed = with_method(start, found.method)
    return (start if name else changed), changed


def _own_images(found: argparse.Namespace) -> Recipe:
    """Default recipe for images of the user, with the network that the flags ask for."""
    start = OWN_IMAGES
    if found.pretrained or (found.pretrained is None and (found.weights or found.freeze)):
        network = found.network or start.network
        start = _fine_tuning(network, found.weights or "", freeze=bool(found.freeze))
    elif (found.network or "").startswith("timm:"):
        from isda.experiments.networks import own_image_size  # slow to import

        start = replace(start, image_size=own_image_size(found.network) or start.image_size)
    return replace(start, precision="bf16") if _on_gpu(found.device or "auto") else start


def _on_gpu(device: str) -> bool:
    import torch  # slow to import

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _fine_tuning(network: str, weights: str, *, freeze: bool) -> Recipe:
    """Default recipe of a pretrained network, with the images as it knows them."""
    from isda.experiments.networks import has_layer_norm, own_preprocessing  # slow to import

    known = own_preprocessing(network)
    preparation = {} if known is None else asdict(known)
    recipe = fine_tuning(
        network, layer_norm=has_layer_norm(network), preparation=preparation, freeze=freeze
    )
    return replace(recipe, weights=weights)


def _one_line(box: str) -> str:
    """Condense tyro's boxed error message to one line, with the flags it suggests.

    On a terminal without box-drawing characters, the title is a part of its own.
    """
    framed = box.startswith("╭")
    text = re.sub(r"(?m)^[╭╰].*$", "", box).replace("│", " ")
    parts = [part.split() for part in re.split(r"(?m)^ *[─-]{3,} *$", text)]
    _, message, *others = [[], *parts] if framed else parts
    near = [word.strip(",") for part in others if part[:1] == ["Perhaps"]
            for word in part if word.startswith("--")]  # fmt: skip
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    words = " ".join(message).rstrip(".")
    return words[:1].lower() + words[1:] + hint
