"""Tables, figures and numbers of the pages are those of the records."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, blocks

from isda.experiments.commands import train as train_command
from isda.experiments.commands.lambda_search import halving
from isda.experiments.cost_records import read_costs
from isda.experiments.errors import InputError
from isda.experiments.published import PUBLISHED
from isda.experiments.records import load_runs
from isda.experiments.report.blocks import BLOCKS, update_markdown
from isda.experiments.report.comparison import comparison, comparison_table, comparisons, strengths
from isda.experiments.report.feature_tables import read_features
from isda.experiments.report.figures import write_figures
from isda.experiments.report.intervals import estimate

COSTS = [
    ROOT / "results" / "benchmarks" / f"cost_{name}_h200.csv" for name in ("cifar100", "imagenet")
]
PAIR = "cifar100-resnet32-ce", "cifar100-resnet32-isda"


@pytest.fixture(scope="module")
def records():
    return load_runs(ROOT / "results")


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{n}.md" for n in ("index", "results", "choosing", "generators"))]
)
def test_tables_are_those_of_the_records(name: str, records, tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    shutil.copy(ROOT / name, copy)
    os.symlink(DOCS / "figures", tmp_path / "figures")
    pictures = read_features([tmp_path / "figures" / "neighbours_cifar10"])
    assert not update_markdown(copy, records, read_costs(COSTS), pictures), "run make results"


def test_stale_tables_are_found(records, tmp_path: Path) -> None:
    """Without one seed, the tables are different ones."""
    fewer = [run for run in records if (run.name, run.seed) != ("cifar100-resnet32-isda", 7)]
    copy = tmp_path / "page.md"
    shutil.copy(ROOT / "README.md", copy)
    assert update_markdown(copy, fewer)


def test_commands_train_the_runs_of_the_records(records) -> None:
    """Every command in the table of times has names, recipes and seeds of the records.

    Runs on folders of images have no recipe of ours.
    """
    runs = {(run.name, run.seed): run.recipe for run in records
            if not run.recipe.data.startswith("imagefolder:")}  # fmt: skip
    shown = {}
    for line in BLOCKS["times"](records).splitlines()[2:]:
        isda, train, *words = shlex.split(line.split("`")[1])
        assert (isda, train) == ("isda", "train")
        plans = train_command.plan(words).plans()
        shown |= {(plan.name, plan.seed): plan.recipe for plan in plans}
        folders = [ROOT / "results" / plan.name / str(plan.seed) for plan in plans]
        texts = [(folder / "metrics.jsonl").read_text() for folder in folders]
        seconds = sum(json.loads(epoch)["seconds"] for text in texts for epoch in text.splitlines())
        assert line.endswith(f"| {seconds / 60:.1f} |")
    assert shown == runs


def test_own_images_shows_the_table_of_the_records(records) -> None:
    names = [
        f"digits-resnet8-{method}drop_rate=0.3+images_per_class=10"
        for method in ("ce+epochs=25+batch_size=10+", "isda+epochs=25+batch_size=10+lambda_0=1.0+")
    ]
    result = comparison([run for run in records if run.name in names], *names)
    table = comparison_table(result).partition("\n\n")[0]
    assert ("text", f"{table}\n") in blocks(DOCS / "own_images.md")


@pytest.mark.parametrize("page", ["own_images", "training"])
def test_epochs_of_a_search_are_counted(page: str) -> None:
    """With as many epochs as the page says, five candidates and three seeds."""
    text = " ".join((DOCS / f"{page}.md").read_text().split())
    pattern = r"(\d+) epochs [^.]*, the search takes (\d+) epochs and the comparison (\d+)"
    found = re.findall(pattern, text)
    ((epochs, search, compared),) = [map(int, numbers) for numbers in found]
    assert search == sum(part.cost for part in halving(5, epochs))
    assert compared == 2 * 3 * epochs


def test_figures_are_those_of_the_records(records, tmp_path: Path) -> None:
    """The description of a figure has all its numbers."""
    names = {f"{name}-{theme}.svg" for name in ("effect", "lambda_0", "images") for theme in
             ("light", "dark")}  # fmt: skip
    files = write_figures(tmp_path, records)
    assert {file.name for file in files} == names
    for file in files:
        kept, new = (
            re.findall(r"<desc>(.*?)</desc>", svg.read_text(), re.DOTALL)
            for svg in (DOCS / "figures" / file.name, file)
        )
        assert kept == new, "run make results"
        assert len(new) == 1
        assert re.search(r"λ₀ = 0\.5|ISDA \d+\.\d\d", new[0])


def test_written_figures(records, tmp_path: Path) -> None:
    files = write_figures(tmp_path / "new", records)
    names = ("effect", "lambda_0", "images")
    assert [file.name for file in files] == [
        f"{name}-{theme}.svg" for theme in ("light", "dark") for name in names
    ]
    light, dark = (file.read_text() for file in files[:: len(names)])
    assert light != dark
    for svg in (file.read_text() for file in files):  # no glyph by its number in a font
        assert {*re.findall(r'href="#(glyph\w+)"', svg)} == {*re.findall(r'"(glyph\w+)"', svg)}
        assert "DejaVu" not in svg
    one = [run for run in records if run.name in PAIR]  # one λ₀, one number of images
    assert [file.name for file in write_figures(tmp_path / "few", one)] == [
        "effect-light.svg",
        "effect-dark.svg",
    ]


def test_records_without_anything_to_draw(records, tmp_path: Path) -> None:
    own = [run for run in records if run.name in ("digits-resnet8-ce", "digits-resnet8-isda")]
    with pytest.raises(InputError, match="nothing for a figure"):
        write_figures(tmp_path / "none", own)
    assert not (tmp_path / "none").exists()
    others = [run for run in records if run.name not in PUBLISHED]
    names = {file.name.partition("-")[0] for file in write_figures(tmp_path / "some", others)}
    assert "effect" not in names
    assert names


def test_interval_of_a_mean() -> None:
    """Against scipy, which computes it on its own."""
    from scipy import stats

    values = [30.1, 30.7, 29.8, 31.0]
    expected = stats.t.interval(0.95, 3, sum(values) / 4, stats.sem(values))
    assert estimate(values).interval == pytest.approx(expected)
    assert estimate([1.0]).interval is None


def test_curve_of_lambda_0_describes_what_it_draws(records, tmp_path: Path) -> None:
    """The difference from cross entropy, with the paired interval of scipy."""
    from scipy import stats

    changes = "+epochs=25+batch_size=10+{}drop_rate=0.3+images_per_class=10"
    methods = ("ce" + changes.format(""), "isda" + changes.format("lambda_0=1.0+"))
    errors = [naive_values(f"digits-resnet8-{method}", "test_error", 6) for method in methods]
    interval = stats.ttest_rel(errors[1], errors[0]).confidence_interval(0.95)
    change = (sum(errors[1]) - sum(errors[0])) / len(errors[0])
    text = f"{change:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})".replace("-", "−")
    write_figures(tmp_path, records)
    found = re.findall(
        "digits, [^.]* dropout 0.3, 10 images per class, λ₀ = 1: [^%]*%, minus cross entropy "
        rf"{re.escape(text)}\.",
        (tmp_path / "lambda_0-dark.svg").read_text(),
    )
    assert len(found) == 1


def naive_mean(name: str, key: str, last: int) -> float:
    """Mean over all seeds of a recipe of the mean of the last epochs, from the files alone."""
    values = naive_values(name, key, last)
    return sum(values) / len(values)


def naive_values(name: str, key: str, last: int) -> list[float]:
    values = []
    for path in sorted((ROOT / "results" / name).glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        values.append(sum(line[key] for line in lines[-last:]) / last)
    assert values
    return values


def row_of(table: str, title: str) -> list[str]:
    """Cells of the only row that starts with a title."""
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.strip("| ").split("|")]


def test_every_block_of_a_page(records) -> None:
    """Records that are added later make further rows, but do not change these."""
    names = {"effect", "summary", "lambda_0", "images", "losses", "calibration", "times"}
    assert names == BLOCKS.keys()
    before, after = (naive_mean(name, "test_error", 10) for name in PAIR)
    title = "CIFAR-100, ResNet-32, λ₀ = 0.5"
    cell = row_of(BLOCKS["effect"](records), title)[1]
    assert cell.startswith(f"{before:.2f} → {after:.2f}: ")
    (own,) = (one for one in comparisons(records) if one.method.name == PAIR[1])
    text = BLOCKS["summary"](records)
    significant = [one.difference for one in comparisons(records) if one.difference.significant]
    lower = text.partition("No significant")[0]
    assert own.difference.significant == (f"* {title}: " in lower)
    assert lower.count("    * ") == sum(one.mean < 0 for one in significant)
    digits = "+epochs=25+batch_size=10+{}drop_rate=0.3+images_per_class=10"
    ece = [
        100 * naive_mean(f"digits-resnet8-{name}", "test_ece", 6)
        for name in (f"ce{digits.format('')}", f"isda{digits.format('lambda_0=2.5+')}")
    ]
    worse = text.partition("Higher NLL")[2]
    assert f"λ₀ = 2.5: ECE {ece[1] - ece[0]:+.2f} (" in worse
    groups = [
        sides for title, sides in strengths(records) if "digits" in title and "25 epochs" in title
    ]
    assert len(groups) == 1
    assert groups[0].keys() >= {0.0, 0.25, 0.5, 1.0, 2.5, 5.0}
    one = [run for run in records if run.name in PAIR]
    for block in ("lambda_0", "images", "calibration"):
        assert "no records" in BLOCKS[block](one)


def test_effect_by_data_and_network(records) -> None:
    """Unchanged recipes, then those with changed settings, in order of images and λ₀."""
    own = [run for run in records if run.name.startswith("cifar100-resnet32")]
    first, title, few = BLOCKS["effect"](own).split("\n\n")
    assert first.splitlines()[2:][0].startswith("| CIFAR-100, ResNet-32, λ₀ = 0.5 | ")
    assert len(first.splitlines()) == 3
    assert title == "CIFAR-100, ResNet-32:"
    for number, row in zip((50, 100), few.splitlines()[2:4], strict=True):
        changes = f"+batch_size=125+images_per_class={number}"
        before, after = (naive_mean(name + changes, "test_error", 10) for name in PAIR)
        label = f"batches of 125, {number} images per class, λ₀ = 0.5"
        assert row.startswith(f"| {label} | {before:.2f} → {after:.2f}: ")
    tables = BLOCKS["effect"](records).split("digits, ResNet-8:\n\n")
    assert len(tables) == 2
    digits = tables[1].partition("\n\n")[0]
    labels = [row.split(" | ")[0] for row in digits.splitlines() if "| 25 epochs" in row]
    values = [float(label.rpartition("= ")[2]) for label in labels]
    assert values == sorted(values)
    assert {0.25, 0.5, 1.0, 2.5, 5.0} <= {*values}


def test_numbers_of_training_images(records) -> None:
    """From the files: CIFAR-100 with 50, 100 and all 500 images per class."""
    own = [run for run in records if run.name.startswith("cifar100-resnet32")]
    table = BLOCKS["images"](own)
    assert table.startswith("CIFAR-100, ResNet-32, λ₀ = 0.5:\n")
    for number in (50, 100, 500):
        changes = "" if number == 500 else f"+batch_size=125+images_per_class={number}"
        cells = row_of(table, str(number))
        keys = {"test_error": (1, 2), "test_loss": (1, 3), "test_ece": (100, 2)}
        for cell, (key, (scale, digits)) in zip(cells[1:], keys.items(), strict=False):
            means = [scale * naive_mean(f"{name}{changes}", key, 10) for name in PAIR]
            assert cell.startswith(" → ".join(f"{mean:.{digits}f}" for mean in means))
        assert cells[4] == ("128" if number == 500 else "125")
    numbers = [int(line.split()[1]) for line in table.splitlines()[4:]]
    assert numbers == sorted(numbers)


def test_rows_of_the_paper(records, tmp_path: Path) -> None:
    """``runs:paper`` has the unchanged recipes, not those with fewer images."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- runs:paper -->\n<!-- /runs -->\n<!-- runs:paper:effect -->\n<!-- /runs -->\n"
    )
    update_markdown(page, records)
    text = page.read_text()
    assert f"| `{PAIR[1]}` | 31.20 ± 0.41 |" in text
    assert "| CIFAR-100, ResNet-32, λ₀ = 0.5 |" in text
    assert "images per class" not in text
    assert "images_per_class" not in text


def test_unknown_blocks_and_missing_costs(records, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- runs:cifar:efect -->\n<!-- /runs -->\n")
    with pytest.raises(InputError, match="unknown block 'efect'; did you mean effect"):
        update_markdown(page, records)
    page.write_text("<!-- runs:all:cost -->\n<!-- /runs -->\n")
    with pytest.raises(InputError, match="give them with --costs"):
        update_markdown(page, records)
