"""The training of a GAN: exact resume, a grid of samples every few epochs."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.errors import InputError, RunError, TimeUp
from isda.experiments.files import write_text
from isda.experiments.generators.gan_folder import GanFolder
from isda.experiments.generators.gan_settings import GanSettings
from isda.experiments.generators.gan_step import GanLane
from isda.experiments.generators.pictures import write_grid
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.settings import Options
from isda.experiments.training.deadline import Deadline
from isda.experiments.training.device import choose_kernels, join_processes
from isda.experiments.training.locks import locked
from isda.experiments.training.progress import show_epochs
from isda.experiments.training.side_by_side import CapturedSteps, graph_sizes

__all__ = ["create_lanes", "train_gan"]

_DATA = ("digits", "cifar10", "cifar100")
_COLUMNS = 10  # pictures per class in a grid of samples
_MOST_ROWS = 20
_SAMPLES = 0x5A  # part of the key


def train_gan(
    settings: GanSettings,
    seed: int,
    options: Options,
    *,
    sample_every: int = 0,
) -> GanFolder:
    """Train a GAN, or continue it with ``options.resume``, and return its folder.

    Args:
        settings: what to train.
        seed: seed of weights and draws.
        options: options, of which out, resume, device, data_root, download, capture,
            deterministic, checkpoint_seconds and minutes are used.
        sample_every: epochs between two grids of samples; 0: a twentieth of all epochs.

    Raises:
        TimeUp: the time limit was reached before the end; the checkpoint is written.
    """
    if sample_every < 0:
        raise InputError(f"sample_every must be >= 0, got {sample_every}")
    sample_every = sample_every or math.ceil(settings.epochs / 20)
    with join_processes(options.device) as (device, _, world), choose_kernels(options, device):
        if world > 1:
            raise InputError("a GAN trains in one process: start isda gan without torchrun")
        data = _load_arrays(settings, options).to(device)
        lanes = create_lanes(settings, seed, data)
        with locked(options.out, settings.name, seed):
            place = Path(options.out) / settings.name / str(seed)
            folder = GanFolder.create(place, settings, seed, device, resume=options.resume)
            _train(folder, settings, lanes, data, options, sample_every)
    return folder


def _load_arrays(settings: GanSettings, options: Options) -> ImageArrays:
    """Data set of a GAN."""
    if settings.data not in _DATA:
        raise InputError(f"data must be one of {', '.join(_DATA)} for a GAN, got {settings.data!r}")
    data = load_data(settings.data, root=options.data_root, download=options.download)
    assert isinstance(data, ImageArrays)
    return data.hold_out(settings.hold_out) if settings.hold_out else data


def create_lanes(settings: GanSettings, seed: int, data: ImageArrays) -> list[GanLane]:
    """The GANs that train side by side: one, or one per class."""
    classes = range(data.num_classes) if settings.per_class else [None]
    missing = {*range(data.num_classes)} - {*data.train_target.tolist()}
    if settings.per_class and missing:
        name = data.class_names[min(missing)]
        raise InputError(f"wgan needs training images of every class, {data.name} has no {name}")
    return [GanLane(settings, seed, data, only=one) for one in classes]


def _train(
    folder: GanFolder,
    settings: GanSettings,
    lanes: list[GanLane],
    data: ImageArrays,
    options: Options,
    sample_every: int,
) -> None:
    def restore(state: dict[str, Any]) -> None:
        shape = [*data.image_shape]
        if (state["image_shape"], state["num_images"]) != (shape, len(data.train_target)):
            raise InputError(f"{settings.data} has changed since {folder.folder} was started")
        if not isinstance(state["history"], list):
            raise TypeError(f"history {state['history']!r}")
        for lane, saved in zip(lanes, state["lanes"], strict=True):
            lane.load_state_dict(saved)

    state = folder.load("checkpoint.pt", restore)
    history: list[dict[str, float]] = [] if state is None else state["history"]
    if state is None and (finished := folder.load("generator.pt")) is not None:
        if finished["epoch"] == settings.epochs:
            return
        raise InputError(f"{folder.folder} has no checkpoint.pt to continue from")
    if len(history) > settings.epochs:
        raise InputError(f"epochs must be >= {len(history)} (already done), got {settings.epochs}")
    folder.change_epochs(settings.epochs)

    runner = CapturedSteps(lanes, capture=options.capture and data.train_images.is_cuda)
    generator = TrainedGenerator.of_lanes(settings, tuple(data.image_shape), lanes)
    steps = _steps_per_epoch(settings, lanes)
    deadline, saved_at = Deadline(options), time.monotonic()
    label = f"{settings.data} {settings.gan}, seed {folder.seed}"
    for epoch in show_epochs(len(history), settings.epochs, label):
        began = time.perf_counter()
        for lane in lanes:
            lane.totals.zero_()
        for times in graph_sizes(steps):
            runner.run(GanLane.step, times=times)
        losses = (torch.stack([lane.totals for lane in lanes]).mean(0) / steps).tolist()
        if not all(map(math.isfinite, losses)):
            raise RunError(
                f"{folder.folder}, epoch {epoch + 1}: a loss is not finite (learning rate "
                f"{settings.learning_rate:g}); the last checkpoint is intact"
            )
        seconds = time.perf_counter() - began
        history.append({"critic_loss": losses[0], "generator_loss": losses[1], "seconds": seconds})
        last = epoch + 1 == settings.epochs
        stop = deadline.is_up(seconds) and not last
        if (epoch + 1) % sample_every == 0 and not last:
            _write_samples(folder, generator, epoch + 1)
        if last or stop or time.monotonic() - saved_at > options.checkpoint_seconds:
            folder.save("checkpoint.pt", _state(lanes, history, data))
            lines = "".join(json.dumps(line) + "\n" for line in history)
            write_text(folder.folder / "losses.jsonl", lines)
            saved_at = time.monotonic()
        if stop:
            raise TimeUp(
                f"time limit of {options.minutes:g} min reached, {epoch + 1} of "
                f"{settings.epochs} epochs done"
            )
    _write_samples(folder, generator, settings.epochs)
    folder.save("generator.pt", {"epoch": settings.epochs, **generator.state()})


def _steps_per_epoch(settings: GanSettings, lanes: list[GanLane]) -> int:
    """Steps in which each critic sees as many images as there are; the same for all lanes."""
    most = max(len(lane.images) for lane in lanes)
    return math.ceil(most / (settings.batch_size * settings.critic_steps))


def _state(
    lanes: list[GanLane], history: list[dict[str, float]], data: ImageArrays
) -> dict[str, Any]:
    return {
        "history": history,
        "num_images": len(data.train_target),
        "image_shape": [*data.image_shape],
        "lanes": [lane.state_dict() for lane in lanes],
    }


def _write_samples(folder: GanFolder, generator: TrainedGenerator, epoch: int) -> None:
    """A row of pictures for each class, from the same latents in every epoch."""
    rows = min(generator.num_classes, _MOST_ROWS)
    key = counter_rng.key(folder.seed, _SAMPLES, device=generator.device)
    images = generator.draw([row for row in range(rows) for _ in range(_COLUMNS)], key)
    samples = folder.folder / "samples"
    samples.mkdir(exist_ok=True)
    write_grid(samples / f"epoch_{epoch:04d}.png", images.unflatten(0, (rows, _COLUMNS)))
