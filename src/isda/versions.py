"""Features that need a newer torch than the 2.6 that the library requires.

``torch.compile`` can trace the criteria since torch 2.9. With older versions, a criterion runs
eagerly inside a compiled model, and ``fullgraph=True`` raises an error with the reason. The Triton
kernels need torch 2.11; with older versions, the same operations fall back to plain torch.
"""

import torch
from torch import nn

__all__ = ["COMPILES", "HAS_KERNELS", "run_eagerly"]

_RELEASE = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))

COMPILES = _RELEASE >= (2, 9)
"""Whether ``torch.compile`` can trace the criteria."""

HAS_KERNELS = _RELEASE >= (2, 11)
"""Whether the Triton kernels are used."""


def run_eagerly(*criteria: type[nn.Module]) -> None:
    """Exclude the forward methods of these classes from ``torch.compile``."""
    for kind in criteria:
        forward = torch.compiler.disable(kind.forward)
        reason = f"torch.compile needs torch 2.9 or newer, got {torch.__version__}"
        # fullgraph=True raises an error with the name of the function
        forward.__qualname__ = f"isda.{kind.__name__}.forward ({reason})"
        kind.forward = forward
