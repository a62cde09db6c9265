"""``isda compare --lambda-0 auto``: the rounds of the search, and the comparison after it."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import search_trainer
from photo_folders import make_image
from search_trainer import Trainer

from isda.experiments.cli import main
from isda.experiments.commands import compare
from isda.experiments.commands.lambda_search import halving
from isda.experiments.errors import RunsFailed
from isda.experiments.recipes import RECIPES
from isda.experiments.records import Run, load_runs
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.loop import Plan, train

QUICK = ["--epochs", "4", "--batch-size", "128", "--hold-out", "1200", "--device", "cpu"]

# fixtures
elsewhere, trainer = search_trainer.elsewhere, search_trainer.trainer


def fields(plans: Sequence[Plan]) -> list[tuple[float, int, int, int]]:
    return [(p.recipe.lambda_0, p.recipe.epochs, p.recipe.hold_out, p.seed) for p in plans]


def test_rounds_and_comparison(
    trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1 is the best after a quarter of the epochs, 0.5 after half of them, 1 on the test set."""
    errors = {10: {0.1: 5.0, 0.25: 6.0, 0.5: 7.0, 0.75: 8.0, 1.0: 9.0},
              20: {0.1: 4.0, 0.25: 5.0, 0.5: 3.0}}  # fmt: skip

    def error(recipe: Recipe, seed: int) -> float:
        if not recipe.hold_out:
            return 20 - recipe.lambda_0 + seed
        return errors[recipe.epochs][recipe.lambda_0] + seed

    stand_in = trainer(error)
    assert main(["compare", "--epochs", "40", "--lambda-0", "auto"]) == 0
    first, second, final = stand_in.calls
    assert fields(first) == [(c, 10, 143, 0) for c in (0.1, 0.25, 0.5, 0.75, 1.0)]
    assert fields(second) == [(c, 20, 143, seed) for c in (0.1, 0.25, 0.5) for seed in (0, 1)]
    assert fields(final) == [(c, 40, 0, seed) for seed in (0, 1, 2) for c in (0.0, 0.5)]
    printed = capsys.readouterr().out
    assert printed.splitlines()[:5] == [
        "λ₀ is chosen on 143 held-out training images:",
        "  round 1: 0.1 0.25 0.5 0.75 1, 10 epochs, seed 0, 50 in all",
        "  round 2: the best 3 of them, 20 epochs, seeds 0 1, 120 in all",
        "  then: cross entropy and ISDA, 40 epochs, seeds 0 1 2, 240 in all",
        "The search takes 170 epochs, 71 % as many as the comparison.",
    ]
    assert re.search(r"^0\.5 +20 +3\.50 ± 0\.71 +2 +← chosen$", printed, re.MULTILINE)
    assert "lowers the test error by 0.50 points" in printed
    assert "have the lowest error" not in printed
    record = json.loads(Path("runs/digits-resnet8-isda+epochs=40.lambda_0.json").read_text())
    assert record["chosen"] == 0.5
    assert [[len(one["candidates"]), one["epochs"]] for one in record["rounds"]] == [
        [5, 10],
        [3, 20],
    ]
    page = Path("runs/digits-resnet8-isda+epochs=40.html").read_text()
    assert "How λ₀ was chosen" in page
    assert "20 epochs, 2 seeds" in page  # in the legend
    assert "chosen: 0.5" in page


def test_candidates_with_the_same_error(
    trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest is chosen, which is said, and how little few images tell."""
    trainer(lambda recipe, _: 20.0 if recipe.lambda_0 in (0.1, 0.5) else 25.0)
    assert main(["compare", "--lambda-0", "auto", "--hold-out", "40"]) == 0
    printed = capsys.readouterr().out
    assert "on 40 held-out training images; each is worth 2.5 points" in printed
    assert re.search(r"^0\.1 .* ← chosen$", printed, re.MULTILINE)
    assert "\n0.1 and 0.5 have the lowest error: the smallest is chosen.\n" in printed


def test_the_runs_are_those_of_a_comparison_with_that_value(
    trainer: Callable[..., Trainer],
) -> None:
    stand_in = trainer(lambda recipe, _: abs(recipe.lambda_0 - 1.0) + 1)
    assert main(["compare", "--lambda-0=auto", "--hold-out", "99"]) == 0
    assert {plan.recipe.hold_out for plan in stand_in.calls[0]} == {99}
    assert main(["compare", "--lambda-0", "1", "--out", "other"]) == 0
    searched, given = stand_in.calls[2], stand_in.calls[3]
    assert searched == given


def test_halving() -> None:
    assert [(r.candidates, r.epochs, r.seeds) for r in halving(2, 160)] == [(2, 80, (0, 1))]
    assert [(r.candidates, r.epochs) for r in halving(5, 3)] == [(5, 2), (3, 2)]  # λ must grow
    recipe = RECIPES["cifar100-resnet32-isda"].shortened(40)
    assert (recipe.epochs, recipe.milestones) == (40, (20, 30))
    assert replace(recipe, epochs=160, milestones=(80, 120)) == RECIPES["cifar100-resnet32-isda"]
    assert RECIPES["cifar100-resnet32-isda"].shortened(1).milestones == (1,)


def test_an_interrupted_search_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds of two epochs each: the second one finds the runs of the first."""
    words = ["compare", *QUICK, "--lambda-0", "auto", "--candidates", "0.5", "1", "2"]
    words += ["--seeds", "0"]

    def killed(plans: Sequence[Plan], options: Options) -> list[Run]:
        if not plans[0].recipe.hold_out:
            raise KeyboardInterrupt
        return train(plans, options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", killed)
        assert main(words) == 130
    before = {run.folder: run.metrics() for run in load_runs("runs")}
    assert len(before) == 5  # 3 candidates with one seed, 2 of them with two
    assert main(words) == 2
    assert "already holds a run: use --resume" in capsys.readouterr().err
    trained: list[Plan] = []

    def noted(plans: Sequence[Plan], options: Options) -> list[Run]:
        trained.extend(plan for plan in plans if not plan.recipe.hold_out)
        return train(plans, options)

    monkeypatch.setattr(loop, "train", noted)
    assert main([*words, "--resume"]) == 0
    assert [plan.recipe.method for plan in trained] == ["ce", "isda"]
    after = {run.folder: run.metrics() for run in load_runs("runs")}
    assert {folder: after[folder] for folder in before} == before  # not trained again
    assert len(after) == 7


def test_a_candidate_that_fails_is_left_out(
    trainer: Callable[..., Trainer],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = trainer(lambda recipe, _: 10 - recipe.lambda_0)
    usual = stand_in.__call__

    def call(plans: Sequence[Plan], options: Options) -> list[Run]:
        runs = usual([plan for plan in plans if plan.recipe.lambda_0 < 1], options)
        if len(runs) < len(plans):
            raise RunsFailed(["it diverged"], runs, len(plans))
        return runs

    monkeypatch.setattr(loop, "train", call)
    assert main(["compare", "--lambda-0", "auto"]) == 0
    assert "0.75" in re.search(r"^.*chosen$", capsys.readouterr().out, re.MULTILINE)[0]


def test_in_a_queue(trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]) -> None:
    stand_in = trainer(lambda recipe, _: 3 + abs(recipe.lambda_0 - 0.25))
    Path("queue").write_text("compare --lambda-0 auto --seeds 4\n")
    assert main(["queue", "queue"]) == 0
    assert fields(stand_in.calls[-1]) == [(0.0, 20, 0, 4), (0.25, 20, 0, 4)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--candidates", "1"], "--candidates requires --lambda-0 auto"),
        (["--lambda-0", "auto", "--candidates"], "candidates must be different numbers >= 0"),
        (["--lambda-0", "auto", "--candidates", "1", "1"], "candidates must be different"),
        (["--lambda-0", "auto", "--epochs", "1"], "epochs must be >= 2 for lambda_0"),
        (["--lambda-0", "auto", "--hold-out", "9999"], "must be between 1 and 1437, got 9999"),
        (["--lambda-0", "automatic"], "error parsing --lambda-0: could not convert string"),
    ],
)
def test_input_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_too_few_images_to_hold_some_out(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        for number in range(2):  # of which one is a test image of one class
            make_image(Path("photos", name, f"{number}.png"), (8, 8), number)
    words = ["--data", "imagefolder:photos", "--network", "resnet8", "--lambda-0", "auto"]
    assert main(["compare", *words]) == 2
    printed = capsys.readouterr()
    assert "must have two or more training images of each class" in printed.err
    assert "got 3 images of 2 classes" in printed.err
    assert not printed.out  # no plan of what cannot be trained


def test_other_flags_are_kept() -> None:
    task = compare.plan(["--seeds", "3", "--lambda_0", "auto", "--epochs", "7"])
    assert isinstance(task, compare.Compare)
    assert (task.seeds, task.recipe.epochs, task.candidates) == ((3,), 7, None)
