"""The one-line change: ``criterion = isda.attach(model, …)`` instead of ``nn.CrossEntropyLoss()``.

A forward pre-hook on the final linear layer captures its input, so the criterion is called with
logits and target, as before.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isda import checks, distributed, ops
from isda.covariance import Estimator
from isda.criterion import Criterion, Ramp
from isda.functional.losses import Reduction, require_reduction
from isda.heads import Head, LinearLayer, require_criterion, require_heads, require_model, sizes
from isda.hook import Capture
from isda.loss import ISDALoss
from isda.pairing import Resizing, Rows, classes_second, pair_rows

__all__ = ["AttachedLoss", "attach"]

_EVAL_MODE = (
    "the attached layer is in eval mode, so this loss is ordinary cross entropy without "
    "augmentation. To train with ISDA while the rest of the model stays in eval mode, call train() "
    "on the layer; for validation, call model.eval() and use torch.no_grad()"
)
_OTHER_MODEL = (
    "the attached layer is in eval mode and has not run since the last loss, so these logits come "
    "from another model, such as a copy, and their loss is ordinary cross entropy without "
    "augmentation. Attach a criterion to the model that is being trained"
)


def attach(
    model: nn.Module,
    criterion: nn.Module | None = None,
    *,
    head: Head | Sequence[Head] | None = None,
    lambda_0: float = 0.5,
    total_steps: int | None = None,
    covariance: str | Estimator = "full",
    decay: float = 1.0,
    ramp: Ramp = "linear",
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    max_shift: float | None = None,
    frozen: bool = False,
    synchronize: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> "AttachedLoss":
    r"""Create a criterion that is attached to a model and called like ``nn.CrossEntropyLoss()``.

    This adds a forward pre-hook to the model. Its parameters, output and checkpoints do not change.
    Call this before or after wrapping the model in ``DistributedDataParallel``, and before the
    first call of a compiled model.

    Args:
        model: a classifier that ends in a linear layer: an ``nn.Linear`` or a 1×1 convolution.
            After this layer, the model may reshape the logits, select one position of a sequence,
            or resize a map (linear, bicubic or nearest), because the same operation can be applied
            to the features.
        criterion: a loss called as ``criterion(features, weight, target, bias=bias,
            logits=logits)`` and, in eval mode, as ``criterion.evaluate(logits, target)`` (ordinary
            cross entropy if there is no such method); None for an :class:`isda.ISDALoss` with the
            options below.
        head: the final layer or its name, such as ``"classifier.4"``, if it cannot be found
            automatically; a list of them for a model that sums their outputs.
        lambda_0: final strength of the augmentation. For this and the following options see
            :class:`isda.ISDALoss`.
        total_steps: total number of training steps.
        covariance: structure of the covariances, or an estimator.
        decay: weight of old samples.
        ramp: "linear" or "constant".
        weight: weight of each class.
        label_smoothing: fraction of the target that is spread over all classes.
        ignore_index: class index of samples to ignore.
        reduction: "mean", "sum" or "none".
        max_shift: maximum shift of a logit, to prevent divergence.
        frozen: use the statistics without updating them.
        synchronize: gather the features of all ranks.
        process_group: the ranks that train the model together.

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
        "max_shift": max_shift,
        "frozen": frozen,
        "synchronize": synchronize,
        "process_group": process_group,
    }
    require_model(model)
    heads = require_heads(model, head)
    if criterion is None:
        criterion = ISDALoss(*sizes(heads), **options)
    else:
        require_criterion(criterion, heads)
        defaults: dict[str, Any] = ISDALoss.__init__.__kwdefaults__  # type: ignore[assignment]
        changed = [
            name
            for name, value in options.items()
            if value is not defaults[name] and value != defaults[name]
        ]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} must be set on the criterion, not passed to attach"
            )
    return AttachedLoss(heads, criterion)


class AttachedLoss(nn.Module):
    """A criterion called with ``(logits, target)``, attached to the final linear layer of a model.

    It follows the mode of the model: after ``model.eval()`` or ``criterion.eval()``, it is ordinary
    cross entropy. Each captured batch can be used once; a call without one raises an error. The
    hook is removed when the criterion is deleted, or by ``remove()``. A weight sharded by FSDP2 is
    gathered for each call.
    """

    criterion: Criterion  # or another loss with the same signature
    mismatch: Tensor

    def __init__(self, heads: Sequence[LinearLayer], criterion: nn.Module) -> None:
        super().__init__()
        self.criterion = criterion  # type: ignore[assignment]
        self.register_buffer("mismatch", torch.zeros((), dtype=torch.bool), persistent=False)
        self._captures = [Capture() for _ in heads]
        self._warned = False
        self._resizing: dict[tuple[torch.Size, torch.Size], Resizing] = {}  # keyed by sizes
        self._classes_last: bool | None = None
        self.heads = tuple(heads)  # a tuple: they must not become submodules of the criterion
        self._handles = [
            head.register_forward_pre_hook(capture, with_kwargs=True)
            for head, capture in zip(heads, self._captures, strict=True)
        ]
        self._remove_hooks_with_criterion()
        self.to(heads[0].weight.device)

    def forward(self, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Loss of the last batch of the model.

        Args:
            logits: output of the model.
            target: class indices or class probabilities.
            options: passed on to the criterion, such as ``progress``.

        Shape:
            logits (N, C), target (N,) or (N, C). Tokens: logits (N, C, L) or (N, L, C). Maps:
            logits (N, C, H, W), at the resolution of the layer or resized. Output () or, with
            reduction "none", the shape of class indices; for multi-label targets, of the logits.
        """
        index = options.get("covariance_index")
        tensors = isinstance(logits, Tensor) and isinstance(target, Tensor)
        named = index is None or isinstance(index, Tensor)
        if not tensors or not logits.is_floating_point() or not named:
            self._notify_ranks()
            raise checks.argument_error(logits, target, index)
        is_new, training = self._captures[0].is_new, self.training
        features, parameters = [], []
        for head, capture in zip(self.heads, self._captures, strict=True):
            training = training and head.training
            features.append(capture.features)
            parameters.append(capture.parameters or (head.weight, head.bias))
            capture.features = capture.parameters = None  # used once
            capture.is_new = False
        if not training:
            return self._evaluate(logits, target, options, is_new=is_new)
        weight, bias = parameters[0]
        now = self.heads[0]._parameters.get("weight")
        # sharded again after the pass: FSDP2 leaves a DTensor, FSDP1 and ZeRO-3 one dimension
        if now is not None and (hasattr(now, "device_mesh") or now.dim() == 1):
            weight, bias = self.gather_parameters()
        elif len(parameters) > 1:
            weight, bias = _join(parameters)
        weight = weight.flatten(1)
        try:
            rows = self._pair(features, logits, target, weight, bias)
        except ValueError:
            self._notify_ranks()
            raise
        if index is not None:
            options["covariance_index"] = index.flatten()
        loss = self.criterion(
            rows.features, weight, rows.target, bias=bias, logits=rows.logits, **options
        )
        if loss.dim() == 1:
            return loss.view(rows.positions)
        if loss.shape != rows.logits.shape:
            return loss
        loss = loss.view(*rows.positions, len(weight))  # one loss for each label
        return loss.movedim(-1, 1) if rows.classes_last is False else loss

    @property
    def estimator(self) -> Estimator:
        """The statistics of the criterion."""
        return self.criterion.estimator

    @property
    def strength(self) -> float:
        """λ of the next step, see :attr:`isda.ISDALoss.strength`."""
        return self.criterion.strength

    @property
    def total_steps(self) -> int | None:
        """Total number of training steps; can be set before the first step."""
        return self.criterion.total_steps

    @total_steps.setter
    def total_steps(self, total_steps: int | None) -> None:
        self.criterion.total_steps = total_steps

    @property
    def frozen(self) -> bool:
        """Whether the statistics are used without updating them; can be changed at any time."""
        return self.criterion.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.criterion.frozen = frozen

    @property
    def reduction(self) -> Reduction:
        """Reduction of the losses: "mean", "sum" or "none"; can be changed at any time."""
        return self.criterion.reduction

    @reduction.setter
    def reduction(self, reduction: Reduction) -> None:
        require_reduction(reduction)
        self.criterion.reduction = reduction

    @property
    def lambda_0(self) -> float:
        """Final strength λ₀ of the augmentation; can be changed at any time."""
        return self.criterion.lambda_0

    @lambda_0.setter
    def lambda_0(self, lambda_0: float) -> None:
        checks.require_lambda_0(lambda_0)
        self.criterion.lambda_0 = lambda_0

    def gather_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight (C, A) and bias (C,) of the final layer, or of several layers combined."""
        parameters = []
        for head in self.heads:
            weight = distributed.full_tensor(head.weight)
            if weight.dim() == 1:
                raise ValueError(
                    f"the weight of the attached layer has shape {tuple(weight.shape)} outside of "
                    "its forward pass, because it is sharded: use torch's fully_shard (FSDP2), or "
                    "call isda.ISDALoss within the forward pass of the model"
                )
            bias = None if head.bias is None else distributed.full_tensor(head.bias)
            parameters.append((weight, bias))
        return _join(parameters)

    def check(self) -> None:
        """Raise any error deferred since the last check (synchronises with the GPU)."""
        mismatch = bool(self.mismatch)
        self.mismatch.zero_()
        check = getattr(self.criterion, "check", None)
        try:
            if check is not None:
                check()
        except ValueError:
            if not mismatch:  # a mismatch replaces the features with NaN
                raise
        if mismatch:
            raise ValueError(checks.MISMATCH)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State of the criterion; calls :meth:`check` first."""
        self.check()
        return super().state_dict(*args, **kwargs)

    def remove(self) -> None:
        """Remove the hook from the model."""
        for capture, handle in zip(self._captures, self._handles, strict=True):
            handle.remove()
            capture.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remove_hooks_with_criterion()

    def _remove_hooks_with_criterion(self) -> None:
        for handle in self._handles:
            weakref.finalize(self, handle.remove).atexit = False

    def _notify_ranks(self) -> None:
        """Make the other ranks raise too, instead of waiting for this one."""
        training = self.training and all(head.training for head in self.heads)
        if training and hasattr(self.criterion, "notify_ranks"):
            self.criterion.notify_ranks()

    def _evaluate(
        self, logits: Tensor, target: Tensor, options: dict[str, Any], *, is_new: bool
    ) -> Tensor:
        """Ordinary cross entropy, as in eval mode; ``options`` have no effect."""
        compiling = torch.compiler.is_compiling()
        if self.training and logits.requires_grad and not (self._warned or compiling):
            self._warned = True
            checks.warn(_EVAL_MODE if is_new else _OTHER_MODEL)
        if options and not compiling:  # unknown ones raise an error
            inspect.signature(self.criterion.forward).bind_partial(**options)
        last, head = self._classes_last, self.heads[0]
        if last is None:  # in the order of the layer's output
            last = isinstance(head, nn.Linear) and self._captures[0].has_tokens
        second, target = classes_second(logits, target, len(head.weight), classes_last=last)
        evaluate = getattr(self.criterion, "evaluate", ops.cross_entropy)
        value: Tensor = evaluate(second, target)
        per_label = value.shape == second.shape
        return value.movedim(1, -1) if per_label and second is not logits else value

    def _pair(
        self,
        captured: list[Tensor | None],
        logits: Tensor,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Rows:
        """Rows of features and logits, after checking that the logits come from the features.

        On a CPU, up to 1024 rows are compared. On a GPU and under ``torch.compile``, 64 classes of
        one row are compared; a mismatch sets ``mismatch`` and replaces the features with NaN, so
        that the batch is left out of the statistics.
        """
        parts: list[Tensor] = []
        for capture, part in zip(self._captures, captured, strict=True):
            if part is None:
                raise ValueError(capture.explain())
            parts.append(part)
        channels_last = isinstance(self.heads[0], nn.Linear)
        features = parts[0] if len(parts) == 1 else _concatenate(parts, -1 if channels_last else 1)
        if self.mismatch.device != features.device:
            self.to(features.device)  # the model was moved after attach
        sizes = features.shape[1:], logits.shape[1:]
        if features.dim() == 2 and logits.shape == (len(features), len(weight)):
            rows = Rows(features, logits, target, torch.Size((len(logits),)), None, None)
        else:
            rows = pair_rows(
                features,
                logits,
                target,
                weight,
                bias,
                channels_last=channels_last,
                resizing=self._resizing.get(sizes),
                classes_last=self._classes_last,
            )
            if rows.resizing is not None:
                self._resizing[sizes] = rows.resizing
            if not torch.compiler.is_compiling():  # a change would trigger a recompilation
                self._classes_last = rows.classes_last
        on_host = checks.known_on_host(features)
        differ = checks.logits_differ(rows.features, weight, bias, rows.logits, thorough=on_host)
        if on_host:
            if not differ:
                return rows
            if self._resizing.pop(sizes, None) is None:
                raise ValueError(checks.MISMATCH)
            return self._pair(captured, logits, target, weight, bias)  # search again
        self.mismatch.logical_or_(differ)
        # not _replace, see ISDALoss._count_step
        return Rows(torch.where(differ, torch.nan, rows.features), *rows[1:])


def _concatenate(features: list[Tensor], dim: int) -> Tensor:
    """Features of one layer that is equivalent to several whose outputs are summed."""
    try:
        return torch.cat(features, dim)
    except RuntimeError:
        shapes = ", ".join(str(tuple(part.shape)) for part in features)
        raise ValueError(f"the head layers must have inputs of equal size, got {shapes}") from None


def _join(parameters: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weight (C, A) and bias (C,) of one layer that is equivalent to several, summed."""
    weight = torch.cat([weight.flatten(1) for weight, _ in parameters], 1)
    biases = [bias for _, bias in parameters if bias is not None]
    return weight, sum(biases) if biases else None  # type: ignore[return-value]
