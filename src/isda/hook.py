"""The forward pre-hook that keeps the input of a layer until the criterion takes it."""

from typing import Any

import torch
from torch import Tensor, nn

from isda import distributed

__all__ = ["Capture"]

_MISSING = {
    "never": (
        "the layer has made no forward pass since attach. Compute the logits with the attached "
        "model itself: not with a copy of it, not by calling a compiled model that ran before "
        "attach, and not by a function of the layer's weight. If the layer was replaced after "
        "attach, attach again"
    ),
    "used": (
        "its last pass was used already, and each call of the criterion needs a pass of its own. "
        "For a second loss of the same pass, attach a second criterion. If the layer was replaced "
        "after attach, attach again; logits of a copy of the model do not count"
    ),
    "eval": "its last pass was in eval mode. Call model.train() before the pass, not after it",
    "removed": "remove() was called, so nothing is captured any more. Attach a new criterion",
}


class Capture:
    """Forward pre-hook that keeps the layer's input until the criterion takes it."""

    def __init__(self) -> None:
        self.features: Tensor | None = None
        self.missing = "never"  # why there are no features
        self.has_tokens = False  # whether the last input had more than two dimensions

    def __call__(
        self, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> None:
        if _in_backward():
            return  # gradient checkpointing recomputes the forward pass
        if getattr(module, "_is_replica", False):
            raise ValueError(
                "an attached model cannot run in nn.DataParallel, whose copies hold parts of a "
                "batch: use DistributedDataParallel, or a single device"
            )
        features = (*inputs, *named.values())[0]
        self.has_tokens = features.dim() > 2
        if not module.training:
            self.features, self.missing = None, "eval"
            return
        if distributed.is_sharded(features):
            raise ValueError(
                "the input of the attached layer must be a plain tensor, got a DTensor: gather "
                "it before the layer (tensor parallelism is not supported)"
            )
        self.features, self.missing = features, "used"  # the reason once they are taken

    def explain(self) -> str:
        """Why there are no features."""
        if _in_backward():
            return "the criterion must be called outside of a checkpointed function"
        return (
            "logits must come from a forward pass of the attached model in training mode: "
            + _MISSING[self.missing]
        )

    def remove(self) -> None:
        """Forget the input, because the hook was removed."""
        self.features, self.missing = None, "removed"

    @property
    def __name__(self) -> str:  # torch.jit.script asks for it first
        raise AttributeError(
            "a model with an attached criterion cannot be compiled by torch.jit.script: call "
            "criterion.remove() first, or use torch.compile"
        )

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the model starts empty
        return {"features": None, "missing": "never", "has_tokens": False}


def _in_backward() -> bool:
    """Whether a backward pass is running."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
