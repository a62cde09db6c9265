"""Runs side by side give the numbers of runs alone, also compiled or captured.

Tests marked gpu compare steps captured in CUDA graphs with steps that are not.
"""

import copy
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lanes
import pytest
import torch
from lanes import EVERYTHING, FINE_TUNING, RECIPE, assert_same_bits, tiny_arrays, train, values
from torch import Tensor

from isda import FullCovariance
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.folder_cache import decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.settings import Recipe
from isda.experiments.training import run_images
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

# fixtures
data, deterministic, full_precision = lanes.data, lanes.deterministic, lanes.full_precision
image_files = lanes.image_files


@pytest.mark.usefixtures("deterministic")
def test_side_by_side_equals_alone(data: ImageArrays, device: torch.device) -> None:
    recipes = [RECIPE, RECIPE.baseline(), EVERYTHING]
    alone = []
    for seed, recipe in enumerate(recipes):
        lane = Lane(recipe, seed, data, device)
        alone.append((lane, [row[0] for row in train([lane], 2)]))
    together = [Lane(recipe, seed, data, device) for seed, recipe in enumerate(recipes)]
    results = train(together, 2)
    for number, (lane, expected) in enumerate(alone):
        assert [row[number] for row in results] == expected
        assert_same_bits(values(lane), values(together[number]))


@pytest.mark.parametrize("network", ["resnet8", "wide_resnet16_8", "shake_shake26_2x32d"])
def test_lanes_share_compiled_code(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compilation for all lanes, losses and epochs; the last, smaller batch runs eagerly."""
    cpu = torch.device("cpu")
    graphs: list[str] = []
    compile_ = torch.compile

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append("network" if "conv2d" in graph.code else "batch")
        return graph.forward

    def counting(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        return compile_(function, dynamic=False, fullgraph=True, backend=backend)

    rate = 0.3 if network != "shake_shake26_2x32d" else 0.0
    recipe = replace(
        RECIPE, network=network, drop_rate=rate, augment=("crop", "flip"), batch_size=3
    )
    recipes = [recipe, recipe.baseline(), recipe]
    images = tiny_arrays(3, 8, cpu)  # five: batches of three and two
    expected = [Lane(recipe, seed, images, cpu) for seed, recipe in enumerate(recipes)]
    results = train(expected, 2)
    torch.compiler.reset()
    run_images.compile_once.cache_clear()
    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr(Lane, "_compiled", True)
    lanes = [Lane(recipe, seed, images, cpu) for seed, recipe in enumerate(recipes)]
    assert train(lanes, 2) == results
    for one, other in zip(lanes, expected, strict=True):
        assert_same_bits(values(one), values(other))
    assert sorted(graphs) == ["batch", "batch", "network"]  # batches of three and two images
    run_images.compile_once.cache_clear()
    torch.compiler.reset()


def test_a_failed_capture_is_one_warning(
    data: ImageArrays, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps run without a graph, with the same numbers; out of memory is an error."""
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("operation failed due to a previous error\nmore lines")

    monkeypatch.setattr(SideBySide, "_warm_up", lambda *_: None)
    monkeypatch.setattr(SideBySide, "_record", fail)
    one, other = (Lane(RECIPE, 1, data, device) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train([one], 2, capture=True) == train([other], 2)
    assert_same_bits(values(one), values(other))
    assert len(calls) == 1
    (message,) = [str(w.message) for w in caught if "captured" in str(w.message)]
    assert message.endswith("which is slower: operation failed due to a previous error")

    def exhaust(*_: object) -> None:
        try:
            raise torch.OutOfMemoryError("no memory")
        finally:
            raise RuntimeError("operation failed due to a previous error")

    monkeypatch.setattr(SideBySide, "_record", exhaust)
    with pytest.raises(RuntimeError, match="operation failed"):
        train([Lane(RECIPE, 1, data, device)], 1, capture=True)


# On a GPU: steps captured in CUDA graphs


@pytest.mark.gpu
def test_precision_of_products_does_not_show_in_the_curves() -> None:
    """Products of Eq. 4 in bfloat16, as in all bf16 recipes, and in float32.

    The two differ only by rounding, so the mean curves of eight seeds are closer to each other than
    the curves of two seeds.
    """
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    device, recipe = torch.device("cuda"), replace(RECIPE, precision="bf16", epochs=30)
    curves = {}
    for precision in ("high", "medium"):
        lanes = [Lane(recipe, seed, digits.to(device), device) for seed in range(8)]
        for lane in lanes:
            estimator = lane.criterion.estimator
            assert isinstance(estimator, FullCovariance)
            assert estimator.precision == "medium"
            estimator.precision = precision
        rows = train(lanes, recipe.epochs, capture=True)
        curves[precision] = torch.tensor(rows)[..., :2]  # loss and error: epochs, seeds, 2
    distance = (curves["high"].mean(1) - curves["medium"].mean(1)).square().mean(0).sqrt()
    spread = curves["high"].var(1).mean(0).sqrt()
    assert (distance < spread).all(), (distance, spread)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", [torch.device("cuda")])
class TestCaptured:
    RECIPES = (
        RECIPE,
        replace(RECIPE.baseline(), precision="bf16", channels_last=True),
        EVERYTHING,
        FINE_TUNING,
    )

    @pytest.mark.parametrize(
        "recipe",
        [*RECIPES, replace(RECIPE, batch_size=8)],
        ids=["isda", "bf16 ce", "everything", "fine-tuning", "eight steps in a row"],
    )
    def test_equals_uncaptured(
        self, recipe: Recipe, data: ImageArrays, device: torch.device
    ) -> None:
        one, other = (Lane(recipe, 1, data, device) for _ in range(2))
        assert train([one], 3, capture=True) == train([other], 3)
        assert_same_bits(values(one), values(other))

    def test_side_by_side_equals_alone(self, data: ImageArrays, device: torch.device) -> None:
        lanes = [Lane(recipe, seed, data, device) for seed, recipe in enumerate(self.RECIPES)]
        results = train(lanes, 3, capture=True)
        for number, recipe in enumerate(self.RECIPES):
            lane = Lane(recipe, number, data, device)
            alone = train([lane], 3, capture=True)
            assert [row[0] for row in alone] == [row[number] for row in results]
            assert_same_bits(values(lane), values(lanes[number]))

    @pytest.mark.parametrize(
        "recipe", RECIPES, ids=["isda", "bf16 ce", "everything", "fine-tuning"]
    )
    def test_resume(self, recipe: Recipe, data: ImageArrays, device: torch.device) -> None:
        whole, first, second = (Lane(recipe, 1, data, device) for _ in range(3))
        expected = train([whole], 3, capture=True)
        results = train([first], 1, capture=True)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        results += train([second], 2, capture=True)
        assert results == expected
        assert_same_bits(values(whole), values(second))

    def test_compiled_is_close_to_plain(self, data: ImageArrays, device: torch.device) -> None:
        recipe = replace(RECIPE, compile=True, channels_last=True, augment=("crop", "flip"))
        compiled = Lane(recipe, 1, data, device)
        plain = Lane(replace(recipe, compile=False), 1, data, device)
        # compiled kernels round differently: see the tolerance of the plain loop
        for one, other in zip(train([compiled], 3, capture=True), train([plain], 3), strict=True):
            assert one[0][0] == pytest.approx(other[0][0], rel=1e-2)
        for one, other in zip(compiled.parameters, plain.parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)

    @pytest.mark.parametrize("cache", ["device", "memory", "disk", "off"])
    def test_folder(self, cache: str, image_files: FolderImages, device: torch.device) -> None:
        recipe = replace(RECIPE, network="resnet8", batch_size=2, epochs=2)
        images = decode_folder(image_files, cache=cache, device=device)
        kept = decode_folder(image_files, cache="device", device=device)
        lanes = [Lane(recipe, seed, images, device) for seed in (1, 2)]
        results = train(lanes, 2, capture=True)
        for number, lane in enumerate(lanes):
            other = Lane(recipe, lane.seed, kept, device)
            assert [[row[number]] for row in results] == train([other], 2)
            assert_same_bits(values(lane), values(other))

    def test_capture_while_a_loader_pins_memory(
        self, data: ImageArrays, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The thread of a loader allocates pinned memory during the capture of every step."""
        pinned, done = [0], threading.Event()
        # a pinned block is used again for tensors of its size, so that every batch is larger
        sizes = [[1024 * number] for number in range(1, 4000)]
        loader = torch.utils.data.DataLoader(
            _Zeros(), batch_sampler=sizes, num_workers=1, pin_memory=True
        )

        def read() -> None:
            for batch in loader:
                assert batch.is_pinned()
                pinned[0] += 1
                if done.is_set():
                    return

        step = Lane.step

        def slow(lane: Lane, size: int) -> None:
            step(lane, size)
            if torch.cuda.is_current_stream_capturing():
                before, began = pinned[0], time.monotonic()
                while pinned[0] < before + 3:
                    assert time.monotonic() - began < 30
                    time.sleep(0.001)

        monkeypatch.setattr(Lane, "step", slow)
        thread = threading.Thread(target=read)
        thread.start()
        try:
            one, other = (Lane(RECIPE, 1, data, device) for _ in range(2))
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # would say that the step is not captured
                captured = train([one], 2, capture=True)
        finally:
            done.set()
            thread.join()
        assert pinned[0] >= 6  # two batch sizes
        assert captured == train([other], 2)
        assert_same_bits(values(one), values(other))

    def test_a_step_that_cannot_be_captured(
        self, data: ImageArrays, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, other = (Lane(RECIPE, 1, data, device) for _ in range(2))
        expected = train([other], 2)
        step = Lane.step

        def synchronising(lane: Lane, size: int) -> None:
            step(lane, size)
            lane.total_loss.item()

        monkeypatch.setattr(Lane, "step", synchronising)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert train([one], 2, capture=True) == expected
        assert len([w for w in caught if "cannot be captured" in str(w.message)]) == 1
        assert_same_bits(values(one), values(other))


class _Zeros(torch.utils.data.Dataset[Tensor]):
    """Tensors of the length that is asked for."""

    def __getitem__(self, length: int) -> Tensor:
        return torch.zeros(length)
