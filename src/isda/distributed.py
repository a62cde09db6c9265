"""The only file with collectives: every rank receives the features of all ranks.

Gathering features and targets (0.3 MiB per step for 128 samples of 640 features) is cheap compared
to merging statistics (156 MiB), and keeps the estimator of every rank equal to that of a single
process. :class:`ShardedCovariance` shards the covariances of many classes across the ranks.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from isda import ops
from isda.checks import SKIP
from isda.covariance import FullCovariance, Precision, align_rows

__all__ = [
    "ShardedCovariance",
    "agree",
    "broadcast",
    "full_tensor",
    "gather_batch",
    "gather_target",
    "is_sharded",
    "rank",
    "sum_over_ranks",
    "world_size",
]

# weak references: the threads of a group that is never freed can abort the process at exit
_host_groups: MutableMapping[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def world_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank(group: dist.ProcessGroup | None) -> int:
    """Rank of this process, 0 without a process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def agree(size: int, problem: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Largest batch size and largest problem code over all ranks, known to each host.

    The exchange runs between the hosts, so that no rank waits for its device.
    """
    if world_size(group) == 1:
        return size, problem
    group = group or dist.group.WORLD
    assert group is not None
    answer = torch.tensor([size, problem])
    dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=_host_group(group))
    size, problem = answer.tolist()
    return size, problem


def gather_batch(
    features: Tensor, target: Tensor, group: dist.ProcessGroup | None, *, size: int
) -> tuple[Tensor, Tensor]:
    """Features and targets of all ranks, in the order of the ranks.

    Args:
        features: features of this rank.
        target: targets of this rank.
        group: the ranks that train the model.
        size: largest batch size over all ranks; smaller batches are padded with skipped samples.

    Shape:
        features (N, A), target (N,); outputs (world * size, A) and (world * size,).
    """
    features = F.pad(features, (0, 0, 0, size - len(target))).contiguous()
    all_features = features.new_empty(world_size(group) * size, features.shape[1])
    dist.all_gather_into_tensor(all_features, features, group=group)
    return all_features, gather_target(target, group, size=size)


def gather_target(target: Tensor, group: dist.ProcessGroup | None, *, size: int) -> Tensor:
    """Targets of all ranks, see :func:`gather_batch`."""
    target = F.pad(target, (0, size - len(target)), value=SKIP).contiguous()
    all_target = target.new_empty(world_size(group) * size)
    dist.all_gather_into_tensor(all_target, target, group=group)
    return all_target


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


@torch.no_grad()
def broadcast(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, *, source: int = 0
) -> None:
    """Broadcast the tensors of one rank to all others, in place."""
    if world_size(group) > 1:
        for tensor in tensors:
            dense = tensor.contiguous()  # NCCL does not accept padded rows
            dist.broadcast(dense, group=group, group_src=source)
            if dense is not tensor:
                tensor.copy_(dense)


def full_tensor(parameter: Tensor) -> Tensor:
    """The full tensor of a parameter sharded by FSDP2; any other tensor is returned unchanged.

    Each rank contributes its gradient, and the shards receive the average, as in FSDP2.
    """
    if not is_sharded(parameter):
        return parameter
    from torch.distributed.tensor import DTensor, Partial  # takes a second unless already imported

    assert isinstance(parameter, DTensor)
    average = [Partial("avg")] * parameter.device_mesh.ndim
    return parameter.full_tensor(grad_placements=average)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, as FSDP2 parameters are outside the forward pass."""
    return hasattr(tensor, "device_mesh")


class ShardedCovariance(FullCovariance):
    """One covariance matrix for each class, sharded across the ranks.

    With C = 1000 classes and A = 2048 features, the covariances take 15.6 GiB; on 8 ranks, 2 GiB
    each. Rank r holds a block of consecutive classes, ``[first_class, first_class + len(count))``.
    The first ``C % world`` ranks hold one class more than the others; with more ranks than classes,
    the last ranks hold none. The loss, the statistics and the averaged gradients (as in
    DistributedDataParallel) equal those of :class:`FullCovariance`; the gradients of a single rank
    do not, because each rank computes the contribution of its classes for the samples of all ranks.
    Without an initialised process group, this is a :class:`FullCovariance`.

    Every rank must take part in each call and its backward pass. A checkpoint is only valid for the
    same rank and number of ranks: each rank saves and loads its own file. ``torch.compile`` breaks
    the graph at the collectives.

    Args:
        num_features: number of features A.
        num_classes: total number of classes C over all ranks.
        decay: see :class:`Covariance`.
        precision: see :class:`FullCovariance`.
        process_group: the ranks that train the model, as in :class:`isda.ISDALoss`; None for all.

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
        with torch.device("meta"):  # the buffers of all classes are never allocated
            super().__init__(num_features, num_classes, decay=decay, precision=precision)
        self.process_group = process_group
        self.world_size = world_size(process_group)
        self.rank = rank(process_group)
        if self.rank < 0:
            raise ValueError("process_group must contain this rank")
        self.first_class, number = self._block(self.rank)
        for name, buffer in self.named_buffers():
            setattr(self, name, torch.zeros(number, *buffer.shape[1:], dtype=buffer.dtype))
        self.covariance = align_rows(self.covariance)
        if self.world_size > 1:  # identifies the checkpoint of each rank
            classes = torch.arange(self.first_class, self.first_class + number)
            self.register_buffer("classes", classes)
            # here, because torch.compiler.disable imports torch._dynamo, which takes a second
            self._uncompiled = torch.compiler.disable(ShardedCovariance._quadratic_of_ranks)

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """Merge a batch into the statistics of the classes of this rank.

        Every rank must pass the samples of all ranks, as :class:`isda.ISDALoss` does.
        """
        self._require_batch(features, target)
        if len(self.count):
            ops.update_(list(self.moments), features, self._local(target), self.decay)

    def quadratic(
        self, weight: Tensor, target: Tensor, covariance_index: Tensor | None = None
    ) -> Tensor:
        """See :func:`isda.functional.full_quadratic`; ranks may pass different targets."""
        if self.world_size == 1:
            return super().quadratic(weight, target, covariance_index)
        if covariance_index is not None:
            raise ValueError("covariance_index is not supported by ShardedCovariance")
        rows: Tensor = self._uncompiled(self, weight, target)
        return rows

    def class_mean(self, index: int) -> Tensor:
        """Mean of a class. Must be called with the same index on every rank."""
        return self._from_owner(self.mean, index).float()

    def class_covariance(self, index: int) -> Tensor:
        """Covariance matrix of a class. Must be called with the same index on every rank."""
        return self._from_owner(self.covariance, index)

    def grow(self, num_classes: int) -> None:
        if self.world_size > 1:
            raise ValueError("grow is not supported by ShardedCovariance on several ranks")
        super().grow(num_classes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._place()}"

    def check_ranks(self, process_group: dist.ProcessGroup | None, *, synchronize: bool) -> None:
        """Raise ValueError if a criterion does not gather the samples of the same ranks."""
        if self.world_size == 1:
            return
        if not synchronize:
            raise ValueError(f"synchronize must be True for a {type(self).__name__}, got False")
        groups = (process_group, self.process_group)
        ranks = [dist.get_process_group_ranks(group) for group in groups]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"process_group must match that of the {type(self).__name__}, ranks {ranks[1]}, "
                f"got {ranks[0]}"
            )

    def check_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Raise ValueError if a checkpoint belongs to other classes or another estimator."""
        if self.world_size > 1 and prefix + "classes" in state:
            found = state[prefix + "classes"].tolist()
            if found != list(range(self.first_class, self.first_class + len(self.count))):
                raise ValueError(
                    f"{prefix}classes must be those of {self._place()}, got {found}: each rank "
                    "must load the file that it saved, with the same number of ranks"
                )
        super().check_state(state, prefix)

    def _quadratic_of_ranks(self, weight: Tensor, target: Tensor) -> Tensor:
        """Rows of this rank's samples, each computed by the rank that holds its class."""
        size, _ = agree(len(target), 0, self.process_group)
        index = self._local(gather_target(target, self.process_group, size=size))
        weight = weight.float()
        if len(self.count):
            # move the classes of this rank to the front
            rolled = weight.roll(-self.first_class, 0)
            rows = ops.full_quadratic(rolled, index, self.covariance, self.precision)
            rows = rows.roll(self.first_class, 1)
        else:  # zeros with a gradient, because all ranks must run the backward pass
            rows = weight[:0].sum().expand(len(index), len(weight))
        local: Tensor = _ScatterSum.apply(rows, self.process_group)
        return local[: len(target)]

    def _local(self, target: Tensor) -> Tensor:
        """Class indices relative to the first class of this rank, negative for other ranks."""
        local = target - self.first_class
        return torch.where((local >= 0) & (local < len(self.count)), local, SKIP)

    def _from_owner(self, buffer: Tensor, index: int) -> Tensor:
        if not 0 <= index < self.num_classes:
            raise IndexError(f"index must be in [0, {self.num_classes}), got {index}")
        blocks = [self._block(rank) for rank in range(self.world_size)]
        owner = next(r for r, (first, number) in enumerate(blocks) if 0 <= index - first < number)
        row = buffer.new_empty(buffer.shape[1:])
        if owner == self.rank:
            row.copy_(buffer[index - self.first_class])
        broadcast([row], self.process_group, source=owner)
        return row

    def _block(self, rank: int) -> tuple[int, int]:
        """First class and number of classes of a rank."""
        share, rest = divmod(self.num_classes, self.world_size)
        return rank * share + min(rank, rest), share + int(rank < rest)

    def _place(self) -> str:
        last = self.first_class + len(self.count)
        return f"rank {self.rank} of {self.world_size}, classes [{self.first_class}, {last})"


class _ScatterSum(torch.autograd.Function):
    """Reduce-scatter: sum rows (world * size, C) over the ranks and keep the local (size, C).

    In the backward pass, every rank receives the gradients of the samples of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        local = rows.new_empty(len(rows) // world_size(group), *rows.shape[1:])
        dist.reduce_scatter_tensor(local, rows.contiguous(), group=group)
        return local

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (local,) = grads
        rows = local.new_empty(len(local) * world_size(ctx.group), *local.shape[1:])
        dist.all_gather_into_tensor(rows, local.contiguous(), group=ctx.group)
        return rows, None


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself if it supports CPU tensors, else a gloo group of the same ranks."""
    if torch.device("cpu") in group._device_types:
        return group
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(host, dist.ProcessGroup)  # this rank is a member
        _host_groups[group] = host
    return _host_groups[group]
