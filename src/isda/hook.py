"""The forward pre-hook that keeps the input of a layer until the criterion takes it."""

from typing import Any

import torch
from torch import Tensor, nn

from isda import distributed

__all__ = ["Capture"]

_MISSING = {
    "never": (
        "the layer has run no forward pass since attach. Compute the logits with the attached "
        "model itself, not with a copy of it, a compiled model that ran before attach, or a "
        "function of the layer's weight. If the layer was replaced after attach, call attach again"
    ),
    "used": (
        "its last pass has already been used, and each call of the criterion needs a new pass. "
        "For mixup, pass class probabilities in one call; for a metric, use F.cross_entropy; for "
        "another loss on the same pass, attach a second criterion. If the layer was replaced after "
        "attach, call attach again. Logits from a copy of the model cannot be used; to evaluate a "
        "copy, call criterion.eval() first"
    ),
    "eval": (
        "its last pass was in eval mode. Call model.train() before the pass, not after it, and "
        "call the criterion before any pass in eval mode"
    ),
    "removed": "remove() was called, so nothing is captured any more. Attach a new criterion",
}


class Capture:
    """Forward pre-hook that keeps the input of a layer until the criterion takes it."""

    def __init__(self) -> None:
        self.features: Tensor | None = None
        # weight and bias in this pass, which torch.func.functional_call may have replaced; None if
        # they are computed, by a parametrization or by torch.nn.utils.prune
        self.parameters: tuple[Tensor, Tensor | None] | None = None
        self.missing_reason = "never"  # why there are no features
        self.has_tokens = False  # whether the last input had more than two dimensions
        self.is_new = False  # whether the layer has run, in any mode, since the last loss

    def __call__(
        self, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor] | None = None
    ) -> None:
        if _in_backward():
            return  # gradient checkpointing recomputes the forward pass
        if getattr(module, "_is_replica", False):
            raise ValueError(
                "an attached model cannot run in nn.DataParallel, whose replicas each process part "
                "of a batch: use DistributedDataParallel or a single device"
            )
        features = (*inputs, *(named or {}).values())[0]
        self.has_tokens, self.is_new = features.dim() > 2, True
        if not module.training:
            self.features, self.missing_reason = None, "eval"
            return
        if distributed.is_sharded(features):
            raise ValueError(
                "the input of the attached layer must be a plain tensor, got a DTensor: gather "
                "it before the layer (tensor parallelism is not supported)"
            )
        self.features, self.missing_reason = features, "used"  # the reason after they are taken
        own = module._parameters
        weight = own.get("weight")
        self.parameters = None if weight is None or "bias" not in own else (weight, own["bias"])

    def explain(self) -> str:
        """Why there are no features."""
        if _in_backward():
            return "the criterion must be called outside of a checkpointed function"
        return (
            "logits must come from a forward pass of the attached model in training mode: "
            + _MISSING[self.missing_reason]
        )

    def remove(self) -> None:
        """Discard the input after the hook was removed."""
        self.features, self.parameters, self.missing_reason = None, None, "removed"

    @property
    def __name__(self) -> str:  # torch.jit.script reads it first
        raise AttributeError(
            "a model with an attached criterion cannot be compiled by torch.jit.script: call "
            "criterion.remove() first, before copying the model, or use torch.compile"
        )

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the model starts empty
        return Capture().__dict__


def _in_backward() -> bool:
    """Whether a backward pass is running."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
