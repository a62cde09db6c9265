"""A lane against a plain loop: weights, statistics and metrics after every epoch."""

import copy
import math
from dataclasses import replace

import lanes
import pytest
import torch
from lanes import NUMBER, RECIPE, SIZES, fed_images, places, scaled, train
from torch.nn import functional as F

from isda import ISDALoss
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.networks import create_network
from isda.experiments.settings import Recipe
from isda.experiments.training.optimizer import optimizer_state
from isda.experiments.training.training_step import Lane

data, full_precision = lanes.data, lanes.full_precision  # fixtures


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


@pytest.fixture(autouse=True)
def smooth_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of ReLU jumps at 0, so a rounding error there could change it by any amount."""
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: F.softplus(x))


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
        # scaled in double or not), which is 2e-7 of a value over nine steps on a CPU; leaving out a
        # term makes it 1e-2 or more.
        assert result[0] == pytest.approx(loss, rel=1e-5)
        for ours, theirs in (
            (lane.network, plain.network),
            (lane.average or plain.average, plain.average),
        ):
            for (key, value), other in zip(
                ours.state_dict().items(), theirs.state_dict().values(), strict=True
            ):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5, msg=key)
        if recipe.momentum:
            for value, other in zip(optimizer_state(lane.optimizer), plain.velocity, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-4)
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
