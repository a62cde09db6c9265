"""ISDALoss = estimator of covariances, ramp of λ, cross entropy on shifted logits (Algorithm 1)."""

import functools
from collections.abc import Hashable, Mapping
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from isda import distributed, functional, kernels
from isda.batch import LARGEST, OUT_OF_RANGE, problem_in, require_origin, screen, tally
from isda.bound import bound, is_number
from isda.covariance import COVARIANCES, Covariance
from isda.distributed import SKIP
from isda.functional import Reduction
from isda.graphs import Graphs, can_capture
from isda.sharded import ShardedCovariance

__all__ = ["ISDALoss"]

_PROBLEMS = (  # what spoils the statistics for good if let in, in the order of isda.batch
    f"features must be finite: found NaN, or values of {LARGEST:g} or more; the batch was left out "
    "of the statistics",
    "target must be in [0, {num_classes}) or ignore_index={ignore_index}: found a class out of "
    "range, or probabilities that are not finite; the batch was left out of the statistics",
)


class ISDALoss(nn.Module):
    r"""Cross entropy under infinite semantic augmentation of the features (Eq. 4, Algorithm 1).

    Every call in training mode merges the batch into the statistics of its classes, then returns
    :func:`isda.functional.isda_loss` at the strength λ = λ₀ · progress. In eval mode it is ordinary
    cross entropy and changes nothing. All state is buffers.

    With an initialised process group, the features of all ranks are gathered, so that the
    statistics equal those of one process. The mean is then taken over the samples of all ranks (a
    rank returns ``world * sum / number of all``), so that gradients averaged by
    DistributedDataParallel equal those of one process for uneven batches, too. Keep the criterion
    outside the DDP module. Under ``torch.compile`` all ranks must bring batches of one size.

    Args:
        num_features: number A of features, the head's ``in_features``.
        num_classes: number C of classes, the head's ``out_features``.
        lambda_0: final strength λ₀ of the augmentation.
        total_steps: number T of steps of the whole training; may be left out if every call passes
            ``progress``, or with ``ramp="constant"``.
        covariance: "full", "diagonal", "shared", "identity", or an estimator (see
            :mod:`isda.covariance`).
        decay: weight of old samples, see :class:`isda.covariance.Covariance`.
        ramp: "linear" for λ = λ₀ t/T, "constant" for λ = λ₀.
        ignore_index: class index of samples that count neither in the loss nor in the statistics.
        reduction: "mean", "sum" or "none".
        synchronize: gather the features of all ranks; False if each rank trains a model of its own.
        process_group: the ranks that train one model; None for all.
        cuda_graph: in an eager loop on CUDA, launch the loss as two CUDA graphs, one each way, in
            place of a dozen kernels, which take the host longer to launch than the GPU to run.
            Inputs whose shapes come again are captured, of up to eight kinds, each of which keeps
            the memory of a step of the loss; ``backward()`` must come before the next call with
            inputs of these shapes. With several ranks, with an estimator of one's own and under
            ``torch.autograd.set_detect_anomaly`` nothing is captured.

    Shape:
        features (N, A) or (N, A, ...), weight (C, A), target (N,) or (N, ...) class indices, or (N,
        C) or (N, C, ...) class probabilities; output () or, without reduction, the shape of class
        indices. The statistics take a sample with class probabilities for its most probable class.

    Example:
        >>> criterion = ISDALoss(num_features=8, num_classes=3, lambda_0=0.5, total_steps=100)
        >>> head = nn.Linear(8, 3)
        >>> features, target = torch.randn(4, 8), torch.tensor([0, 2, 1, 2])
        >>> loss = criterion(features, head.weight, target, bias=head.bias)
        >>> loss.backward()
    """

    step: Tensor
    problem: Tensor

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        lambda_0: float = 0.5,
        total_steps: int | None = None,
        covariance: str | Covariance = "full",
        decay: float = 1.0,
        ramp: Literal["linear", "constant"] = "linear",
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        synchronize: bool = True,
        process_group: dist.ProcessGroup | None = None,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= lambda_0 < float("inf"):
            raise ValueError(f"lambda_0 must be >= 0 and finite, got {lambda_0}")
        if total_steps is not None and not (total_steps >= 1 and total_steps % 1 == 0):
            raise ValueError(f"total_steps must be a whole number >= 1, got {total_steps}")
        if ramp not in ("linear", "constant"):
            raise ValueError(f"ramp must be 'linear' or 'constant', got {ramp!r}")
        functional.require_reduction(reduction)
        if isinstance(covariance, str):
            if covariance not in COVARIANCES:
                raise ValueError(
                    f"covariance must be an estimator or one of {', '.join(COVARIANCES)}, "
                    f"got {covariance!r}"
                )
            self.estimator = COVARIANCES[covariance](num_features, num_classes, decay=decay)
        else:
            if decay != 1.0:
                raise ValueError(
                    f"decay must be set on the estimator, got decay={decay} beside one"
                )
            if isinstance(covariance, type) or not (
                hasattr(covariance, "update") and hasattr(covariance, "quadratic")
            ):
                raise ValueError(
                    f"covariance must be an estimator with update and quadratic, got {covariance!r}"
                )
            shape = (num_features, num_classes)
            if isinstance(covariance, Covariance) and shape != (
                covariance.num_features,
                covariance.num_classes,
            ):
                raise ValueError(
                    f"covariance must be for num_features={num_features} and "
                    f"num_classes={num_classes}, got {covariance}"
                )
            if isinstance(covariance, ShardedCovariance):
                covariance.check_ranks(synchronize, process_group)
            self.estimator = covariance
        self.num_features = num_features
        self.num_classes = num_classes
        self.lambda_0 = lambda_0
        self.total_steps = None if total_steps is None else int(total_steps)
        self.ramp = ramp
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.synchronize = synchronize
        self.process_group = process_group
        self.cuda_graph = cuda_graph
        self._graphs = Graphs()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("problem", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(
        self,
        features: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        logits: Tensor | None = None,
        progress: float | Tensor | None = None,
        mismatch: Tensor | None = None,
    ) -> Tensor:
        """Merge the batch into the statistics and return the loss.

        Args:
            features: input of the final linear layer.
            weight: of the final linear layer.
            target: class indices or class probabilities.
            bias: of the final linear layer.
            logits: of the final linear layer, if they have been computed before.
            progress: t/T in [0, 1], a number or a device tensor, in place of the criterion's own
                count.
            mismatch: a flag on the device, if logits that do not come from the features are an
                error: it is set, and the batch left out; on a CPU the error comes at once.
        """
        self._check_arguments(features, weight, target, bias, logits, progress)
        if logits is None:
            logits = F.linear(features.movedim(1, -1), weight, bias).movedim(-1, 1)
        with torch.autocast(features.device.type, enabled=False):
            if not self.training:
                return functional.cross_entropy(
                    logits, target, ignore_index=self.ignore_index, reduction=self.reduction
                )
            seen_bias = None if mismatch is None or bias is None else bias.detach()
            inputs = (features.detach(), weight, seen_bias, target, logits)
            run = functools.partial(self._bound, mismatch)
            if self.cuda_graph and self._is_capturable(*inputs, progress):
                if progress is not None and not isinstance(progress, Tensor):
                    progress = torch.full((), float(progress), device=features.device)
                flag = None if mismatch is None else mismatch.data_ptr()
                fixed = self._fixed_in_graphs()
                return self._graphs(run, self.problem, fixed, flag, *inputs, progress)
            return run(*inputs, progress)

    def check(self) -> None:
        """Raise the error of a bad batch that a GPU saw since the last look (waits for it)."""
        problem = int(self.problem)
        if problem:
            self.problem.zero_()
            raise ValueError(self._explain(problem))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Buffers of the criterion and its estimator; looks for bad batches first."""
        self.check()
        return super().state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"lambda_0={self.lambda_0}, total_steps={self.total_steps}, ramp={self.ramp!r}"

    def _world(self) -> int:
        return distributed.world_size(self.process_group) if self.synchronize else 1

    def _bound(
        self,
        mismatch: Tensor | None,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        logits: Tensor,
        progress: float | Tensor | None,
    ) -> Tensor:
        """Algorithm 1: merge the batch of all ranks into the statistics; the loss of Eq. 4."""
        if self.ramp == "linear" and progress is None and self.total_steps is None:
            raise ValueError("total_steps must be given to the criterion, or progress to each call")
        if mismatch is not None:
            features = require_origin(features, weight, bias, logits, mismatch)
        batch, index, own = self._collect(functional.flatten(features), target)
        strength: float | Tensor
        beside_batch = (
            isinstance(progress, Tensor)
            and progress.device == index.device
            and not progress.requires_grad
        )
        index, scale, strength = tally(
            self.step,
            self.problem,
            index,
            self.lambda_0,
            self.total_steps or 1,
            self._world(),
            self.reduction == "mean",
            progress if beside_batch else None,
        )
        if self.ramp == "constant":
            strength = self.lambda_0
        elif progress is not None and not beside_batch:
            strength = functional.ramped_strength(self.lambda_0, progress)
        if target.is_floating_point():
            self.estimator.update(batch, index)
            quadratic = self.estimator.quadratic
        else:
            own_index = index if own is None else index[own]
            rows = self._update_and_quadratic(batch, index, weight, own_index)  # (N, C)
            if kernels.usable(logits) and kernels.usable(rows) and is_number(strength):
                loss = bound(
                    functional.flatten(logits),
                    rows,
                    own_index,
                    strength,
                    scale=scale,
                    ignore_index=SKIP,
                    reduce=self.reduction != "none",
                )
                return loss.view(target.shape) if self.reduction == "none" else loss
            target = own_index.view(target.shape)

            def quadratic(weight: Tensor, target: Tensor) -> Tensor:
                return rows

        loss = functional.isda_loss(
            features,
            weight,
            target,
            quadratic,
            strength=strength,
            logits=logits.to(torch.promote_types(logits.dtype, torch.float32)),
            ignore_index=SKIP,
            reduction="none" if self.reduction == "none" else "sum",
        )
        return torch.where(scale == 0, torch.nan, loss * scale.to(loss.dtype))

    def _is_capturable(self, *inputs: float | Tensor | None) -> bool:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        return (
            not torch.compiler.is_compiling()
            and not torch.is_anomaly_enabled()  # looks at every gradient
            and torch.is_grad_enabled()
            and any(x.requires_grad for x in tensors)
            and tensors[0].numel() > 0
            and type(self.estimator) in COVARIANCES.values()  # others may keep more than buffers
            and self._world() == 1
            and can_capture(tensors)
        )

    def _fixed_in_graphs(self) -> Hashable:
        """What a graph of the loss holds beside its inputs: options, and where the state lies."""
        options = (self.lambda_0, self.total_steps, self.ramp, self.reduction, self.ignore_index)
        others = (self.estimator.decay, getattr(self.estimator, "precision", None))
        return *options, *others, *(buffer.data_ptr() for buffer in self.buffers())

    def _collect(self, features: Tensor, target: Tensor) -> tuple[Tensor, Tensor, slice | None]:
        """Features and class indices of all ranks, and where those of this rank are among them.

        On a CPU a bad batch raises at once, on every rank. Elsewhere the host does not know yet:
        the class indices tell (see :func:`isda.batch.screen`).
        """
        if target.is_floating_point():
            target = functional.flatten(target)
            index = screen(features, target.argmax(1), self.num_classes, SKIP)
            index = torch.where(target.isfinite().all(1), index, OUT_OF_RANGE)
        else:
            index = screen(features, target.reshape(-1), self.num_classes, self.ignore_index)
        number = size = len(index)
        world = self._world()
        if not torch.compiler.is_compiling():
            known = int(problem_in(index)) if index.device.type == "cpu" else 0
            if world > 1:
                size, known = distributed.agree(size, known, self.process_group)
            if known:
                raise ValueError(self._explain(known))
        if world == 1:
            return features, index, None
        features, index = distributed.gather_batch(features, index, self.process_group, size=size)
        start = size * distributed.rank(self.process_group)
        return features, index, slice(start, start + number)

    def _update_and_quadratic(
        self, features: Tensor, index: Tensor, weight: Tensor, target: Tensor
    ) -> Tensor:
        """At once, unless the estimator has an update or a quadratic that its own kind lacks."""
        for names in (vars(self.estimator), *map(vars, type(self.estimator).__mro__)):
            if "update_and_quadratic" in names:
                return self.estimator.update_and_quadratic(features, index, weight, target)
            if "update" in names or "quadratic" in names:
                break
        return Covariance.update_and_quadratic(self.estimator, features, index, weight, target)

    def _explain(self, problem: int) -> str:
        return _PROBLEMS[problem - 1].format(
            num_classes=self.num_classes, ignore_index=self.ignore_index
        )

    def _check_arguments(
        self,
        features: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        logits: Tensor | None,
        progress: float | Tensor | None,
    ) -> None:
        """Everything that shapes and types tell, before any state changes."""
        classes, width = self.num_classes, self.num_features
        for name, tensor in (("criterion", self.step), ("weight", weight), ("target", target)):
            if tensor.device != features.device:
                raise ValueError(
                    f"{name} must be on the device of the features, {features.device}, "
                    f"got {tensor.device}"
                )
        if features.dim() < 2 or features.shape[1] != width:
            raise ValueError(f"features must have shape (N, {width}), got {tuple(features.shape)}")
        if not features.is_floating_point():
            raise ValueError(f"features must be floating point, got {features.dtype}")
        if weight.shape != (classes, width):
            raise ValueError(
                f"weight must have shape ({classes}, {width}), got {tuple(weight.shape)}"
            )
        if bias is not None and bias.shape != (classes,):
            raise ValueError(f"bias must have shape ({classes},), got {tuple(bias.shape)}")
        shape, positions = (features.shape[0], *features.shape[2:]), features.shape[2:]
        dense = (features.shape[0], classes, *positions)
        if logits is not None and logits.shape != dense:
            raise ValueError(
                f"logits must have shape {dense} for features {tuple(features.shape)}, "
                f"got {tuple(logits.shape)}"
            )
        if target.is_floating_point():
            if target.shape != dense:
                raise ValueError(
                    f"target of class probabilities must have shape {dense}, "
                    f"got {tuple(target.shape)}"
                )
        elif target.dtype != torch.int64:
            raise ValueError(
                f"target must be int64 class indices or floating-point class probabilities, "
                f"got {target.dtype}"
            )
        elif target.shape != shape:
            raise ValueError(
                f"target of class indices must have shape {shape}, got {tuple(target.shape)}"
            )
        if isinstance(progress, Tensor) and progress.numel() != 1:
            raise ValueError(f"progress must be one number, got shape {tuple(progress.shape)}")
        if not isinstance(progress, Real | Tensor | None):
            raise ValueError(f"progress must be a number or a tensor, got {progress!r}")
        known = (
            functional.at_hand(progress) if isinstance(progress, Tensor) else progress is not None
        )
        if known and not 0 <= progress <= 1:  # type: ignore[operator]
            raise ValueError(f"progress must be in [0, 1], got {progress}")

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(self.estimator, Covariance) and prefix + "step" in state_dict:
            # before the step count is overwritten
            self.estimator.check_state(state_dict, prefix + "estimator.")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
