"""Every number of Tables 1 to 5 of the paper, as printed.

Errors are in percent. Numbers that belong to a recipe are in ``PUBLISHED`` by name; ``METHODS`` and
``ABLATION`` are the complete Tables 4 and 5, including the GANs.

The numbers are as printed even where the paper contradicts itself: the 6.23 and 27.11 that the text
gives for ISDA on ResNet-110 are *Basic + Dropout* in Table 4, and *Basic* on CIFAR-100 is 18.58 in
Table 5, but 18.53 for the same network in Tables 2 and 4.
"""

from dataclasses import dataclass

__all__ = ["ABLATION", "COST", "METHODS", "PARAMETERS", "PUBLISHED", "Cost", "Result"]


@dataclass(frozen=True)
class Result:
    """An error rate printed in the paper."""

    mean: float
    """Test error in percent: mean over three runs if std is given, else of one run."""

    std: float | None = None
    """Standard deviation over three runs."""

    top5: float | None = None
    """Top-5 error in percent (ImageNet)."""

    def __str__(self) -> str:
        digits = 1 if self.top5 is not None else 2
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


@dataclass(frozen=True)
class Cost:
    """Cost that ISDA adds to training (Table 1, eight Tesla V100 GPUs)."""

    theoretical: float
    """Added computation in percent."""

    wall: float
    """Added wall time in percent."""


# Tables 1 and 2: parameters in millions.
PARAMETERS: dict[str, float] = {
    "resnet50": 25.6,
    "resnet101": 44.6,
    "resnet152": 60.3,
    "densenet121": 8.0,
    "densenet265": 33.3,
    "resnext50_32x4d": 25.0,
    "resnext101_32x8d": 88.8,
    "resnet32": 0.5,
    "resnet110": 1.7,
    "se_resnet110": 1.7,
    "wide_resnet16_8": 11.0,
    "wide_resnet28_10": 36.5,
    "resnext29_8x64d": 34.4,
    "densenet_bc100_12": 0.8,
    "densenet_bc190_40": 25.6,
}

# Table 1: the last two columns.
COST: dict[str, Cost] = {
    "resnet50": Cost(0.25, 7.6),
    "resnet101": Cost(0.13, 7.4),
    "resnet152": Cost(0.09, 5.4),
    "densenet121": Cost(0.20, 5.6),
    "densenet265": Cost(0.24, 5.4),
    "resnext50_32x4d": Cost(0.24, 6.6),
    "resnext101_32x8d": Cost(0.06, 7.9),
}

_Pair = tuple[float, float]  # top-1 and top-5 error, or mean and standard deviation
_Cell = _Pair | float

# Table 1: network, baseline, ISDA.
_TABLE_1: list[tuple[str, _Pair, _Pair]] = [
    ("resnet50", (23.0, 6.8), (21.9, 6.3)),
    ("resnet101", (21.7, 6.1), (20.8, 5.7)),
    ("resnet152", (21.3, 5.8), (20.3, 5.5)),
    ("densenet121", (23.7, 6.8), (23.2, 6.6)),
    ("densenet265", (21.9, 6.1), (21.2, 6.0)),
    ("resnext50_32x4d", (22.5, 6.4), (21.3, 5.9)),
    ("resnext101_32x8d", (21.1, 5.9), (20.1, 5.4)),
]

# Table 2: network, method, CIFAR-10, CIFAR-100.
_TABLE_2: list[tuple[str, str, _Cell, _Cell]] = [
    ("resnet32", "ce", (7.39, 0.10), (31.20, 0.41)),
    ("resnet32", "isda", (7.09, 0.12), (30.27, 0.34)),
    ("resnet110", "ce", (6.76, 0.34), (28.67, 0.44)),
    ("resnet110", "isda", (6.33, 0.19), (27.57, 0.46)),
    ("se_resnet110", "ce", (6.14, 0.17), (27.30, 0.03)),
    ("se_resnet110", "isda", (5.96, 0.21), (26.63, 0.21)),
    ("wide_resnet16_8", "ce", (4.25, 0.18), (20.24, 0.27)),
    ("wide_resnet16_8", "isda", (4.04, 0.29), (19.91, 0.21)),
    ("wide_resnet28_10", "ce", (3.82, 0.15), (18.53, 0.07)),
    ("wide_resnet28_10", "isda", (3.58, 0.15), (17.98, 0.15)),
    ("resnext29_8x64d", "ce", (3.86, 0.14), (18.16, 0.13)),
    ("resnext29_8x64d", "isda", (3.67, 0.12), (17.43, 0.25)),
    ("densenet_bc100_12", "ce", (4.90, 0.08), (22.61, 0.10)),
    ("densenet_bc100_12", "isda", (4.54, 0.07), (22.10, 0.34)),
    ("densenet_bc190_40", "ce", 3.52, 17.74),
    ("densenet_bc190_40", "isda", 3.24, 17.42),
]

# Table 3: data, network, then the four columns.
_TABLE_3_COLUMNS = ("cutout", "cutout_isda", "autoaugment", "autoaugment_isda")
_TABLE_3: list[tuple[str, str, tuple[_Cell, _Cell, _Cell, _Cell]]] = [
    ("cifar10", "wide_resnet28_10", ((2.99, 0.06), (2.83, 0.04), (2.65, 0.07), (2.56, 0.01))),
    ("cifar10", "shake_shake26_2x32d", ((3.16, 0.09), (2.93, 0.03), (2.89, 0.09), (2.68, 0.12))),
    ("cifar10", "shake_shake26_2x112d", (2.36, 2.25, 2.01, 1.82)),
    ("cifar100", "wide_resnet28_10", ((18.05, 0.25), (17.02, 0.11), (16.60, 0.40), (15.62, 0.32))),
    (
        "cifar100",
        "shake_shake26_2x32d",
        ((18.92, 0.21), (18.17, 0.08), (17.50, 0.19), (17.21, 0.33)),
    ),
    (
        "cifar100",
        "shake_shake26_2x112d",
        ((17.34, 0.28), (16.24, 0.20), (15.21, 0.20), (13.87, 0.26)),
    ),
]

# Table 4: the columns, then method and cells; a dash in the paper is None.
_TABLE_4_COLUMNS = (
    "cifar10-resnet110",
    "cifar100-resnet110",
    "cifar10-wide_resnet28_10",
    "cifar100-wide_resnet28_10",
)
_TABLE_4: dict[str, tuple[_Pair | None, _Pair | None, _Pair | None, _Pair | None]] = {
    "large_margin": ((6.46, 0.20), (28.00, 0.09), (3.69, 0.10), (18.48, 0.05)),
    "disturb_label": ((6.61, 0.04), (28.46, 0.32), (3.91, 0.10), (18.56, 0.22)),
    "focal": ((6.68, 0.22), (28.28, 0.32), (3.62, 0.07), (18.22, 0.08)),
    "center": ((6.38, 0.20), (27.85, 0.10), (3.76, 0.05), (18.50, 0.25)),
    "lq": ((6.69, 0.07), (28.78, 0.35), (3.78, 0.08), (18.43, 0.37)),
    "wgan": ((6.63, 0.23), None, (3.81, 0.08), None),
    "cgan": ((6.56, 0.14), (28.25, 0.36), (3.84, 0.07), (18.79, 0.08)),
    "acgan": ((6.32, 0.12), (28.48, 0.44), (3.81, 0.11), (18.54, 0.05)),
    "infogan": ((6.59, 0.12), (27.64, 0.14), (3.81, 0.05), (18.44, 0.10)),
    "basic": ((6.76, 0.34), (28.67, 0.44), None, None),
    "basic_dropout": ((6.23, 0.11), (27.11, 0.06), (3.82, 0.15), (18.53, 0.07)),
    "isda": ((6.33, 0.19), (27.57, 0.46), None, None),
    "isda_dropout": ((5.98, 0.20), (26.35, 0.30), (3.58, 0.15), (17.98, 0.15)),
}


def _result(cell: _Cell) -> Result:
    return Result(*cell) if isinstance(cell, tuple) else Result(cell)


METHODS: dict[str, dict[str, Result]] = {
    method: {
        column: _result(cell)
        for column, cell in zip(_TABLE_4_COLUMNS, cells, strict=True)
        if cell is not None
    }
    for method, cells in _TABLE_4.items()
}
"""Table 4 by method and ``<data>-<network>``. *Dropout* is a rate of 0.3 in ResNet-110; the
Wide-ResNet always has it."""

ABLATION: dict[str, dict[str, Result]] = {
    "basic": {"cifar10": Result(3.82, 0.15), "cifar100": Result(18.58, 0.10)},
    "identity": {"cifar10": Result(3.63, 0.12), "cifar100": Result(18.53, 0.02)},
    "diagonal": {"cifar10": Result(3.70, 0.15), "cifar100": Result(18.23, 0.02)},
    "shared": {"cifar10": Result(3.67, 0.07), "cifar100": Result(18.29, 0.13)},
    "constant": {"cifar10": Result(3.69, 0.08), "cifar100": Result(18.33, 0.16)},
    "isda": {"cifar10": Result(3.58, 0.15), "cifar100": Result(17.98, 0.15)},
}
"""Table 5 (Wide-ResNet-28-10) by setting and data set."""

PUBLISHED: dict[str, Result] = {
    **{
        f"imagenet-{network}-{method}": Result(top1, top5=top5)
        for network, *cells in _TABLE_1
        for method, (top1, top5) in zip(("ce", "isda"), cells, strict=True)
    },
    **{
        f"{data}-{network}-{method}": _result(cell)
        for network, method, *cells in _TABLE_2
        for data, cell in zip(("cifar10", "cifar100"), cells, strict=True)
    },
    **{
        f"{data}-{network}-{method}": _result(cell)
        for data, network, cells in _TABLE_3
        for method, cell in zip(_TABLE_3_COLUMNS, cells, strict=True)
    },
    **{
        f"{training}-{method}": result
        for method in list(METHODS)[:9]  # losses and GANs
        for training, result in METHODS[method].items()
    },
    **{
        f"{data}-resnet110-{recipe}": METHODS[method][f"{data}-resnet110"]
        for recipe, method in {"dropout": "basic_dropout", "dropout_isda": "isda_dropout"}.items()
        for data in ("cifar10", "cifar100")
    },
    **{
        f"{data}-wide_resnet28_10-{setting}_isda": result
        for setting in ("identity", "diagonal", "shared", "constant")
        for data, result in ABLATION[setting].items()
    },
}
"""Tables 1 to 5 by recipe; the first table counts if a recipe is in several."""
