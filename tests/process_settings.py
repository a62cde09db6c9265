"""Threads and precision of a test process; imported by each one that does not inherit them."""

import os

import torch

# the suite runs one process per core; those that it starts have one thread, too
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as --deterministic; read at the first use
torch.backends.cudnn.allow_tf32 = False  # tolerances are those of float32
torch.backends.cudnn.deterministic = True
