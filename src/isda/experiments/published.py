"""Tables 1 to 5 of the paper: every number as printed, with the recipe that trains it.

The address of a cell is ``DATA/NETWORK/METHOD``, the parts of its recipe's name. Errors are in
percent.

The numbers are as printed even where the paper contradicts itself: the 6.23 and 27.11 that the text
gives for ISDA on ResNet-110 are *Basic + Dropout* in Table 4, and *Basic* on CIFAR-100 is 18.58 in
Table 5, but 18.53 for the same network in Tables 2 and 4.
"""

from dataclasses import dataclass

from isda.experiments.errors import InputError, unknown
from isda.experiments.recipes import RECIPES, baseline_of

__all__ = [
    "COST",
    "DASH",
    "NAMES",
    "PARAMETERS",
    "PUBLISHED",
    "TABLES",
    "Cell",
    "Cost",
    "Result",
    "Table",
    "cell_recipes",
    "find_cells",
    "get_table",
]


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


@dataclass(frozen=True)
class Cell:
    """A number in a table of the paper."""

    recipe: str
    """Its recipe."""

    paper: Result
    """The number as printed."""

    @property
    def address(self) -> str:
        """``DATA/NETWORK/METHOD``."""
        return self.recipe.replace("-", "/")

    @property
    def baseline(self) -> str | None:
        """Recipe of its baseline; None if it is a baseline itself."""
        training, _, method = self.recipe.rpartition("-")
        if method.endswith("isda"):
            return baseline_of(self.recipe)
        return None if method in ("ce", "cutout", "autoaugment") else f"{training}-ce"

    @property
    def printed(self) -> str:
        """The paper's number, and its top-5 error if there is one."""
        return str(self.paper) + (f" / {self.paper.top5}" if self.paper.top5 is not None else "")


_Row = tuple["str | Cell", ...]


@dataclass(frozen=True)
class Table:
    """A table as the paper prints it."""

    number: int
    title: str
    columns: tuple[str, ...]
    blocks: tuple[tuple[_Row, ...], ...]
    """Rows, grouped as the paper's horizontal rules do."""

    spans: tuple[tuple[str, int], ...] = ()
    """Header above the columns: text and number of columns."""

    note: str = ""
    """Note for the reader."""

    @property
    def rows(self) -> list[_Row]:
        return [row for block in self.blocks for row in block]

    @property
    def cells(self) -> list[Cell]:
        return [entry for row in self.rows for entry in row if isinstance(entry, Cell)]

    def has_cells(self, column: int) -> bool:
        """Whether a column has numbers with recipes, not only text."""
        return any(isinstance(row[column], Cell) for row in self.rows)

    @property
    def published(self) -> dict[str, Result]:
        """The paper's numbers by recipe; those of this table take precedence."""
        return PUBLISHED | {cell.recipe: cell.paper for cell in self.cells}


def cell_recipes(table: int, *cells: str) -> list[str]:
    """Recipes of cells and their baselines, each once, baselines first.

    >>> cell_recipes(2, "cifar100/resnet32")
    ['cifar100-resnet32-ce', 'cifar100-resnet32-isda']
    >>> cell_recipes(4, "cifar10/resnet110/focal")
    ['cifar10-resnet110-ce', 'cifar10-resnet110-focal']

    Args:
        table: number of the table.
        cells: ``DATA/NETWORK/METHOD``, or ``DATA/NETWORK`` for all methods of the table.
    """
    found = [one for cell in cells for one in find_cells(table, cell)]
    recipes = [name for one in found for name in (one.baseline, one.recipe) if name]
    names = list(RECIPES)
    return sorted(set(recipes), key=names.index)


def get_table(number: int) -> Table:
    """Table of the paper by number."""
    if number not in TABLES:
        raise InputError(f"table must be one of {', '.join(map(str, TABLES))}, got {number}")
    return TABLES[number]


def find_cells(table: int, address: str) -> list[Cell]:
    """Cells at ``DATA/NETWORK/METHOD``, or all at ``DATA/NETWORK``."""
    cells = get_table(table).cells
    address = address.strip("/")
    found = [cell for cell in cells if address in (cell.address, cell.address.rpartition("/")[0])]
    if not found:
        groups = [cell.address.rpartition("/")[0] for cell in cells]
        known = dict.fromkeys([*groups, *(cell.address for cell in cells)])
        raise unknown(f"cell of Table {table}", address, known)
    return found


DASH = "–"
"""Mark of a number that the paper does not have."""

NAMES: dict[str, str] = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "resnet152": "ResNet-152",
    "densenet121": "DenseNet-BC-121",
    "densenet265": "DenseNet-BC-265",
    "resnext50_32x4d": "ResNeXt-50, 32x4d",
    "resnext101_32x8d": "ResNeXt-101, 32x8d",
    "resnet32": "ResNet-32",
    "resnet110": "ResNet-110",
    "se_resnet110": "SE-ResNet-110",
    "wide_resnet16_8": "Wide-ResNet-16-8",
    "wide_resnet28_10": "Wide-ResNet-28-10",
    "resnext29_8x64d": "ResNeXt-29, 8x64d",
    "densenet_bc100_12": "DenseNet-BC-100-12",
    "densenet_bc190_40": "DenseNet-BC-190-40",
    "shake_shake26_2x32d": "Shake-Shake (26, 2x32d)",
    "shake_shake26_2x112d": "Shake-Shake (26, 2x112d)",
}
"""Names of data sets and networks in the paper."""

_Numbers = tuple[float, ...]  # mean and standard deviation, or the number of one run
_Block = tuple[tuple[str, str, *tuple[_Numbers | None, ...]], ...]  # rows between two rules

# Table 1: million parameters, top-1 and top-5 error of the baseline and of ISDA, cost of ISDA.
_TABLE_1: dict[str, tuple[float, float, float, float, float, float, float]] = {
    "resnet50": (25.6, 23.0, 6.8, 21.9, 6.3, 0.25, 7.6),
    "resnet101": (44.6, 21.7, 6.1, 20.8, 5.7, 0.13, 7.4),
    "resnet152": (60.3, 21.3, 5.8, 20.3, 5.5, 0.09, 5.4),
    "densenet121": (8.0, 23.7, 6.8, 23.2, 6.6, 0.20, 5.6),
    "densenet265": (33.3, 21.9, 6.1, 21.2, 6.0, 0.24, 5.4),
    "resnext50_32x4d": (25.0, 22.5, 6.4, 21.3, 5.9, 0.24, 6.6),
    "resnext101_32x8d": (88.8, 21.1, 5.9, 20.1, 5.4, 0.06, 7.9),
}
# Table 2: million parameters, the baseline on CIFAR-10 and CIFAR-100, then ISDA.
_TABLE_2: dict[str, tuple[float, _Numbers, _Numbers, _Numbers, _Numbers]] = {
    "resnet32": (0.5, (7.39, 0.10), (31.20, 0.41), (7.09, 0.12), (30.27, 0.34)),
    "resnet110": (1.7, (6.76, 0.34), (28.67, 0.44), (6.33, 0.19), (27.57, 0.46)),
    "se_resnet110": (1.7, (6.14, 0.17), (27.30, 0.03), (5.96, 0.21), (26.63, 0.21)),
    "wide_resnet16_8": (11.0, (4.25, 0.18), (20.24, 0.27), (4.04, 0.29), (19.91, 0.21)),
    "wide_resnet28_10": (36.5, (3.82, 0.15), (18.53, 0.07), (3.58, 0.15), (17.98, 0.15)),
    "resnext29_8x64d": (34.4, (3.86, 0.14), (18.16, 0.13), (3.67, 0.12), (17.43, 0.25)),
    "densenet_bc100_12": (0.8, (4.90, 0.08), (22.61, 0.10), (4.54, 0.07), (22.10, 0.34)),
    "densenet_bc190_40": (25.6, (3.52,), (17.74,), (3.24,), (17.42,)),
}
# Table 3: Cutout, Cutout with ISDA, AutoAugment, AutoAugment with ISDA.
_TABLE_3: dict[str, dict[str, tuple[_Numbers, _Numbers, _Numbers, _Numbers]]] = {
    "cifar10": {
        "wide_resnet28_10": ((2.99, 0.06), (2.83, 0.04), (2.65, 0.07), (2.56, 0.01)),
        "shake_shake26_2x32d": ((3.16, 0.09), (2.93, 0.03), (2.89, 0.09), (2.68, 0.12)),
        "shake_shake26_2x112d": ((2.36,), (2.25,), (2.01,), (1.82,)),
    },
    "cifar100": {
        "wide_resnet28_10": ((18.05, 0.25), (17.02, 0.11), (16.60, 0.40), (15.62, 0.32)),
        "shake_shake26_2x32d": ((18.92, 0.21), (18.17, 0.08), (17.50, 0.19), (17.21, 0.33)),
        "shake_shake26_2x112d": ((17.34, 0.28), (16.24, 0.20), (15.21, 0.20), (13.87, 0.26)),
    },
}
# Table 4: method, title, ResNet-110 on CIFAR-10 and CIFAR-100, then Wide-ResNet-28-10.
_LOSSES: _Block = (
    ("large_margin", "Large Margin", (6.46, 0.20), (28.00, 0.09), (3.69, 0.10), (18.48, 0.05)),
    ("disturb_label", "Disturb Label", (6.61, 0.04), (28.46, 0.32), (3.91, 0.10), (18.56, 0.22)),
    ("focal", "Focal Loss", (6.68, 0.22), (28.28, 0.32), (3.62, 0.07), (18.22, 0.08)),
    ("center", "Center Loss", (6.38, 0.20), (27.85, 0.10), (3.76, 0.05), (18.50, 0.25)),
    ("lq", "Lq Loss", (6.69, 0.07), (28.78, 0.35), (3.78, 0.08), (18.43, 0.37)),
)
_GANS: _Block = (
    ("wgan", "WGAN", (6.63, 0.23), None, (3.81, 0.08), None),
    ("cgan", "CGAN", (6.56, 0.14), (28.25, 0.36), (3.84, 0.07), (18.79, 0.08)),
    ("acgan", "ACGAN", (6.32, 0.12), (28.48, 0.44), (3.81, 0.11), (18.54, 0.05)),
    ("infogan", "infoGAN", (6.59, 0.12), (27.64, 0.14), (3.81, 0.05), (18.44, 0.10)),
)
_DROPOUT: _Block = (
    ("ce", "Basic", (6.76, 0.34), (28.67, 0.44), None, None),
    ("dropout", "Basic + Dropout", (6.23, 0.11), (27.11, 0.06), (3.82, 0.15), (18.53, 0.07)),
    ("isda", "ISDA", (6.33, 0.19), (27.57, 0.46), None, None),
    ("dropout_isda", "ISDA + Dropout", (5.98, 0.20), (26.35, 0.30), (3.58, 0.15), (17.98, 0.15)),
)
# Table 5: method, title, CIFAR-10, CIFAR-100.
_TABLE_5: tuple[_Block, ...] = (
    (("ce", "Basic", (3.82, 0.15), (18.58, 0.10)),),
    (
        ("identity_isda", "Identity matrix", (3.63, 0.12), (18.53, 0.02)),
        ("diagonal_isda", "Diagonal matrix", (3.70, 0.15), (18.23, 0.02)),
        ("shared_isda", "Single covariance matrix", (3.67, 0.07), (18.29, 0.13)),
        ("constant_isda", "Constant λ₀", (3.69, 0.08), (18.33, 0.16)),
    ),
    (("isda", "ISDA", (3.58, 0.15), (17.98, 0.15)),),
)
COST = {network: Cost(*row[-2:]) for network, row in _TABLE_1.items()}
"""The last two columns of Table 1."""

PARAMETERS = {network: row[0] for table in (_TABLE_1, _TABLE_2) for network, row in table.items()}
"""Parameters in millions (Tables 1 and 2)."""

_DATA = {data: NAMES[data] for data in ("cifar10", "cifar100")}


def _table_1() -> Table:
    def row(network: str) -> _Row:
        size, top1, top5, isda_top1, isda_top5, theoretical, wall = _TABLE_1[network]
        return (
            NAMES[network],
            f"{size}M",
            Cell(f"imagenet-{network}-ce", Result(top1, top5=top5)),
            Cell(f"imagenet-{network}-isda", Result(isda_top1, top5=isda_top5)),
            f"{theoretical:.2f}%",
            f"{wall:.1f}%",
        )

    costs = ("Additional Cost (Theoretical)", "Additional Cost (Wall Time)")
    families = ("resnet", "densenet", "resnext")
    return Table(
        1,
        "Single crop error rates (%) of different deep networks on the validation set of ImageNet",
        ("Networks", "Params", "Baselines", "ISDA", *costs),
        tuple(tuple(row(network) for network in _TABLE_1 if network.startswith(family))
              for family in families),
        (("", 2), ("Top-1 / Top-5 Error Rates (%)", 2), ("", 2)),
        "The last two columns are the paper's; isda report --costs shows ours below the table.",
    )  # fmt: skip


def _table_2() -> Table:
    def row(network: str, method: str, *numbers: _Numbers) -> _Row:
        name = NAMES[network] + (" + ISDA" if method == "isda" else "")
        recipes = (f"{data}-{network}-{method}" for data in _DATA)
        return name, f"{PARAMETERS[network]}M", *map(_cell, recipes, numbers)

    return Table(
        2,
        "Evaluation of ISDA on CIFAR with different models: test error (%)",
        ("Method", "Params", *_DATA.values()),
        tuple(
            (row(network, "ce", *numbers[:2]), row(network, "isda", *numbers[2:]))
            for network, (_, *numbers) in _TABLE_2.items()
        ),
    )


def _table_3() -> Table:
    def row(data: str, network: str) -> _Row:
        methods = ("cutout", "cutout_isda", "autoaugment", "autoaugment_isda")
        recipes = (f"{data}-{network}-{method}" for method in methods)
        return _DATA[data], NAMES[network], *map(_cell, recipes, _TABLE_3[data][network])

    return Table(
        3,
        "Evaluation of ISDA with non-semantic augmentation techniques: test error (%)",
        ("Dataset", "Networks", "Cutout", "Cutout + ISDA", "AA", "AA + ISDA"),
        tuple(tuple(row(data, network) for network in _TABLE_3[data]) for data in _DATA),
        note="AA is AutoAugment.",
    )


def _table_4() -> Table:
    def row(method: str, title: str, *numbers: _Numbers | None) -> _Row:
        # Wide-ResNet-28-10 always has dropout
        wide = {"dropout": "ce", "dropout_isda": "isda"}.get(method, method)
        recipes = [f"{data}-resnet110-{method}" for data in _DATA]
        recipes += [f"{data}-wide_resnet28_10-{wide}" for data in _DATA]
        return title, *map(_cell, recipes, numbers)

    return Table(
        4,
        "Comparisons with the state-of-the-art methods: test error (%)",
        ("Method", *_DATA.values(), *_DATA.values()),
        tuple(tuple(row(*entries) for entries in block) for block in (_LOSSES, _GANS, _DROPOUT)),
        (("", 1), ("ResNet-110", 2), ("Wide-ResNet-28-10", 2)),
    )


def _table_5() -> Table:
    def row(method: str, title: str, *numbers: _Numbers | None) -> _Row:
        recipes = (f"{data}-wide_resnet28_10-{method}" for data in _DATA)
        return title, *map(_cell, recipes, numbers)

    return Table(
        5,
        "The ablation study for ISDA, Wide-ResNet-28-10: test error (%)",
        ("Setting", *_DATA.values()),
        tuple(tuple(row(*entries) for entries in block) for block in _TABLE_5),
    )


def _cell(recipe: str, numbers: _Numbers | None) -> Cell | str:
    return DASH if numbers is None else Cell(recipe, Result(*numbers))


TABLES: dict[int, Table] = {
    table.number: table for table in (_table_1(), _table_2(), _table_3(), _table_4(), _table_5())
}
"""Tables by number."""

PUBLISHED: dict[str, Result] = {
    cell.recipe: cell.paper for table in reversed(TABLES.values()) for cell in table.cells
}
"""Tables 1 to 5 by recipe; the first table counts if a recipe is in several."""
