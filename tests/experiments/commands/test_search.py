"""Search for λ₀: which is chosen, defaults and names, the record, input errors.

A stand-in writes records with made-up errors.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import search_trainer
from search_trainer import DIGITS, Trainer, fields, main, search

from isda.experiments.commands import lambda_search
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.errors import InputError
from isda.experiments.recipes import RECIPES
from isda.experiments.records import Run

# fixtures
elsewhere, trainer = search_trainer.elsewhere, search_trainer.trainer


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
