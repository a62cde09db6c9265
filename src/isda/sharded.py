"""Full covariances of many classes, spread over the ranks: each rank holds those of some classes.

With C = 1000 classes and A = 2048 features, covariances take 15.6 GiB; on each of 8 ranks, 2 GiB.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isda import distributed, per_class
from isda.covariance import FullCovariance, _align
from isda.functional import Precision
from isda.per_class import full_quadratic_op, update_full_op

__all__ = ["ShardedCovariance"]


class ShardedCovariance(FullCovariance):
    """One covariance matrix for every class, each of them held by one rank alone.

    Rank r holds a block of neighbouring classes, from ``first_class`` on; the blocks of the first
    ``C % world`` ranks have one class more, and with more ranks than classes the last ones are
    empty. Loss, statistics and gradients averaged over ranks (as DistributedDataParallel does) are
    those of :class:`FullCovariance`; the gradient of one rank before that average is not, for a
    rank computes the part of its own classes, for the samples of all ranks. Without an initialised
    process group it is :class:`FullCovariance`.

    Every rank must take part in each call and in its backward pass, as with DDP. A checkpoint
    belongs to one rank and one number of ranks: each rank saves and loads a file of its own, and
    refuses one of other classes. With several ranks, collectives run inside: ``torch.compile`` of
    the loss breaks the graph there, and ``fullgraph=True`` is refused.

    Args:
        num_features: number A of features.
        num_classes: number C of classes, of all ranks together.
        decay: see :class:`Covariance`.
        precision: see :class:`FullCovariance`.
        process_group: the ranks that train one model, as in :class:`isda.ISDALoss`; None for all.

    Example:
        >>> covariance = isda.ShardedCovariance(num_features=8, num_classes=3)
        >>> criterion = isda.ISDALoss(8, 3, lambda_0=0.5, total_steps=100, covariance=covariance)
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        decay: float = 1.0,
        precision: Precision = "high",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        with torch.device("meta"):  # the buffers of all classes are never made
            super().__init__(num_features, num_classes, decay=decay, precision=precision)
        self.process_group = process_group
        self.world_size = distributed.world_size(process_group)
        self.rank = distributed.rank(process_group)
        if self.rank < 0:
            raise ValueError("process_group must have this rank, got a group of other ranks")
        share, rest = divmod(num_classes, self.world_size)
        self.first_class = self.rank * share + min(self.rank, rest)
        number = share + int(self.rank < rest)
        for name, buffer in self.named_buffers():
            setattr(self, name, torch.zeros(number, *buffer.shape[1:], dtype=buffer.dtype))
        self.covariance = _align(self.covariance)
        if self.world_size > 1:  # tells the checkpoints of ranks apart
            classes = torch.arange(self.first_class, self.first_class + number)
            self.register_buffer("classes", classes)

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """Merge a batch into the statistics of the classes here.

        Every rank must be given the samples of all ranks, as :class:`isda.ISDALoss` does.
        """
        if len(self.count):
            update_full_op(
                self.count,
                self.mean,
                self.covariance,
                features,
                target,
                self.decay,
                self.first_class,
            )

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        """See :func:`isda.functional.full_quadratic`; ranks may differ in targets and number."""
        if self.world_size == 1:
            return super().quadratic(weight, target)
        index = self._gather(target)
        if not len(self.count):
            return self._own(_no_rows(weight, index), target)
        rows, *_ = full_quadratic_op(
            weight.float(), index, self.covariance, self.precision, self.first_class
        )
        return self._own(rows, target)

    def update_and_quadratic(
        self, features: Tensor, index: Tensor, weight: Tensor, target: Tensor
    ) -> Tensor:
        """Merge a batch, then the variance of every logit margin.

        Args:
            features: of the samples of all ranks, the same on each.
            index: class indices of the samples of all ranks: as many of each rank, negative ones
                where it has fewer.
            weight: rows of the final linear layer.
            target: class indices of this rank's samples, which ``index`` has at this rank's place.

        Shape:
            features (world * size, A), index (world * size,), weight (C, A), target (N,) with N <=
            size; output (N, C), in which the rows of negative targets mean nothing.
        """
        if self.world_size == 1:
            return super().update_and_quadratic(features, index, weight, target)
        if len(index) % self.world_size or len(target) * self.world_size > len(index):
            raise ValueError(
                f"index must be of all {self.world_size} ranks, as many of each and at least "
                f"len(target)={len(target)}, got {len(index)} in all"
            )
        if not len(self.count):
            return self._own(_no_rows(weight, index), target)
        rows = per_class.update_and_quadratic(
            self.count,
            self.mean,
            self.covariance,
            features,
            index,
            weight.float(),
            index,
            decay=self.decay,
            precision=self.precision,
            first_class=self.first_class,
        )
        return self._own(rows, target)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._place()}"

    def check_ranks(self, synchronize: bool, process_group: dist.ProcessGroup | None) -> None:
        """Raise ValueError if a criterion does not hand over the samples of the ranks here."""
        if self.world_size == 1:
            return
        if not synchronize:
            raise ValueError(f"synchronize must be True for a {type(self).__name__}, got False")
        if not distributed.same_ranks(process_group, self.process_group):
            raise ValueError(
                f"process_group must have the ranks of the {type(self).__name__}, got "
                f"{process_group} beside {self.process_group}"
            )

    def check_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Raise ValueError if a checkpoint is of other classes or another estimator."""
        if self.world_size > 1 and prefix + "classes" in state:
            found = state[prefix + "classes"].tolist()
            if found != list(range(self.first_class, self.first_class + len(self.count))):
                raise ValueError(
                    f"{prefix}classes must be those of {self._place()}, got {found}: each rank "
                    "loads what it saved, with the same number of ranks"
                )
        super().check_state(state, prefix)

    @torch.compiler.disable
    def _gather(self, target: Tensor) -> Tensor:
        """Targets of all ranks, as many of each."""
        size, _ = distributed.agree(len(target), 0, self.process_group)
        return distributed.gather_target(target, self.process_group, size=size)

    @torch.compiler.disable
    def _own(self, rows: Tensor, target: Tensor) -> Tensor:
        """Rows of this rank's samples, each from the rank that holds its class."""
        return distributed.scatter_sum(rows, self.process_group)[: len(target)]

    def _place(self) -> str:
        last = self.first_class + len(self.count)
        return f"rank {self.rank} of {self.world_size}, classes [{self.first_class}, {last})"


def _no_rows(weight: Tensor, index: Tensor) -> Tensor:
    """Rows of a rank without classes: 0, but with a gradient, for all ranks must ask for it."""
    nothing = weight[:0].float().sum()
    return nothing.expand(len(index), len(weight))
