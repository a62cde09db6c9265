"""Blocks of Markdown pages: their rows, and how a page is updated."""

import dataclasses
import re
from functools import partial

import pytest
from made_runs import (
    CE,
    FIRST,
    ISDA,
    expected_numbers,
    make_run,
    naive_row,
    strip_checks,
)
from shown_tables import markdown_cells

from isda.experiments.cli import run as run_command
from isda.experiments.errors import InputError
from isda.experiments.recipes import get_recipe
from isda.experiments.records import load_runs
from isda.experiments.report.blocks import BLOCKS, recipes_block, update_markdown

main = partial(run_command, "report")


def test_records_without_likelihood(tmp_path, capsys):
    """As earlier versions wrote them: blocks have dashes, and nothing is drawn."""
    for seed in range(2):
        for name, lambda_0 in ((CE, 0.0), (ISDA, 0.5), (f"{ISDA}+lambda_0=1.0", 1.0)):
            make_run(tmp_path / "runs", name, seed, 9.0 - lambda_0, lambda_0=lambda_0)
        for method in ("ce", "isda", "focal"):
            make_run(tmp_path / "runs", f"{FIRST}-{method}", seed, 6.0 + seed)
    for path in tmp_path.rglob("metrics.jsonl"):
        strip_checks(path)
        path.write_text(re.sub('"test_(loss|ece)": [^,]*, ', "", path.read_text()))
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- runs:all:{name} -->\n<!-- /runs -->\n" for name in BLOCKS))
    drawn = tmp_path / "figures"
    main(["--runs", str(tmp_path / "runs"), "--update", str(page), "--figures", str(drawn)])
    assert re.search(r"\| 1 \| 8\.\d\d ± 0\.\d\d \| – \| – \| −1\.\d\d ", page.read_text())
    assert {file.name for file in drawn.iterdir()} == {"lambda_0-dark.svg", "lambda_0-light.svg"}


def test_recipes_block(out):
    header, rule, row = markdown_cells(recipes_block(load_runs(out)))
    assert len(header) == len(rule) == len(row)
    assert row == [f"`{ISDA}`", "–", "–", *expected_numbers(out), "3"]
    with pytest.raises(InputError, match="no records of ISDA and its baseline"):
        recipes_block([run for run in load_runs(out) if run.recipe.method == "ce"])


@pytest.mark.parametrize("block", BLOCKS)
def test_no_block_is_updated_with_fewer_seeds(block, out, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"<!-- runs:digits:{block} -->\n<!-- /runs -->\n")
    assert update_markdown(path, load_runs(out))
    before = path.read_text()
    metrics = out / ISDA / "1" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"epoch": 5', '"epoch": 1'))
    with pytest.raises(InputError, match=r"1/metrics.jsonl is damaged: line 6"):
        update_markdown(path, load_runs(out))
    assert path.read_text() == before


def test_update_markdown(out, tmp_path):
    path = tmp_path / "README.md"
    block = "<!-- runs:{} -->\n{}<!-- /runs -->\n"
    frame = "# Title\n\n" + block + "between\n" + block + "end"
    path.write_text(frame.format("digits", "old\nrows\n", "all", ""))
    runs = load_runs(out)
    table = recipes_block(runs) + "\n"
    assert update_markdown(path, runs)
    assert path.read_text() == frame.format("digits", table, "all", table)
    assert not update_markdown(path, runs)
    path.write_text(frame.format("digits", "", "all", ""))
    path.chmod(0o640)
    mine, link = tmp_path / "README.md.new", tmp_path / "docs" / "link.md"
    mine.write_text("mine")
    link.parent.mkdir()
    link.symlink_to("../README.md")
    assert update_markdown(link, runs)
    assert link.is_symlink()
    assert path.read_text() == frame.format("digits", table, "all", table)
    assert path.stat().st_mode & 0o777 == 0o640
    assert mine.read_text() == "mine"
    assert {one.name for one in tmp_path.iterdir()} == {
        "README.md",
        "README.md.new",
        "docs",
        "runs",
    }
    for mark in ("cifar10", "cifar10:images", "cifar10:losses"):
        path.write_text(f"<!-- runs:{mark} -->\n<!-- /runs -->\n")
        message = rf"README\.md: <!-- runs:{mark} -->: there are no runs whose names begin with cif"
        with pytest.raises(InputError, match=message):
            update_markdown(path, runs)


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- runs:all -->\nnever closed",
        "<!-- /runs -->",
        "<!-- runs:all -->\n<!-- runs:all -->\n<!-- /runs -->",
    ],
)
def test_broken_markers_are_refused(tmp_path, text):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(InputError, match="at least one <!-- runs:NAME -->"):
        update_markdown(path, [])
    assert path.read_text() == text


def test_losses_block(records):
    """Only the training with a loss other than ISDA has a table."""
    title, table = BLOCKS["losses"](load_runs(records)).split("\n\n")
    assert title == "CIFAR-10, ResNet-110:"
    expected = []
    for method, label in (("isda", "ISDA, λ₀ = 0.5"), ("focal", "Focal loss")):
        change, _, errors, *_ = naive_row(records, method)
        means = re.sub(" ± [0-9.]+", "", errors)
        same = ["0.510 → 0.510: +0.000", "3.10 → 3.10: +0.00"]
        expected.append([label, f"{means}: {change}", *same, "3"])
    assert markdown_cells(table)[2:] == expected
    others = [run for run in load_runs(records) if "focal" not in run.name]
    assert "no records" in BLOCKS["losses"](others)


def test_losses_block_with_two_baselines(tmp_path):
    """A method with dropout is in the table of dropout, not in that of plain cross entropy."""
    for method in ("ce", "focal", "dropout", "dropout_isda"):
        make_run(tmp_path, f"{FIRST}-{method}", 0, 6.0)
    dropout = get_recipe(f"{FIRST}-dropout")
    changed = dataclasses.asdict(dataclasses.replace(dropout, method="lq"))
    make_run(tmp_path, f"{FIRST}-dropout+method=lq", 0, 6.0, **changed)
    text = BLOCKS["losses"](load_runs(tmp_path))
    parts = text.split("\n\n")
    assert parts[::2] == ["CIFAR-10, ResNet-110:", "CIFAR-10, ResNet-110, Dropout:"]
    losses = [[row[0] for row in markdown_cells(table)[2:]] for table in parts[1::2]]
    assert losses == [["Focal loss"], ["Dropout + ISDA, λ₀ = 0.5", "Lq loss"]]
