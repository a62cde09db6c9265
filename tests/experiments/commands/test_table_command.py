"""``isda table``: cells that are trained, dry runs, errors, and tables of records."""

import json
import shlex

import numpy as np
import pytest
from made_runs import make_run, raw_errors
from shown_tables import markdown_cells
from table_commands import CE, ISDA, show_report, show_table

from isda.experiments import cli
from isda.experiments.errors import InputError, RunsFailed
from isda.experiments.published import TABLES
from isda.experiments.recipes import RECIPES
from isda.experiments.records import default_folder, load_runs
from isda.experiments.report.sides import create_sides
from isda.experiments.report.tables import our_result, section


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
            "--results cannot be used with --cell",
        ),
        (
            ["2", "--cell", "cifar100/resnet32", "--results", "x", "--dry-run"],
            "--results cannot be used with --cell",
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
    rows = {row[0]: row for row in markdown_cells(text)}
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
        rows = markdown_cells(capsys.readouterr().out)
        (row,) = [row for row in rows if "31.20 ± 0.41" in row]
        return row[5]

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
