"""A/B on a GPU: kernels that begin early, update apart for wide features, blocks of the gradient.

    PYTHONPATH=src:benchmarks python carry/exp/tune.py early wide grad
"""

import itertools
import sys

import kernels as bench
import torch

import isda.kernels.batch, isda.kernels.bound, isda.kernels.covariances  # noqa
import isda.kernels.products, isda.kernels.rows, isda.kernels.statistics  # noqa
from isda.kernels import launch

MODULES = [
    sys.modules[f"isda.kernels.{name}"]
    for name in ("batch", "bound", "covariances", "products", "rows", "statistics")
]
FULL = [shape for shape in bench.SHAPES if shape[3] == "full" and shape[1] <= 256]
BANDWIDTH = bench.copy_bandwidth("cuda", repeat=5)


def micros(piece, shape, precision="medium", repeat=6):
    row = bench.Row("", "", piece, "kernels", *shape, precision if shape[3] == "full" else "")
    row.copy_gigabytes_per_second = BANDWIDTH
    bench.measure(row, "cuda", repeat=repeat)
    return row.microseconds


def early():
    real = launch.early
    for shape in [*FULL, (256, 1000, 1024, "diagonal"), (256, 1000, 2048, "diagonal")]:
        for piece in ("update and quadratic", "quadratic backward", "loss"):
            times = {}
            for name in ("late", "early", "late ", "early "):
                for module in MODULES:
                    if hasattr(module, "early"):
                        module.early = real if "early" in name else (lambda d: {"early": False})
                times[name] = micros(piece, shape)
            print("early", shape, piece, times, flush=True)
    for module in MODULES:
        if hasattr(module, "early"):
            module.early = real


def wide():
    products = sys.modules["isda.kernels.products"]
    for a in (512, 640, 1024, 1536, 2190):
        times = {}
        for name, rows in (("fused", 4), ("apart", -(10**6))):
            products._BATCH_ROWS, kept = rows, products._BATCH_ROWS
            launch_fused = products._launch_fused

            def fused(*arguments):
                products._BATCH_ROWS = 4
                launch_fused(*arguments)
                products._BATCH_ROWS = rows

            products._launch_fused = fused
            times[name] = micros("update and quadratic", (64 if a == 2190 else 128, 100, a, "full"))
            products._launch_fused, products._BATCH_ROWS = launch_fused, kept
        print("wide", a, times, flush=True)


def grad():
    rows = sys.modules["isda.kernels.rows"]
    real = rows._weight_gradient

    class Launch:
        def __init__(self, features, lines, warps):
            self.features, self.lines, self.warps = features, lines, warps

        def __getitem__(self, grid):
            def call(*arguments, rows_block, features_block, **rest):
                size = -(-arguments[7] // self.features)
                real[(grid[0], size)](
                    *arguments, rows_block=self.lines, features_block=self.features,
                    num_warps=self.warps, **rest,
                )
            return call

    for n, a in ((128, 512), (128, 640), (128, 1024), (64, 2190), (64, 342)):
        shape = (n, 100, a, "full")
        rows._weight_gradient = real
        print("grad", a, "now", micros("quadratic backward", shape), flush=True)
        times = []
        for features, lines, warps in itertools.product((64, 128, 256, 512), (16, 32, 64, 128), (2, 4, 8)):
            if 2048 <= features * lines <= 16384:
                rows._weight_gradient = Launch(features, lines, warps)
                times.append((micros("quadratic backward", shape, repeat=3), features, lines, warps))
        print("grad", a, sorted(times)[:6], flush=True)
    rows._weight_gradient = real


for name in sys.argv[1:]:
    {"early": early, "wide": wide, "grad": grad}[name]()
