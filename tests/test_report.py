"""Reports: every number on a page or in a table is recomputed here from the raw records."""

import csv
import dataclasses
import html
import json
import os
import re
import shutil
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from isda.experiments.cli import run as run_command
from isda.experiments.errors import InputError
from isda.experiments.published import COST, cell_recipes
from isda.experiments.recipes import RECIPES, get_recipe
from isda.experiments.records import Run, load_runs
from isda.experiments.report.blocks import BLOCKS, recipes_block, update_markdown
from isda.experiments.report.comparison import (
    advice,
    comparison,
    comparison_table,
    sentence,
    strengths,
)
from isda.experiments.report.intervals import difference, signed
from isda.experiments.report.pages import write_comparison_page, write_report_page
from isda.experiments.report.plots import curves
from isda.experiments.report.sides import Side, create_side
from isda.experiments.report.tables import recipes_table, report_markdown
from isda.experiments.settings import Recipe
from isda.experiments.training.run_folder import RunFolder

main = partial(run_command, "report")

CE, ISDA = "digits-resnet8-ce", "digits-resnet8-isda"
FIRST = "cifar10-resnet110"


def make_run(
    out: Path,
    name: str,
    seed: int,
    error: float,
    *,
    epochs: int | None = None,
    start: str | None = None,
    **changes,
) -> Run:
    """A run whose test error falls from 90 to about ``error``."""
    begun = get_recipe(start or name.partition("+")[0])
    recipe: Recipe = dataclasses.replace(begun, **changes)
    run = RunFolder.create(out, name, recipe, seed)
    (run.folder / "lock").touch()  # as in training
    noise = np.random.default_rng(seed)
    for epoch in range(recipe.epochs if epochs is None else epochs):
        late = epoch >= recipe.epochs - 10
        run.append(
            {
                "epoch": epoch,
                "learning_rate": recipe.learning_rate_at(epoch),
                "strength": recipe.lambda_0 * recipe.progress_at(epoch),
                "train_loss": 2.0 / (epoch + 1),
                "test_error": error + noise.normal(0, 0.1) if late else 90.0 - epoch / 4,
                "test_loss": 0.5 + 0.01 * seed,
                "test_ece": 0.03 + 0.001 * seed,
                "seconds": 1.5,
                "images_per_second": 1000.0,
            }
        )
    return run


def raw_errors(out: Path, name: str) -> dict[int, float]:
    """Mean test error of the last lines of every metrics file, straight from disk."""
    errors = {}
    for path in sorted((out / name).glob("*/metrics.jsonl")):
        records = [json.loads(text) for text in path.read_text().splitlines()]
        last = records[-max(1, min(10, len(records) // 4)) :]
        errors[int(path.parent.name)] = float(np.mean([r["test_error"] for r in last]))
    return errors


def strip_checks(path: Path) -> None:
    """Metrics as earlier versions wrote them."""
    path.write_text(re.sub(', "check": "[0-9a-f]{16}"', "", path.read_text()))


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "runs"
    for seed, (one, other) in enumerate([(31.0, 30.2), (30.6, 30.1), (30.9, 30.1)]):
        make_run(folder, CE, seed, one)
        make_run(folder, ISDA, seed, other)
    return folder


def expected_numbers(out: Path) -> list[str]:
    """Means, spreads, difference and interval, by numpy and scipy."""
    sides = [list(raw_errors(out, name).values()) for name in (CE, ISDA)]
    numbers = [f"{np.mean(side):.2f} ± {np.std(side, ddof=1):.2f}" for side in sides]
    interval = scipy.stats.ttest_rel(sides[1], sides[0]).confidence_interval(0.95)
    change = np.mean(sides[1]) - np.mean(sides[0])
    text = f"{change:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"
    return [*numbers, text.replace("-", "−")]


def test_comparison_table_and_sentence(out):
    result = comparison(load_runs(out), CE, ISDA)
    text = comparison_table(result)
    for number in expected_numbers(out):
        assert number in text
    one, other = (np.array(list(raw_errors(out, name).values())) for name in (CE, ISDA))
    ends = re.search(r"\((.*)\)", expected_numbers(out)[2])[1]  # with the signs of the table
    assert sentence(result) == (
        f"ISDA lowers the test error by {(one - other).mean():.2f} points "
        f"(95 % interval of the difference {ends}, 3 paired seeds)."
    )
    assert sentence(result) in text
    assert "0.510 ± 0.010" in text  # loss 0.50, 0.51, 0.52
    assert "3.10 ± 0.10" in text  # calibration error 3.0, 3.1, 3.2 %


def test_sentence_when_worse_equal_or_uncertain(tmp_path):
    for seed, (one, other) in enumerate([(10.0, 12.0), (10.0, 12.1), (10.1, 12.0)]):
        make_run(tmp_path / "worse", CE, seed, one)
        make_run(tmp_path / "worse", ISDA, seed, other)
        make_run(tmp_path / "same", CE, seed, 10.0)
        make_run(tmp_path / "same", ISDA, seed, 10.0)
        make_run(tmp_path / "noise", CE, seed, 10.0 + seed)
        make_run(tmp_path / "noise", ISDA, seed, 12.2 - 1.1 * seed)

    def words(folder: str) -> str:
        return sentence(comparison(load_runs(tmp_path / folder), CE, ISDA))

    assert re.fullmatch(
        r"ISDA raises the test error by 2\.00 points \(95 % interval of the difference "
        r"\+1\.\d\d to \+2\.\d\d, 3 paired seeds\)\.",
        words("worse"),
    )
    same = comparison(load_runs(tmp_path / "same"), CE, ISDA)
    assert sentence(same) == ("ISDA does not change the test error in any seed (3 paired seeds).")
    assert signed(same.difference) == "+0.00"  # no interval of zero width
    assert words("noise").startswith(
        "ISDA makes no significant difference to the test error: +0.10 points (95 % interval of "
        "the difference −"
    )


def test_one_seed_and_unpaired_seeds(tmp_path):
    make_run(tmp_path, CE, 0, 10.0)
    make_run(tmp_path, ISDA, 0, 9.0)
    result = comparison(load_runs(tmp_path), CE, ISDA)
    assert sentence(result) == (
        "ISDA lowers the test error by 1.00 points (1 seed); "
        "an interval needs at least 2 seeds per side."
    )
    assert "−1.00" in comparison_table(result)
    make_run(tmp_path, CE, 1, 10.2)
    make_run(tmp_path, ISDA, 2, 9.1)
    sides = [list(raw_errors(tmp_path, name).values()) for name in (CE, ISDA)]
    interval = scipy.stats.ttest_ind(*sides, equal_var=False).confidence_interval(0.95)
    result = comparison(load_runs(tmp_path), CE, ISDA)
    assert result.seeds == "2 / 2"
    words = sentence(result)
    ends = f"{-interval.high:.2f} to {-interval.low:.2f}".replace("-", "−")
    assert f"(95 % interval of the difference {ends}, 2 and 2 seeds)" in words
    make_run(tmp_path, CE, 3, 8.0)
    make_run(tmp_path, ISDA, 4, 11.0)
    answer, reason = advice(comparison(load_runs(tmp_path), CE, ISDA))
    assert answer == "Not clear from these seeds"
    assert "different seeds" in reason


def test_a_seed_without_a_partner_is_left_out_and_named(out):
    expected = expected_numbers(out)[2]
    make_run(out, CE, 3, 40.0)
    result = comparison(load_runs(out), CE, ISDA)
    assert signed(result.difference) == expected
    assert sentence(result).endswith("3 paired seeds; without 3, missing on one side).")


def test_labels_are_those_of_what_was_trained(tmp_path):
    for name, changes in (
        (CE, {}),
        (f"{CE}+method=focal", {"method": "focal"}),
        (f"{FIRST}-dropout", {}),
        (f"{FIRST}-dropout_isda", {}),
        (f"{FIRST}-infogan", {}),
        (f"{FIRST}-wgan", {}),
        (f"{FIRST}-identity_isda", {"start": f"{FIRST}-isda", "covariance": "identity"}),
    ):
        make_run(tmp_path, name, 0, 3.0 + len(name) / 10, **changes)
    runs = load_runs(tmp_path)
    labels = {name: create_side(runs, name).label for name in {run.name for run in runs}}
    assert [*sorted(labels.values())] == [
        "Cross entropy", "Dropout", "Dropout + ISDA", "Focal loss", "ISDA with identity matrix",
        "WGAN", "infoGAN",
    ]  # fmt: skip
    result = comparison(runs, f"{FIRST}-dropout", f"{FIRST}-dropout_isda")
    assert sentence(result).startswith("Dropout + ISDA raises the test error of Dropout by 0.50")


@pytest.mark.parametrize(("freeze", "kind"), [(True, "frozen"), (False, "fine-tuned")])
def test_titles_of_pretrained_networks(freeze, kind):
    recipe = dataclasses.replace(
        get_recipe(ISDA), data="imagefolder:birds", network="timm:resnet18", pretrained=True,
        freeze=freeze, augment=(), image_size=128,
    )  # fmt: skip
    side = Side(f"birds-timm_resnet18_pretrained{'_frozen' * freeze}-isda+image_size=128", recipe,
                {}, {}, 0)  # fmt: skip
    assert side.training() == f"birds, timm:resnet18, {kind}, 128 pixels"


def test_isda_without_strength_does_not_replace_cross_entropy(tmp_path):
    make_run(tmp_path, CE, 0, 9.0)
    for lambda_0, error in ((0.0, 8.0), (0.5, 7.0), (1.0, 6.0)):
        make_run(tmp_path, f"{ISDA}+lambda_0={lambda_0}", 0, error, lambda_0=lambda_0)
    ((_, sides),) = strengths(load_runs(tmp_path))
    assert [round(side.error.mean) for side in sides.values()] == [9, 7, 6]
    assert list(sides) == [0.0, 0.5, 1.0]
    assert not strengths([run for run in load_runs(tmp_path) if "1.0" not in run.name])


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


def test_other_covariances_are_another_curve_of_lambda_0(tmp_path):
    make_run(tmp_path, CE, 0, 9.0)
    errors = {
        "": 8.0,
        "+lambda_0=2.0": 7.0,
        "+covariance=shared+lambda_0=2.0": 6.0,
        "+covariance=shared+lambda_0=1.0": 5.0,
        "+covariance=identity+lambda_0=2.0": 4.0,
    }
    for changes, error in errors.items():
        fields = dict(change.split("=") for change in changes.split("+")[1:])
        lambda_0 = float(fields.pop("lambda_0", 0.5))
        make_run(tmp_path, f"{ISDA}{changes}", 0, error, lambda_0=lambda_0, **fields)
    found = {
        title: {lambda_0: round(side.error.mean) for lambda_0, side in sides.items()}
        for title, sides in strengths(load_runs(tmp_path))
    }
    assert found == {
        "digits, ResNet-8": {0.0: 9, 0.5: 8, 2.0: 7},
        "digits, ResNet-8, covariance shared": {0.0: 9, 1.0: 5, 2.0: 6},
    }


def test_differences_without_spread_are_not_called_significant():
    change = difference({0: 10.0, 1: 11.0}, {0: 9.0, 1: 10.0})
    assert (change.interval, change.significant) == ((-1.0, -1.0), False)
    assert difference({0: 10.0, 1: 11.0}, {0: 9.0, 1: 10.001}).significant


def test_differences_of_one_image_in_float32_are_not_called_significant():
    """Errors as in records: every seed has one wrong image fewer, out of 359."""
    wrong = {0: 7, 1: 30, 2: 211}
    baseline, method = (
        {seed: float(100 * np.float32((count - less) / 359)) for seed, count in wrong.items()}
        for less in (0, 1)
    )
    change = difference(baseline, method)
    low, high = change.interval
    assert high - low > 0  # float32
    assert not change.significant


def test_unfinished_runs_are_left_out_and_counted(out):
    make_run(out, ISDA, 7, 1.0, epochs=12)
    result = comparison(load_runs(out), CE, ISDA)
    assert sorted(result.method.runs) == [0, 1, 2]
    assert "Left out: 1 unfinished run." in comparison_table(result)
    with pytest.raises(InputError, match="no finished run of 'cifar10-resnet32-ce'"):
        comparison(load_runs(out), "cifar10-resnet32-ce", ISDA)


def test_runs_that_must_not_be_mixed(out, tmp_path):
    make_run(tmp_path / "more", ISDA, 9, 30.0, lambda_0=0.25)
    with pytest.raises(InputError, match="differ in lambda_0"):
        comparison(load_runs(tmp_path), CE, ISDA)
    make_run(tmp_path / "twice", CE, 0, 30.0, compile=True)
    with pytest.raises(InputError, match=r"same seed: .*runs/.*, .*twice/"):
        comparison([*load_runs(out), *load_runs(tmp_path / "twice")], CE, ISDA)


def test_copies_of_a_run_count_once(out, tmp_path):
    """Copies, such as exported records, may differ in their times; one with checksums counts."""
    shutil.copytree(out, tmp_path / "copy")
    path = tmp_path / "copy" / ISDA / "0" / "metrics.jsonl"
    strip_checks(path)
    path.write_text(path.read_text().replace('"seconds": 1.5', '"seconds": 2.5'))
    both = load_runs(tmp_path)
    assert len(both) == 2 * len(load_runs(out))
    assert report_markdown(both) == report_markdown(load_runs(out))
    assert recipes_table(tmp_path) == recipes_table(out)


def test_runs_in_conflict_are_left_out_and_named(out, tmp_path, capsys):
    """Other runs are still reported; a Markdown file is not updated."""
    kept = report_markdown(load_runs(out)).partition("## In words")[0]
    for name, lambda_0 in ((f"{FIRST}-isda", 0.5), (f"{FIRST}-ce", 0.0)):
        for folder in "ab":
            make_run(out / folder, name, 0, 6.0 + (folder == "b"), lambda_0=lambda_0)
    runs, reason = load_runs(out), rf"two runs of '{FIRST}-ce' have the same seed: "
    text = report_markdown(runs)
    assert text.startswith(kept)
    places = f"{out}/a/{FIRST}-ce/0, {out}/b/{FIRST}-ce/0"
    assert f"Left out: {reason}{places}." in text
    assert "belong to no cell" not in text
    write_report_page(tmp_path / "report.html", runs)
    assert places in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    for show in (partial(run_command, "table"), lambda words: print(recipes_table(words[2]))):
        show(["2", "--results", str(out)])
        assert f"Left out: {reason}{places}." in capsys.readouterr().out
    with pytest.raises(InputError, match=reason):
        recipes_block(runs, FIRST)
    with pytest.raises(InputError, match=r"have the same name and seed"):
        main(["--runs", str(out), "--export", str(tmp_path / "kept")])
    assert not (tmp_path / "kept").exists()


def test_damaged_records_are_left_out_and_named(out, tmp_path, capsys):
    """Others are still reported; a Markdown file is not updated with fewer seeds."""
    kept = report_markdown(load_runs(out)).partition("## In words")[0]
    make_run(out, ISDA, 7, 30.0)
    make_run(out, ISDA, 8, 30.0)
    (out / ISDA / "7" / "config.json").write_text("[" * 100_000)
    path = out / ISDA / "8" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"epoch": 5', '"epoch": 1'))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- runs:digits -->\n<!-- /runs -->\n")
    for command in (["report", "--runs"], ["table", "2", "--results"], ["list", "--results"]):
        run_command(command[0], [*command[1:], str(out)])
        text = capsys.readouterr().out
        assert f"Left out: {out}/{ISDA}/7/config.json is not a run record" in text
        assert f"Left out: {out}/{ISDA}/8/metrics.jsonl is damaged: line 6" in text
        assert command[0] != "report" or text.startswith(kept)
    assert "nfinished" not in report_markdown(load_runs(out))
    with pytest.raises(InputError, match=r"7/config.json is not .*; .*8/metrics.jsonl"):
        main(["--runs", str(out), "--update", str(readme)])
    assert readme.read_text().count("\n") == 2


def test_page_into_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", str(tmp_path)):
        with pytest.raises(InputError, match=r"is a folder: give the path of a file"):
            main(["--runs", str(RESULTS), "--page", folder])


def test_held_out_images_are_not_called_test(tmp_path):
    for name in (CE, ISDA):
        make_run(tmp_path, name, 0, 10.0, hold_out=100)
    result = comparison(load_runs(tmp_path), CE, ISDA)
    assert "validation error" in comparison_table(result)
    assert "test error" not in comparison_table(result)


class Page(HTMLParser):
    """Cells by row, tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.ids += [value for key, value in attributes if key == "id" and value]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


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


def test_records_without_checksums_are_unverified(out, tmp_path):
    text = report_markdown(load_runs(out))
    assert "unverified" not in text
    strip_checks(out / ISDA / "1" / "metrics.jsonl")
    again = report_markdown(load_runs(out))
    assert "Finished runs without checksums (unverified): 1." in again
    assert "3 unverified |" in again
    assert expected_numbers(out)[-1] in again
    path = tmp_path / "page.html"
    write_comparison_page(path, comparison(load_runs(out), CE, ISDA))
    seeds = [row[0] for row in Page(path.read_text(encoding="utf-8")).rows]
    assert {"0", "1 (unverified)", "2"} <= {*seeds}


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


def test_labels_are_not_mathematics(out):
    side = create_side(load_runs(out), ISDA)
    strange = dataclasses.replace(side, name=r"digits-resnet8-$\foo$ & $isda")
    assert strange.label == r"$\foo$ & $isda"
    svg = curves([(strange, "#000000")], "test_error", "error")
    assert r"$\foo$ &amp; $isda" in svg


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


def test_recipes_block(out):
    header, rule, row = recipes_block(load_runs(out)).splitlines()
    assert header.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [f"`{ISDA}`", "–", "–", *expected_numbers(out), "3"]
    with pytest.raises(InputError, match="no records of an ISDA recipe cifar"):
        recipes_block(load_runs(out), "cifar")


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
    path.write_text("<!-- runs:cifar10 -->\n<!-- /runs -->\n")
    with pytest.raises(InputError, match="cifar10"):
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


RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Two cells and their baseline in Tables 2 and 4, a pair in no table, an unfinished run."""
    folder = tmp_path_factory.mktemp("records")
    errors = {"ce": (6.8, 6.7, 6.9), "isda": (6.3, 6.3, 6.4), "focal": (6.6, 6.9, 6.7)}
    for method, values in errors.items():
        for seed, error in enumerate(values):
            make_run(folder, f"{FIRST}-{method}", seed, error)
    for name, error in ((CE, 3.0), (ISDA, 2.0)):
        make_run(folder, name, 0, error)
    make_run(folder, f"{FIRST}-isda", 5, 1.0, epochs=3)
    return folder


def naive_row(folder: Path, method: str) -> list[str]:
    """Row of a comparison with cross entropy, from the files, by numpy and scipy."""
    names = [f"{FIRST}-ce", f"{FIRST}-{method}"]
    one, other = ([raw_errors(folder, name)[seed] for seed in range(3)] for name in names)
    interval = scipy.stats.ttest_rel(other, one).confidence_interval(0.95)
    change = np.mean(other) - np.mean(one)
    text = f"{change:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})".replace("-", "−")
    significant = scipy.stats.ttest_rel(other, one).pvalue < 0.05
    word = ("lower" if change < 0 else "higher") if significant else "not significant"
    errors = " → ".join(naive_cell(folder, name)[:-4] for name in ("ce", method))
    return [text, word, errors, "0.510 → 0.510", "3.10 → 3.10", "3"]


def naive_cell(folder: Path, method: str) -> str:
    values = [raw_errors(folder, f"{FIRST}-{method}")[seed] for seed in range(3)]
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} (3)"


def test_losses_block(records):
    """Only the training with a loss other than ISDA has a table."""
    title, empty, _, _, *rows = BLOCKS["losses"](load_runs(records), "").splitlines()
    assert (title, empty) == ("CIFAR-10, ResNet-110:", "")
    expected = []
    for method, label in (("isda", "ISDA, λ₀ = 0.5"), ("focal", "Focal loss")):
        change, _, errors, *_ = naive_row(records, method)
        means = re.sub(" ± [0-9.]+", "", errors)
        same = ["0.510 → 0.510: +0.000", "3.10 → 3.10: +0.00"]
        expected.append([label, f"{means}: {change}", *same, "3"])
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert found == expected
    assert "no records" in BLOCKS["losses"](
        [run for run in load_runs(records) if "focal" not in run.name], ""
    )


def test_losses_block_with_two_baselines(tmp_path):
    """A method with dropout is in the table of dropout, not in that of plain cross entropy."""
    for method in ("ce", "focal", "dropout", "dropout_isda"):
        make_run(tmp_path, f"{FIRST}-{method}", 0, 6.0)
    dropout = get_recipe(f"{FIRST}-dropout")
    changed = dataclasses.asdict(dataclasses.replace(dropout, method="lq"))
    make_run(tmp_path, f"{FIRST}-dropout+method=lq", 0, 6.0, **changed)
    text = BLOCKS["losses"](load_runs(tmp_path), "")
    tables = [part.splitlines() for part in text.split("\n\n")]
    assert [tables[0], tables[2]] == [["CIFAR-10, ResNet-110:"], ["CIFAR-10, ResNet-110, Dropout:"]]
    losses = [[row.split("|")[1].strip() for row in table[2:]] for table in tables[1::2]]
    assert losses == [["Focal loss"], ["Dropout + ISDA, λ₀ = 0.5", "Lq loss"]]


def test_report_equals_the_raw_records(records):
    text = report_markdown(load_runs(records))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
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
    assert [ISDA, "ce", "–", "−1.00", "too few seeds"] in [row[:5] for row in rows]


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
    rows = [
        line.split("|") for line in text.partition("## Beyond")[2].splitlines() if "| ce" in line
    ]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [
        (searched, "ce"),
        (f"digits-resnet8-focal{changed}", "ce"),
        (f"{ISDA}{changed}", "ce"),
    ]
    assert all("→ 6." in row[6] for row in rows)
    assert "in no cell and no comparison: 8." in text
    write_report_page(tmp_path / "report.html", load_runs(tmp_path))
    details = (tmp_path / "report.html").read_text(encoding="utf-8").split("<summary>")[1:]
    for row, text in zip(rows, details, strict=True):
        assert f"<code>{row[1].strip()}</code>" in text
    other = "digits, ResNet-8, batches of 16, weight decay 1e-05"
    titles = ("CIFAR-10, ResNet-110: ISDA", f"{other}: Focal loss", f"{other}: ISDA")
    for title, text in zip(titles, details, strict=True):
        assert text.startswith(f"<strong>{title} vs. Cross entropy.</strong>")
    assert f"`{searched}`" in recipes_block(load_runs(tmp_path), FIRST)


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
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]
    for rows in (shown, Page(page.read_text(encoding="utf-8")).rows):
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


def test_the_page_names_the_augmentation_of_image_files(tmp_path):
    for name in (CE, ISDA):
        make_run(tmp_path, name, 0, 5.0, data="imagefolder:photos")
    write_comparison_page(tmp_path / "page.html", comparison(load_runs(tmp_path), CE, ISDA))
    page = (tmp_path / "page.html").read_text()
    assert "<dt><code>augment</code></dt><dd>random crop, flip</dd>" in page
    assert "The result of a run is the mean of its last 5 epochs of 20." in page
