"""Cells of the paper's tables: their layout and recipes, and every cell trains."""

from dataclasses import replace

import numpy as np
import pytest
from loaded_data import cifar_arrays
from PIL import Image
from shown_tables import markdown_cells
from table_commands import CE, ISDA, show_table

import isda
from isda.experiments.errors import InputError
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.generators.gan_training import train_gan
from isda.experiments.losses import baselines
from isda.experiments.networks import create_network
from isda.experiments.published import PUBLISHED, TABLES, Cell, Result, cell_recipes
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.recipes import RECIPES
from isda.experiments.records import Run, load_runs, summary
from isda.experiments.report.tables import report_markdown, table_markdown
from isda.experiments.settings import Options
from isda.experiments.training import training_step

GANS = ("wgan", "cgan", "acgan", "infogan")
TRAINED = [(number, cell) for number, table in TABLES.items() for cell in table.cells]


def test_layout_is_the_papers():
    shapes = {n: (len(t.blocks), len(t.rows), len(t.columns)) for n, t in TABLES.items()}
    assert shapes == {1: (3, 7, 6), 2: (8, 16, 4), 3: (2, 6, 6), 4: (3, 13, 5), 5: (3, 6, 3)}
    assert all(len(row) == len(table.columns) for table in TABLES.values() for row in table.rows)
    assert all(sum(n for _, n in t.spans) in (0, len(t.columns)) for t in TABLES.values())
    assert {n: len(t.cells) for n, t in TABLES.items()} == {1: 14, 2: 32, 3: 24, 4: 46, 5: 12}

    def printed(number: int, row: int) -> list[str]:
        return [e.printed if isinstance(e, Cell) else e for e in TABLES[number].rows[row]]

    assert printed(1, 4) == [
        "DenseNet-BC-265",
        "33.3M",
        "21.9 / 6.1",
        "21.2 / 6.0",
        "0.24%",
        "5.4%",
    ]
    assert printed(2, 9) == ["Wide-ResNet-28-10 + ISDA", "36.5M", "3.58 ± 0.15", "17.98 ± 0.15"]
    assert printed(2, 14) == ["DenseNet-BC-190-40", "25.6M", "3.52", "17.74"]
    assert printed(3, 5) == ["CIFAR-100", "Shake-Shake (26, 2x112d)", "17.34 ± 0.28",
                             "16.24 ± 0.20", "15.21 ± 0.20", "13.87 ± 0.26"]  # fmt: skip
    assert printed(4, 5) == ["WGAN", "6.63 ± 0.23", "–", "3.81 ± 0.08", "–"]
    assert printed(4, 9) == ["Basic", "6.76 ± 0.34", "28.67 ± 0.44", "–", "–"]
    assert printed(4, 12) == ["ISDA + Dropout", "5.98 ± 0.20", "26.35 ± 0.30", "3.58 ± 0.15",
                              "17.98 ± 0.15"]  # fmt: skip
    assert printed(5, 0) == ["Basic", "3.82 ± 0.15", "18.58 ± 0.10"]
    assert printed(5, 3) == ["Single covariance matrix", "3.67 ± 0.07", "18.29 ± 0.13"]


@pytest.mark.parametrize(("number", "cell"), TRAINED, ids=lambda v: getattr(v, "address", str(v)))
def test_every_cell_has_a_recipe_with_its_number(number, cell):
    recipe = RECIPES[cell.recipe]
    data, network, _ = cell.address.split("/")
    assert (recipe.data, recipe.network) == (data, network)
    if (number, cell.recipe) == (5, "cifar100-wide_resnet28_10-ce"):
        assert (cell.paper, PUBLISHED[cell.recipe]) == (Result(18.58, 0.10), Result(18.53, 0.07))
    else:
        assert cell.paper == PUBLISHED[cell.recipe]
    needed = cell_recipes(number, cell.address)
    assert needed == ([cell.baseline] if cell.baseline else []) + [cell.recipe]
    assert cell.recipe in cell_recipes(number, f"{data}/{network}")
    if recipe.method == "isda":
        assert cell.baseline
    if cell.baseline:
        own = {"method", "lambda_0", "noise_rate", "covariance", "ramp", "generator", "synthetic"}
        changed = differing_fields(RECIPES[cell.baseline], recipe).keys()
        assert changed == {"drop_rate"} if cell.recipe.endswith("dropout") else changed <= own


def test_rows_and_columns_are_what_their_titles_say():
    """Titles of rows and columns match the fields of the recipes in them."""
    for number, table in TABLES.items():
        for row in table.rows:
            for title, entry in zip(table.columns, row, strict=True):
                if not isinstance(entry, Cell):
                    continue
                recipe = RECIPES[entry.recipe]
                words = f"{row[0]} {title}"
                if number < 5:
                    assert (recipe.method == "isda") == ("ISDA" in words)
                if title in ("CIFAR-10", "CIFAR-100"):
                    assert recipe.data == title.lower().replace("-", "")
                if number == 3:
                    assert recipe.data == row[0].lower().replace("-", "")
                    assert ("autoaugment" in recipe.augment) == ("AA" in title)
                    assert "cutout" in recipe.augment
                if number == 4:
                    assert (recipe.drop_rate > 0) == (
                        "Dropout" in words or recipe.network == "wide_resnet28_10"
                    )
                    assert recipe.method.replace("_", " ")[:5] in f"{words.lower()} ce"
    assert [RECIPES[row[1].recipe].covariance for row in TABLES[5].rows] == [
        "full", "identity", "diagonal", "shared", "full", "full"
    ]  # fmt: skip
    assert [RECIPES[row[1].recipe].ramp for row in TABLES[5].rows][4:] == ["constant", "epoch"]


def test_gan_cells_are_recipes_that_mix_in_a_sixth():
    gans = [cell for cell in TABLES[4].cells if RECIPES[cell.recipe].generator != "none"]
    assert len(gans) == 14
    for cell in gans:
        recipe = RECIPES[cell.recipe]
        gan = cell.address.rpartition("/")[2]
        assert gan in GANS
        assert (recipe.generator, recipe.synthetic) == (gan, 1 / 6)
        assert cell_recipes(4, cell.address) == [cell.baseline, cell.recipe]
    text = table_markdown(TABLES[4], {})
    lines = [line for line in text.splitlines() if "GAN" in line]
    assert [line.count(" · |") for line in lines] == [2, 4, 4, 4]


def test_what_cells_need():
    shake = "cifar10-shake_shake26_2x32d"
    assert cell_recipes(1, "imagenet/resnet50") == [
        "imagenet-resnet50-ce",
        "imagenet-resnet50-isda",
    ]
    assert cell_recipes(2, "cifar100/resnet32") == [CE, ISDA]
    assert cell_recipes(3, "cifar10/shake_shake26_2x32d/autoaugment_isda") == [
        f"{shake}-autoaugment", f"{shake}-autoaugment_isda"
    ]  # fmt: skip
    assert len(cell_recipes(3, "cifar10/shake_shake26_2x32d")) == 4
    assert cell_recipes(4, "cifar10/resnet110/dropout_isda") == [
        "cifar10-resnet110-dropout", "cifar10-resnet110-dropout_isda"
    ]  # fmt: skip
    assert len(cell_recipes(4, "cifar100/resnet110")) == 12
    assert len(cell_recipes(4, "cifar10/resnet110")) == 13  # with WGAN
    assert cell_recipes(5, "cifar10/wide_resnet28_10/constant_isda") == [
        "cifar10-wide_resnet28_10-ce", "cifar10-wide_resnet28_10-constant_isda"
    ]  # fmt: skip
    with pytest.raises(InputError, match="did you mean cifar100/resnet32"):
        cell_recipes(2, "cifar100/resnet23")
    with pytest.raises(InputError, match="unknown cell of Table 5"):
        cell_recipes(5, "cifar100/resnet32")
    with pytest.raises(InputError, match="1, 2, 3, 4, 5, got 6"):
        cell_recipes(6, "cifar100/resnet32")


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory):
    """CIFAR with 12 images and ImageNet with four, in the format of the real files."""
    root = tmp_path_factory.mktemp("data")
    for num_classes in (10, 100):
        labels = np.arange(12) % num_classes  # every class of CIFAR-10
        arrays = {**cifar_arrays(num_classes), "train_labels": labels}
        np.savez(root / f"cifar{num_classes}.npz", **arrays)
    random = np.random.default_rng(0)
    for folder in ("train/ant", "train/bee", "val/ant", "val/bee"):
        (root / folder).mkdir(parents=True)
        pixels = random.integers(0, 256, (40, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / folder / "0.png")
    return root


def assert_criterion(criterion, name):
    """Loss and covariance match the name of the recipe."""
    data, _, method = name.split("-")
    if not method.endswith("isda"):
        losses = {"large_margin": baselines.LargeMarginLoss, "focal": baselines.FocalLoss,
                  "disturb_label": baselines.DisturbLabelLoss, "center": baselines.CenterLoss,
                  "lq": baselines.LqLoss,
                  "label_smoothing": baselines.LabelSmoothingLoss}  # fmt: skip
        assert type(criterion) is losses.get(method, baselines.CrossEntropyLoss)
        return
    assert type(criterion) is isda.ISDALoss
    usual = isda.DiagonalCovariance if data == "imagenet" else isda.FullCovariance
    estimators = {"identity": isda.IdentityCovariance, "diagonal": isda.DiagonalCovariance,
                  "shared": isda.SharedCovariance}  # fmt: skip
    assert type(criterion.estimator) is estimators.get(method.partition("_")[0], usual)


@pytest.mark.slow
@pytest.mark.parametrize("number", TABLES)
def test_every_cell_trains(number, tiny_data, tmp_path, monkeypatch, capsys):
    """The command runs on every cell and prints its number; only the networks are small."""
    built = []

    def small_network(name, **options):
        built.append((name, options["drop_rate"]))
        return create_network("resnet8", **options)

    criteria = {}

    def known_criterion(recipe, **options):
        criteria[recipe] = baselines.create_criterion(recipe, **options)
        return criteria[recipe]

    monkeypatch.setattr(training_step, "create_network", small_network)
    monkeypatch.setattr(training_step, "create_criterion", known_criterion)
    table = TABLES[number]
    paper = {cell.recipe: str(cell.paper) for cell in table.cells}
    for data, gan in {(RECIPES[name].data, RECIPES[name].generator) for name in paper}:
        if gan != "none":
            settings = replace(get_gan(gan), data=data, epochs=1, width=2, batch_size=4)
            train_gan(settings, 0, Options(out=tmp_path / "gans", device="cpu",
                                           data_root=tiny_data))  # fmt: skip
    visited = set()
    for address in dict.fromkeys(cell.address.rpartition("/")[0] for cell in table.cells):
        built.clear()
        show_table([str(number), "--cell", address, "--seeds", "0", "--epochs", "2",
                     "--batch-size", "6", "--workers", "0", "--device", "cpu",
                     "--data-root", str(tiny_data), "--out", str(tmp_path),
                     "--generators", str(tmp_path / "gans")])  # fmt: skip
        printed = markdown_cells(capsys.readouterr().out)[2:]
        names = [name for name in paper if name.startswith(address.replace("/", "-") + "-")]
        for name in names:
            recipe = replace(RECIPES[name], epochs=2, batch_size=6)
            run = Run(tmp_path / f"{name}+epochs=2+batch_size=6" / "0")
            result = summary(run)
            assert run.recipe == recipe
            assert result.finished
            assert_criterion(criteria[recipe], name)
            assert [record["strength"] for record in run.metrics()] == [
                recipe.lambda_0 * progress
                for progress in ((1, 1) if recipe.ramp == "constant" else (0, 0.5))
            ]
            assert [run.name, paper[name], f"{result.error:.2f} (1)"] in printed
        assert len(printed) == len(names)
        assert sorted(built) == sorted((RECIPES[n].network, RECIPES[n].drop_rate) for n in names)
        visited |= {*names}
    assert visited == {*paper}
    runs = load_runs(tmp_path)
    assert {run.name.partition("+")[0] for run in runs} == visited
    text = report_markdown(runs)
    assert all(run.name in text for run in runs if run.recipe.method == "isda")
