"""The training loop: metrics of epochs, order of runs, held-out images, device, TensorBoard."""

import math
import sys
import types
from dataclasses import replace

import pytest
import torch
import training_runs
from torch import Tensor
from torch.nn import functional as F
from training_runs import FEW, RECIPE, TIMES, assert_same_runs, checkpoint, records, train_until

from isda.experiments.data.arrays import ImageArrays, load_data, normalize
from isda.experiments.errors import InputError
from isda.experiments.networks import create_network
from isda.experiments.records import Run
from isda.experiments.settings import Options
from isda.experiments.training.loop import Plan, train

# fixtures
exact = training_runs.exact
options = training_runs.options
uninterrupted = training_runs.uninterrupted


def test_images_drawn_by_the_seed_are_held_out_first(options: Options) -> None:
    (run,) = train([Plan("held", replace(FEW, hold_out=100, epochs=1), 0)], options)
    assert checkpoint(run)["data"] == [70, 100, 10]


def test_the_epochs_of_a_run(uninterrupted: list[Run]) -> None:
    """The metrics contain learning rate and strength of the epoch."""
    for run in uninterrupted:
        lines = run.metrics()
        assert [line["epoch"] for line in lines] == [0, 1, 2, 3]
        rates = [0.5 * 0.05 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
        assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
        assert [line["strength"] for line in lines] == pytest.approx([0, 0.25, 0.5, 0.75])
        for line in lines:
            assert line["images_per_second"] == pytest.approx(238 / line["seconds"])
            assert 0 < line["seconds"] < 60
    one, other = (records(run) for run in uninterrupted)
    assert one != other
    assert (uninterrupted[0].seed, uninterrupted[1].seed) == (0, 1)


def test_runs_come_back_in_the_order_of_the_plans(options: Options) -> None:
    brief = replace(RECIPE, epochs=1)
    plans = [
        Plan("a", brief, 1),
        Plan("b", replace(brief, hold_out=1300), 0),  # other data in between
        Plan("a", brief, 0),
    ]
    runs = train(plans, options)
    assert [(run.name, run.seed) for run in runs] == [("a", 1), ("b", 0), ("a", 0)]
    # a run is the same alone and side by side
    (alone,) = train(plans[2:], replace(options, out=options.out / "alone"))
    assert_same_runs([runs[2]], [alone], without=(*TIMES, "side_by_side"))


def test_hold_out_trains_on_the_rest_and_evaluates_what_is_held_out(options: Options) -> None:
    recipe = replace(RECIPE, epochs=2, hold_out=1100, augment=(), ema=0.0, drop_rate=0.0)
    (run,) = train([Plan("held", recipe, 0)], options)
    state = checkpoint(run)
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    network = create_network("resnet8", num_classes=10, in_channels=1)
    network.load_state_dict(state["network"])
    network.eval()

    def error_and_loss(images: Tensor, target: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            logits = network(normalize(images, digits.mean, digits.std))
        wrong = (logits.argmax(1) != target).double().mean().item()
        return 100 * wrong, F.cross_entropy(logits, target).item()

    held = digits.hold_out(1100)
    everything = {image.numpy().tobytes() for image in digits.train_images}
    assert all(image.numpy().tobytes() in everything for image in held.test_images)
    line = run.metrics()[-1]
    error, loss = error_and_loss(held.test_images, held.test_target)
    # the same sums with another batch size
    assert line["test_loss"] == pytest.approx(loss, rel=1e-3)
    assert line["test_error"] == pytest.approx(error, abs=100 / 1100 * 1.01)
    assert line["test_loss"] != pytest.approx(
        error_and_loss(digits.test_images, digits.test_target)[1], rel=1e-3
    )
    count = held.train_target.bincount(minlength=10)
    assert torch.equal(state["criterion"]["estimator.count"], 2 * count)


def test_auto_is_a_gpu_if_there_is_one(options: Options) -> None:
    recipe = replace(RECIPE, epochs=1)
    (run,) = train([Plan("one", recipe, 0)], replace(options, device="auto"))
    assert (run.environments[0]["cuda"] is not None) == torch.cuda.is_available()


def test_tensorboard(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(options, tensorboard=True)
    plans = [Plan("one", replace(RECIPE, epochs=2), 0)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="--tensorboard needs the package tensorboard"):
        train(plans, options)
    assert not options.out.exists()

    written: list[tuple[object, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((folder, purge_step))

        def add_scalar(self, *scalar: object) -> None:
            written.append(scalar)

        def close(self) -> None:
            written.append(("closed",))

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (run,) = train(plans, options)
    assert written[0] == (str(run.folder), 0)
    assert written[-1] == ("closed",)
    expected = [(k, v, line["epoch"]) for line in run.metrics() for k, v in line.items()]
    assert written[1:-1] == expected
    written.clear()
    again = replace(options, out=options.out / "again")
    train_until(plans, again, 1)
    train(plans, replace(again, resume=True))
    assert [entry[1] for entry in written if len(entry) == 2] == [0, 1]
