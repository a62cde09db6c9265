"""HTML pages: their numbers are those of the raw records, and they need nothing else."""

import dataclasses
import os
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
from shown_tables import Page

from isda.experiments.cli import run as run_command
from isda.experiments.errors import InputError
from isda.experiments.published import cell_recipes
from isda.experiments.recipes import get_recipe
from isda.experiments.records import load_runs
from isda.experiments.report.blocks import update_markdown
from isda.experiments.report.comparison import comparison, sentence
from isda.experiments.report.pages import write_comparison_page, write_report_page
from isda.experiments.report.tables import report_markdown
from isda.experiments.training.run_folder import RunFolder

main = partial(run_command, "report")
RESULTS = Path(__file__).parents[3] / "results"


def test_page_without_figures(out, tmp_path):
    """The page is written although the records have nothing for a figure."""
    page = tmp_path / "page.html"
    with pytest.raises(InputError, match="the records have nothing for a figure"):
        main(["--runs", str(out), "--page", str(page), "--figures", str(tmp_path / "figures")])
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_page_into_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", str(tmp_path)):
        with pytest.raises(InputError, match=r"is a folder: give the path of a file"):
            main(["--runs", str(RESULTS), "--page", folder])


def test_page_numbers(out, tmp_path):
    result = comparison(load_runs(out), CE, ISDA)
    path = tmp_path / "page.html"
    write_comparison_page(path, result)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert ["test error, %", *expected_numbers(out)] in page.rows
    raw = [raw_errors(out, name) for name in (CE, ISDA)]
    for seed in range(3):
        one, other = raw[0][seed], raw[1][seed]
        row = [str(seed), f"{one:.2f}", f"{other:.2f}", f"{other - one:+.2f}".replace("-", "−")]
        assert row in page.rows
    assert ["lambda_0", "0", "0.5"] in page.rows
    assert ["method", "ce", "isda"] in page.rows
    assert sentence(result) in text
    for value in result.method.runs[0].environments[0].values():
        assert value is None or str(value) in text


def test_page_stands_alone(out, tmp_path):
    path = tmp_path / "page.html"
    write_comparison_page(path, comparison(load_runs(out), CE, ISDA))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("svg") == 2
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    references = [value for key, value in page.attributes if key in ("href", "src", "xlink:href")]
    assert all(value is not None and value.startswith("#") for value in references)
    assert {value[1:] for value in references if value} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))  # the two plots do not share clip paths
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"var\((--[a-z]+)\)", text)) == set(re.findall(r"(--[a-z]+):", text))


def test_curves_are_means_over_seeds(tmp_path):
    """Slopes 1, 1, 1 and 0, 0, 3 have the same mean, so the two lines must coincide."""
    epochs = get_recipe(CE).epochs
    for name, slopes in ((CE, (1, 1, 1)), (ISDA, (0, 0, 3))):
        for seed, slope in enumerate(slopes):
            run = RunFolder.create(tmp_path, name, get_recipe(name), seed)
            for epoch in range(epochs):
                error = 10.0 + slope * epoch
                run.append({"epoch": epoch, "test_error": error, "train_loss": 1.0, "seconds": 1})
    path = tmp_path / "page.html"
    write_comparison_page(path, comparison(load_runs(tmp_path), CE, ISDA))
    text = path.read_text(encoding="utf-8")
    lines = []
    for colour in ("baseline", "method"):
        found = re.search(rf'<path d="([^"]*)"[^>]*fill: none; stroke: var\(--{colour}\)', text)
        assert found
        points = re.findall(r"[ML] (\S+) (\S+)", found[1])
        lines.append(np.array(points, dtype=float))  # (epochs, 2)
    assert len(lines[0]) == epochs
    np.testing.assert_allclose(lines[0], lines[1], atol=1e-5)  # the file has 6 decimals
    assert (np.diff(lines[0][:, 1]) < 0).all()  # the y axis of SVG points down


def test_all_lines_of_a_figure_of_the_paper_look_different(tmp_path):
    recipes = cell_recipes(4, "cifar10/resnet110")
    for name in recipes:
        make_run(tmp_path / "runs", name, 0, 6.0)
    page = tmp_path / "report.html"
    write_report_page(page, load_runs(tmp_path / "runs"))
    figure = page.read_text(encoding="utf-8").partition("ResNet-110 on CIFAR-10 (Appendix D)")[2]
    svg = figure[: figure.index("</svg>")]
    paths = re.findall(r'<path d="([^"]*)"[^>]*style="(fill: none;[^"]*width: 1\.6[^"]*)"', svg)
    styles = [style for d, style in paths if d.count("L") > 2]  # not those of the legend
    assert len(styles) == len({*styles}) == len(recipes)


def test_names_are_escaped(tmp_path):
    for name, recipe in (("<b>-x-ce", get_recipe(CE)), ("<b>-x-isda", get_recipe(ISDA))):
        recipe = dataclasses.replace(recipe, network="<i>", epochs=1)
        run = RunFolder.create(tmp_path, name, recipe, 0)
        run.append({"epoch": 0, "test_error": 1.0, "train_loss": 1.0, "seconds": 1.0})
    path = tmp_path / "page.html"
    write_comparison_page(path, comparison(load_runs(tmp_path), "<b>-x-ce", "<b>-x-isda"))
    assert not {"b", "i"} & set(Page(path.read_text(encoding="utf-8")).tags)


STRANGE = ("<b>|_x_*y*`z`$^$", os.fsdecode(b"a\xff\xfe"), "new\nline[link](x)", "a_b-$_{$")


@pytest.mark.parametrize("strange", STRANGE)
def test_strange_names_in_markdown_and_plots(tmp_path, strange):
    """Bytes that are not UTF-8, mathematics, Markdown and line ends; also in the path."""
    names = [f"{strange}-{method}{strange}" for method in ("ce", "isda")]
    for name, start in zip(names, (CE, ISDA), strict=True):
        for seed in range(2):
            make_run(tmp_path / strange, name, seed, 9.0, start=start, epochs=None)
    runs = load_runs(tmp_path)
    path = tmp_path / strange / "page.html"
    write_comparison_page(path, comparison(runs, *names))
    write_report_page(path, runs)
    assert not {"b", "i"} & set(Page(path.read_text(encoding="utf-8")).tags)
    text = report_markdown(runs)
    text.encode()
    readme = tmp_path / strange / "README.md"
    readme.write_text("<!-- runs:all -->\n<!-- /runs -->\n")
    assert update_markdown(readme, runs)
    for part in (text, readme.read_text(encoding="utf-8")):
        # outside of code, no mark is left without a backslash
        plain = re.sub(r"``? .*? ``?|`[^`]*`", "", part)
        plain = re.sub(r"^\| | \| | \|$|<!--.*-->|^#+ |^\* ", "", plain, flags=re.MULTILINE)
        assert not re.search(r"(?<!\\)[`*\[\]<>|$]", plain)
        widths = {line.count(" | ") for line in part.split("Beyond")[-1].splitlines()
                  if line.startswith("|")}  # fmt: skip
        assert len(widths) == 1


def test_report_page(records, tmp_path):
    path = tmp_path / "report.html"
    write_report_page(path, load_runs(records))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    for method, paper in (("isda", "−0.43"), ("focal", "−0.08")):
        assert [f"{FIRST}-{method}", "ce", paper, *naive_row(records, method)] in page.rows
    row = ["ResNet-110 + ISDA", "1.7M", "6.33 ± 0.19", naive_cell(records, "isda")]
    assert [*row, "27.57 ± 0.46", "·"] in page.rows
    assert [len(row) for row in page.rows if row[:1] == ["WGAN"]] == [9]
    assert sum(row.count("·") for row in page.rows) == 128 - 5
    assert "Not run yet: ce, isda." in text  # the Wide-ResNet's figure
    assert "isda table 2 --cell cifar100/wide_resnet28_10" in text
    assert (
        "Not run yet: large_margin, disturb_label, center, lq, wgan, cgan, acgan, infogan, "
        "dropout, dropout_isda."
    ) in text
    assert page.tags.count("svg") == 2 * 3 + 1  # each comparison once, and one figure
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    references = [value for key, value in page.attributes if key in ("href", "src", "xlink:href")]
    assert {value[1:] for value in references if value} <= set(page.ids)
    assert all(value is not None and value.startswith("#") for value in references)
    assert len(page.ids) == len(set(page.ids))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert set(re.findall(r"var\((--[a-z]+)\)", text)) == set(re.findall(r"(--[a-z]+):", text))


def test_the_page_names_the_augmentation_of_image_files(tmp_path):
    for name in (CE, ISDA):
        make_run(tmp_path, name, 0, 5.0, data="imagefolder:photos")
    write_comparison_page(tmp_path / "page.html", comparison(load_runs(tmp_path), CE, ISDA))
    page = (tmp_path / "page.html").read_text()
    assert "<dt><code>augment</code></dt><dd>random crop, flip</dd>" in page
    assert "The result of a run is the mean of its last 5 epochs of 20." in page
