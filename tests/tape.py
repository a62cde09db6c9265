"""A capture on a CPU: what functions do to tensors is taped, and replayed into the same tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["capture"]

_LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class _Tape(TorchDispatchMode):
    """Calls of torch's operators, and what was in the tensors that they changed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator in _LOOKS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = value.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = operator(*args, **kwargs)
        is_view = any(returned.alias_info is not None for returned in operator._schema.returns)
        made = [] if is_view else [x.detach() for x in tree_leaves(result) if _is_tensor(x)]
        self.calls.append((operator, args, kwargs, made))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for operator, args, kwargs, made in self.calls:
            result = operator(*args, **kwargs)
            for old, new in zip(made, filter(_is_tensor, tree_leaves(result)), strict=False):
                old.copy_(new)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def capture(
    warm_up: Callable[[], None], functions: tuple[Callable[[], None], ...], device: torch.device
) -> list[Callable[[], None]]:
    """As ``isda.graphs._capture``, which runs nothing of the functions but launches."""
    warm_up()
    tapes = []
    for function in functions:
        with _Tape() as tape:
            function()
        tapes.append(tape)
    for tape in tapes:
        for storage, before in tape.before.values():
            storage.copy_(before)
    return [tape.replay for tape in tapes]
