"""Help, version and lists of the command line: what they say, width, and what they import."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import command_line
import pytest
from doc_pages import ROOT

from isda import __version__
from isda.experiments import commands
from isda.experiments.cli import main
from isda.experiments.published import PUBLISHED
from isda.experiments.recipes import DEFAULT, RECIPES
from isda.experiments.settings import Recipe
from isda_command import COMMANDS, USAGE

elsewhere = command_line.elsewhere  # fixture


@pytest.fixture(scope="module")
def printed() -> subprocess.CompletedProcess[str]:
    """What the commands that only print write to an ASCII terminal, and the modules they import."""
    code = """
import sys
from isda.experiments.cli import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0
print(*sys.modules, file=sys.stderr)
"""
    costs = "cost --table results/benchmarks/cost_cifar100_h200.csv"
    return subprocess.run(
        [sys.executable, "-c", code, "list", "report", "table 2", costs],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_printing_does_not_import_the_training_code(
    printed: subprocess.CompletedProcess[str],
) -> None:
    assert "cifar100-resnet32-isda" in printed.stdout
    loaded = set(printed.stderr.split())
    assert "isda.experiments.cli" in loaded
    slow = {"torchvision", "timm", "sklearn", "matplotlib", "jinja2"}
    own = {f"isda.experiments.{name}" for name in ("training", "networks", "losses", "data")}
    assert loaded & (slow | own) == set()


def test_ascii_terminal(printed: subprocess.CompletedProcess[str]) -> None:
    row = r"^cifar100-resnet32-isda +30.27 \? 0.34 +\S"
    assert re.search(row, printed.stdout, re.MULTILINE)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for command in ("train", "compare", "list"):
        assert re.search(rf"^  {command} +\w", printed, flags=re.MULTILINE)
    for line in printed.splitlines():
        words = line.split()
        if words[:1] == ["isda"] and len(words) > 2 and not words[2].startswith("-"):
            assert words[2] in RECIPES  # the recipe in the examples exists


def test_help_fits_80_columns_and_shows_no_internal_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        with contextlib.suppress(SystemExit):
            assert main([command, "--help"]) == 0
        printed = capsys.readouterr().out
        assert f"usage: isda {command}" in printed
        assert max(map(len, printed.splitlines())) <= 80
        assert "--started-at" not in printed
    assert max(map(len, USAGE.splitlines())) <= 80
    assert DEFAULT in USAGE
    files = Path(commands.__file__).parent.glob("*.py")
    found = {file.stem for file in files if "\ndef run(" in file.read_text(encoding="utf-8")}
    assert found | {"gan", "invert", "neighbours"} == COMMANDS.keys()


def test_help_answers_before_torch_is_imported() -> None:
    code = "import sys, isda_command; isda_command.main(['--help']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == f"{USAGE}\nFalse\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torch-isda {__version__}\n"


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    flags = set(re.findall(r"--[a-z0-9-]+", printed))
    fields = {f"--{name.replace('_', '-')}" for name in Recipe.__dataclass_fields__}
    assert fields <= flags
    assert {"--seeds", "--out", "--resume", "--device", "--data-root", "--download"} <= flags


def test_help_of_a_recipe_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "cifar100-wide_resnet28_10-isda", "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "isda train cifar100-wide_resnet28_10-isda" in printed
    assert "(default: 240)" in printed  # epochs
    assert "(default: 60 120 160 200)" in printed  # milestones


def test_list_shows_every_recipe_with_the_papers_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "-" in line}
    assert lines.keys() == RECIPES.keys()
    for name in RECIPES:
        assert (str(PUBLISHED[name]) if name in PUBLISHED else "–") in lines[name]
    assert sum(name in PUBLISHED for name in RECIPES) >= 70


def test_help_is_quick_and_narrow() -> None:
    """It imports neither torch nor the library."""
    code = "import sys; from isda_command import main; main(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{USAGE}\nFalse\n"
    assert DEFAULT in USAGE
    assert max(map(len, USAGE.splitlines())) <= 80


@pytest.mark.parametrize("command", [*COMMANDS, "list --results results"])
def test_help_and_lists_fit_80_columns(command: str, monkeypatch, capsys) -> None:
    from isda.experiments.cli import main

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    words = command.split()
    with contextlib.suppress(SystemExit):  # after --help
        assert main([*words, *["--help"] * (len(words) == 1)]) == 0
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert len(printed.splitlines()) > 5
    assert max(map(len, printed.splitlines())) <= 80
