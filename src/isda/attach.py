"""The one-line change: ``criterion = isda.attach(model, …)`` instead of ``nn.CrossEntropyLoss()``.

A forward pre-hook on the final linear layer captures its input, so that the criterion is called as
before, with logits and target.
"""

import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isda import checks, ops
from isda.covariance import Estimator
from isda.criterion import Ramp
from isda.functional.losses import Reduction, flatten
from isda.loss import ISDALoss

__all__ = ["AttachedLoss", "attach", "find_head"]

_EVAL_MODE = (
    "the attached layer is in eval mode, so this loss is ordinary cross entropy without "
    "augmentation. To train with ISDA while the rest of the model stays in eval mode, call train() "
    "on the layer; for validation, call the criterion under torch.no_grad()"
)


def attach(
    model: nn.Module,
    criterion: nn.Module | None = None,
    *,
    head: nn.Module | None = None,
    lambda_0: float = 0.5,
    total_steps: int | None = None,
    covariance: str | Estimator = "full",
    decay: float = 1.0,
    ramp: Ramp = "linear",
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    frozen: bool = False,
    synchronize: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> "AttachedLoss":
    r"""Create a criterion for a model that is called like ``nn.CrossEntropyLoss()``.

    The model keeps its parameters, its output and its checkpoints; it gets one forward pre-hook.
    Call this before or after wrapping the model in ``DistributedDataParallel``, and before the
    first call of a compiled model.

    Args:
        model: a classifier that ends in a linear layer.
        criterion: a loss called as ``criterion(features, weight, target, bias=bias,
            logits=logits)`` and, in eval mode, as ``criterion.evaluate(logits, target)`` (ordinary
            cross entropy if there is no such method); None for an :class:`isda.ISDALoss` with the
            options below.
        head: the final ``nn.Linear`` (or 1×1 ``nn.Conv2d`` for dense prediction), if it cannot be
            found automatically.
        lambda_0: final strength of the augmentation. For this and the following options see
            :class:`isda.ISDALoss`.
        total_steps: number of steps of the whole training.
        covariance: structure of the covariances, or an estimator.
        decay: weight of old samples.
        ramp: "linear" or "constant".
        weight: weight of each class.
        label_smoothing: share of the target that is spread over all classes.
        ignore_index: class index of samples that do not count.
        reduction: "mean", "sum" or "none".
        frozen: use the statistics without updating them.
        synchronize: gather the features of all ranks.
        process_group: the ranks that train one model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> criterion = attach(model, lambda_0=0.5, total_steps=100)
        >>> loss = criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0]))
    """
    options: dict[str, Any] = {
        "lambda_0": lambda_0,
        "total_steps": total_steps,
        "covariance": covariance,
        "decay": decay,
        "ramp": ramp,
        "weight": weight,
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "frozen": frozen,
        "synchronize": synchronize,
        "process_group": process_group,
    }
    head = find_head(model) if head is None else head
    if not any(head is module for module in model.modules()):
        raise ValueError(f"head must be a module of the model, got {head}")
    if not _is_linear(head):
        raise ValueError(f"head must be an nn.Linear or a 1×1 nn.Conv2d, got {head}")
    if criterion is None:
        head_weight: Tensor = head.weight  # type: ignore[assignment]
        criterion = ISDALoss(head_weight.shape[1], head_weight.shape[0], **options)
    else:
        defaults: dict[str, Any] = attach.__kwdefaults__  # type: ignore[assignment]
        changed = [name for name, value in options.items() if value is not defaults[name]]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} must be set on the criterion that is passed, not on attach"
            )
    return AttachedLoss(head, criterion)


class AttachedLoss(nn.Module):
    """A criterion called with ``(logits, target)`` for the final linear layer of a model.

    It follows the mode of the model: after ``model.eval()`` or ``criterion.eval()`` it is ordinary
    cross entropy. Each captured batch is used once; a call without one raises. The hook is removed
    with the criterion, or by ``remove()``.
    """

    mismatch: Tensor

    def __init__(self, head: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion
        self.register_buffer("mismatch", torch.zeros((), dtype=torch.bool), persistent=False)
        self._capture = _Capture()
        self._warned = False
        self._head = (head,)  # a tuple, so that the head is no submodule of the criterion
        self._handle = head.register_forward_pre_hook(self._capture, with_kwargs=True)
        self._remove_hook_with_criterion()
        self.to(head.weight.device)  # type: ignore[arg-type]

    def forward(self, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Loss of the last batch of the model.

        Args:
            logits: output of the model.
            target: class indices or class probabilities.
            options: passed on to the criterion, such as ``progress``.
        """
        (head,) = self._head
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"logits must be a tensor, got {type(logits).__name__}; the output of a "
                "Hugging Face model has them as .logits"
            )
        features, self._capture.features = self._capture.features, None
        if not (self.training and head.training):
            compiling = torch.compiler.is_compiling()
            if self.training and logits.requires_grad and not (self._warned or compiling):
                self._warned = True
                warnings.warn(_EVAL_MODE, stacklevel=2)
            evaluate = getattr(self.criterion, "evaluate", ops.cross_entropy)
            value: Tensor = evaluate(logits, target)
            return value
        soft = target.is_floating_point()
        positions = target.shape[:1] + target.shape[2:] if soft else target.shape
        weight: Tensor = head.weight.flatten(1)  # type: ignore[operator]
        bias: Tensor | None = head.bias  # type: ignore[assignment]
        try:
            features, logits = self._require_pair(features, logits, weight, bias)
        except ValueError:
            if hasattr(self.criterion, "refuse"):
                self.criterion.refuse()  # type: ignore[operator]
            raise
        if isinstance(head, nn.Linear) and len(positions) > 1:  # tokens: (N, L, A)
            target = flatten(target) if soft else target.flatten()
            if options.get("covariance_index") is not None:
                options["covariance_index"] = options["covariance_index"].flatten()
        loss = self.criterion(features, weight, target, bias=bias, logits=logits, **options)
        return loss.view(positions) if loss.dim() == 1 else loss

    @property
    def estimator(self) -> Estimator:
        """The statistics of the criterion."""
        estimator: Estimator = self.criterion.estimator  # type: ignore[assignment]
        return estimator

    @property
    def strength(self) -> float:
        """λ of the next step, see :attr:`isda.ISDALoss.strength`."""
        strength: float = self.criterion.strength  # type: ignore[assignment]
        return strength

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole training; can be set before the first step."""
        steps: int | None = self.criterion.total_steps  # type: ignore[assignment]
        return steps

    @total_steps.setter
    def total_steps(self, total_steps: int | None) -> None:
        checks.require_ramp(0.0, total_steps, "linear")
        self.criterion.total_steps = total_steps  # type: ignore[assignment]

    def check(self) -> None:
        """Raise the error of a bad batch seen by a GPU since the last check (synchronises)."""
        mismatch = bool(self.mismatch)
        self.mismatch.zero_()
        try:
            if hasattr(self.criterion, "check"):
                self.criterion.check()  # type: ignore[operator]
        except ValueError:
            if not mismatch:  # which replaced the features by NaN
                raise
        if mismatch:
            raise ValueError(checks.MISMATCH)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State of the criterion; calls :meth:`check` first."""
        self.check()
        return super().state_dict(*args, **kwargs)

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remove_hook_with_criterion()

    def _remove_hook_with_criterion(self) -> None:
        weakref.finalize(self, self._handle.remove).atexit = False

    def _require_pair(
        self, features: Tensor | None, logits: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Features and logits in matching shapes, if the logits are computed from the features.

        On a CPU up to 1024 samples are compared. On a GPU, and when compiled, it is the first
        sample and 64 classes; the error is kept in ``mismatch``, and NaN features keep the batch
        out of the statistics.
        """
        (head,) = self._head
        if features is None:
            raise ValueError(
                "the criterion must be called outside of a checkpointed function"
                if _in_backward()
                else "logits must come from a forward pass of the attached model in training mode, "
                "one pass for each call of the criterion; there was no pass before this call"
            )
        if self.mismatch.device != features.device:
            self.to(features.device)  # the model was moved after attach
        if isinstance(head, nn.Linear) and features.dim() > 2:  # tokens: (N, L, A)
            features, logits = features.flatten(0, -2), flatten(logits)
        elif features.shape[2:] == (1, 1) and logits.dim() == 2:  # flattened after the head
            features = features.flatten(1)
        if features.dim() > 2 and logits.shape[2:] != features.shape[2:]:
            raise ValueError(
                f"logits must have the resolution of the attached layer's input, "
                f"{tuple(features.shape[2:])}, got {tuple(logits.shape[2:])}: they were resized "
                "after the layer; pass logits of the layer itself, or use isda.ISDALoss"
            )
        if len(logits) != len(features):
            raise ValueError(
                f"logits must be of the last batch of the model, {len(features)} samples, "
                f"got {len(logits)}"
            )
        if logits.shape[1] != len(weight):
            raise ValueError(
                f"logits must have {len(weight)} classes, like the attached layer {head}, got "
                f"{logits.shape[1]}; pass head= if the model ends in another layer"
            )
        at_once = checks.known_on_host(features)
        samples, step, classes = (None, len(features) // 1024 + 1, None) if at_once else (1, 1, 64)
        with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
            some, outputs = features[:samples:step], logits[:samples:step]
            if features.dim() > 2:
                some, outputs = flatten(some)[:samples], flatten(outputs)[:samples]
            differ = checks.logits_differ(
                some,
                weight[:classes],
                None if bias is None else bias[:classes],
                outputs[:, :classes],
            )
        if at_once:
            if differ:
                raise ValueError(checks.MISMATCH)
            return features, logits
        self.mismatch.logical_or_(differ)
        return torch.where(differ, torch.nan, features), logits


def find_head(model: nn.Module) -> nn.Linear:
    """Final linear layer of a classifier: timm's ``get_classifier()``, else the last ``nn.Linear``.

    A second layer with as many outputs, such as an auxiliary classifier, makes the answer
    ambiguous and raises.
    """
    inner: Any = getattr(model, "module", model)
    if callable(getattr(inner, "get_classifier", None)):
        classifier = inner.get_classifier()
        if isinstance(classifier, nn.Linear):
            return classifier
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not linear:
        raise ValueError(
            f"model must end in an nn.Linear layer, found none in {type(inner).__name__}; "
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
        if _in_backward():
            return  # gradient checkpointing recomputes the forward pass
        self.features = (*inputs, *named.values())[0] if module.training else None

    def __getstate__(self) -> dict[str, None]:
        return {"features": None}  # a copy or a pickle of the model starts empty


def _in_backward() -> bool:
    """Whether a backward pass is running."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1
    return isinstance(module, nn.Linear)
