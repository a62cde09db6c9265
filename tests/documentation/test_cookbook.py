"""The cookbook: every entry runs, is short, and is printed in the documentation."""

import ast
import re

import pytest
from cookbook_loops import ROOT, load

ENTRIES = sorted(path.stem for path in (ROOT / "examples" / "cookbook").glob("*.py"))
PAGE = (ROOT / "docs" / "cookbook.md").read_text()


def user_code(name: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of an entry that users copy: those in ``__all__``."""
    tree = ast.parse((ROOT / "examples" / "cookbook" / f"{name}.py").read_text())
    return [node for node in tree.body if getattr(node, "name", None) in load(name).__all__]


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_runs_and_its_loss_falls(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    output = capsys.readouterr().out
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) >= 4
    assert losses[-1] < 0.75 * losses[0] or name == "incremental"


def test_incremental_entry_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    load("incremental").main()
    errors = re.findall(r"error ([\d.]+) % of (\d)", capsys.readouterr().out)
    assert [number for _, number in errors] == ["2", "4", "6"]
    assert float(errors[-1][0]) < 30  # a network that forgets knows 2 of 6 classes: 67 %


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_has_at_most_25_lines(name: str) -> None:
    lines = (ROOT / "examples" / "cookbook" / f"{name}.py").read_text().splitlines()
    counted = 0
    for node in user_code(name):
        docstrings: set[int] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
                docstrings |= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
        for number in range(node.lineno, node.end_lineno + 1):
            line = lines[number - 1].strip()
            counted += bool(line) and not line.startswith("#") and number not in docstrings
    assert 5 <= counted <= 25


@pytest.mark.parametrize("name", ENTRIES)
def test_page_prints_the_code_of_the_entry(name: str) -> None:
    source = (ROOT / "examples" / "cookbook" / f"{name}.py").read_text()
    code = "\n\n\n".join(ast.get_source_segment(source, node) for node in user_code(name))
    section = PAGE.split(f"`examples/cookbook/{name}.py`")[1].split("\n## ")[0]
    assert re.findall(r"```python\n(.*?)\n```", section, re.DOTALL) == [code]
    imports = re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(f"{imports}\n{code}", names)  # the imports on the page are enough
    assert set(load(name).__all__) <= names.keys()
