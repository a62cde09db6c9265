"""The report and its tables: every number is recomputed here from the raw records."""

import csv
import html
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from made_runs import (
    CE,
    FIRST,
    ISDA,
    expected_numbers,
    make_run,
    naive_cell,
    naive_row,
    raw_errors,
)
from shown_tables import Page, markdown_cells

from isda.experiments.cli import run as run_command
from isda.experiments.cost_records import read_costs
from isda.experiments.errors import InputError
from isda.experiments.published import COST
from isda.experiments.recipes import RECIPES
from isda.experiments.records import load_runs
from isda.experiments.report.blocks import recipes_block
from isda.experiments.report.pages import write_report_page
from isda.experiments.report.tables import recipes_table, report_markdown

main = partial(run_command, "report")
RESULTS = Path(__file__).parents[3] / "results"


def test_recipes_table(out, tmp_path):
    text = recipes_table()
    assert len(text.splitlines()) == 2 + len(RECIPES)
    row = next(line for line in text.splitlines() if line.startswith("cifar100-resnet32-isda"))
    assert re.split(r"\s{2,}", row) == ["cifar100-resnet32-isda", "30.27 ± 0.34", "–"]
    assert max(map(len, text.splitlines())) <= 80
    make_run(tmp_path / "changed", ISDA, 8, 3.0, lambda_0=0.1)  # a different recipe: ignored
    row = next(line for line in recipes_table(tmp_path).splitlines() if line.startswith(ISDA))
    assert expected_numbers(out)[1] + " (3)" in row
    with pytest.raises(InputError, match="does not exist"):
        recipes_table(tmp_path / "nowhere")


def test_report_equals_the_raw_records(records):
    text = report_markdown(load_runs(records))
    rows = markdown_cells(text)
    isda, focal = naive_row(records, "isda"), naive_row(records, "focal")
    assert (isda[1], focal[1]) == ("lower", "not significant")
    assert rows.count([f"{FIRST}-isda", "ce", "−0.43", *isda]) == 2  # Tables 2 and 4
    assert rows.count([f"{FIRST}-focal", "ce", "−0.08", *focal]) == 1
    cells = {method: naive_cell(records, method) for method in ("ce", "isda", "focal")}
    by_title = {}
    for row in rows:
        by_title.setdefault(row[0], []).append(row)
    assert by_title["ResNet-110"][0][2:4] == ["6.76 ± 0.34", cells["ce"]]
    assert by_title["ResNet-110 + ISDA"][0][2:4] == ["6.33 ± 0.19", cells["isda"]]
    assert by_title["Focal Loss"][0][1:3] == ["6.68 ± 0.22", cells["focal"]]
    assert by_title["Basic"][0][1:3] == ["6.76 ± 0.34", cells["ce"]]
    assert by_title["ISDA"][0][1:3] == ["6.33 ± 0.19", cells["isda"]]
    assert sum(row.count("·") for row in rows) == 128 - 5
    assert "5 of the 128 cells" in text
    assert (
        "Of 2 comparisons of ISDA with a baseline, 1 finds a significantly lower error, 1 has too "
        "few seeds for an interval. The one comparison of other methods with a baseline finds no "
        "significant difference." in text
    )
    # what was found comes first: of the tables, the comparison with the most seeds
    words = text.partition("## In words\n\n")[2]
    assert words.startswith("CIFAR-10, ResNet-110: ISDA lowers the test error by ")
    assert words.split(". ")[1] == "NLL 0.510 → 0.510, ECE 3.10 → 3.10 %"
    assert words.index("Of 2 comparisons") < words.index("5 of the 128 cells")
    assert f"* {FIRST}-focal: Focal loss makes no significant difference to " in text
    assert "Unfinished runs that are left out: 1." in text
    assert [ISDA, "ce", "−1.00", "too few seeds"] in [row[:4] for row in rows]


def test_changed_recipes_are_compared(tmp_path):
    """A different λ₀, smaller batches and another loss are paired by recipe, not by name."""
    searched = f"{FIRST}-isda+lambda_0=0.25"
    small = {"batch_size": 16, "weight_decay": 1e-5}
    changed = "+batch_size=16+weight_decay=1e-05"
    for seed in range(2):
        make_run(tmp_path, f"{FIRST}-ce", seed, 6.8)
        for name, changes in (
            (searched, {"lambda_0": 0.25}),
            (f"{CE}{changed}", small),
            (f"{ISDA}{changed}", small),
            (f"digits-resnet8-focal{changed}", {**small, "start": CE, "method": "focal"}),
            (f"{ISDA}+lambda_0=2.0", {"lambda_0": 2.0}),  # without a baseline
            (f"{CE}+hold_out=99", {"hold_out": 99}),  # on validation images
            (f"{ISDA}+hold_out=99", {"hold_out": 99}),
            (
                f"{FIRST}-isda+method=ce+lambda_0=0.0",
                {"start": f"{FIRST}-ce"},
            ),  # ce under another name
        ):
            make_run(tmp_path, name, seed, 6.0 + len(name) / 100, **changes)
    text = report_markdown(load_runs(tmp_path))
    rows = [row for row in markdown_cells(text.partition("## Beyond")[2]) if row[1] == "ce"]
    assert [row[0] for row in rows] == [
        searched, f"digits-resnet8-focal{changed}", f"{ISDA}{changed}"
    ]  # fmt: skip
    assert all("→ 6." in row[4] for row in rows)
    assert "in no cell and no comparison: 8." in text
    write_report_page(tmp_path / "report.html", load_runs(tmp_path))
    details = (tmp_path / "report.html").read_text(encoding="utf-8").split("<summary>")[1:]
    for row, text in zip(rows, details, strict=True):
        assert f"<code>{row[0]}</code>" in text
    other = "digits, ResNet-8, batches of 16, weight decay 1e-05"
    titles = ("CIFAR-10, ResNet-110: ISDA", f"{other}: Focal loss", f"{other}: ISDA")
    for title, text in zip(titles, details, strict=True):
        assert text.startswith(f"<strong>{title} vs. Cross entropy.</strong>")
    assert f"`{searched}`" in recipes_block(load_runs(tmp_path))


def test_the_papers_tables_are_left_out_for_own_images(tmp_path):
    """With runs on other data only, the page opens with them, and no table is empty."""
    for name, error in ((CE, 7.0), (ISDA, 6.0)):
        make_run(tmp_path, f"{name}+weight_decay=0.1", 0, error, weight_decay=0.1)
    runs = load_runs(tmp_path)
    path = tmp_path / "report.html"
    for costs, tables in ([], 0), (read_costs([RESULTS / "benchmarks/cost_imagenet_h200.csv"]), 5):
        write_report_page(path, runs, costs)
        page = html.unescape(path.read_text(encoding="utf-8"))
        text = report_markdown(runs, costs)
        assert page.count("<h2>Table ") == text.count("## Table ") == tables
        for shown in (page, text):
            assert ("The paper's tables are left out" in shown) == (tables == 0)
        assert ("<h2>Beyond" in page) == ("## Beyond" in text) == bool(tables)
        assert ("Not run yet" in page) == ("reproduced" in page) == bool(tables)
        assert [f"{ISDA}+weight_decay=0.1", "ce", "−1.00", "too few seeds"] in [
            row[:4] for row in Page(page).rows
        ]


def test_report_of_nothing(tmp_path):
    text = report_markdown([])
    assert "0 of the 128 cells" in text
    write_report_page(tmp_path / "report.html", [])
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "svg" not in page.tags
    assert sum(row.count("·") for row in page.rows) == 128


def test_report_command_on_the_kept_records(tmp_path, capsys):
    page, readme = tmp_path / "report.html", tmp_path / "README.md"
    readme.write_text("<!-- runs:cifar100-resnet32 -->\n<!-- /runs -->\n")
    kept = tmp_path / "kept"
    main(["--runs", str(RESULTS), "--export", str(kept), "--update", str(readme),
          "--page", str(page)])  # fmt: skip
    shown = capsys.readouterr().out
    assert report_markdown(load_runs(kept)) in shown
    assert f"{readme}: updated" in shown
    for name in ("cifar100-resnet32-ce", "cifar100-resnet32-isda"):
        values = list(raw_errors(RESULTS, name).values())
        number = f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
        assert f"{number} ({len(values)})" in shown
        assert number in page.read_text(encoding="utf-8")
        assert number in readme.read_text()


def test_our_cost_below_table_1(tmp_path, capsys):
    """Our costs are next to the paper's; the last measurement on a device counts."""
    kept, again = RESULTS / "benchmarks" / "cost_imagenet_h200.csv", tmp_path / "again.csv"
    with kept.open(newline="") as file:
        lines = list(csv.DictReader(file))
    changes = [
        {"added_percent": "-3.04"},
        {"device": "x86_64", "note": "no memory", "paper_theoretical_percent": "",
         "paper_wall_percent": "", "added_percent": ""},
    ]  # fmt: skip
    with again.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows({**line, **change} for change in changes for line in lines[:3])
    time = f"{float(lines[0]['milliseconds']):.2f}"
    added = ["−3.04 %", "−3.04 %"]
    expected = [["resnet50", "25.6", "0.25 %", "0.25 %", time, *added, "7.6 %", "NVIDIA H200"]]
    for ce, *cases in zip(lines[3::3], lines[4::3], lines[5::3], strict=True):
        paper = COST[ce["network"]]
        row = [f"{float(ce['parameters']) / 1e6:.1f}", f"{float(ce['theoretical_percent']):.2f} %"]
        row += [f"{paper.theoretical:.2f} %", f"{float(ce['milliseconds']):.2f}"]
        row += [f"{float(case['added_percent']):+.2f} %".replace("-", "−") for case in cases]
        expected.append([ce["network"], *row, f"{paper.wall:.1f} %", ce["device"]])
    expected.append(["resnet50", "25.6", "0.25 %", "", *["no memory"] * 3, "", "x86_64"])
    page = tmp_path / "report.html"
    main(["--runs", str(RESULTS), "--page", str(page), "--costs", str(kept), str(again)])
    first = capsys.readouterr().out.partition("## Table 2.")[0]
    for rows in (markdown_cells(first), Page(page.read_text(encoding="utf-8")).rows):
        assert [row for row in rows if row[-1] in ("NVIDIA H200", "x86_64")] == expected


@pytest.mark.parametrize("text", [None, "recipe,error\n", "{theory}\nresnet50,\n"])
def test_invalid_costs_are_refused(tmp_path, text, capsys):
    path = tmp_path / "costs.csv"
    if text is not None:
        with (RESULTS / "benchmarks" / "cost_imagenet_h200.csv").open() as file:
            path.write_text(text.format(theory=file.readline()))
    with pytest.raises(InputError, match=re.escape(str(path))):
        main(["--runs", str(RESULTS), "--costs", str(path)])
    assert capsys.readouterr().out == ""
