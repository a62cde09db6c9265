"""The training step: against a plain loop, resumed, side by side, and for every recipe.

Tests marked gpu compare steps captured in CUDA graphs with steps that are not.
"""

import contextlib
import copy
import io
import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from isda import FullCovariance, ISDALoss
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.folder_cache import DecodedImages, decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError
from isda.experiments.networks import create_network
from isda.experiments.networks.stochastic import Dropout
from isda.experiments.recipe_checks import differing_fields
from isda.experiments.recipes import RECIPES
from isda.experiments.settings import Recipe
from isda.experiments.training import run_images, training_step
from isda.experiments.training.optimizer import optimizer_state
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic

RECIPE = Recipe(
    data="digits", network="resnet8", epochs=3, batch_size=32, learning_rate=0.05,
    weight_decay=5e-4, lambda_0=2.0,
)  # fmt: skip
NUMBER = 77  # images: batches of 32, 32 and 13
SIZES = [32, 32, 13]


@pytest.fixture(scope="module")
def data(device: torch.device) -> ImageArrays:
    """Some of the digits, without duplicates."""
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    digits = replace(
        digits,
        train_images=digits.train_images[:NUMBER],
        train_target=digits.train_target[:NUMBER],
        test_images=digits.test_images[:101],
        test_target=digits.test_target[:101],
    )
    assert len(digits.train_images.unique(dim=0)) == NUMBER
    return digits.to(device)


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic kernels on a GPU; those of the CPU always are."""
    torch.use_deterministic_algorithms(device.type == "cuda")
    yield
    torch.use_deterministic_algorithms(False)


def train(lanes: list[Lane], epochs: int, *, capture: bool = False) -> list[list[list[float]]]:
    """Results of every epoch."""
    runner = SideBySide(lanes, capture=capture)
    results = []
    for _ in range(epochs):
        runner.train_epoch()
        results.append(runner.evaluate())
        for lane in lanes:
            lane.epoch += 1
    return results


def values(lane: Lane) -> list[Tensor]:
    """Copies of all tensors that a step changes."""
    return [tensor.detach().clone() for tensor in lane.tensors()]


def assert_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def scaled(data: ImageArrays, images: Tensor) -> Tensor:
    """Input of a network."""
    mean = torch.tensor(data.mean, device=images.device).view(-1, 1, 1)
    std = torch.tensor(data.std, device=images.device).view(-1, 1, 1)
    return (images.double() / 255 - mean) / std


def fed_images(lane: Lane) -> list[Tensor]:
    """List to which every step appends the input of its network."""
    batches: list[Tensor] = []
    model = lane._model

    def recorded(images: Tensor) -> tuple[Tensor, Tensor]:
        batches.append(images.clone())
        return model(images)

    lane._model = recorded
    return batches


def places(batch: Tensor, candidates: Tensor) -> list[int]:
    """Index of every image among candidates (N, C, H, W), up to rounding."""
    distance = torch.cdist(
        batch.double().flatten(1),
        candidates.double().flatten(1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    nearest = distance.min(1)
    assert (nearest.values < 1e-5).all()
    return nearest.indices.tolist()


class PlainLoop:
    """Training of a recipe in the simplest form: no random numbers, capture or fused kernels."""

    def __init__(self, recipe: Recipe, seed: int, data: ImageArrays) -> None:
        self.recipe, self.data = recipe, data
        self.network = create_network(
            recipe.network,
            num_classes=data.num_classes,
            in_channels=data.train_images.shape[1],
            generator=torch.Generator().manual_seed(seed),
        ).to(data.train_images.device)
        self.velocity = [torch.zeros_like(p) for p in self.network.parameters()]
        self.average = copy.deepcopy(self.network)
        self.criterion = ISDALoss(
            self.network.num_features,
            data.num_classes,
            lambda_0=recipe.lambda_0,
            covariance=recipe.covariance,
        ).to(data.train_images.device)

    def epoch(self, batches: list[list[int]], rate: float, progress: list[float]) -> float:
        """Train on the images with these indices and return their mean loss."""
        total = 0.0
        for numbers, t in zip(batches, progress, strict=True):
            images = scaled(self.data, self.data.train_images[numbers]).float()
            target = self.data.train_target[numbers]
            features = self.network.forward_features(images)
            head = self.network.get_classifier()
            if self.recipe.method == "ce":
                loss = F.cross_entropy(head(features), target)
            else:
                loss = self.criterion(features, head.weight, target, bias=head.bias, progress=t)
            self.network.zero_grad()
            loss.backward()
            self.update(rate)
            total += loss.item() * len(numbers)
        return total / NUMBER

    @torch.no_grad()
    def update(self, rate: float) -> None:
        recipe = self.recipe
        parameters = list(self.network.parameters())
        for parameter, velocity in zip(parameters, self.velocity, strict=True):
            gradient = parameter.grad + recipe.weight_decay * parameter
            velocity.mul_(recipe.momentum).add_(gradient)
            step = gradient + recipe.momentum * velocity if recipe.nesterov else velocity
            parameter -= rate * step
        average, network = self.average.state_dict(), self.network.state_dict()
        for name, value in network.items():
            if value.is_floating_point():
                average[name].copy_(recipe.ema * average[name] + (1 - recipe.ema) * value)
            else:
                average[name].copy_(value)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float, float, float]:
        network = self.average if self.recipe.ema else self.network
        network.eval()
        logits = network(scaled(self.data, self.data.test_images).float()).double()
        network.train()
        wrong, missed, nll, bins = 0, 0, 0.0, [[0.0, 0.0] for _ in range(15)]
        for row, target in zip(logits, self.data.test_target.tolist(), strict=True):
            probabilities = row.softmax(0)
            confidence, prediction = probabilities.max(0)
            wrong += int(prediction != target)
            missed += int((row > row[target]).sum() >= 5)
            nll -= math.log(probabilities[target])
            accumulated = bins[math.ceil(confidence.item() * 15) - 1]
            accumulated[0] += confidence.item()
            accumulated[1] += float(prediction == target)
        number = len(logits)
        ece = sum(abs(confidence - right) for confidence, right in bins) / number
        return 100 * wrong / number, nll / number, ece, 100 * missed / number


VARIANTS = {
    "ce": {"method": "ce", "lambda_0": 0.0},
    "isda": {},
    "step schedule": {"schedule": "step", "milestones": (2,), "gamma": 0.1},
    "ramp per step": {"ramp": "step", "cosine_offset": 1, "covariance": "diagonal"},
    "constant strength": {"ramp": "constant", "covariance": "shared", "lambda_0": 0.1},
    "plain momentum": {"nesterov": False, "covariance": "identity"},
    "no momentum": {"momentum": 0.0, "nesterov": False, "method": "ce", "lambda_0": 0.0},
    "average": {"ema": 0.8},
    "channels last": {"channels_last": True},
}
# in force during the three epochs; 0.05 · ½ (1 + cos(π e / 3)) without schedule of its own
RATES = {
    "step schedule": (0.05, 0.005, 0.005),
    "ramp per step": (0.0375, 0.0125, 0.0),
}
COSINE = (0.05, 0.0375, 0.0125)
PROGRESS = {
    "ramp per step": ((0, 1 / 9, 2 / 9), (3 / 9, 4 / 9, 5 / 9), (6 / 9, 7 / 9, 8 / 9)),
    "constant strength": ((1, 1, 1),) * 3,
}
PER_EPOCH = ((0, 0, 0), (1 / 3, 1 / 3, 1 / 3), (2 / 3, 2 / 3, 2 / 3))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_lane_equals_a_plain_loop(name: str, data: ImageArrays, device: torch.device) -> None:
    recipe = replace(RECIPE, **VARIANTS[name])
    lane = Lane(recipe, 5, data, device)
    plain = PlainLoop(recipe, 5, data)
    batches = fed_images(lane)
    originals = scaled(data, data.train_images)
    for epoch in range(recipe.epochs):
        (result,) = train([lane], 1)[0]
        numbers = [places(batch, originals) for batch in batches]
        assert [len(batch) for batch in numbers] == SIZES
        assert sorted(n for batch in numbers for n in batch) == list(range(NUMBER))
        batches.clear()

        rate = RATES.get(name, COSINE)[epoch]
        assert lane.learning_rate.item() == pytest.approx(rate, rel=1e-6, abs=1e-12)
        loss = plain.epoch(numbers, rate, list(PROGRESS.get(name, PER_EPOCH)[epoch]))
        # Both round to float32 at every operation but in another order (fused or not, images
        # scaled in double or not). That is 6e-8 of a value at first, and the network, being
        # non-linear, makes it some 1e-5 over nine steps; leaving out a term makes it 1e-2 or more.
        assert result[0] == pytest.approx(loss, rel=2e-4)
        for ours, theirs in (
            (lane.network, plain.network),
            (lane.average or plain.average, plain.average),
        ):
            for (key, value), other in zip(
                ours.state_dict().items(), theirs.state_dict().values(), strict=True
            ):
                torch.testing.assert_close(value, other, rtol=1e-3, atol=2e-4, msg=key)
        if recipe.momentum:
            for value, other in zip(optimizer_state(lane.optimizer), plain.velocity, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-3)
        error, nll, ece, top5_error = plain.evaluate()
        # one image at the decision boundary
        assert result[1] == pytest.approx(error, abs=100 / 101 * 1.01)
        assert result[2] == pytest.approx(nll, rel=2e-3)
        assert result[3] == pytest.approx(ece, abs=1.5 / 101)
        assert result[4] == pytest.approx(top5_error, abs=100 / 101 * 1.01)
        assert lane.network.training
    assert int(lane.steps) == 3 * recipe.epochs


def test_the_statistics_are_those_of_all_images_seen(
    data: ImageArrays, device: torch.device
) -> None:
    lane = Lane(RECIPE, 0, data, device)
    train([lane], 2)
    assert isinstance(lane.criterion, ISDALoss)
    count = lane.criterion.state_dict()["estimator.count"]
    assert torch.equal(count, 2 * data.train_target.bincount(minlength=10))


def test_order_and_augmentation_by_seed_and_epoch(data: ImageArrays, device: torch.device) -> None:
    """Each cropped and flipped image is one of its 162 variants, which vary."""
    recipe = replace(RECIPE, augment=("crop", "flip"))
    padded = F.pad(data.train_images.float(), [4] * 4, mode="reflect").to(torch.uint8)
    variants = torch.stack(
        [
            crop.flip(3) if flip else crop
            for y in range(9)
            for x in range(9)
            for flip in (False, True)
            for crop in (padded[:, :, y : y + 8, x : x + 8],)
        ],
        1,
    )  # (N, 162, 1, 8, 8)
    lanes = {seed: Lane(recipe, seed, data, device) for seed in (0, 1)}
    again = Lane(recipe, 0, data, device)
    seen = {}
    for name, lane in {**lanes, "again": again}.items():
        batches = fed_images(lane)
        train([lane], 2)
        fed = torch.cat(batches)
        candidates = scaled(data, variants.flatten(0, 1))
        found = torch.tensor(places(fed, candidates)).view(2, NUMBER)
        # several offsets may give the same variant, but never that of another image
        for epoch in range(2):
            assert sorted((found[epoch] // 162).tolist()) == list(range(NUMBER))
        assert len((found % 162).unique()) > 50
        seen[name] = found
    assert torch.equal(seen[0], seen["again"])
    for one, other in ((seen[0][0], seen[0][1]), (seen[0][0], seen[1][0])):
        for part in (lambda f: f // 162, lambda f: (f % 162)[f.argsort()]):
            assert (part(one) == part(other)).float().mean() < 0.3


def test_batch_sizes_keep_the_partial_batch(data: ImageArrays, device: torch.device) -> None:
    for size, expected in ((32, SIZES), (77, [77]), (100, [77]), (76, [76, 1]), (11, [11] * 7)):
        assert list(
            Lane(replace(RECIPE, batch_size=size), 0, data, device).images.batch_sizes()
        ) == (expected)


EVERYTHING = replace(  # everything that may have state
    RECIPE, augment=("crop", "flip", "autoaugment", "cutout"), drop_rate=0.3, ema=0.9, ramp="step"
)
FINE_TUNING = replace(
    RECIPE, optimizer="adamw", nesterov=False, warmup=2, head_rate=5.0, decay_all=False
)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "recipe",
    [RECIPE, EVERYTHING, replace(RECIPE.baseline(), momentum=0.0, nesterov=False), FINE_TUNING],
    ids=["isda", "everything", "no momentum", "fine-tuning"],
)
def test_a_checkpoint_is_complete(recipe: Recipe, data: ImageArrays, device: torch.device) -> None:
    lane = Lane(recipe, 3, data, device)
    train([lane], 1)
    file = io.BytesIO()
    torch.save(lane.state_dict(), file)
    file.seek(0)
    other = Lane(recipe, 3, data, device)
    with torch.no_grad():
        for tensor in other.tensors():
            # the overflow of a criterion is a number for a message
            if tensor.is_floating_point() and tensor is not other.criterion._buffers.get(
                "overflow"
            ):
                tensor.fill_(0.5)
        other.steps.fill_(1000)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.epoch == 1
    assert train([lane], 2) == train([other], 2)
    assert_same_bits(values(lane), values(other))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "recipe", [RECIPE, EVERYTHING, FINE_TUNING], ids=["isda", "everything", "fine-tuning"]
)
def test_tensors_are_all_that_a_step_changes(
    recipe: Recipe, data: ImageArrays, device: torch.device
) -> None:
    lane = Lane(recipe, 0, data, device)
    train([lane], 1)
    lane.begin_epoch()
    lane.step(SIZES[0])
    lane.optimizer.zero_grad(set_to_none=True)
    known = {tensor.data_ptr() for tensor in lane.tensors()}
    before = reachable(lane)
    start = values(lane)
    lane.step(SIZES[1])
    first = values(lane)
    lane.optimizer.zero_grad(set_to_none=True)
    after = reachable(lane)
    assert after.keys() == before.keys()
    changed = {path for path, value in before.items() if not same(value, after[path])}
    found = {path for path, value in after.items() if is_tensor(value) and value[0] in known}
    assert changed <= found
    assert len(changed) > len(lane.parameters)

    with torch.no_grad():
        for tensor, saved in zip(lane.tensors(), start, strict=True):
            tensor.copy_(saved)
    lane.step(SIZES[1])
    assert_same_bits(values(lane), first)


def reachable(root: object) -> dict[str, object]:
    """All tensors (address and copy), numbers and strings reachable from an object."""
    found: dict[str, object] = {}
    seen = set()

    def walk(path: str, value: object) -> None:
        if isinstance(value, Tensor):
            found[path] = (value.data_ptr(), value.detach().clone())
        elif value is None or isinstance(value, bool | int | float | str):
            found[path] = value
        elif id(value) not in seen:
            seen.add(id(value))
            parts: object = value
            if isinstance(value, list | tuple):
                parts = dict(enumerate(value))
            elif not isinstance(value, dict):
                parts = getattr(value, "__dict__", {})
            for number, (key, part) in enumerate(parts.items()):
                name = key if isinstance(key, str | int) else number
                walk(f"{path}.{name}", part)

    walk("lane", root)
    return found


def is_tensor(value: object) -> bool:
    return isinstance(value, tuple)


def same(one: object, other: object) -> bool:
    if is_tensor(one) and is_tensor(other):
        return one[0] == other[0] and torch.equal(one[1], other[1])
    return one == other


@pytest.mark.usefixtures("deterministic")
def test_dropout_is_drawn_by_seed_step_and_layer(data: ImageArrays, device: torch.device) -> None:
    recipe = replace(RECIPE, batch_size=NUMBER, drop_rate=0.5)
    runs = []
    for seed in (0, 0, 1):
        lane = Lane(recipe, seed, data, device)
        masks: list[Tensor] = []

        def record(layer: Dropout, inputs: tuple[Tensor], _: Tensor, masks: list = masks) -> None:
            if layer.training:
                masks.append(layer.forward(torch.ones_like(inputs[0][:, :16, :2, :2])))

        for module in lane.network.modules():
            if isinstance(module, Dropout):
                module.register_forward_hook(record)
        torch.manual_seed(len(runs))  # torch's generator is not used
        train([lane], 2)
        runs.append((lane, torch.stack(masks).flatten(1)))
    (first, masks), (again, repeated), (_, others) = runs
    assert_same_bits(values(first), values(again))
    assert torch.equal(masks, repeated)
    number = masks.shape[1]
    assert masks.shape[0] == 6  # three layers, two steps
    assert masks.unique().tolist() == [0, 2]
    # fair coins: six standard deviations of their mean, and of how often two series agree
    bound = 6 * 0.5 / math.sqrt(number)
    assert ((masks == 0).double().mean(1) - 0.5).abs().max() < bound
    for one, other in itertools.combinations([*masks, *others], 2):
        assert abs((one == other).double().mean() - 0.5) < bound


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


def test_evaluation_in_several_batches(
    data: ImageArrays, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = Lane(RECIPE, 0, data, device)
    (whole,) = train([lane], 1)[0]
    state = values(lane)
    monkeypatch.setattr(run_images, "_TEST_BATCH", 30)  # 30, 30, 30, 11
    (parts,) = SideBySide([lane], capture=False).evaluate()
    # the same sums in a different order
    assert parts == pytest.approx(whole, rel=1e-4)
    assert_same_bits(values(lane), state)


# Every recipe of the paper

LIGHT = ("resnet8", "resnet32", "resnet110", "densenet_bc100_12", "shake_shake26_2x32d")


def test_cifar_recipes_differ_in_their_data_alone() -> None:
    names = [name for name in RECIPES if name.startswith("cifar10-")]
    assert len(names) >= 32
    for name in names:
        if name.endswith("-wgan"):
            continue  # on CIFAR-10 alone, as in the paper
        other = RECIPES["cifar100-" + name.removeprefix("cifar10-")]
        noise = {"noise_rate"} if name == "cifar10-resnet110-disturb_label" else set()
        assert differing_fields(RECIPES[name], other).keys() == {"data"} | noise


@pytest.fixture(scope="module")
def image_files(tmp_path_factory: pytest.TempPathFactory) -> FolderImages:
    path = tmp_path_factory.mktemp("imagenet")
    for part, number in (("train", 3), ("val", 1)):
        for name in ("ant", "bee", "cow"):
            (path / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = torch.randint(0, 256, (40, 36, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(path / part / name / f"{i}.png")
    images = load_data("imagenet", root=path, image_size=33, workers=0)
    assert isinstance(images, FolderImages)
    return images


@pytest.fixture(scope="module")
def folder_images(image_files: FolderImages, device: torch.device) -> DecodedImages:
    return decode_folder(image_files, device=device)


def tiny_arrays(channels: int, size: int, device: torch.device) -> ImageArrays:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        0, 256, (8, channels, size, size), dtype=torch.uint8, generator=generator
    )
    target = torch.tensor([0, 1, 2, 0, 1, 0, 2, 1])
    half = (0.5,) * channels
    return ImageArrays(
        "tiny", images[:5], target[:5], images[5:], target[5:], half, half, ("a", "b", "c")
    ).to(device)


def every_network_and_method() -> list[str]:
    """Recipes with each network of each kind of data, by ISDA, and one recipe of each method.

    The methods do not depend on the network, so they train a small one.
    """
    networks = {(recipe.data, recipe.network): name for name, recipe in RECIPES.items()
                if name.endswith("-isda") and recipe.data != "cifar100"}  # fmt: skip
    names = [name for name in reversed(RECIPES) if name.startswith("cifar10-")]
    methods = {name.rpartition("-")[2]: name for name in names}
    return sorted({*networks.values(), *methods.values()})


@pytest.mark.parametrize("name", every_network_and_method())
def test_recipes_train(name: str, folder_images: DecodedImages, device: torch.device) -> None:
    usual = RECIPES[name]
    folder = usual.data == "imagenet"
    network = usual.network if name.endswith("-isda") else "resnet8"
    recipe = replace(
        usual,
        network=network,
        batch_size=5 if folder else 2,
        learning_rate=usual.learning_rate / 100,  # made for larger batches
        epochs=3,  # of which the second is trained: the last may have a learning rate of 0
        compile=False,  # takes a minute each on a GPU, and has its own test
        precision=usual.precision if network in LIGHT else "fp32",
    )
    channels = 1 if usual.data == "digits" else 3
    tiny = folder_images if folder else tiny_arrays(channels, 8, device)
    lane = Lane(recipe, 0, tiny, device)
    lane.epoch = 1
    for module in lane.network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # two or three steps are too few for a running average
    start = [parameter.detach().clone() for parameter in lane.parameters]
    assert list(lane.images.batch_sizes()) == ([5, 4] if folder else [2, 2, 1])
    ((results,),) = train([lane], 1)  # with a third of λ₀
    assert all(map(math.isfinite, results))
    assert int(lane.steps) == (2 if folder else 3)
    for parameter, before in zip(lane.parameters, start, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, before)
    if usual.method == "isda" and usual.covariance != "identity":
        assert int(lane.criterion.estimator.count.sum()) == lane.num_images
    assert recipe.precision == "fp32" or network in LIGHT


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
@pytest.mark.parametrize("device", [torch.device("cuda")], scope="module")
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


def test_covariances_that_do_not_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take more than 300 GiB."""
    monkeypatch.setattr(training_step, "host_memory", lambda: 2**37)  # some hosts have more
    images = tiny_arrays(3, 8, device)
    images = replace(images, class_names=tuple(map(str, range(200_000))))
    recipe = replace(RECIPE, network="wide_resnet28_10")
    message = (
        "full covariances of 200000 classes with 640 features do not fit in memory: use "
        "--covariance diagonal or shared"
    )
    with pytest.raises(InputError, match=message):
        Lane(recipe, 0, images, device)


def test_covariances_larger_than_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before they are allocated: the system may promise more than it has."""
    device = torch.device("cpu")
    images = tiny_arrays(3, 8, device)
    statistics = 4 * images.num_classes * 64 * 64  # bytes of the matrices
    for memory, fits in ((statistics, False), (2 * statistics, True)):
        monkeypatch.setattr(training_step, "host_memory", lambda memory=memory: memory)
        with contextlib.nullcontext() if fits else pytest.raises(InputError, match="do not fit"):
            Lane(RECIPE, 0, images, device)
