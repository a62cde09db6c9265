"""The search for λ₀: what is trained, chosen and recorded, and resume after a kill.

Most tests train nothing: a stand-in writes records with made-up errors.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_distributed import on_two

from isda.experiments.cli import run as run_command
from isda.experiments.commands import lambda_search
from isda.experiments.commands.search import Search, SearchResult
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.errors import InputError
from isda.experiments.recipes import RECIPES, Start
from isda.experiments.records import Run, load_runs
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.training_step import Lane

main = partial(run_command, "search")

DIGITS = RECIPES["digits-resnet8-isda"]
QUICK = ["--epochs", "2", "--batch-size", "128", "--hold-out", "1200", "--device", "cpu"]
QUICK += ["--candidates", "0.25", "1", "--final-seeds", "3"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def search(recipe: Recipe, name: str | None = None, **given: Any) -> SearchResult | None:
    return Search(recipe, Start(RECIPES.get(name or "", recipe), name), **given).search()


class Trainer:
    """Stand-in for ``train`` that writes records; the error is a function of recipe and seed."""

    def __init__(self, error: Callable[[Recipe, int], float]) -> None:
        self.error = error
        self.calls: list[list[Plan]] = []
        self.options: list[Options] = []

    def __call__(self, plans: Sequence[Plan], options: Options) -> list[Run]:
        self.calls.append(list(plans))
        self.options.append(options)
        runs = []
        for plan in plans:
            run = RunFolder.create(
                options.out, plan.name, plan.recipe, plan.seed, resume=options.resume
            )
            run.rewind(0)
            for epoch in range(plan.recipe.epochs):
                # far off before the epochs of the result; their offsets cancel out
                number = max(1, min(10, plan.recipe.epochs // 4))
                last = epoch - plan.recipe.epochs + number
                offset = 50.0 if last < 0 else 0.01 * (last - (number - 1) / 2)
                run.append(
                    {"epoch": epoch, "test_error": self.error(plan.recipe, plan.seed) + offset}
                )
            runs.append(run)
        return runs


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    def install(error: Callable[[Recipe, int], float]) -> Trainer:
        stand_in = Trainer(error)
        monkeypatch.setattr(loop, "train", stand_in)
        return stand_in

    return install


def fields(plans: Sequence[Plan]) -> list[tuple[float, int, int]]:
    return [(plan.recipe.lambda_0, plan.recipe.hold_out, plan.seed) for plan in plans]


# Choosing


def test_the_lowest_mean_error_is_chosen(trainer: Callable[..., Trainer]) -> None:
    """The first seed alone would choose 0.5, and the test set 0.1."""
    validation = {0.1: (9.0, 8.0), 0.25: (7.0, 5.0), 0.5: (4.0, 12.0)}
    stand_in = trainer(
        lambda recipe, seed: validation[recipe.lambda_0][seed] if recipe.hold_out
        else 30 * recipe.lambda_0 + seed
    )  # fmt: skip
    result = search(
        replace(DIGITS, hold_out=100), "digits-resnet8-isda", candidates=(0.1, 0.25, 0.5),
        seeds=(0, 1), final_seeds=(4, 2),
    )  # fmt: skip
    assert result is not None
    first, second = stand_in.calls  # every candidate in one call: side by side
    assert fields(first) == [(c, 100, seed) for c in (0.1, 0.25, 0.5) for seed in (0, 1)]
    assert fields(second) == [(0.25, 0, 4), (0.25, 0, 2)]
    same = replace(DIGITS, lambda_0=0.25, hold_out=0)
    assert all(replace(plan.recipe, lambda_0=0.25, hold_out=0) == same for plan in first + second)
    assert result.choice.chosen.recipe.lambda_0 == 0.25
    assert [side.error.mean for side in result.choice.rounds[-1]] == pytest.approx([8.5, 6, 8])
    assert result.choice.rounds[-1][1].error.std == pytest.approx(2**0.5)
    assert result.final.errors == pytest.approx({4: 11.5, 2: 9.5})
    assert result.final.error.mean == pytest.approx(10.5)


def test_a_search_may_start_from_cross_entropy(trainer: Callable[..., Trainer]) -> None:
    stand_in = trainer(lambda recipe, seed: 3 + recipe.lambda_0)
    main(["digits-resnet8-ce", "--method", "isda", "--candidates", "0.5", "1"])
    assert [plan.recipe.lambda_0 for plan in stand_in.calls[0]] == [0.5, 1.0]


@pytest.mark.parametrize("candidates", [(0.25, 0.5, 1.0), (1.0, 0.5, 0.25)])
def test_of_equal_errors_the_smaller_is_chosen(
    candidates: tuple[float, ...], trainer: Callable[..., Trainer]
) -> None:
    errors = {
        0.25: 1.39860141,
        0.5: 1.39860138,
        1.0: 2.0,
    }  # 2 of 143 wrong, or 1 and 3 alternating, in float32
    trainer(lambda recipe, _: errors[recipe.lambda_0])
    result = search(DIGITS, candidates=candidates)
    assert result is not None
    assert result.choice.chosen.recipe.lambda_0 == result.final.recipe.lambda_0 == 0.25


def test_the_baseline_is_shown_and_not_chosen(
    trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = trainer(lambda recipe, seed: 3 + recipe.lambda_0 + seed)
    main(["--candidates", "2", "1", "--seeds", "0", "1", "--with-baseline", "--hold-out", "99"])
    names = [f"{plan.name}/{plan.seed}" for plan in stand_in.calls[0]]
    assert names[:3] == [
        "digits-resnet8-ce+hold_out=99/0",
        "digits-resnet8-ce+hold_out=99/1",
        "digits-resnet8-isda+lambda_0=2.0+hold_out=99/0",
    ]
    assert stand_in.calls[0][0].recipe == replace(DIGITS.baseline(), hold_out=99)
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r" {2,}", line) for line in lines]
    assert rows[0] == ["λ₀", "validation error, %", "seeds"]
    assert rows[2:5] == [
        ["cross entropy", "3.50 ± 0.71", "2"],
        ["2", "5.50 ± 0.71", "2"],
        ["1", "4.50 ± 0.71", "2", "← chosen"],
    ]
    assert lines[6] == "λ₀ = 1, trained on all images: test error 5.00 ± 1.00 % (3 seeds)."
    assert lines[7] == "runs/digits-resnet8-isda.search.json"


# Defaults and names


@pytest.mark.parametrize(
    ("name", "candidates", "hold_out"),
    [
        ("digits-resnet8-isda", [0.1, 0.25, 0.5, 0.75, 1], 143),  # of 1438
        ("cifar10-resnet32-isda", [0.1, 0.25, 0.5, 0.75, 1], 5000),
        ("cifar100-wide_resnet28_10-cutout_isda", [0.1, 0.25, 0.5, 0.75, 1], 5000),
        ("imagenet-resnet50-isda", [1, 2.5, 5, 7.5, 10], 50000),
    ],
)
def test_defaults_and_names(
    name: str, candidates: list[float], hold_out: int, trainer: Callable[..., Trainer]
) -> None:
    stand_in = trainer(lambda recipe, _: recipe.lambda_0)
    main([name])
    assert fields(stand_in.calls[0]) == [(c, hold_out, 0) for c in candidates]
    assert fields(stand_in.calls[1]) == [(candidates[0], 0, seed) for seed in (0, 1, 2)]
    for plan in stand_in.calls[0]:
        own = plan.recipe.lambda_0 == RECIPES[name].lambda_0  # names contain the changed fields
        changed = "" if own else f"+lambda_0={plan.recipe.lambda_0}"
        assert plan.name == f"{name}{changed}+hold_out={hold_out}"
    changed = "" if RECIPES[name].lambda_0 == candidates[0] else f"+lambda_0={candidates[0]:.1f}"
    assert {plan.name for plan in stand_in.calls[1]} == {name + changed}
    assert Path(f"runs/{name}.search.json").exists()


def test_few_images_of_many_classes(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the images would not contain all classes."""
    arrays = load_data("digits")
    assert isinstance(arrays, ImageArrays)
    few = replace(arrays, train_target=arrays.train_target[:60])
    monkeypatch.setattr(lambda_search, "load_images", lambda *_, **__: few)
    stand_in = trainer(lambda *_: 1.0)
    search(DIGITS)
    assert stand_in.calls[0][0].recipe.hold_out == 10


def test_changed_fields_are_in_the_names(trainer: Callable[..., Trainer]) -> None:
    stand_in = trainer(lambda recipe, _: recipe.lambda_0)
    main(["--epochs", "3", "--hold-out", "7", "--candidates", "1"])
    assert stand_in.calls[0][0].name == "digits-resnet8-isda+epochs=3+lambda_0=1.0+hold_out=7"
    assert stand_in.calls[1][0].name == "digits-resnet8-isda+epochs=3+lambda_0=1.0"
    assert Path("runs/digits-resnet8-isda+epochs=3.search.json").exists()
    main(["--data", "imagefolder:/my/birds", "--network", "timm:resnet18", "--hold-out", "7"])
    assert stand_in.calls[2][0].name == "birds-timm_resnet18-isda+lambda_0=0.1+hold_out=7"
    assert stand_in.calls[2][0].recipe.data == "imagefolder:/my/birds"
    assert Path("runs/birds-timm_resnet18-isda.search.json").exists()


def test_record(trainer: Callable[..., Trainer]) -> None:
    trainer(lambda recipe, seed: recipe.lambda_0 + 2 * seed + bool(recipe.hold_out))
    main(["--out", "here", "--candidates", "1", "0.5", "--seeds", "0", "1", "--hold-out", "9"])
    record = json.loads(Path("here/digits-resnet8-isda.search.json").read_text())
    assert record["hold_out"] == 9
    assert record["chosen"] == 0.5
    expected = {
        "name": "digits-resnet8-isda+lambda_0=1.0+hold_out=9", "method": "isda", "lambda_0": 1.0,
        "mean": 3.0, "std": 2**0.5, "seeds": [0, 1], "errors": [2.0, 4.0],
    }  # fmt: skip
    one, other = record["candidates"]
    folders = one.pop("runs")
    assert one == {key: pytest.approx(value) if key in ("mean", "std", "errors") else value
                   for key, value in expected.items()}  # fmt: skip
    assert folders == [f"{expected['name']}/{seed}" for seed in (0, 1)]
    assert other["lambda_0"] == 0.5
    assert record["final"]["errors"] == pytest.approx([0.5, 2.5, 4.5])
    for folder in record["final"]["runs"]:
        assert Run(Path("here") / folder).recipe == DIGITS
    assert not list(Path("here").glob("*.new"))


# Input errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits-resnet8-ce"], "method must be isda to search for its lambda_0, got 'ce'"),
        (["--method", "focal", "--lambda-0", "0"], "method must be isda"),
        (["digits-resnet9-isda"], "unknown recipe 'digits-resnet9-isda'; did you mean"),
        (["--lambda-0", "0.3"], "isda search chooses lambda_0: give its values with --cand"),
        (["--candidates"], "candidates must be different numbers >= 0, got none"),
        (["--candidates", "-0.5", "1"], "candidates must be different numbers >= 0, got -0.5 1"),
        (["--candidates", "1", "0.5", "1.0"], "candidates must be different numbers >= 0, got 1 "),
        (["--candidates", "nan"], "candidates must be different numbers >= 0, got nan"),
        (["--candidates", "inf"], "candidates must be different numbers >= 0, got inf"),
        (["--seeds", "1", "1"], "seeds must be different integers from 0 to 2³² - 1, got 1 1"),
        (["--seeds"], "seeds must be different integers from 0 to 2³² - 1, got none"),
        (["--final-seeds", "-1"], "final_seeds must be different integers from 0 to"),
        (["--final-seeds"], "final_seeds must be different integers from 0 to"),
        (["--hold-out", "1438"], "must be between 1 and 1437, got 1438"),
        (["--hold-out", "-1"], "hold_out must be >= 0, got -1"),
        (["--device", "tpu"], "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    ],
)  # fmt: skip
def test_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        main(arguments)
    assert not Path("runs").exists()


def test_help_shows_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    flags = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    assert {"--candidates", "--seeds", "--final-seeds", "--with-baseline", "--hold-out"} <= flags
    assert {"--epochs", "--out", "--resume", "--device"} <= flags


# Resume


def test_existing_runs(trainer: Callable[..., Trainer]) -> None:
    stand_in = trainer(lambda recipe, _: recipe.lambda_0)
    arguments = ["--candidates", "0.5", "1", "--hold-out", "9"]
    main(arguments)
    with pytest.raises(InputError, match="already holds a run: use --resume or a different --out"):
        main(arguments)
    # an existing run of the final training is found at the start
    RunFolder.create("new", "digits-resnet8-isda+lambda_0=1.0", replace(DIGITS, lambda_0=1.0), 2)
    with pytest.raises(InputError, match=r"lambda_0=1\.0/2 already holds a run: use"):
        main([*arguments, "--out", "new"])
    assert len(stand_in.calls) == 2
    main([*arguments, "--resume"])
    assert [options.resume for options in stand_in.options] == [False, False, True, True]


def test_an_unfinished_run_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(plans: Sequence[Plan], options: Options) -> list[Run]:
        return [RunFolder.create(options.out, plan.name, plan.recipe, plan.seed) for plan in plans]

    monkeypatch.setattr(loop, "train", nothing)
    with pytest.raises(InputError, match="no finished run of"):
        search(replace(DIGITS, hold_out=9))


def contents() -> dict[str, Any]:
    """All metrics of all runs, except times."""
    return {
        str(run.folder): [
            {key: value for key, value in line.items() if "second" not in key}
            for line in run.metrics()
        ]
        for run in load_runs("runs")
    }


def test_a_search_on_digits_resumes_after_a_kill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class SpiedLane(Lane):
        def __init__(self, recipe: Recipe, seed: int, data: ImageArrays, *rest: Any, **more: Any):
            seen.append((recipe, data))
            super().__init__(recipe, seed, data, *rest, **more)

    def killed(plans: Sequence[Plan], options: Options) -> list[Run]:
        if not plans[0].recipe.hold_out:
            raise KeyboardInterrupt
        return train(plans, options)

    seen: list[tuple[Recipe, ImageArrays]] = []
    monkeypatch.setattr("isda.experiments.training.loop.Lane", SpiedLane)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            main(QUICK)
    assert capsys.readouterr().out == ""
    assert not list(Path("runs").glob("*.json"))
    before = contents()
    assert len(before) == 2

    main([*QUICK, "--resume"])
    printed = capsys.readouterr().out
    after = contents()
    assert {folder: after[folder] for folder in before} == before  # not trained again
    (new,) = after.keys() - before.keys()

    means = {
        Run(folder).recipe.lambda_0: lines[-1]["test_error"]  # a quarter of 2 epochs, at least 1
        for folder, lines in before.items()
    }
    chosen = min(sorted(means), key=means.__getitem__)
    final = Run(new)
    assert (final.recipe.lambda_0, final.recipe.hold_out, final.seed) == (chosen, 0, 3)
    for lambda_0, mean in means.items():
        mark = " +← chosen" if lambda_0 == chosen else "$"
        assert re.search(rf"^{lambda_0:g} +{mean:.2f} +1{mark}", printed, flags=re.MULTILINE)
    error = after[new][-1]["test_error"]
    assert f"λ₀ = {chosen:g}, trained on all images: test error {error:.2f} % (1 seed)." in printed

    # candidates used neither the test images nor, in training, the held-out images
    whole = load_data("digits")
    assert isinstance(whole, ImageArrays)
    for recipe, data in seen:
        if recipe.hold_out:
            assert (len(data.train_images), len(data.test_images)) == (238, 1200)
            parts = torch.cat([data.train_images, data.test_images]).flatten(1).cpu()
            rows, expected = (sorted(map(tuple, images.tolist()))
                              for images in (parts, whole.train_images.flatten(1)))  # fmt: skip
            assert rows == expected
        else:
            assert torch.equal(data.train_images.cpu(), whole.train_images)
            assert torch.equal(data.test_images.cpu(), whole.test_images)
    assert {recipe.hold_out for recipe, _ in seen} == {0, 1200}

    # an uninterrupted search ends with the same numbers
    main([*QUICK, "--out", "other"])
    for folder, lines in after.items():
        other = Run(Path("other") / Path(folder).relative_to("runs")).metrics()
        assert [line["test_error"] for line in other] == [line["test_error"] for line in lines]
    records = [next(Path(out).glob("*.json")).read_text() for out in ("runs", "other")]
    assert records[0] == records[1]


# Several processes


def search_as_rank(rank: int) -> None:
    def noted(plans: Sequence[Plan], options: Options) -> list[Run]:
        with open(f"rank{rank}", "a") as file:
            file.writelines(f"{plan}\n" for plan in plans)
        return train(plans, options)

    loop.train = noted  # this process is used for nothing else
    # nothing is learned, so all candidates tie: the smallest wins
    result = search(
        replace(DIGITS, epochs=2, batch_size=128, learning_rate=1e-12, hold_out=1200),
        candidates=(1.0, 0.5),
        final_seeds=(0,),
        options=Options(device="cpu"),
    )
    assert (result is None) == (rank == 1)  # rank 0 writes


@pytest.mark.ddp
def test_two_processes_choose_the_same() -> None:
    assert on_two(search_as_rank) == [0, 0]
    (path,) = Path("runs").glob("*.search.json")
    assert json.loads(path.read_text())["final"]["lambda_0"] == 0.5
    one, other = (Path(f"rank{rank}").read_text().splitlines() for rank in range(2))
    assert len(one) == 3
    assert one == other
