"""Pretrained weights: where they are, how a file is read, and whether it fits a network.

Files are safetensors or torch files of tensors; a file with other Python objects is rejected. Every
tensor of the network must be in the file with the same shape, except the head, which is new if the
file does not have one or has a different number of classes.
"""

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from isda.experiments.errors import InputError, few, one_line, reason

__all__ = [
    "LoadedWeights",
    "Preprocessing",
    "find_weights",
    "load_tensors",
    "loaded",
    "read_tensors",
]

_CONTAINERS = ("state_dict", "model", "network")  # keys under which training scripts store weights
_PREFIXES = ("module.", "model.")  # of DistributedDataParallel, and of our checkpoints


@dataclass(frozen=True)
class LoadedWeights:
    """What a network was started from."""

    file: str
    sha256: str
    tensors: int  # number that was loaded
    new: tuple[str, ...]  # names of the tensors that were not loaded, such as a new head

    def as_dict(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return {"file": self.file, "sha256": self.sha256, "tensors": self.tensors,
                "new": list(self.new)}  # fmt: skip


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of the images that a network was pretrained on; names as in a recipe."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    test_crop: float


def find_weights(network: str, file: str = "", *, download: bool = False) -> Path:
    """The file with the pretrained weights of a network.

    Args:
        network: ``timm:NAME``, ``torchvision:NAME`` or ``MODULE:FUNCTION``.
        file: path of the file; if empty, the file is looked up in the caches of timm and
            torchvision.
        download: download a missing file to the cache.
    """
    if file:
        path = Path(file).expanduser()
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"weights must be a file of tensors, but {one_line(path)} {problem}")
        return path
    kind, _, name = network.partition(":")
    if kind == "timm":
        found = _timm_file(name, download=download)
    elif kind == "torchvision":
        found = _torchvision_file(name, download=download)
    else:
        raise InputError(
            f"{network} is a function of your own: give its pretrained weights with --weights PATH"
        )
    if found is None:
        raise InputError(
            f"pretrained weights of {network} are not on this machine: use --download, or give a "
            "file with --weights PATH"
        )
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by name, without names of containers and common prefixes."""
    try:
        content = _read(path)
    except OSError as error:
        raise InputError(f"{one_line(path)} cannot be read: {reason(error)}") from error
    except Exception as error:  # a damaged file can fail in any way
        why = reason(error)
        if path.suffix != ".safetensors" and not _is_torch_file(path):
            why = "it is neither a .safetensors file nor a torch file"
        elif "weights_only" in str(error) or "Weights only" in str(error):
            why = "it holds Python objects other than tensors: save it as safetensors"
        raise InputError(f"{one_line(path)} is not a file of tensors: {one_line(why)}") from error
    for key in _CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = content if isinstance(content, Mapping) else {}
    if not tensors or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        raise InputError(f"{one_line(path)} must hold the tensors of a network by name")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return dict(tensors)


def load_tensors(
    model: nn.Module, head: str, tensors: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], str]:
    """Copy tensors into a model, unless they do not fit; a new head becomes zero.

    Gradients through a random head would change the features before the head has learned anything.
    timm's heads of EfficientNet and MobileNet begin with weights up to 1 / √C for C classes, which
    is far too large if there are few.

    Args:
        model: model whose head has the final number of classes.
        head: name of the head in the model.
        tensors: tensors by name.

    Returns:
        The names of the tensors that were not loaded, such as a new head, and the reason if nothing
        was loaded, otherwise "".
    """
    own = model.state_dict()
    of_head = tuple(name for name in own if name.startswith(f"{head}."))
    fits = {name: name in tensors and tensors[name].shape == own[name].shape for name in own}
    new_head = () if all(fits[name] for name in of_head) else of_head
    # counters, which do not change the network, are not in all files
    counters = [name for name in own if name.endswith(".num_batches_tracked") and not fits[name]]
    new = (*new_head, *counters)
    wrong = [name for name in own if not fits[name] and name not in (*of_head, *counters)]
    missing = [name for name in wrong if name not in tensors]
    reshaped = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in wrong
        if name in tensors
    ]
    unexpected = [name for name in tensors if name not in own and not name.startswith(f"{head}.")]
    reasons = [
        f"{len(names)} of {len(own)} tensors {what}: {few(names, 3)}"
        for names, what in ((missing, "are missing"), (reshaped, "have another shape"))
        if names
    ]
    if unexpected:
        reasons.append(f"{len(unexpected)} are not in the network: {few(unexpected, 3)}")
    if reasons:
        return (), "; ".join(reasons)
    with torch.no_grad():
        for name, value in own.items():
            if name not in new:
                value.copy_(tensors[name])
            elif name in (f"{head}.weight", f"{head}.bias"):
                value.zero_()
    return new, ""


@functools.lru_cache(maxsize=8)
def _digest(path: str, _changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def loaded(path: Path, model: nn.Module, new: tuple[str, ...]) -> LoadedWeights:
    """Description of what was loaded into a model."""
    digest = _digest(str(path), os.stat(path).st_mtime_ns)
    return LoadedWeights(str(path), digest, len(model.state_dict()) - len(new), new)


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _is_torch_file(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")  # a zip archive, or a pickle of early versions


def _timm_file(name: str, *, download: bool) -> Path | None:
    """File of a timm model in the cache of the Hugging Face hub, or of torch.hub."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    from isda.experiments.networks.timm_network import pretrained_settings  # imports this module

    found = pretrained_settings(name)
    if found is None or not (found.hf_hub_id or found.url):
        raise InputError(
            f"timm has no pretrained weights of {name}: give a file with --weights PATH"
        )
    if not found.hf_hub_id:
        return _hub_file(str(found.url), download=download)
    repository, _, revision = found.hf_hub_id.partition("@")
    files = [found.hf_hub_filename or "pytorch_model.bin"]
    if not found.hf_hub_filename:
        files.insert(0, "model.safetensors")
    for file in files:
        cached = try_to_load_from_cache(repository, file, revision=revision or None)
        if isinstance(cached, str):
            return Path(cached)
    for file in files if download else []:
        try:
            return Path(hf_hub_download(repository, file, revision=revision or None))
        except LocalEntryNotFoundError as error:
            raise _not_downloaded(f"timm:{name}", error) from error
        except EntryNotFoundError:
            continue
        except Exception as error:  # of the network
            raise _not_downloaded(f"timm:{name}", error) from error
    return None


def _torchvision_file(name: str, *, download: bool) -> Path | None:
    from isda.experiments.networks.wrapped import torchvision_weights

    return _hub_file(torchvision_weights(name).url, download=download)


def _hub_file(url: str, *, download: bool) -> Path | None:
    """File of a URL in the cache of torch.hub."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(urlparse(url).path)
    if path.is_file():
        return path
    if not download:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    checked = re.search(r"-([a-f0-9]{8,})\.", path.name)  # as in torch.hub
    try:
        torch.hub.download_url_to_file(url, str(path), checked[1] if checked else None)
    except Exception as error:  # of the network
        raise _not_downloaded(path.name, error) from error
    return path


def _not_downloaded(what: str, error: Exception) -> InputError:
    return InputError(
        f"pretrained weights of {what} cannot be downloaded: {one_line(reason(error))}"
    )
