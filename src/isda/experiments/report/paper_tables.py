"""Tables 1 to 5 as the paper prints them, with the recipe of every number.

The address of a cell is ``DATA/NETWORK/METHOD``, the parts of its recipe's name.
"""

from dataclasses import dataclass

from isda.experiments.errors import InputError, unknown
from isda.experiments.published import ABLATION, COST, METHODS, PARAMETERS, PUBLISHED, Result
from isda.experiments.recipes import RECIPES, baseline_of

__all__ = [
    "DASH",
    "EMPTY",
    "NAMES",
    "TABLES",
    "Cell",
    "Row",
    "Table",
    "cell_recipes",
    "find_cells",
    "get_table",
]

EMPTY = "·"
"""Mark of a number that was not run yet."""

DASH = "–"
"""Mark of a number that the paper does not have."""


@dataclass(frozen=True)
class Cell:
    """A number in a table of the paper."""

    address: str
    """``DATA/NETWORK/METHOD``."""

    paper: Result
    """The number as printed."""

    recipe: str
    """Its recipe."""

    baseline: str | None
    """Recipe of its baseline; None if it is a baseline itself."""

    @property
    def printed(self) -> str:
        """The paper's number, with the top-5 error if there is one."""
        return str(self.paper) + (f" / {self.paper.top5}" if self.paper.top5 is not None else "")


Row = tuple["str | Cell", ...]


@dataclass(frozen=True)
class Table:
    """A table as the paper prints it."""

    number: int
    title: str
    columns: tuple[str, ...]
    blocks: tuple[tuple[Row, ...], ...]
    """Rows, grouped as the paper's horizontal rules do."""

    spans: tuple[tuple[str, int], ...] = ()
    """Header above the columns: text and number of columns."""

    note: str = ""
    """Note for the reader."""

    @property
    def rows(self) -> list[Row]:
        return [row for block in self.blocks for row in block]

    def has_cells(self, column: int) -> bool:
        """Whether a column has numbers with recipes, not only text."""
        return any(isinstance(row[column], Cell) for row in self.rows)

    @property
    def legend(self) -> str:
        """Explanation of the marks in the table."""
        entries = [entry for row in self.rows for entry in row]
        marks = [f"{EMPTY}: not run yet."]
        marks += [f"{DASH}: not in the paper."] * (DASH in entries)
        return " ".join([*marks, self.note]).rstrip()

    @property
    def published(self) -> dict[str, Result]:
        """The paper's numbers by recipe; those of this table take precedence."""
        return PUBLISHED | {cell.recipe: cell.paper for cell in self.cells}

    @property
    def cells(self) -> list[Cell]:
        return [entry for row in self.rows for entry in row if isinstance(entry, Cell)]


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

_DATA = {data: NAMES[data] for data in ("cifar10", "cifar100")}


def _cell(recipe: str, paper: Result | None = None, baseline: str | None = None) -> Cell:
    if recipe.endswith("isda"):
        baseline = baseline_of(recipe)
    address = "/".join(recipe.split("-"))
    return Cell(address, PUBLISHED[recipe] if paper is None else paper, recipe, baseline)


def _gan(training: str, method: str) -> Cell | str:
    if training not in METHODS[method]:
        return DASH
    return _cell(f"{training}-{method}", baseline=f"{training}-ce")


def _table_1() -> Table:
    def row(network: str) -> Row:
        cost = COST[network]
        return (
            NAMES[network],
            f"{PARAMETERS[network]}M",
            _cell(f"imagenet-{network}-ce"),
            _cell(f"imagenet-{network}-isda"),
            f"{cost.theoretical:.2f}%",
            f"{cost.wall:.1f}%",
        )

    costs = ("Additional Cost (Theoretical)", "Additional Cost (Wall Time)")
    families = ("resnet5", "resnet1"), ("densenet",), ("resnext",)
    return Table(
        1,
        "Single crop error rates (%) of different deep networks on the validation set of ImageNet",
        ("Networks", "Params", "Baselines", "ISDA", *costs),
        tuple(tuple(row(network) for network in COST if network.startswith(family))
              for family in families),
        (("", 2), ("Top-1 / Top-5 Error Rates (%)", 2), ("", 2)),
        "The last two columns are the paper's; isda report --costs adds ours.",
    )  # fmt: skip


def _table_2() -> Table:
    networks = [network for network in PARAMETERS if f"cifar10-{network}-ce" in PUBLISHED]

    def row(network: str, method: str) -> Row:
        name = NAMES[network] + (" + ISDA" if method == "isda" else "")
        cells = (_cell(f"{data}-{network}-{method}") for data in _DATA)
        return name, f"{PARAMETERS[network]}M", *cells

    return Table(
        2,
        "Evaluation of ISDA on CIFAR with different models: test error (%)",
        ("Method", "Params", *_DATA.values()),
        tuple((row(network, "ce"), row(network, "isda")) for network in networks),
    )


def _table_3() -> Table:
    networks = ("wide_resnet28_10", "shake_shake26_2x32d", "shake_shake26_2x112d")
    methods = ("cutout", "cutout_isda", "autoaugment", "autoaugment_isda")
    return Table(
        3,
        "Evaluation of ISDA with non-semantic augmentation techniques: test error (%)",
        ("Dataset", "Networks", "Cutout", "Cutout + ISDA", "AA", "AA + ISDA"),
        tuple(
            tuple(
                (title, NAMES[network],
                 *(_cell(f"{data}-{network}-{method}") for method in methods))
                for network in networks
            )
            for data, title in _DATA.items()
        ),
        note="AA is AutoAugment.",
    )  # fmt: skip


def _table_4() -> Table:
    trainings = [f"{data}-{network}" for network in ("resnet110", "wide_resnet28_10")
                 for data in _DATA]  # fmt: skip
    losses = {
        "large_margin": "Large Margin",
        "disturb_label": "Disturb Label",
        "focal": "Focal Loss",
        "center": "Center Loss",
        "lq": "Lq Loss",
    }
    gans = {"wgan": "WGAN", "cgan": "CGAN", "acgan": "ACGAN", "infogan": "infoGAN"}
    basic = {  # title, recipe on ResNet-110, recipe on Wide-ResNet, which always has dropout
        "basic": ("Basic", "ce", ""),
        "basic_dropout": ("Basic + Dropout", "dropout", "ce"),
        "isda": ("ISDA", "isda", ""),
        "isda_dropout": ("ISDA + Dropout", "dropout_isda", "isda"),
    }

    def own(training: str, method: str) -> Cell | str:
        if training not in METHODS[method]:
            return DASH
        recipe = basic[method][2 if training.endswith("wide_resnet28_10") else 1]
        baseline = f"{training}-ce" if recipe == "dropout" else None
        return _cell(f"{training}-{recipe}", METHODS[method][training], baseline)

    return Table(
        4,
        "Comparisons with the state-of-the-art methods: test error (%)",
        ("Method", *_DATA.values(), *_DATA.values()),
        (
            tuple(
                (title, *(_cell(f"{training}-{method}", baseline=f"{training}-ce")
                          for training in trainings))
                for method, title in losses.items()
            ),
            tuple(
                (title, *(_gan(training, method) for training in trainings))
                for method, title in gans.items()
            ),
            tuple(
                (title, *(own(training, method) for training in trainings))
                for method, (title, *_) in basic.items()
            ),
        ),
        (("", 1), ("ResNet-110", 2), ("Wide-ResNet-28-10", 2)),
    )  # fmt: skip


def _table_5() -> Table:
    settings = {
        "basic": ("Basic", "ce"),
        "identity": ("Identity matrix", "identity_isda"),
        "diagonal": ("Diagonal matrix", "diagonal_isda"),
        "shared": ("Single covariance matrix", "shared_isda"),
        "constant": ("Constant λ₀", "constant_isda"),
        "isda": ("ISDA", "isda"),
    }

    def row(setting: str) -> Row:
        title, method = settings[setting]
        cells = (_cell(f"{data}-wide_resnet28_10-{method}", ABLATION[setting][data])
                 for data in _DATA)  # fmt: skip
        return title, *cells

    return Table(
        5,
        "The ablation study for ISDA, Wide-ResNet-28-10: test error (%)",
        ("Setting", *_DATA.values()),
        (
            (row("basic"),),
            tuple(row(setting) for setting in ("identity", "diagonal", "shared", "constant")),
            (row("isda"),),
        ),
    )


TABLES: dict[int, Table] = {
    table.number: table for table in (_table_1(), _table_2(), _table_3(), _table_4(), _table_5())
}
"""Tables by number."""
