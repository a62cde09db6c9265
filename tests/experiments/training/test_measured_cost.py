"""Measured costs of tiny networks: time, memory, turns of the cases, what does not fit."""

import math
import os
from collections import Counter

import pytest
import torch
from costs import Machine, measure

from isda import ISDALoss
from isda.covariance import DiagonalCovariance, FullCovariance
from isda.experiments.cost_records import CASES
from isda.experiments.losses.baselines import CrossEntropyLoss
from isda.experiments.recipes import get_recipe
from isda.experiments.training import step_cost
from isda.experiments.training.memory import peak_host_memory
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.step_cost import measured_cost, random_images


def test_random_images(device: torch.device) -> None:
    options = {"num_classes": 13, "shape": (3, 5, 7), "device": device}
    data = random_images(230, **options)
    assert data.train_images.shape == (230, 3, 5, 7)
    assert data.train_images.dtype == torch.uint8
    assert data.test_images.shape == (1, 3, 5, 7)
    assert len(data.train_images.unique(dim=0)) == 230  # also across chunks
    images = data.train_images.double()
    deviation = 255 / math.sqrt(12)  # of a uniform number; 5 standard errors
    assert abs(images.mean() - 127.5) < 5 * deviation / math.sqrt(images.numel())
    assert sorted(Counter(data.train_target.tolist())) == list(range(13))
    assert data.num_classes == 13
    again = random_images(230, **options)
    assert torch.equal(again.train_images, data.train_images)
    assert torch.equal(again.train_target, data.train_target)


@pytest.mark.parametrize("network", ["resnet8", "timm:test_resnet"])
def test_measured_cost(network: str, device: torch.device) -> None:
    image_size = 8 if network == "resnet8" else 32
    rows = measured_cost(
        network,
        device=device,
        num_classes=7,
        image_size=image_size,
        batch_size=5,
        steps=2,
        repeats=2,
    )
    assert [row.case for row in rows] == list(CASES)
    on_gpu = device.type == "cuda"
    for row in rows:
        assert row.batch_size == 5
        assert row.precision == ("bf16" if on_gpu and network != "resnet8" else "fp32")
        assert row.milliseconds is not None
        assert row.milliseconds > 0
        assert row.added_percent == pytest.approx(
            100 * (row.milliseconds / rows[0].milliseconds - 1)
        )
        assert row.mebibytes is not None
        assert row.mebibytes > 0
        assert row.added_mebibytes == row.mebibytes - rows[0].mebibytes
        assert row.note == ""
    assert rows[0].added_percent == 0


def test_peak_host_memory() -> None:
    before = torch.empty(5, 2**18)  # not counted

    def step() -> torch.Tensor:
        nonlocal before
        first = torch.empty(2**18)  # 1 MiB
        second = torch.empty(2, 2**18)
        del first, before
        return second.add(1).sum()  # takes 2 MiB more, before the sum

    assert 4 * 2**20 <= peak_host_memory(step) < 4 * 2**20 + 100  # and a few numbers
    assert peak_host_memory(lambda: None) == 0


def test_host_memory_is_measured_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    peak_host_memory(lambda: torch.empty(3).sum())
    assert capfd.readouterr() == ("", "")
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_added_memory_is_the_state(device: torch.device) -> None:
    rows = measured_cost(
        "resnet8", device=device, num_classes=1000, batch_size=8, steps=2, repeats=1
    )
    state = {"ce": 0, "diagonal": 2 * 1000 * 64, "full": 1000 * 64 * (64 + 1)}
    for row in rows:
        assert row.added_mebibytes is not None
        least = 4 * state[row.case] / 2**20
        assert least <= row.added_mebibytes < least + 8  # other memory of a step


def test_criteria_are_exchanged(device: torch.device) -> None:
    data = random_images(12, num_classes=10, shape=(1, 8, 8), device=device)
    recipe = get_recipe("digits-resnet8-isda")
    trained = step_cost._Bench(recipe, data, device)
    lane = trained._lane
    weight = lane.network.get_classifier().weight
    for case, structure in (("diagonal", DiagonalCovariance), ("full", FullCovariance)):
        assert trained.seconds(case) > 0
        criterion, _ = trained._cases[case]
        before = int(criterion.estimator.count.sum())
        with trained._using(criterion):
            assert isinstance(lane.criterion, ISDALoss)
            assert type(lane.criterion.estimator) is structure
            SideBySide([lane], capture=False).train_epoch()
            assert lane.criterion.estimator.count.sum() == before + 12
            assert before == 24  # one warm-up, one timed
            assert float(lane.progress) == 0.5  # λ > 0
            assert weight.grad is not None
        assert weight.grad is None
    assert isinstance(lane.criterion, CrossEntropyLoss)


def test_cases_take_turns() -> None:
    machine = Machine()
    rows = measure(lambda: machine)
    assert machine.asked == [*CASES] * 5
    # without interleaving, the drift would have been 0.5 and 1.0 percent
    assert rows[1].added_percent == pytest.approx(5, abs=0.15)
    assert rows[2].added_percent == pytest.approx(50, abs=0.4)
    assert [row.mebibytes for row in rows] == [100, 101, 300]
    assert [row.added_mebibytes for row in rows] == [0, 1, 200]


def test_medians() -> None:
    times = {"ce": [2.0, 100.0, 1.0], "diagonal": [2.2, 2.4, 2.0], "full": [3.0, 3.0, 3.0]}
    rows = step_cost._summary(times, {}, batch_size=4, precision="fp32")
    assert [row.milliseconds for row in rows] == pytest.approx([2000, 2200, 3000])
    assert [row.added_percent for row in rows] == pytest.approx([0, 10, 50])
    assert [row.spread_percent for row in rows] == pytest.approx([4900, 100 / 11, 0])
    assert [row.mebibytes for row in rows] == [None, None, None]


def test_cases_that_do_not_fit_in_memory() -> None:
    rows = measure(lambda: Machine(room=2))
    assert [row.note for row in rows] == ["", "", "does not fit"]
    assert rows[1].added_percent is not None
    assert rows[2].milliseconds is rows[2].added_percent is rows[2].mebibytes is None

    def no_room() -> Machine:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("capture was not ended")  # as in a failed capture

    assert [row.note for row in measure(no_room)] == ["does not fit"] * 3

    alone = step_cost._summary({"full": [1.0]}, {}, batch_size=4, precision="fp32")
    assert alone[2].note == "does not fit"  # no baseline

    def broken() -> Machine:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measure(broken)


def test_statistics_larger_than_host_memory_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    full = 4 * 10 * 64 * 64  # bytes of ten matrices
    options = {"device": torch.device("cpu"), "batch_size": 4, "steps": 1, "repeats": 1}
    monkeypatch.setattr(step_cost, "host_memory", lambda: 2 * full)
    assert [row.note for row in measured_cost("resnet8", **options)] == ["", "", "does not fit"]
    others = 10_000  # bytes of means and counts
    monkeypatch.setattr(step_cost, "host_memory", lambda: 2 * (full + others))
    assert [row.note for row in measured_cost("resnet8", **options)] == ["", "", ""]
