"""Functions that torch.compile takes as one node, and that run as they are without it.

A node has static shapes and hides what is inside, such as a loop over the classes present. Going
through torch's dispatcher costs more than the kernels of a small loss do, so that eager code calls
the function itself, with the same gradient.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["operator"]

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
            return output

        @torch.autograd.function.once_differentiable
        def plain_gradient(ctx: Any, *grads: Any) -> Any:
            return gradient(ctx, plain, *grads)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(plain_gradient)}
        kind: Any = type(name.replace("::", "_"), (torch.autograd.Function,), methods)
        eager = kind.apply

    def call(*inputs: Any) -> Any:
        return node(*inputs) if torch.compiler.is_compiling() else eager(*inputs)

    call.node, call.eager = node, eager  # type: ignore[attr-defined]
    return call


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function on the GPU of its first argument: Triton launches on the current one."""

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: Any) -> Any:
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return function(first, *others)
        return function(first, *others)

    return call
