"""Metrics for TensorBoard, an optional dependency."""

from typing import Any

from isda.experiments.errors import InputError
from isda.experiments.settings import Options
from isda.experiments.training.run_folder import RunFolder

__all__ = ["create_writer", "summary_writer"]


def create_writer(run: RunFolder | None, options: Options, epoch: int) -> Any:
    """Writer of a run, or None; epochs after the checkpoint are rewritten."""
    if run is None or not options.tensorboard:
        return None
    return summary_writer()(str(run.folder), purge_step=epoch)


def summary_writer() -> Any:
    """The class of the writers; raises InputError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "--tensorboard needs the package tensorboard: pip install -e '.[tensorboard]'"
        ) from error
    return SummaryWriter
