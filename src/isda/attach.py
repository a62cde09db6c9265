"""The one-line change: ``criterion = isda.attach(model, …)`` in place of ``nn.CrossEntropyLoss()``.

A forward pre-hook on the final linear layer captures its input; the criterion that comes back is
called as before, with logits and target.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from isda import functional
from isda.batch import MISMATCH, require_origin
from isda.loss import ISDALoss
from isda.operators import in_backward

__all__ = ["AttachedLoss", "attach", "find_head"]


def attach(
    model: nn.Module,
    criterion: nn.Module | None = None,
    *,
    head: nn.Module | None = None,
    **options: Any,
) -> "AttachedLoss":
    r"""Make a criterion called with ``(logits, target)`` that knows the features of the model.

    The model keeps its parameters, its output and its checkpoints; it gets one forward pre-hook.
    Put it in front of or behind ``DistributedDataParallel`` and before the first call of a compiled
    model.

    Args:
        model: a classifier whose last layer is linear.
        criterion: a loss called as ``criterion(features, weight, target, bias=bias,
            logits=logits)``; None for an :class:`isda.ISDALoss` made from ``options``.
        head: the final ``nn.Linear`` (or 1×1 ``nn.Conv2d`` for dense prediction), if it cannot be
            found.
        options: of :class:`isda.ISDALoss`, such as ``lambda_0``, ``total_steps`` and
            ``covariance``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> criterion = attach(model, lambda_0=0.5, total_steps=100)
        >>> loss = criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0]))
    """
    head = find_head(model) if head is None else head
    if not any(head is module for module in model.modules()):
        raise ValueError(f"head must be a module of the model, got {head}")
    if not _is_linear(head):
        raise ValueError(f"head must be an nn.Linear or a 1×1 nn.Conv2d, got {head}")
    weight: Tensor = head.weight  # type: ignore[assignment]
    if criterion is None:
        criterion = ISDALoss(weight.shape[1], weight.shape[0], **options)
    elif options:
        raise ValueError(f"options go with ISDALoss, got {sorted(options)} beside a criterion")
    return AttachedLoss(head, criterion)


class AttachedLoss(nn.Module):
    """A criterion called with ``(logits, target)``, bound to the final linear layer of a model.

    It follows the mode of the model: after ``model.eval()`` or ``criterion.eval()`` it is ordinary
    cross entropy. What was captured is used once; a call without it raises. The hook goes with the
    criterion, or by ``remove()``.
    """

    mismatch: Tensor

    def __init__(self, head: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion
        self.register_buffer("mismatch", torch.zeros((), dtype=torch.bool), persistent=False)
        self._capture = _Capture()
        self._head = (head,)  # in a tuple: the head stays the model's alone
        self._handle = head.register_forward_pre_hook(self._capture, with_kwargs=True)
        self._watch()
        self.to(head.weight.device)  # type: ignore[arg-type]

    def forward(self, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Loss of the batch that the model saw last; options such as ``progress`` are passed on."""
        (head,) = self._head
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"logits must be a tensor, got {type(logits).__name__}; such an output may have "
                "them as .logits"
            )
        features, self._capture.features = self._capture.features, None
        if not (self.training and head.training):
            return functional.cross_entropy(
                logits,
                target,
                ignore_index=getattr(self.criterion, "ignore_index", -100),
                reduction=getattr(self.criterion, "reduction", "mean"),
            )
        if features is None and in_backward():
            raise ValueError("the criterion must be called outside of what a checkpoint repeats")
        if features is None:
            raise ValueError(
                "logits must come from a pass of the attached model in training mode, one pass for "
                "each call; got a call with no pass before it"
            )
        if self.mismatch.device != features.device:
            self.to(features.device)  # the model was moved after it was attached
        weight: Tensor = head.weight.flatten(1)  # type: ignore[operator]
        bias: Tensor | None = head.bias  # type: ignore[assignment]
        soft = target.is_floating_point()
        positions = target.shape[:1] + target.shape[2:] if soft else target.shape
        if isinstance(head, nn.Linear) and features.dim() > 2:  # tokens: (N, L, A)
            features, logits = features.flatten(0, -2), functional.flatten(logits)
            target = functional.flatten(target) if soft else target.flatten()
        elif features.shape[2:] == (1, 1) and logits.dim() == 2:  # pooled, and flattened behind it
            features = features.flatten(1)
        if len(logits) != len(features):
            raise ValueError(
                f"logits must be of the batch that the model saw last, {len(features)} samples, "
                f"got {len(logits)}"
            )
        if logits.shape[1] != len(weight):
            raise ValueError(
                f"logits must have {len(weight)} classes, as the attached layer {head}, got "
                f"{logits.shape[1]}; pass head= if the model ends in another layer"
            )
        if _has_graphs(self.criterion):
            options["mismatch"] = self.mismatch  # looked for in the graph: fewer launches
        else:
            features = require_origin(features, weight, bias, logits, self.mismatch)
        loss = self.criterion(features, weight, target, bias=bias, logits=logits, **options)
        return loss.view(positions) if loss.dim() == 1 else loss

    def check(self) -> None:
        """Raise the error of a bad batch that a GPU saw since the last look (waits for it)."""
        mismatch = bool(self.mismatch)
        self.mismatch.zero_()
        try:
            if hasattr(self.criterion, "check"):
                self.criterion.check()  # type: ignore[operator]
        except ValueError:
            if not mismatch:  # else it tells of the NaN that took the place of the features
                raise
        if mismatch:
            raise ValueError(MISMATCH)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State of the criterion; looks for bad batches first."""
        self.check()
        return super().state_dict(*args, **kwargs)

    def remove(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch()

    def _watch(self) -> None:
        """Take the hook off the model when the criterion is gone."""
        weakref.finalize(self, self._handle.remove).atexit = False


def find_head(model: nn.Module) -> nn.Linear:
    """Final linear layer of a classifier: timm's ``get_classifier()``, else the last ``nn.Linear``.

    A second layer with as many outputs, such as an auxiliary classifier, makes the answer
    ambiguous.
    """
    inner: Any = getattr(model, "module", model)
    inner = getattr(inner, "_orig_mod", inner)
    if callable(getattr(inner, "get_classifier", None)):
        classifier = inner.get_classifier()
        if isinstance(classifier, nn.Linear):
            return classifier
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linear:
        raise ValueError(
            f"model must have a final nn.Linear layer, found none in {type(inner).__name__}; "
            "pass head= if its last layer is a 1×1 convolution"
        )
    last = list(linear.values())[-1]
    candidates = [name for name, m in linear.items() if m.out_features == last.out_features]
    if len(candidates) > 1:
        raise ValueError(
            f"model must have one final nn.Linear layer, found {len(candidates)} with "
            f"{last.out_features} outputs ({', '.join(candidates[-4:])}); pass head="
        )
    return last


class _Capture:
    """Forward pre-hook that keeps the layer's input until the criterion takes it."""

    def __init__(self) -> None:
        self.features: Tensor | None = None

    def __call__(
        self, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> None:
        if in_backward():
            return  # where a checkpoint computes it once more
        self.features = (*inputs, *named.values())[0] if module.training else None

    def __getstate__(self) -> dict[str, None]:
        return {"features": None}  # a copy or a pickle of the model starts empty


def _has_graphs(criterion: nn.Module) -> bool:
    """Whether it is an ISDALoss that captures graphs, with no forward but its own."""
    plain = type(criterion).forward is ISDALoss.forward and "forward" not in vars(criterion)
    return plain and bool(criterion.cuda_graph)


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1
    return isinstance(module, nn.Linear)
