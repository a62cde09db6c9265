"""`isda invert` that is stopped and continued: the same result, and refusals."""

import contextlib
import json
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isda.experiments.cli import TIME_UP, main
from isda.experiments.commands import generators
from isda.experiments.generators import stages
from isda.experiments.generators.latent_search import LatentSearch
from isda.experiments.generators.trained_classifier import TrainedClassifier
from isda.experiments.recipes import get_recipe
from isda.experiments.settings import Options
from isda.experiments.training.locks import locked_folder
from isda.experiments.training.loop import Plan, train

PATIENCE = 120  # seconds until a process that hangs fails the test
RECIPE = replace(get_recipe("digits-resnet8-isda"), epochs=1)
FILES = ("inversion.json", "inversion.png", "lock")
WORDS = ["--device", "cpu", "--samples", "3", "--draws", "2", "--restarts", "2", "--iterations",
         "18", "--start", "decoder", "--decoder-steps", "5"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A classifier with ISDA, and another one as judge."""
    out = tmp_path_factory.mktemp("runs")
    plans = [Plan("isda", RECIPE, seed) for seed in range(2)]
    train(plans, Options(out=out, device="cpu"), progress=False)
    return plans[0].folder(out)


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
        assert sorted(path.name for path in Path("parts").iterdir()) == ["inversion.pt", "lock"]
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
    pictures = found["pictures"]
    wrong = {**pictures, "control": {**pictures["control"], "own_class": "x"}}
    for damaged in ({}, {key: value for key, value in found.items() if key != "pictures"},
                    {**found, "pictures": wrong}):  # fmt: skip
        record.write_text(json.dumps(damaged))
        assert "inversion.json is damaged" in refused("--resume")
    del found["classifier_digest"]  # as in an earlier version
    record.write_text(json.dumps(found))
    assert "other settings (classifier_digest 'unknown' → " in refused("--resume")
    assert invert("out") == 0  # starts again
    assert json.loads(record.read_text())["pictures"] == found["pictures"]


@contextlib.contextmanager
def retrained(run: Path, out: Path):
    """Inside the context, a folder holds a run that was trained with another learning rate."""
    plan = Plan(run.parent.name, replace(RECIPE, learning_rate=0.02), int(run.name))
    train([plan], Options(out=out, device="cpu"), progress=False)
    kept = run.rename(run.with_name("kept"))
    try:
        shutil.copytree(plan.folder(out), run)
        yield
    finally:
        shutil.rmtree(run)
        kept.rename(run)


@pytest.mark.parametrize("what", ["classifier", "judge"])
def test_a_retrained_network_is_another_one(what, invert, run, capsys, tmp_path) -> None:
    judge = run.with_name("1")
    words = ["--judge", str(judge), "--minutes", "1e-9"]
    assert invert("out", *words) == TIME_UP
    with retrained(run if what == "classifier" else judge, tmp_path / "again"):
        capsys.readouterr()
        assert invert("out", *words, "--resume") == 2
        assert f"made with other settings ({what}_digest" in capsys.readouterr().err
    assert invert("out", *words, "--resume") == TIME_UP


def test_a_network_may_be_moved(invert, run, tmp_path) -> None:
    judge = ["--judge", str(run.with_name("1"))]
    assert invert("out", *judge, "--minutes", "1e-9") == TIME_UP
    Path("moved").symlink_to(run.parent.parent)
    words = ["--out", "out", *WORDS, "--judge", "moved/isda/1", "--resume"]
    for _ in range(2):  # from the state, and from the record
        assert main(["invert", "moved/isda/0", *words]) == 0
    assert json.loads(Path("out/inversion.json").read_text())["judge"] == "moved/isda/1"


def hold(folder: Path, held, release) -> None:
    with locked_folder(folder):
        held.set()
        release.wait(PATIENCE)


def test_one_process_at_a_time(invert, capsys, monkeypatch) -> None:
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(Path("out"), held, release))
    process.start()
    assert held.wait(PATIENCE)
    assert invert("out", "--resume") == 2
    assert "isda: out is being written to by another process" in capsys.readouterr().err
    release.set()
    process.join(PATIENCE)
    assert not Path("out").exists()

    def join_processes(device: str):
        return contextlib.nullcontext((torch.device(device), 0, 2))

    monkeypatch.setattr(generators, "join_processes", join_processes)
    assert invert("out") == 2
    assert "runs in one process: start isda invert without torchrun" in capsys.readouterr().err


def test_a_record_has_its_own_picture(invert, monkeypatch) -> None:
    def files() -> list[bytes]:
        return [(Path("out") / name).read_bytes() for name in FILES]

    assert invert("out") == 0
    first = files()
    Path("out/inversion.png").unlink()
    assert invert("out", "--resume") == 0
    assert files() == first

    def killed(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_json", killed)
        assert invert("out", "--seed", "5") == 130
    assert Path("out/inversion.png").read_bytes() != first[1]
    assert invert("out", "--resume") == 0
    assert files() == first


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_lower_learning_rates_after_a_divergence(words, invert, capsys) -> None:
    high = ["--learning-rates", "1e38", "1", "--checkpoint-seconds", "0"]
    assert invert("out", *high) == 2
    assert "diverged at learning rate 1e+38: use lower --learning" in capsys.readouterr().err
    assert invert("out", *words, "--learning-rates", "1", "1") == 0


def test_a_finished_decoder_needs_no_features(invert, monkeypatch) -> None:
    sizes, features = [], TrainedClassifier.all_features

    def all_features(self, images):
        sizes.append(len(images))
        return features(self, images)

    monkeypatch.setattr(TrainedClassifier, "all_features", all_features)
    once = ["--minutes", "1e-9", "--resume"]
    for _ in range(5):  # four steps of the decoder, then its last one and one of step I
        assert invert("out", *once) == TIME_UP
    assert sizes.count(1438) == 5  # all training images
    assert invert("out", *once) == TIME_UP
    assert sizes.count(1438) == 5


@pytest.mark.gpu
def test_deterministic_kernels_give_the_same_pictures_on_a_gpu(invert) -> None:
    words = ["--device", "cuda", "--iterations", "40", "--deterministic"]
    assert invert("whole", *words) == 0
    assert invert("parts", *words, "--minutes", "1e-9") == TIME_UP
    while invert("parts", *words, "--minutes", "1e-9", "--resume") == TIME_UP:
        pass
    for name in FILES:
        assert (Path("parts") / name).read_bytes() == (Path("whole") / name).read_bytes()
