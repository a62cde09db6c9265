"""Sides of a comparison: their labels, and which runs count, are left out, or are refused."""

import dataclasses
import html
import shutil
from functools import partial

import pytest
from made_runs import CE, FIRST, ISDA, expected_numbers, make_run, strip_checks
from shown_tables import Page

from isda.experiments.cli import run as run_command
from isda.experiments.errors import InputError
from isda.experiments.recipes import get_recipe
from isda.experiments.records import load_runs
from isda.experiments.report.blocks import recipes_block
from isda.experiments.report.comparison import comparison, comparison_table, sentence
from isda.experiments.report.pages import write_comparison_page, write_report_page
from isda.experiments.report.plots import curves
from isda.experiments.report.sides import Side, create_side
from isda.experiments.report.tables import recipes_table, report_markdown

main = partial(run_command, "report")


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
    assert result.title == "CIFAR-10, ResNet-110, Dropout, λ₀ = 0.5"  # of both sides
    identity = create_side(runs, f"{FIRST}-identity_isda")
    assert identity.training() == "CIFAR-10, ResNet-110, ISDA with identity matrix"


@pytest.mark.parametrize(("freeze", "kind"), [(True, "frozen"), (False, "fine-tuned")])
def test_titles_of_pretrained_networks(freeze, kind):
    recipe = dataclasses.replace(
        get_recipe(ISDA), data="imagefolder:birds", network="timm:resnet18", pretrained=True,
        freeze=freeze, augment=(), image_size=128,
    )  # fmt: skip
    side = Side(f"birds-timm_resnet18_pretrained{'_frozen' * freeze}-isda+image_size=128", recipe,
                {}, 0)  # fmt: skip
    assert side.training() == f"birds, timm:resnet18, {kind}, 128 pixels"


def test_labels_are_not_mathematics(out):
    side = create_side(load_runs(out), ISDA)
    strange = dataclasses.replace(side, name=r"digits-resnet8-$\foo$ & $isda")
    assert strange.label == r"$\foo$ & $isda"
    svg = curves([(strange, "#000000")], "test_error", "error")
    assert r"$\foo$ &amp; $isda" in svg


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
    before = report_markdown(load_runs(out)).partition("\n\n## In words")[0]
    kept = before.removeprefix("## Comparisons")
    assert kept != before
    for name, lambda_0 in ((f"{FIRST}-isda", 0.5), (f"{FIRST}-ce", 0.0)):
        for folder in "ab":
            make_run(out / folder, name, 0, 6.0 + (folder == "b"), lambda_0=lambda_0)
    runs, reason = load_runs(out), rf"two runs of '{FIRST}-ce' have the same seed: "
    text = report_markdown(runs)
    assert kept in text
    places = f"{out}/a/{FIRST}-ce/0, {out}/b/{FIRST}-ce/0"
    assert f"Left out: {reason}{places}." in text
    assert "belong to no cell" not in text
    write_report_page(tmp_path / "report.html", runs)
    assert places in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    for show in (partial(run_command, "table"), lambda words: print(recipes_table(words[2]))):
        show(["2", "--results", str(out)])
        assert f"Left out: {reason}{places}." in capsys.readouterr().out
    with pytest.raises(InputError, match=reason):
        recipes_block(runs)
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
