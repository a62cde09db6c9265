"""Functions that torch.compile takes as one node, and that run as they are without it.

A node has static shapes and hides what is inside, such as a loop over the classes present. Going
through torch's dispatcher costs more than the kernels of a small loss do, so that eager code calls
the function itself, with the same gradient.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["in_backward", "once", "operator"]

Save = Callable[[Any, tuple[Any, ...], Any], None]


def operator(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates_args: Iterable[str] = (),
    save: Save | None = None,
    backward: Callable[..., Any] | None = None,
    gradient: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Make an operator of a function.

    Args:
        name: of the node.
        function: what is done; annotated, for torch reads its signature.
        fake: the same for shapes alone.
        mutates_args: names of arguments that change.
        save: ``save(ctx, inputs, output)`` keeps what the gradient needs.
        backward: operator that computes the gradient.
        gradient: ``gradient(ctx, backward, *grads)`` gives the gradients of the inputs.
    """
    function = _on_its_device(function)
    node = torch.library.custom_op(name, function, mutates_args=mutates_args)
    node.register_fake(fake)
    eager = function
    if gradient is not None:
        assert save is not None
        assert backward is not None
        compiled, plain = backward.node, backward.eager  # type: ignore[attr-defined]
        node.register_autograd(
            lambda ctx, *grads: gradient(ctx, compiled, *grads), setup_context=save
        )

        def forward(ctx: Any, *inputs: Any) -> Any:  # setup_context would cost more than a kernel
            output = function(*inputs)
            save(ctx, inputs, output)
            saved = {id(x) for x in ctx.to_save}
            ctx.sources = [
                x
                for x in inputs
                if isinstance(x, torch.Tensor) and x.requires_grad and id(x) not in saved
            ]
            return output

        @once
        def plain_gradient(ctx: Any, *grads: Any) -> Any:
            return gradient(ctx, plain, *grads)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(plain_gradient)}
        kind: Any = type(name.replace("::", "_"), (torch.autograd.Function,), methods)
        eager = kind.apply

    def call(*inputs: Any) -> Any:
        return node(*inputs) if torch.compiler.is_compiling() else eager(*inputs)

    call.node, call.eager = node, eager  # type: ignore[attr-defined]
    return call


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the gradients of a backward method refuse to be differentiated again.

    ``torch.autograd.function.once_differentiable`` does so for ``backward()`` alone:
    ``torch.autograd.grad`` would pass by what it cannot differentiate, and be wrong.

    Args:
        backward: gradients from a context and from upstream gradients; the context's ``sources``
            are the tensors that have gradients and that it has not saved.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # there will be no second derivatives
            return results
        candidates = (*grads, *ctx.sources, *ctx.saved_tensors)
        sources = [x for x in candidates if x is not None and x.requires_grad]
        return tuple(x if x is None else _Once.apply(x, *sources) for x in results)

    return call


def in_backward() -> bool:
    """Whether a backward pass runs, in which a checkpoint computes anew what is called."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _Once(torch.autograd.Function):
    """A gradient as it is, with all that it depends on."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("the terms of ISDA can be differentiated once: no second derivatives")


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function on the GPU of its first argument: Triton launches on the current one."""

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Any:
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return function(first, *others)
        return function(first, *others)

    return call
