"""Number of runs side by side: candidates, choice, and measurements that are kept."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.recipes import get_recipe
from isda.experiments.settings import Options
from isda.experiments.training import groups
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import ImageStore
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane
from isda.experiments.training.width import candidates, choose_width, fastest_width

RECIPE = replace(get_recipe("digits-resnet8-ce"), batch_size=16)
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> ImageArrays:
    found = load_data("digits")
    assert isinstance(found, ImageArrays)
    return found


class Bench:
    """Lanes, and a clock that shows what a test wants."""

    def __init__(
        self, data: ImageArrays, monkeypatch: pytest.MonkeyPatch, times: dict[int, float]
    ) -> None:
        self.timed: list[int] = []
        self.data = data

        def seconds(runner: SideBySide, size: int) -> float:
            number = len(runner.lanes)
            self.timed.append(number)
            if number not in times:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return times[number]

        monkeypatch.setattr(SideBySide, "seconds_per_step", seconds)

    def lanes(self, number: int) -> Sequence[Lane]:
        return [Lane(RECIPE, seed, self.data, DEVICE) for seed in range(number)]


def test_choice() -> None:
    # ResNet-32 on an H200, seconds per epoch and run: 0.495 with 5, 0.46 with 6, 0.53 with 10
    assert choose_width({5: 5 * 0.495, 6: 6 * 0.46, 10: 10 * 0.53}) == 6
    assert choose_width({1: 1.0, 2: 2.0, 3: 3.1}) == 1  # nothing to gain
    assert choose_width({4: 4.0, 6: 5.95, 8: 7.9}) == 4  # equal within two percent
    assert candidates(2, 6) == [2]
    assert candidates(100, 3) == [2, 3, 4]


def test_measured_once_per_folder(data, monkeypatch, tmp_path: Path, capsys) -> None:
    bench = Bench(data, monkeypatch, {4: 0.0050, 6: 0.0066, 8: 0.0100})
    options = Options(out=tmp_path / "runs")
    assert fastest_width(RECIPE, 10, 6, bench.lanes, options) == 6
    assert bench.timed == [4, 6, 8]
    shown = capsys.readouterr().err
    assert "resnet8, ms per step and run by number of runs side by side: 4: 1.25, 6: 1.10" in shown
    assert shown.endswith("using 6\n")
    assert fastest_width(RECIPE, 10, 6, bench.lanes, options) == 6
    assert bench.timed == [4, 6, 8]
    # another network is measured, and so is the first one if the file is damaged
    assert fastest_width(replace(RECIPE, method="lq"), 10, 6, bench.lanes, options) == 6
    assert len(bench.timed) == 6
    path = tmp_path / "runs" / "side_by_side.json"
    assert len(json.loads(path.read_text())) == 2
    keys = json.loads(path.read_text())
    wrong: list[object] = ["no", {}, {"0": 1.0}, {"-6": 1.0}, {"9": 1.0}, {"6": "1"}, {"6": -1.0}]
    wrong += [{"4": math.nan, "6": 1.0}, {"6": True}, {"6": 10**400}, {"six": 1.0}, [6]]
    damages = [json.dumps(dict.fromkeys(keys, value)) for value in wrong]
    for number, damage in enumerate(["[", "[]", "[" * 100_000, *damages]):
        path.write_text(damage)
        bench.timed.clear()
        assert fastest_width(RECIPE, 10, 6, bench.lanes, options) == 6, damage[:80]
        assert bench.timed == [4, 6, 8], (number, damage[:80])


def test_out_of_memory(data, monkeypatch, tmp_path: Path) -> None:
    bench = Bench(data, monkeypatch, {4: 0.005})
    assert fastest_width(RECIPE, 10, 6, bench.lanes, Options(out=tmp_path)) == 4
    assert bench.timed == [4, 6]  # more runs do not fit, either
    bench = Bench(data, monkeypatch, {})
    assert fastest_width(RECIPE, 10, 6, bench.lanes, Options(out=tmp_path / "other")) == 6


def test_other_errors_are_left_to_the_training(data, tmp_path: Path) -> None:
    def create(number: int) -> list[Lane]:
        raise RuntimeError("the network does not accept these images")

    assert fastest_width(RECIPE, 10, 6, create, Options(out=tmp_path)) == 6
    assert not list(tmp_path.iterdir())


def test_nothing_to_measure(data, monkeypatch, tmp_path: Path) -> None:
    bench = Bench(data, monkeypatch, {})
    options = Options(out=tmp_path)
    assert fastest_width(RECIPE, 10, 1, bench.lanes, options) == 1
    assert fastest_width(RECIPE, 1, 6, bench.lanes, options) == 1
    large = replace(RECIPE, batch_size=64)  # fewer steps in an epoch than are timed
    assert fastest_width(large, 10, 6, bench.lanes, options) == 6
    assert bench.timed == []
    assert not (tmp_path / "side_by_side.json").exists()


def test_a_measurement_takes_steps_of_the_training(data) -> None:
    """The real clock, on a CPU: eight steps to capture, four times eight timed."""
    lanes = [Lane(RECIPE, seed, data, DEVICE) for seed in range(2)]
    assert SideBySide(lanes, capture=False).seconds_per_step(16) > 0
    assert [int(lane.steps) for lane in lanes] == [40, 40]


def test_a_cpu_trains_one_run_at_a_time() -> None:
    plans = [Plan("any", RECIPE, seed) for seed in range(10)]
    assert groups._side_by_side(plans, Options(), DEVICE, ImageStore()) == 1
