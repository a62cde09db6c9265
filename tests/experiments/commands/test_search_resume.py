"""Search for λ₀: existing runs, resume after a kill, and several processes."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import search_trainer
import torch
from command_line import contents
from programs import on_two
from search_trainer import DIGITS, Trainer, main, search

from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.errors import InputError
from isda.experiments.records import Run
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder
from isda.experiments.training.training_step import Lane

# fixtures
elsewhere, trainer = search_trainer.elsewhere, search_trainer.trainer

QUICK = ["--epochs", "2", "--batch-size", "128", "--hold-out", "1200", "--device", "cpu"]
QUICK += ["--candidates", "0.25", "1", "--final-seeds", "3"]


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
    before = contents("runs")
    assert len(before) == 2

    main([*QUICK, "--resume"])
    printed = capsys.readouterr().out
    after = contents("runs")
    assert {folder: after[folder] for folder in before} == before  # not trained again
    (new,) = after.keys() - before.keys()

    means = {
        Run(f"runs/{folder}").recipe.lambda_0: lines[-1][
            "test_error"
        ]  # a quarter of 2 epochs, at least 1
        for folder, lines in before.items()
    }
    chosen = min(sorted(means), key=means.__getitem__)
    final = Run(f"runs/{new}")
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
    assert contents("other") == after
    records = [next(Path(out).glob("*.json")).read_text() for out in ("runs", "other")]
    assert records[0] == records[1]


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
