"""Pages: links, code, commands, navigation, release files."""

import ast
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import torch
from doc_pages import DOCS, GENERATED, ROOT, blocks, pages
from programs import run_program

import isda
from isda.experiments.recipes import RECIPES
from isda_command import COMMANDS


def anchors(page: Path) -> set[str]:
    """Ids of the headings, as Python-Markdown makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title.encode("ascii", "ignore").decode()) for title in plain}


@pages
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if name in GENERATED:
            continue
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pages
def test_python_blocks_are_python(page: Path) -> None:
    for language, text in blocks(page):
        assert language, f"a block without a language: {text[:40]}"
        if language == "python":
            ast.parse(text)


@pages
def test_commands_exist(page: Path) -> None:
    """Every ``isda`` command names an existing command, recipe and flag."""
    import dataclasses

    from isda.experiments.commands.generators import Measure
    from isda.experiments.commands.recipe_arguments import RecipeArguments
    from isda.experiments.generators.gan_settings import GanSettings
    from isda.experiments.generators.inversion_settings import InversionSettings
    from isda.experiments.settings import Options, Recipe

    kinds: dict[str, Any] = {"train": RecipeArguments}
    for name in COMMANDS.keys() - kinds:
        file = "generators" if name in ("gan", "invert", "neighbours") else name
        module = importlib.import_module(f"isda.experiments.commands.{file}")
        kinds[name] = getattr(module, name.capitalize())
    text = page.read_text()
    code = [block for language, block in blocks(page) if language in ("sh", "bash")]
    code += re.findall(r"`(isda [a-z]+[^`]*)`", text)
    for line in "\n".join(code).replace("\\\n", " ").splitlines():
        words = line.partition(" #")[0].split()
        if words[:1] != ["isda"] or len(words) < 2 or words[1].startswith("-"):
            continue
        command = words[1]
        assert command in COMMANDS, line
        if command in ("train", "compare", "search") and words[2:3] and words[2][0] not in "-…":
            assert words[2] in RECIPES, line
        owners = [kinds[command], Recipe, Options]
        if command == "invert":
            owners.append(InversionSettings)
        if command == "gan":
            owners = [kinds[command], GanSettings, Measure]
        known = {f.name for kind in owners for f in dataclasses.fields(kind)}
        for flag in re.findall(r"--(?:no-)?([a-z0-9-]+)", line.partition(" #")[0]):
            assert flag.replace("-", "_") in known | {"help"}, line


def test_first_page_trains_a_model(tmp_path: Path) -> None:
    code = next(text for language, text in blocks(DOCS / "index.md") if language == "python")
    script = tmp_path / "digits.py"
    script.write_text(code)
    done = run_program(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (error,) = re.findall(r"test error ([\d.]+) %, NLL [\d.]+", done.stdout)
    assert float(error) < 12


def test_examples_of_the_api_run() -> None:
    """The statistics of two batches, merged, are those of the estimator that saw all samples."""
    code = [text for language, text in blocks(DOCS / "api.md") if language == "python"]
    assert len(code) == 6
    names: dict[str, Any] = {}
    for text in code:
        exec(text, names)
    assert names["quadratic"].shape == (20, 3)
    assert names["augmented"].shape == (8, 20, 5)
    assert names["loss"].item() > 0
    for merged, estimated in zip(names["moments"], names["estimator"].moments, strict=True):
        torch.testing.assert_close(merged, estimated)


def test_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\w+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted({page.name for page in DOCS.glob("*.md")} | GENERATED)


def test_one_version_everywhere() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert metadata["project"]["dynamic"] == ["version"]
    assert metadata["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "isda._version.__version__"
    }
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [isda.__version__]
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[([\d.]+)\]", changes, re.MULTILINE)
    assert released[0] == isda.__version__
    assert not re.search(r"^(<<<<<<<|=======|>>>>>>>)", changes, re.MULTILINE)
