"""Comparisons of a method with its baseline: tables, sentences, intervals, and curves of λ₀."""

import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from made_runs import CE, ISDA, expected_numbers, make_run, raw_errors

from isda.experiments.records import load_runs
from isda.experiments.report.comparison import (
    advice,
    comparison,
    comparison_rows,
    comparison_table,
    sentence,
    strengths,
)
from isda.experiments.report.figures import write_figures
from isda.experiments.report.intervals import difference, seeds_needed, signed


def test_comparison_table_and_sentence(out):
    result = comparison(load_runs(out), CE, ISDA)
    text = comparison_table(result)
    for number in expected_numbers(out):
        assert number in text
    one, other = (np.array(list(raw_errors(out, name).values())) for name in (CE, ISDA))
    ends = re.search(r"\((.*)\)", expected_numbers(out)[2])[1]  # with the signs of the table
    assert sentence(result) == (
        f"ISDA lowers the test error by {(one - other).mean():.2f} points "
        f"(95 % interval of the difference {ends}, 3 paired seeds)."
    )
    assert sentence(result) in text
    assert "0.510 ± 0.010" in text  # loss 0.50, 0.51, 0.52
    assert "3.10 ± 0.10" in text  # calibration error 3.0, 3.1, 3.2 %


def test_sentence_when_worse_equal_or_uncertain(tmp_path):
    for seed, (one, other) in enumerate([(10.0, 12.0), (10.0, 12.1), (10.1, 12.0)]):
        make_run(tmp_path / "worse", CE, seed, one)
        make_run(tmp_path / "worse", ISDA, seed, other)
        make_run(tmp_path / "same", CE, seed, 10.0)
        make_run(tmp_path / "same", ISDA, seed, 10.0)
        make_run(tmp_path / "noise", CE, seed, 10.0 + seed)
        make_run(tmp_path / "noise", ISDA, seed, 12.2 - 1.1 * seed)

    def words(folder: str) -> str:
        return sentence(comparison(load_runs(tmp_path / folder), CE, ISDA))

    assert re.fullmatch(
        r"ISDA raises the test error by 2\.00 points \(95 % interval of the difference "
        r"\+1\.\d\d to \+2\.\d\d, 3 paired seeds\)\.",
        words("worse"),
    )
    same = comparison(load_runs(tmp_path / "same"), CE, ISDA)
    assert sentence(same) == ("ISDA does not change the test error in any seed (3 paired seeds).")
    assert signed(same.difference) == "+0.00"  # no interval of zero width
    assert words("noise").startswith(
        "ISDA makes no significant difference to the test error: +0.10 points (95 % interval of "
        "the difference −"
    )


def test_one_seed_and_unpaired_seeds(tmp_path):
    make_run(tmp_path, CE, 0, 10.0)
    make_run(tmp_path, ISDA, 0, 9.0)
    result = comparison(load_runs(tmp_path), CE, ISDA)
    assert sentence(result) == (
        "ISDA lowers the test error by 1.00 points (1 seed); "
        "an interval needs at least 2 seeds per side."
    )
    assert "−1.00" in comparison_table(result)
    make_run(tmp_path, CE, 1, 10.2)
    make_run(tmp_path, ISDA, 2, 9.1)
    sides = [list(raw_errors(tmp_path, name).values()) for name in (CE, ISDA)]
    interval = scipy.stats.ttest_ind(*sides, equal_var=False).confidence_interval(0.95)
    result = comparison(load_runs(tmp_path), CE, ISDA)
    assert result.seeds == "2 / 2"
    words = sentence(result)
    ends = f"{-interval.high:.2f} to {-interval.low:.2f}".replace("-", "−")
    assert f"(95 % interval of the difference {ends}, 2 and 2 seeds)" in words
    make_run(tmp_path, CE, 3, 8.0)
    make_run(tmp_path, ISDA, 4, 11.0)
    answer, reason = advice(comparison(load_runs(tmp_path), CE, ISDA))
    assert answer == "Not clear from these seeds"
    assert "different seeds" in reason


def test_a_seed_without_a_partner_is_left_out_and_named(out):
    expected = expected_numbers(out)[2]
    make_run(out, CE, 3, 40.0)
    result = comparison(load_runs(out), CE, ISDA)
    assert signed(result.difference) == expected
    assert sentence(result).endswith("3 paired seeds; without 3, missing on one side).")


def test_isda_without_strength_does_not_replace_cross_entropy(tmp_path):
    make_run(tmp_path, CE, 0, 9.0)
    for lambda_0, error in ((0.0, 8.0), (0.5, 7.0), (1.0, 6.0)):
        make_run(tmp_path, f"{ISDA}+lambda_0={lambda_0}", 0, error, lambda_0=lambda_0)
    ((_, sides),) = strengths(load_runs(tmp_path))
    assert [round(side.error.mean) for side in sides.values()] == [9, 7, 6]
    assert list(sides) == [0.0, 0.5, 1.0]
    assert not strengths([run for run in load_runs(tmp_path) if "1.0" not in run.name])


def test_the_curve_of_a_search_needs_no_baseline(tmp_path):
    for lambda_0 in (0.25, 0.5):
        name = f"{ISDA}+lambda_0={lambda_0}+hold_out=99"
        make_run(tmp_path / "runs", name, 0, 9.0 - lambda_0, lambda_0=lambda_0, hold_out=99)
    files = write_figures(tmp_path / "figures", load_runs(tmp_path / "runs"))
    assert [file.name for file in files] == ["lambda_0-light.svg", "lambda_0-dark.svg"]
    assert "validation on 99 held-out images, λ₀ = 0.25: 8." in files[0].read_text()


def test_other_covariances_are_another_curve_of_lambda_0(tmp_path):
    make_run(tmp_path, CE, 0, 9.0)
    errors = {
        "": 8.0,
        "+lambda_0=2.0": 7.0,
        "+covariance=shared+lambda_0=2.0": 6.0,
        "+covariance=shared+lambda_0=1.0": 5.0,
        "+covariance=identity+lambda_0=2.0": 4.0,
    }
    for changes, error in errors.items():
        fields = dict(change.split("=") for change in changes.split("+")[1:])
        lambda_0 = float(fields.pop("lambda_0", 0.5))
        make_run(tmp_path, f"{ISDA}{changes}", 0, error, lambda_0=lambda_0, **fields)
    found = {
        title: {lambda_0: round(side.error.mean) for lambda_0, side in sides.items()}
        for title, sides in strengths(load_runs(tmp_path))
    }
    assert found == {
        "digits, ResNet-8": {0.0: 9, 0.5: 8, 2.0: 7},
        "digits, ResNet-8, covariance shared": {0.0: 9, 1.0: 5, 2.0: 6},
    }


def test_differences_without_spread_are_not_called_significant():
    change = difference({0: 10.0, 1: 11.0}, {0: 9.0, 1: 10.0})
    assert (change.interval, change.significant) == ((-1.0, -1.0), False)
    assert difference({0: 10.0, 1: 11.0}, {0: 9.0, 1: 10.001}).significant


def test_differences_of_one_image_in_float32_are_not_called_significant():
    """Errors as in records: every seed has one wrong image fewer, out of 359."""
    wrong = {0: 7, 1: 30, 2: 211}
    baseline, method = (
        {seed: float(100 * np.float32((count - less) / 359)) for seed, count in wrong.items()}
        for less in (0, 1)
    )
    change = difference(baseline, method)
    low, high = change.interval
    assert high - low > 0  # float32
    assert not change.significant


def test_held_out_images_are_not_called_test(tmp_path):
    for name in (CE, ISDA):
        make_run(tmp_path, name, 0, 10.0, hold_out=100)
    result = comparison(load_runs(tmp_path), CE, ISDA)
    assert "validation error" in comparison_table(result)
    assert "test error" not in comparison_table(result)


def test_advice_and_seeds_needed(tmp_path: Path) -> None:
    for seed, (one, other) in enumerate([(10.0, 9.0), (10.0, 8.8), (10.1, 9.0)]):
        make_run(tmp_path, CE, seed, one)
        make_run(tmp_path, ISDA, seed, other)
    assert advice(comparison(load_runs(tmp_path), CE, ISDA))[0] == "Yes"
    change = difference({0: 10.0, 1: 10.0, 2: 10.0}, {0: 9.9, 1: 9.5, 2: 10.05})
    needed = seeds_needed(change)
    assert needed is not None
    spread = np.std([-0.1, -0.5, 0.05], ddof=1)
    halves = [scipy.stats.t.ppf(0.975, n - 1) * spread / n**0.5 for n in (needed - 1, needed)]
    assert halves[0] >= abs(change.mean) > halves[1]
    assert seeds_needed(difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 1.01})) is None


@pytest.mark.parametrize(
    ("error", "nll", "ece", "answer", "note"),
    [
        (-1, -1, -1, "Yes", "Its NLL and ECE are lower."),
        (-1, 0, 0, "Yes", ""),
        (-1, -1, 1, "Yes, for its accuracy", "Its NLL is lower. Its ECE is higher: if you use"),
        (0, -1, -1, "Yes, for its probabilities", "Its NLL and ECE are lower. An error"),
        (0, -1, 1, "Not clear from these seeds", "Its NLL is lower. Its ECE is higher: if"),
        (0, 0, 0, "Not clear from these seeds", "An error difference of"),
        (1, -1, 0, "No", "Its NLL is lower."),
        (1, 0, 0, "No", ""),
    ],
)
def test_advice_considers_error_nll_and_ece(error, nll, ece, answer, note, tmp_path: Path) -> None:
    for seed, noise in enumerate([-0.001, 0.0, 0.002]):
        make_run(tmp_path, CE, seed, 10.0, metrics={"test_loss": 0.5, "test_ece": 0.05})
        changed = {"test_loss": 0.5 + 0.1 * nll + noise, "test_ece": 0.05 + 0.01 * ece + noise}
        make_run(tmp_path, ISDA, seed, 10 + error + 100 * noise, metrics=changed)
    found, reason = advice(comparison(load_runs(tmp_path), CE, ISDA))
    assert found == answer
    assert reason.startswith(note)
    assert bool(reason) == bool(note)


@pytest.mark.parametrize(
    ("last", "cell"),
    [
        ({"side_by_side": 1}, "+100 %"),
        ({"side_by_side": 2, "peak_mib": 5.0}, "+100 %"),  # with runs of the same method
        ({"side_by_side": 6}, "both trained side by side"),
    ],
)
def test_time_of_runs_side_by_side(last: dict[str, float], cell: str, tmp_path: Path) -> None:
    """The time of runs of both methods side by side does not tell which of them takes longer."""
    for name, seconds in ((CE, 1.0), (ISDA, 2.0)):
        run = make_run(tmp_path, name, 0, 10.0, epochs=0)
        for epoch in range(run.recipe.epochs):
            run.append({"epoch": epoch, "test_error": 10.0, "train_loss": 1.0,
                        "seconds": seconds, **last})  # fmt: skip
    rows = comparison_rows(comparison(load_runs(tmp_path), CE, ISDA))
    assert next(row for row in rows if row[0] == "s / epoch") == ["s / epoch", "1.00", "2.00", cell]
