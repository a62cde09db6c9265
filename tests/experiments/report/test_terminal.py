"""What commands print fits the terminal and loses nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from isda.experiments.cli import main
from isda.experiments.report.text import fit, markdown_rows, terminal_width, text_table

ROOT = Path(__file__).parents[3]
LABELS = ["plain", r"a|b \ c", "wide_resnet16_8"]


def words(text: str) -> set[str]:
    """Cells and words, without the lines around them."""
    cells = re.split(r"(?<!\\)\||\n", text)
    return {cell.strip() for cell in cells} - {""}


def table(label: str = "network", ours: str = "ours (n)", width: int = 12) -> str:
    titles = [f"column {n}".ljust(width, "x") for n in range(4)]
    header = [label, titles[0], ours, titles[1], ours, titles[2], titles[3]]
    rows = [[name, *(f"{name[0]}{n}" for n in range(6))] for name in LABELS]
    return markdown_rows(header, rows)


@pytest.mark.parametrize("width", [46, 60, 80])
def test_wide_table_becomes_several(width: int) -> None:
    text = table()
    narrow = fit(text, width)
    assert max(map(len, text.splitlines())) > 80
    assert max(map(len, narrow.splitlines())) <= width
    assert words(narrow) == words(text)
    parts = narrow.split("\n\n")
    assert len(parts) > 1
    for part in parts:
        header, rule, *rows = part.splitlines()
        assert header.startswith("| network ")
        assert len(rows) == len(LABELS)
        assert {line.count(" | ") for line in (header, rule, *rows)} == {header.count(" | ")}
        assert not re.match(r"\| network +\| ours", header)  # it stays with the paper's number


def test_narrow_table_is_left_alone() -> None:
    assert fit(table(), 200) == table()


def test_table_with_wide_labels_becomes_a_list() -> None:
    text = table("network" * 10)
    narrow = fit(text, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    items = narrow.split("* ")[1:]
    assert [item.split("\n")[0] for item in items] == ["plain", r"a\|b \\ c", "wide_resnet16_8"]
    flat = " ".join(items[0].split())
    assert "column 0xxxx: p0; ours (n): p1; column 1xxxx: p2;" in flat


def test_table_with_many_columns_becomes_a_list() -> None:
    text = markdown_rows(["name", *["x" * 30] * 5], [["a", *"12345"]])
    assert fit(text, 40).startswith("* a\n  " + "x" * 30 + ": 1;")
    assert fit(text, 80).count("| name ") == 3


def test_table_without_rows_and_cells_with_spaces() -> None:
    empty = markdown_rows(["x" * 60, "y" * 60], [])
    assert fit(empty, 80) == empty
    assert fit("| " + "y" * 90 + " |", 40) == "| " + "y" * 90 + " |"
    text = markdown_rows(["name", "x" * 90], [["a", "b  c " * 30]])
    assert max(map(len, fit(text, 80).splitlines()[2:])) <= 80


def test_paragraphs_are_wrapped() -> None:
    sentence = "* " + "a sentence with some-words " * 8 + "path/" * 30
    narrow = fit(f"## Title\n\n{sentence}\nshort\n\na  b" + " " * 90 + "c", 60)
    assert narrow.split() == f"## Title {sentence} short a b c".split()
    first, second, *_ = narrow.splitlines()[2:]
    assert (first[:2], second[:2], second[2] != " ") == ("* ", "  ", True)
    assert "a  b" + " " * 90 + "c" in narrow  # columns of a text table
    assert max(len(line) for line in narrow.splitlines()[:6]) <= 60


def test_names_longer_than_a_line_are_broken_behind_a_plus() -> None:
    name = "digits-resnet8-isda+" + "+".join(f"field{number}=1.0" for number in range(6))
    narrow = fit(f"* {name}: a sentence with a + b.\n* short+name of a run {'x' * 30}", 50)
    assert max(map(len, narrow.splitlines())) <= 50
    assert narrow.replace("\n  ", "").startswith(f"* {name}:")
    assert "a + b" in " ".join(narrow.split())
    assert "\n* short+name" in narrow


def test_text_table(monkeypatch: pytest.MonkeyPatch) -> None:
    header, rows = ["name", "one" * 5, "two" * 5, "three" * 5], [["a", "1", "2", "3"], ["b", "4"]]
    monkeypatch.setenv("COLUMNS", "100")
    whole = text_table(header, rows)
    assert [line.split() for line in whole.splitlines()[2:]] == [["a", "1", "2", "3"], ["b", "4"]]
    monkeypatch.setenv("COLUMNS", "42")
    first, second = text_table(header, rows).split("\n\n")
    assert [line.split() for line in first.splitlines()[2:]] == [["a", "1", "2"], ["b", "4"]]
    assert [line.split() for line in second.splitlines()[2:]] == [["a", "3"], ["b"]]
    assert max(map(len, [*first.splitlines(), *second.splitlines()])) <= 42


def test_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in {"100": 100, "1": 40}.items():
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal_width() == width
    code = "from isda.experiments.report.text import terminal_width as w; print(w() > 1000)"
    monkeypatch.delenv("COLUMNS")
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert printed.strip() == b"True"  # a file or a pipe gets whole tables


@pytest.mark.parametrize(
    "command",
    [
        *(f"table {number}" for number in range(1, 6)),
        "report --runs results --costs results/benchmarks/cost_cifar100_h200.csv",
        "list --results results",
        "queue evidence.queue --dry-run --minutes 20",
        "cost --networks resnet50 densenet121 --no-measure",
    ],
)
def test_commands_fit_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80
