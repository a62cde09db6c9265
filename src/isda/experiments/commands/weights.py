"""``isda weights``: the weights of a finished run as safetensors, with a model card beside them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from safetensors.torch import save
from torch import Tensor

from isda._version import __version__
from isda.experiments.commands.arguments import parse
from isda.experiments.data.arrays import CIFAR_MEAN, CIFAR_STD, ImageArrays, load_data
from isda.experiments.data.folder_cache import DecodedImages
from isda.experiments.errors import InputError
from isda.experiments.files import write_bytes, write_text
from isda.experiments.predictions import load_predictions
from isda.experiments.records import Run, result_epochs, summary
from isda.experiments.settings import Recipe
from isda.experiments.training.run_folder import RunFolder

__all__ = ["Weights", "export_weights", "model_card", "run"]


@dataclass(frozen=True)
class Weights:
    """Arguments of ``isda weights``."""

    run: tyro.conf.Positional[Path]
    """Folder of a finished run with its checkpoint: OUT/<recipe>/<seed>."""

    out: Path
    """File to write, NAME.safetensors; the model card is NAME.md."""


def run(words: list[str]) -> None:
    """Write the weights and the model card."""
    given = parse(Weights, "weights", words)
    print(*export_weights(given.run, given.out), sep="\n")


def export_weights(folder: Path, out: Path) -> tuple[Path, Path]:
    """Write the weights of a finished run, and a model card with the same name and ``.md``.

    With ``ema``, these are the averaged weights, which are the ones that were evaluated.

    Args:
        folder: folder of the run, with its checkpoint.
        out: file to write, ``NAME.safetensors``.

    Returns:
        The two files.

    Raises:
        InputError: the run is missing or not finished, or has no checkpoint.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"out must be a file NAME.safetensors, got {str(out)!r}")
    if not out.parent.is_dir():
        raise InputError(f"folder {str(out.parent)!r} of {out.name} does not exist")
    if not folder.is_dir():
        raise InputError(f"folder {str(folder)!r} does not exist")
    run = RunFolder(folder)
    result = summary(run)
    if not result.finished:
        raise InputError(
            f"{folder} is not finished: {result.epochs} of {run.recipe.epochs} epochs; "
            "--resume continues it"
        )
    state = run.load_finished()
    weights: dict[str, Tensor] = state["average" if run.recipe.ema else "network"]
    about = _about(run, state, weights)
    tensors = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    text = {key: value if isinstance(value, str) else json.dumps(value)
            for key, value in about.items()}  # fmt: skip
    card = out.with_suffix(".md")
    write_bytes(out, save(tensors, metadata={"format": "pt", **text}))
    write_text(card, model_card(run, out.name, about))
    return out, card


def model_card(run: Run, file: str, about: dict[str, Any]) -> str:
    """What the weights are, how well they do, how to load them, and what not to use them for.

    Args:
        run: record of the run.
        file: name of the file with the weights.
        about: how to build the network and normalise its images.
    """
    recipe, last, result = run.recipe, run.metrics()[-1], summary(run)
    number = result_epochs(recipe.epochs)
    split = f"{recipe.hold_out} held-out training images" if recipe.hold_out else "test images"
    where = run.environments[-1]
    averaged = ", averaged over the steps (ema)" if recipe.ema else ""
    rows = [
        ("error, %", last["test_error"], result.error, 2),
        ("negative log-likelihood", last.get("test_loss"), result.loss, 4),
        ("expected calibration error", last.get("test_ece"), result.ece, 4),
    ]
    table = [f"| {title} | {_number(own, digits)} | {_number(mean, digits)} |"
             for title, own, mean, digits in rows]  # fmt: skip
    options = _arguments(about, "num_classes", "in_channels", "drop_rate")
    imported = prepare = ""
    if recipe.has_image_files:
        imported = "from isda.experiments.data.decoding import decode_center_crop\n"
        preparation = _arguments(about, "image_size", "interpolation", "test_crop")
        prepare = f"""

def prepare(file):  # as the test images: uint8 (1, 3, H, W)
    return decode_center_crop(file, {preparation}).permute(2, 0, 1)[None]
"""
    fields = "\n".join(f"| {key} | `{json.dumps(value)}` |" for key, value in
                       recipe.as_dict().items())  # fmt: skip
    return f"""---
library_name: torch-isda
tags:
- image-classification
- {recipe.method}
---

# {run.name}, seed {run.seed}

{recipe.network} trained on {_data_words(recipe)} with {_method_words(recipe)}, by torch-isda
{__version__}. The weights are those after the last of {recipe.epochs} epochs{averaged}.

## Results on the {split}

| | these weights | {"last epoch" if number == 1 else f"mean of the last {number} epochs"} |
|---|---:|---:|
{chr(10).join(table)}

These are the numbers of a single seed. The calibration error has 15 bins of equal width.

## Loading

```python
import torch
from safetensors.torch import load_file

{imported}from isda.experiments.networks import create_network

network = create_network({recipe.network!r}, {options})
network.load_state_dict(load_file({file!r}))
network.eval()
mean = torch.tensor({about["mean"]}).view(-1, 1, 1)
std = torch.tensor({about["std"]}).view(-1, 1, 1)
{prepare}

def predict(images):  # uint8 (N, {about["in_channels"]}, H, W)
    with torch.no_grad():
        return network((images / 255 - mean) / std).softmax(1)
```

The header of the file also holds these settings, the recipe, the class names and the commit.

## Intended use

To repeat and examine the results above: predictions, calibration and features of a network that was
trained with this loss, next to one of the same recipe with another loss.

## Caveats

* Every image gets one of the {about["num_classes"]} classes of {recipe.data}, whatever it shows.
  The network was not tested on images from other sources.
* Probabilities are calibrated, if at all, for images like the test images above.
* The license of the data set applies, also to what may be derived from the weights.
* One seed does not show whether a method is better than another: compare several.

## Training

| field of the recipe | value |
|---|---|
{fields}

Seed {run.seed}; commit {where.get("commit") or "unknown"}; torch {where.get("torch")},
CUDA {where.get("cuda") or "none"}, {where.get("device")}. The recipe, changed fields included, is
all that `isda train` needs to train it again.
"""


def _about(run: Run, state: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    recipe = run.recipe
    kernels = (tensor for tensor in weights.values() if tensor.dim() == 4)
    first = None if recipe.has_image_files else next(kernels)
    mean, std = _normalization(recipe)
    predictions = load_predictions(run)
    return {
        "network": recipe.network,
        "num_classes": state["data"][2],
        "in_channels": 3 if first is None else first.shape[1],
        "drop_rate": recipe.drop_rate,
        "mean": list(mean),
        "std": list(std),
        "image_size": recipe.image_size,
        "interpolation": recipe.interpolation,
        "test_crop": recipe.test_crop,
        "class_names": [] if predictions is None else list(predictions.class_names),
        "name": run.name,
        "seed": run.seed,
        "recipe": recipe.as_dict(),
        "commit": run.environments[-1].get("commit") or "",
    }


def _normalization(recipe: Recipe) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by which the images were normalised, of values from 0 to 1."""
    if recipe.mean:
        return recipe.mean, recipe.std
    if recipe.data == "digits":
        digits = load_data(recipe.data)
        assert isinstance(digits, ImageArrays)
        return digits.mean, digits.std
    if recipe.data in ("cifar10", "cifar100"):
        return CIFAR_MEAN, CIFAR_STD
    return DecodedImages.mean, DecodedImages.std


def _arguments(about: dict[str, Any], *names: str) -> str:
    """Arguments of a call in Python."""
    return ", ".join(f"{name}={about[name]!r}" for name in names)


def _data_words(recipe: Recipe) -> str:
    words = "images of a folder" if recipe.data.startswith("imagefolder:") else recipe.data
    if recipe.images_per_class:
        words += f", {recipe.images_per_class} images per class drawn by the seed,"
    if recipe.hold_out:
        words += f" without {recipe.hold_out} held-out images"
    return words


def _method_words(recipe: Recipe) -> str:
    if recipe.method == "isda":
        return f"ISDA (λ₀ = {recipe.lambda_0:g}, {recipe.covariance} covariances)"
    return "cross entropy" if recipe.method == "ce" else recipe.method.replace("_", " ")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
