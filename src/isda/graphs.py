"""The loss as two CUDA graphs, one each way, in place of a dozen kernels that a host launches.

Nothing that a graph holds leaves it: the loss and its gradients are copies, so that they can be
kept and accumulated (those of ``torch.cuda.make_graphed_callables`` are overwritten by the next
call, pytorch/pytorch#181723).
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from isda import kernels
from isda.operators import in_backward, once

__all__ = ["Graphs", "can_capture"]

_KINDS = 8  # of inputs that have graphs of their own; further ones are not captured
_SEEN = 64  # kinds of inputs that are remembered until they come again

Bound = Callable[..., Tensor]


class Graphs:
    """Graphs of a loss for each kind of inputs that comes again: their shapes, dtypes, gradients.

    The first call of a kind runs as it is, the second one captures it. Graphs keep the memory that
    they work in. A copy or a pickle starts empty.
    """

    def __init__(self) -> None:
        self._state: Hashable = None
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, _Captured] = {}

    def __reduce__(self) -> tuple[type["Graphs"], tuple[()]]:
        return Graphs, ()

    def __call__(
        self,
        bound: Bound,
        problem: Tensor,
        state: Hashable,
        caller: Hashable,
        *inputs: Tensor | None,
    ) -> Tensor:
        """What ``bound(*inputs)`` returns.

        Args:
            bound: a loss that leaves a batch of NaN features out of its state and notes it in
                ``problem``.
            problem: see ``isda.batch.tally``.
            state: all else that the graphs depend on; if it changes, they are dropped.
            caller: what depends on the caller; each has graphs of its own.
            inputs: of the loss, the features first.
        """
        if state != self._state:
            self._state, self._captured = state, {}
            self._seen.clear()
        shapes = (x if x is None else (x.shape, x.dtype, x.requires_grad) for x in inputs)
        kind = (caller, *shapes)
        if kind not in self._captured:
            # in a backward pass, a checkpoint computes the loss once more: as it did before
            if kind not in self._seen or len(self._captured) == _KINDS or in_backward():
                if len(self._seen) == _SEEN:
                    self._seen.clear()
                self._seen.add(kind)
                return bound(*inputs)
            self._captured[kind] = _Captured(bound, problem, inputs)
        loss: Tensor = _Replay.apply(self._captured[kind], *inputs)
        return loss


def can_capture(inputs: Sequence[Tensor]) -> bool:
    """Whether a loss of some inputs can be captured now; the plain forms ask the host."""
    return (
        all(x.is_cuda for x in inputs)
        and kernels.usable(inputs[0])
        and not torch.cuda.is_current_stream_capturing()
    )


class _Captured:
    """Both graphs of a loss for one kind of inputs, and the tensors that they read and write."""

    def __init__(self, bound: Bound, problem: Tensor, inputs: tuple[Tensor | None, ...]) -> None:
        self.calls = 0
        self._inputs = tuple(x if x is None else _room(x) for x in inputs)
        leaves = [x for x in self._inputs if x is not None and x.requires_grad]

        def forward() -> None:
            self._loss = bound(*self._inputs)

        def backward() -> None:
            # may be replayed twice: what autograd frees stays in the memory of the other graph
            self._grads = torch.autograd.grad(self._loss, leaves, self._grad, allow_unused=True)

        def warm_up() -> None:
            """Compile and load all kernels, with features that no statistics take."""
            features, *_ = self._inputs
            assert features is not None
            before = problem.clone()
            features.fill_(torch.nan)
            try:
                forward()
                self._grad = torch.ones_like(self._loss)
                backward()
            finally:
                problem.copy_(before)
            del self._loss  # and with it the nodes of the leaves, which remember a stream

        # hooks of the caller's, such as a checkpoint's, have no business here
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            self._replay_forward, self._replay_backward = _capture(
                warm_up, (forward, backward), problem.device
            )

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        for room, given in zip(self._inputs, inputs, strict=True):
            if room is not None and given is not None:
                room.copy_(given)
        self._replay_forward()
        self.calls += 1
        return self._loss.detach().clone()

    def backward(self, call: int, grad: Tensor) -> list[Tensor | None]:
        if call != self.calls:
            raise RuntimeError(
                "backward() must come before the next call of a criterion with cuda_graph=True for "
                "inputs of these shapes: its graph holds one batch at a time"
            )
        self._grad.copy_(grad)
        self._replay_backward()
        grads = iter(self._grads)
        return [
            None if x is None or not x.requires_grad else _copy(next(grads)) for x in self._inputs
        ]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, *inputs: Tensor | None) -> Tensor:
        loss = captured.forward(inputs)
        ctx.captured, ctx.call = captured, captured.calls
        ctx.save_for_backward(*(x for x in inputs if x is not None and x.requires_grad))
        ctx.sources = ()
        return loss

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.captured.backward(ctx.call, *grads)


def _room(tensor: Tensor) -> Tensor:
    room = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return room.requires_grad_(tensor.requires_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _capture(
    warm_up: Callable[[], None], functions: tuple[Callable[[], None], ...], device: torch.device
) -> list[Callable[[], None]]:
    """Capture what functions launch, after a warm-up; functions that launch it again."""
    stream = _stream(device)
    replays = []
    with torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        for function in functions:
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads, such as a DataLoader's, may do as they like meanwhile
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                function()
            replays.append(graph.replay)
    return replays


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one of all captures on a device: what libraries keep for a stream, they keep once."""
    return torch.cuda.Stream(device)
