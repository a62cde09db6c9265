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
from isda.experiments.training.width import _read, candidates, choose_width, fastest_width

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
        self._lanes: list[Lane] = []

        def seconds(runner: SideBySide, size: int) -> float:
            number = len(runner.lanes)
            self.timed.append(number)
            if number not in times:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return times[number]

        monkeypatch.setattr(SideBySide, "seconds_per_step", seconds)

    def lanes(self, number: int) -> Sequence[Lane]:
        for seed in range(len(self._lanes), number):
            self._lanes.append(Lane(RECIPE, seed, self.data, DEVICE))
        return self._lanes[:number]


def test_choice() -> None:
    # ResNet-32 on an H200, seconds per epoch and run: 0.495 with 5, 0.46 with 6, 0.53 with 10
    assert choose_width({5: 5 * 0.495, 6: 6 * 0.46, 10: 10 * 0.53}) == 6
    assert choose_width({1: 1.0, 2: 2.0, 3: 3.1}) == 1  # nothing to gain
    assert choose_width({4: 4.0, 6: 5.95, 8: 7.9}) == 4  # equal within two percent
    assert candidates(2, 6) == [2]
    assert candidates(100, 3) == [2, 3, 4]


def width(bench: Bench, runs: int, expected: int, options: Options, **changes: object) -> int:
    recipe = replace(RECIPE, **changes)  # type: ignore[arg-type]
    return fastest_width(recipe, runs, expected, bench.lanes, options, DEVICE)


def test_measured_once(data, monkeypatch, tmp_path: Path, capsys) -> None:
    bench = Bench(data, monkeypatch, {4: 0.0050, 6: 0.0066, 8: 0.0100})
    options = Options(out=tmp_path / "runs")
    assert width(bench, 10, 6, options) == 6
    assert bench.timed == [4, 6, 8]
    shown = capsys.readouterr().err
    assert "resnet8, ms per step and run by number of runs side by side: 4: 1.25, 6: 1.10" in shown
    assert shown.endswith("using 6\n")
    # known for fewer runs and for other losses, too
    assert [width(bench, runs, 6, options, method="lq") for runs in (10, 7, 6, 5)] == [6, 6, 6, 5]
    assert bench.timed == [4, 6, 8]
    # other batch and image sizes are measured, and so is the first one if the file is damaged
    assert width(bench, 10, 6, options, batch_size=15) == 6
    assert width(bench, 10, 6, options, image_size=64) == 6
    assert len(bench.timed) == 9
    path = tmp_path / "runs" / "side_by_side.json"
    assert len(json.loads(path.read_text())) == 3
    for damage in ("[", "{}"):
        path.write_text(damage)
        bench.timed.clear()
        assert width(bench, 10, 6, options) == 6
        assert bench.timed == [4, 6, 8]


DAMAGED = ["no", {"0": 1.0}, {"-6": 1.0}, {"6": "1"}, {"6": -1.0}, {"4": math.nan, "6": 1.0},
           {"6": True}, {"6": 10**400}, {"six": 1.0}, [6]]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["[", "[]", "[" * 100_000, *(json.dumps({"key": value}) for value in DAMAGED)],
    ids=lambda content: content[:20],
)
def test_damaged_measurements_are_not_used(content: str, tmp_path: Path) -> None:
    path = tmp_path / "side_by_side.json"
    path.write_text('{"key": {"6": 1.0}}')
    assert _read(path) == {"key": {6: 1.0}}
    path.write_text(content)
    assert _read(path) == {}


def test_only_missing_numbers_are_measured(data, monkeypatch, tmp_path: Path) -> None:
    bench = Bench(data, monkeypatch, {4: 0.0050, 6: 0.0066, 7: 0.0080, 8: 0.0100})
    options = Options(out=tmp_path)
    assert width(bench, 7, 6, options) == 6
    assert width(bench, 20, 6, options) == 6
    assert bench.timed == [4, 6, 7, 8]


def test_measurements_travel_with_the_compiled_code(data, monkeypatch, tmp_path: Path) -> None:
    bench = Bench(data, monkeypatch, {4: 0.0050, 6: 0.0090, 8: 0.0100})
    cache = tmp_path / "cache"
    assert width(bench, 10, 6, Options(out=tmp_path / "one", compile_cache=cache)) == 4
    assert width(bench, 10, 6, Options(out=tmp_path / "other", compile_cache=cache)) == 4
    assert bench.timed == [4, 6, 8]
    assert [path.name for path in tmp_path.rglob("*.json")] == ["side_by_side.json"]


def test_a_short_command_does_not_measure(data, monkeypatch, tmp_path: Path) -> None:
    """Of ten minutes, a measurement would take more than it can save."""
    bench = Bench(data, monkeypatch, {4: 0.0050, 6: 0.0090, 8: 0.0100})
    short, long = (Options(out=tmp_path, minutes=minutes) for minutes in (9, 90))
    assert width(bench, 10, 6, short) == 6
    assert bench.timed == []
    assert width(bench, 10, 6, long) == 4
    assert width(bench, 10, 6, short) == 4  # known now


def test_out_of_memory(data, monkeypatch, tmp_path: Path) -> None:
    bench = Bench(data, monkeypatch, {4: 0.005})
    assert width(bench, 10, 6, Options(out=tmp_path)) == 4
    assert bench.timed == [4, 6]  # more runs do not fit, either
    bench = Bench(data, monkeypatch, {})
    assert width(bench, 10, 6, Options(out=tmp_path / "other")) == 6


def test_other_errors_are_left_to_the_training(data, tmp_path: Path) -> None:
    def create(number: int) -> list[Lane]:
        raise RuntimeError("the network does not accept these images")

    assert fastest_width(RECIPE, 10, 6, create, Options(out=tmp_path), DEVICE) == 6
    assert not list(tmp_path.iterdir())


def test_nothing_to_measure(data, monkeypatch, tmp_path: Path) -> None:
    bench = Bench(data, monkeypatch, {})
    options = Options(out=tmp_path)
    assert width(bench, 10, 1, options) == 1
    assert width(bench, 1, 6, options) == 1
    assert width(bench, 5, 6, options) == 5  # all of them
    # fewer steps in an epoch than are timed
    assert width(bench, 10, 6, options, batch_size=64) == 6
    assert bench.timed == []
    assert not (tmp_path / "side_by_side.json").exists()


def test_runs_of_a_seed_stay_together() -> None:
    def whole(methods: int, seeds: int, width: int) -> int:
        plans = [Plan(f"{method}", RECIPE, seed)
                 for seed in range(seeds) for method in range(methods)]  # fmt: skip
        return groups.whole_seeds(plans, width)

    assert [whole(2, 5, width) for width in (1, 2, 3, 4, 5, 6)] == [1, 2, 2, 4, 4, 6]
    assert [whole(3, 5, width) for width in (4, 6, 8)] == [3, 6, 6]
    assert whole(7, 3, 6) == 6  # does not fit in any case
    assert whole(1, 5, 4) == 4


def test_compiled_code_is_kept_for_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a queue that train the same network do not compile it again."""
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(groups, "_compiled", None)
    monkeypatch.setattr(groups, "_side_by_side", lambda *_: 2)
    gpu, counts = torch.device("cuda"), []
    for name in ("resnet110-ce", "resnet110-isda", "resnet32-isda", "resnet110-isda"):
        plans = [Plan(name, get_recipe(f"cifar100-{name}"), seed) for seed in range(3)]
        assert list(groups.groups(plans, [0, 1, 2], Options(), gpu, ImageStore())) == [[0, 1], [2]]
        counts.append(len(resets))
    assert counts == [1, 1, 2, 3]


def test_a_measurement_takes_steps_of_the_training(data) -> None:
    """The real clock, on a CPU: eight steps to capture, four times eight timed."""
    lanes = [Lane(RECIPE, seed, data, DEVICE) for seed in range(2)]
    assert SideBySide(lanes, capture=False).seconds_per_step(16) > 0
    assert [int(lane.steps) for lane in lanes] == [40, 40]


def test_a_cpu_trains_one_run_at_a_time() -> None:
    plans = [Plan("any", RECIPE, seed) for seed in range(10)]
    assert groups._side_by_side(plans, Options(), DEVICE, ImageStore()) == 1
