"""Before the first step: which runs are finished, their folders, and whether the images fit."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from isda.experiments.data.features import FeatureArrays
from isda.experiments.data.folders import require_folder
from isda.experiments.errors import InputError, as_input_error
from isda.experiments.networks import find_weights, require_network
from isda.experiments.records import Run, export, load_runs, summary
from isda.experiments.settings import Options
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import require_fit
from isda.experiments.training.locks import locked
from isda.experiments.training.run_folder import RunFolder, require_free
from isda.experiments.training.training_step import Lane

__all__ = [
    "adopt_records",
    "create_folders",
    "finished_runs",
    "records_of",
    "require_inputs",
]


def finished_runs(plans: Sequence[Plan], options: Options) -> dict[int, RunFolder]:
    """Finished runs, which need neither data nor a network; without those that look damaged."""
    found = {}
    for number, plan in enumerate(plans):
        if plan.recipe.data.startswith("imagefolder:"):
            continue  # the images may have changed
        with contextlib.suppress(InputError, OSError):  # reported when the run is resumed
            run = RunFolder(plan.folder(options.out))
            if run.recipe != plan.recipe or not summary(run).finished:
                continue
            state = run.load()  # an exported record has none
            if state is None or state["epoch"] == plan.recipe.epochs:
                found[number] = run
    return found


def records_of(plan: Plan, *folders: Path) -> list[Run]:
    """Finished runs of a plan in folders of runs or records, with the same recipe."""
    found: list[Run] = []
    for folder in folders:
        path = plan.folder(folder)
        if (path / "config.json").exists():
            found += load_runs(path)
    return [run for run in found if summary(run).finished and run.recipe == plan.recipe]


def adopt_records(plans: Sequence[Plan], records: Path, out: Path) -> None:
    """Copy finished runs from a folder of records to the folder of runs, unless they are there."""
    for plan in plans:
        if not plan.folder(out).exists():
            for run in records_of(plan, records):
                export(run, out)


def require_inputs(plans: Sequence[Plan], options: Options) -> None:
    """Raise InputError before images are decoded if images, network or weights do not exist.

    Downloads pretrained weights if requested.
    """
    for data in {plan.recipe.data for plan in plans}:
        kind, _, path = data.partition(":")
        if kind == "imagefolder" and path:
            require_folder(Path(path).expanduser())
    for name, drop_rate in {(plan.recipe.network, plan.recipe.drop_rate) for plan in plans}:
        require_network(name, drop_rate=drop_rate)
    for recipe in {plan.recipe for plan in plans if plan.recipe.pretrained}:
        find_weights(recipe.network, recipe.weights, download=options.download)


def create_folders(
    plans: Sequence[Plan],
    waiting: Sequence[int],
    options: Options,
    locks: contextlib.ExitStack,
    lane: Lane,
) -> dict[int, RunFolder]:
    """Create and lock the run folders; an input error leaves no folders behind."""
    _require_fit(lane)
    if not options.resume:
        require_free(plan.folder(options.out) for plan in plans)
    found = {number: plans[number] for number in waiting}
    for plan in found.values():
        locks.enter_context(locked(options.out, plan.name, plan.seed))
    return {
        number: RunFolder.create(
            options.out,
            plan.name,
            plan.recipe,
            plan.seed,
            device=lane.device,
            resume=options.resume,
        )
        for number, plan in found.items()
    }


def _require_fit(lane: Lane) -> None:
    """Raise InputError if the network cannot take the images; changes nothing."""
    if isinstance(lane.data, FeatureArrays):
        return  # was verified when the features were computed
    recipe, device = lane.recipe, lane.device
    shape = lane.data.image_shape
    require_fit(lane.network.eval(), recipe, shape, device)
    lane.network.train()
    if (lane.num_images - 1) % recipe.batch_size:
        return
    with (
        as_input_error(
            f"{recipe.network} cannot train on the last batch, which has only 1 of "
            f"{lane.num_images} images: choose a batch_size other than {recipe.batch_size}"
        ),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
    ):
        network = lane.create_network(recipe, lane.data, lane.seed)
        network.to(device).train()(torch.zeros(1, *shape, device=device))
