"""Device, process group, precision and kernels of a training."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

# Before there is a process group: it would become a default argument of these functions, never be
# freed, and the threads of such a group can abort the process at exit.
import torch.distributed.nn.functional

from isda.experiments.errors import InputError
from isda.experiments.files import create_folder
from isda.experiments.settings import Options, Recipe

__all__ = [
    "autocast_of",
    "choose_kernels",
    "join_processes",
    "keep_compiled_code",
    "memory_format_of",
]


@contextlib.contextmanager
def join_processes(name: str) -> Iterator[tuple[torch.device, int, int]]:
    """Device, rank and world size of this process; under torchrun, joins the process group."""
    ranked = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    known = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if known is None:
        raise InputError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    device = torch.device("cpu")
    if name != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local = int(os.environ.get("LOCAL_RANK", 0)) if ranked else 0
        index = int(known[1] or local)
        if index >= count:
            raise InputError(
                f"GPU {index} not found, there are {count}: use --device cpu to run without a GPU"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if not ranked:
        yield device, 0, 1
        return
    if dist.is_initialized():  # by a caller that trains several times
        yield device, dist.get_rank(), dist.get_world_size()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield device, dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def keep_compiled_code(folder: Path | None) -> Iterator[None]:
    """Store compiled code in a folder inside the context, and reuse what is already there.

    The names of the files depend on the code, the versions of torch and Triton and the kind of GPU,
    but not on the folder, so that the folder can be moved to another machine.
    """
    if folder is None:
        yield
        return
    folder = folder.expanduser().resolve()
    create_folder(folder)
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def choose_kernels(options: Options, device: torch.device) -> Iterator[None]:
    """Use fast or deterministic kernels inside the context."""
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(options.deterministic and device.type == "cuda")
    torch.backends.cudnn.benchmark = not options.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def autocast_of(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Context in which the network of a recipe is called."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16")


def memory_format_of(recipe: Recipe) -> torch.memory_format:
    """Memory format of images and weights."""
    return torch.channels_last if recipe.channels_last else torch.contiguous_format
