"""How tests start processes: forked if possible, which saves importing torch again.

A forked process can run a backward pass only if the first one of its parent came before any
torch.compile. This module makes sure of that when pytest imports the tests. The compilation imports
what compiled steps and optimizers need: several seconds in every process that has not inherited it.
"""

import torch

__all__ = ["START_METHOD"]

START_METHOD = "spawn" if torch.cuda.is_available() else "fork"  # CUDA does not survive a fork

torch.ones(1, requires_grad=True).sum().backward()
torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(torch.ones(1, requires_grad=True))
