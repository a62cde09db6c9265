"""The paper's tables: layout as printed, a recipe for every cell, our numbers from records."""

import json
import shlex
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from made_runs import make_run, raw_errors
from PIL import Image
from test_data import cifar_arrays

import isda
from isda.experiments import cli
from isda.experiments.errors import InputError, RunsFailed
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.generators.gan_training import train_gan
from isda.experiments.losses import baselines
from isda.experiments.networks import create_network
from isda.experiments.published import PUBLISHED, TABLES, Cell, Result, cell_recipes
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.recipes import RECIPES
from isda.experiments.records import Run, default_folder, load_runs, summary
from isda.experiments.report.sides import create_sides
from isda.experiments.report.tables import our_result, report_markdown, section, table_markdown
from isda.experiments.settings import Options
from isda.experiments.training import training_step

GANS = ("wgan", "cgan", "acgan", "infogan")
TRAINED = [(number, cell) for number, table in TABLES.items() for cell in table.cells]
show_table, show_report = partial(cli.run, "table"), partial(cli.run, "report")
CE, ISDA = "cifar100-resnet32-ce", "cifar100-resnet32-isda"


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


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Plans and options passed to ``train``, which is replaced by made-up records."""
    calls = []

    def train(plans, options):
        calls.append((plans, options))
        return [make_run(tmp_path / "trained", p.name.partition("+")[0], p.seed, 30.0 + p.seed / 10
                         - (p.recipe.method == "isda"), epochs=None)
                for p in plans if p.name in (CE, ISDA)]  # fmt: skip

    monkeypatch.setattr("isda.experiments.training.loop.train", train)
    return calls


def test_cell_is_trained_with_its_baseline(planned, capsys, tmp_path):
    show_table(["2", "--cell", "cifar100/resnet32", "--out", str(tmp_path), "--resume"])
    ((plans, options),) = planned
    assert [(p.name, p.seed) for p in plans] == [(n, s) for s in (0, 1, 2) for n in (CE, ISDA)]
    assert all(plan.recipe == RECIPES[plan.name] for plan in plans)
    assert (options.out, options.resume) == (tmp_path, True)
    text = capsys.readouterr().out
    raw = {name: list(raw_errors(tmp_path / "trained", name).values()) for name in (CE, ISDA)}
    for name, paper in ((CE, "31.20 ± 0.41"), (ISDA, "30.27 ± 0.34")):
        number = f"{np.mean(raw[name]):.2f} ± {np.std(raw[name], ddof=1):.2f} (3)"
        assert f"| {paper} | {number} |" in text
    assert "ISDA lowers the test error by 1.00 points" in text


def test_the_finished_runs_of_a_cell_are_shown(monkeypatch, tmp_path, capsys):
    """Even if all runs of its baseline have failed."""
    for seeds in ({CE: [0, 1], ISDA: [0]}, {ISDA: [0, 1]}):
        out = tmp_path / str(len(seeds))
        runs = [make_run(out, name, seed, 30.0) for name, own in seeds.items() for seed in own]

        def failing(plans, options, runs=runs):
            raise RunsFailed(["the training loss is nan"], runs, len(plans))

        monkeypatch.setattr("isda.experiments.training.loop.train", failing)
        with pytest.raises(RunsFailed, match="the training loss is nan"):
            show_table(["2", "--cell", "cifar100/resnet32", "--seeds", "0", "1"])
        text = capsys.readouterr().out
        assert all((f"| {name} " in text) == (name in seeds) for name in (CE, ISDA))
        assert ("the test error" in text) == (CE in seeds)


def test_several_cells(planned):
    cells = [f"cifar10/resnet110/{method}" for method in ("focal", "dropout_isda", "focal")]
    show_table(["4", *(word for cell in cells for word in ("--cell", cell)), "--seeds", "5"])
    ((plans, _),) = planned
    methods = ("ce", "focal", "dropout", "dropout_isda")
    assert [plan.name for plan in plans] == [f"cifar10-resnet110-{method}" for method in methods]


def test_changed_cell(planned):
    arguments = ["4", "--cell", "cifar10/resnet110/focal", "--seeds", "5", "--epochs", "2"]
    show_table([*arguments, "--batch-size", "8"])
    ((plans, _),) = planned
    assert [(p.name, p.seed, p.recipe.epochs, p.recipe.batch_size) for p in plans] == [
        (f"cifar10-resnet110-{method}+epochs=2+batch_size=8", 5, 2, 8) for method in ("ce", "focal")
    ]


def test_dry_run_prints_commands_that_train_the_same(planned, capsys):
    arguments = ["3", "--cell", "cifar10/wide_resnet28_10/cutout_isda", "--seeds", "3", "4",
                 "--epochs", "7", "--out", "some where", "--download", "--no-capture"]  # fmt: skip
    show_table([*arguments, "--dry-run"])
    assert planned == []
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [command[:2] for command in commands] == [["isda", "train"]] * 2
    for command in commands:
        assert cli.main(command[1:]) == 0
    show_table(arguments)
    *alone, together = planned
    assert {plan for plans, _ in alone for plan in plans} == {*together[0]}
    assert [plan.seed for plan in together[0]] == [3, 3, 4, 4]  # pairs finish together
    assert {options for _, options in planned} == {together[1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7"], "table must be one of"),
        (["2", "--cell", "cifar100/resnet32", "--seeds", "1", "1"], "seeds must be different"),
        (
            ["2", "--cell", "cifar100/resnet32", "--results", "x"],
            "--results does not go with --cell",
        ),
        (
            ["2", "--cell", "cifar100/resnet32", "--results", "x", "--dry-run"],
            "--results does not go with --cell",
        ),
        (["2", "--epochs", "3"], "training needs a cell"),
        (["2", "--dry-run"], "training needs a cell"),
        (["2", "--results", "nowhere"], "does not exist"),
    ],
)
def test_input_errors(planned, arguments, message):
    with pytest.raises(InputError, match=message):
        show_table(arguments)
    assert planned == []


def test_table_of_records(tmp_path, capsys):
    for seed, (one, other) in enumerate([(31.0, 30.2), (30.6, 30.1)]):
        make_run(tmp_path, CE, seed, one)
        make_run(tmp_path, ISDA, seed, other)
    make_run(tmp_path, ISDA, 7, 1.0, epochs=12)  # unfinished
    make_run(tmp_path / "changed", ISDA, 8, 1.0, lambda_0=0.25)  # not the paper's recipe
    show_table(["2", "--results", str(tmp_path)])
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = {row[0]: row for row in cells}
    sides = [list(raw_errors(tmp_path, name).values())[:2] for name in (CE, ISDA)]
    ours = [f"{np.mean(side):.2f} ± {np.std(side, ddof=1):.2f} (2)" for side in sides]
    assert rows["ResNet-32"] == ["ResNet-32", "0.5M", "7.39 ± 0.10", "·", "31.20 ± 0.41", ours[0]]
    assert rows["ResNet-32 + ISDA"][-2:] == ["30.27 ± 0.34", ours[1]]
    assert text.count("· |") == 30  # 32 cells, two of them run
    assert rows[ISDA][1:3] == ["ce", "−0.93"]
    assert len({len(line) for line in text.splitlines() if line.startswith("| ResNet")}) == 1


def test_default_folder(tmp_path, monkeypatch, capsys):
    """The table and the report show the same records: those in runs, else in results."""
    monkeypatch.chdir(tmp_path)

    def shown(show, *arguments) -> str:
        show([*arguments])
        lines = capsys.readouterr().out.splitlines()
        (row,) = [line for line in lines if "31.20 ± 0.41" in line]
        return row.split("|")[6].strip()

    (tmp_path / "runs").mkdir()  # and empty
    assert default_folder() is None
    show_table(["2"])  # the paper's numbers need no records
    assert capsys.readouterr().out.count("· |") == 32
    with pytest.raises(InputError, match=r"no records in runs or results.* --runs"):
        show_report([])
    for folder, error in (("results", 31.0), ("runs", 30.0)):
        make_run(tmp_path / folder, CE, 0, error)
        (number,) = raw_errors(tmp_path / folder, CE).values()
        assert shown(show_table, "2") == shown(show_report) == f"{number:.2f} (1)"


def test_difference_is_that_of_the_table(tmp_path):
    """Table 5 has a different baseline than Table 2 for the same network."""
    names = [f"cifar100-wide_resnet28_10-{method}" for method in ("ce", "isda")]
    for name in names:
        make_run(tmp_path, name, 0, 18.0)
    sides, _ = create_sides(load_runs(tmp_path))
    for number, paper in ((2, "−0.55"), (4, "−0.55"), (5, "−0.60")):
        (line,) = [line for line in section(TABLES[number], sides).splitlines() if names[1] in line]
        assert f" {paper} |" in line
        assert "too few seeds" in line


def test_top_5_error_next_to_top_1(tmp_path):
    """Table 1 has both errors; records without the top-5 error show only the top-1 error."""
    name = "imagenet-resnet50-isda"
    for seed, top5 in enumerate((6.0, 7.0)):
        make_run(tmp_path, name, seed, 21.0 + seed)
        path = tmp_path / name / str(seed) / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            del line["check"]
        path.write_text(
            "".join(json.dumps({**line, "test_top5_error": top5}) + "\n" for line in lines)
        )
    cell = next(cell for cell in TABLES[1].cells if cell.recipe == name)
    top1 = our_result(cell, create_sides(load_runs(tmp_path))[0]).partition(" / ")
    assert top1[2] == "6.50 ± 0.71 (2)"


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
        lines = capsys.readouterr().out.splitlines()
        printed = [[cell.strip() for cell in line.strip("|").split("|")]
                   for line in lines if line.startswith("| ")][2:]  # fmt: skip
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
