"""`isda invert` that is stopped and continued: the same result, and refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from isda.experiments.cli import TIME_UP, main
from isda.experiments.generators.latent_search import LatentSearch
from isda.experiments.recipes import get_recipe
from isda.experiments.settings import Options
from isda.experiments.training.loop import Plan, train

RECIPE = replace(get_recipe("digits-resnet8-isda"), epochs=1)
FILES = ("inversion.json", "inversion.png")
WORDS = ["--device", "cpu", "--samples", "3", "--draws", "2", "--restarts", "2", "--iterations",
         "18", "--start", "decoder", "--decoder-steps", "5"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A classifier with ISDA."""
    out = tmp_path_factory.mktemp("runs")
    train([Plan("isda", RECIPE, 0)], Options(out=out, device="cpu"), progress=False)
    return out / "isda" / "0"


@pytest.fixture
def invert(run, monkeypatch, tmp_path):
    """Invert into a folder with further words; return the exit code."""
    monkeypatch.chdir(tmp_path)
    return lambda out, *words: main(["invert", str(run), "--out", out, *WORDS, *words])


def test_stopped_after_every_iteration_it_ends_with_the_same_result(
    invert, capsys, monkeypatch
) -> None:
    assert invert("whole") == 0
    assert sorted(path.name for path in Path("whole").iterdir()) == [*FILES]
    once = ["--minutes", "1e-9"]
    assert invert("parts", *once) == TIME_UP
    message = capsys.readouterr().err.splitlines()[-1]
    assert "1 of 5 iterations of decoder done; continue with: isda invert" in message
    assert message.endswith("--minutes 1e-9 --resume")
    stops = 1
    while invert("parts", *once, "--resume") == TIME_UP:
        stops += 1
        assert [path.name for path in Path("parts").iterdir()] == ["inversion.pt"]
    # 5 steps of the decoder; each search has quarters of 5, 5, 5 and 3 iterations; no stop at ends
    assert stops == 4 + 17 + 17
    for name in FILES:
        assert (Path("parts") / name).read_bytes() == (Path("whole") / name).read_bytes()
    assert sorted(path.name for path in Path("parts").iterdir()) == [*FILES]

    monkeypatch.setattr(LatentSearch, "run", None)  # a finished inversion is shown again
    capsys.readouterr()
    assert invert("parts", "--resume") == 0
    assert "| control" in capsys.readouterr().out


def test_a_killed_inversion_continues_from_its_last_state(invert, monkeypatch) -> None:
    invert("whole")
    step, steps = LatentSearch.step, []

    def killed(search: LatentSearch) -> None:
        steps.append(0)
        if len(steps) == 25:  # in step II
            raise KeyboardInterrupt
        step(search)

    monkeypatch.setattr(LatentSearch, "step", killed)
    assert invert("parts", "--checkpoint-seconds", "0") == 130
    assert invert("parts", "--resume") == 0
    assert len(steps) == 25 + 36 - 24
    for name in FILES:
        assert (Path("parts") / name).read_bytes() == (Path("whole") / name).read_bytes()


def test_refusals(invert, capsys) -> None:
    assert invert("out", "--minutes", "1e-9") == TIME_UP
    state = Path("out/inversion.pt")
    whole = state.read_bytes()

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert invert("out", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "inversion.pt is unfinished: use --resume or a different --out" in refused()
    line = refused("--resume", "--seed", "1", "--eta", "0.2")
    assert "was made with other settings (seed 0 → 1, eta 0.1 → 0.2)" in line
    for damaged in (b"", whole[:-100], whole[:5000] + b"?" + whole[5001:]):
        state.write_bytes(damaged)
        assert "inversion.pt is damaged (" in refused("--resume")
        assert state.read_bytes() == damaged
    state.write_bytes(whole)
    assert invert("out", "--resume") == 0
    assert "other settings (seed 0 → 1)" in refused("--resume", "--seed", "1")
    record = Path("out/inversion.json")
    found = json.loads(record.read_text())
    record.write_text("{}")
    assert "inversion.json is damaged" in refused("--resume")
    assert invert("out") == 0  # starts again
    assert json.loads(record.read_text()) == found


def test_a_retrained_classifier_is_another_one(invert, run, capsys, tmp_path) -> None:
    assert invert("out", "--minutes", "1e-9") == TIME_UP
    plan = Plan("isda", replace(RECIPE, learning_rate=0.02), 0)
    train([plan], Options(out=tmp_path / "again", device="cpu"), progress=False)
    kept = run.rename(run.with_name("kept"))
    try:
        (tmp_path / "again" / "isda" / "0").rename(run)
        capsys.readouterr()
        assert invert("out", "--resume") == 2
        assert "made with other settings (classifier_digest" in capsys.readouterr().err
    finally:
        run.rename(run.with_name("other"))
        kept.rename(run)
