"""Optimizers of a run: every step against the equations, by group, with warm-up."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.errors import InputError
from isda.experiments.own_images import OWN_IMAGES
from isda.experiments.recipes import RECIPES
from isda.experiments.settings import Recipe
from isda.experiments.training.training_step import Lane

RECIPE = Recipe(
    data="digits", network="resnet8", epochs=4, batch_size=32, learning_rate=0.05,
    weight_decay=0.01, method="ce",
)  # fmt: skip
ADAMW = replace(RECIPE, optimizer="adamw", nesterov=False, learning_rate=2e-3)
GROUPS = {"head_rate": 7.0, "decay_all": False, "warmup": 2}


@pytest.fixture(scope="module")
def data(device: torch.device) -> ImageArrays:
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    few = replace(
        digits, train_images=digits.train_images[:77], train_target=digits.train_target[:77],
        test_images=digits.test_images[:50], test_target=digits.test_target[:50],
    )  # fmt: skip
    return few.to(device)


def expected_rate(recipe: Recipe, step: int, *, head: bool) -> float:
    """Three steps per epoch; the rate of an epoch, the warm-up of the step, and the group."""
    rate = recipe.learning_rate * (1 + math.cos(math.pi * (step // 3) / recipe.epochs)) / 2
    if recipe.warmup:
        rate *= min(1, (step + 1) / (3 * recipe.warmup))
    return rate * (recipe.head_rate if head else 1)


class Naive:
    """One parameter by the equations of SGD with Nesterov momentum, or AdamW, in float64."""

    def __init__(self, recipe: Recipe, value: Tensor, *, head: bool) -> None:
        self.recipe, self.head, self.value = recipe, head, value.detach().double().clone()
        self.first, self.second = torch.zeros_like(self.value), torch.zeros_like(self.value)
        decayed = recipe.decay_all or value.dim() > 1
        self.decay = recipe.weight_decay if decayed else 0.0

    def step(self, gradient: Tensor, number: int) -> None:
        rate, beta = expected_rate(self.recipe, number, head=self.head), self.recipe.momentum
        if self.recipe.optimizer == "sgd":
            gradient = gradient.double() + self.decay * self.value
            self.first = beta * self.first + gradient
            self.value = self.value - rate * (gradient + beta * self.first)
            return
        self.value = self.value * (1 - rate * self.decay)
        self.first = beta * self.first + (1 - beta) * gradient.double()
        self.second = 0.999 * self.second + 0.001 * gradient.double() ** 2
        mean = self.first / (1 - beta ** (number + 1))
        scale = (self.second / (1 - 0.999 ** (number + 1))).sqrt() + 1e-8
        self.value = self.value - rate * mean / scale


@pytest.mark.parametrize(
    "recipe",
    [RECIPE, replace(RECIPE, **GROUPS), replace(RECIPE, head_rate=3.0), ADAMW,
     replace(ADAMW, **GROUPS)],
    ids=["sgd", "sgd groups", "sgd head", "adamw", "adamw groups"],
)  # fmt: skip
def test_steps_are_those_of_the_equations(
    recipe: Recipe, data: ImageArrays, device: torch.device
) -> None:
    lane = Lane(recipe, 0, data, device)
    head = {id(parameter) for parameter in lane.network.get_classifier().parameters()}
    naive = [Naive(recipe, p, head=id(p) in head) for p in lane.parameters]
    number = 0
    for epoch in range(recipe.epochs):
        lane.epoch = epoch
        lane.begin_epoch()
        for size in lane.images.batch_sizes():
            lane.step(size)
            for parameter, one in zip(lane.parameters, naive, strict=True):
                assert parameter.grad is not None
                one.step(parameter.grad, number)
                # float32 against float64, over at most twelve steps
                torch.testing.assert_close(
                    parameter.detach().double(), one.value, rtol=2e-4, atol=2e-6
                )
            number += 1
    assert number == 12


def test_state_of_sgd_is_the_momentum_in_the_order_of_the_parameters(
    data: ImageArrays, device: torch.device
) -> None:
    """Checkpoints of earlier versions hold it in this order."""
    lane = Lane(RECIPE, 0, data, device)
    lane.begin_epoch()
    lane.step(32)
    assert len(lane.optimizer.param_groups) == 1
    assert lane.optimizer.param_groups[0]["lr"] is lane.learning_rate
    saved = lane.state_dict()["momentum"]
    buffers = [lane.optimizer.state[p]["momentum_buffer"] for p in lane.network.parameters()]
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in buffers]


def test_warmup_of_a_shortened_recipe() -> None:
    recipe = replace(RECIPE, epochs=30, warmup=3)
    assert recipe.shortened(10).warmup == 1
    assert recipe.shortened(1).warmup == 1
    assert RECIPE.shortened(1).warmup == 0
    assert [recipe.warmup_at(epochs) for epochs in (0.3, 1, 3, 30)] == pytest.approx(
        [0.1, 1 / 3, 1, 1]
    )
    assert RECIPE.warmup_at(0.5) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamw"}, "nesterov must be False with optimizer adamw"),
        ({"optimizer": "adam"}, "optimizer must be one of sgd, adamw"),
        ({"warmup": 5}, "warmup must be <= epochs, 4, got 5"),
        ({"warmup": -1}, "warmup must be >= 0"),
        ({"head_rate": 0.0}, "head_rate must be > 0"),
        ({"pretrained": True}, "network must be timm:NAME, .* with pretrained, got 'resnet8'"),
        ({"weights": "a.pth"}, "weights must be empty without pretrained"),
        ({"freeze": True}, "freeze must be False without pretrained"),
        ({"mean": (0.5,)}, "std must be of the length of mean, 1"),
        ({"mean": (0.5,), "std": (0.0,)}, "std must be > 0"),
        ({"mean": (math.nan,), "std": (1.0,)}, "mean must be finite"),
        ({"test_crop": 1.5}, "test_crop must be > 0 and <= 1"),
        ({"interpolation": "nearest"}, "interpolation must be one of bilinear, bicubic"),
    ],
)
def test_refused_fields(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(RECIPE, **changes)


def test_frozen_recipes() -> None:
    frozen = replace(OWN_IMAGES, pretrained=True, freeze=True)
    assert frozen.augmentation == "none"
    with pytest.raises(InputError, match="head_rate must be 1 with freeze"):
        replace(frozen, head_rate=2.0)
    with pytest.raises(InputError, match="augment must be empty with freeze"):
        replace(frozen, augment=("flip",))


def test_recipes_of_the_paper_have_none_of_it() -> None:
    plain = Recipe(data="x", network="y", epochs=1, batch_size=1, learning_rate=1, weight_decay=0)
    for recipe in RECIPES.values():
        for field in ("pretrained", "weights", "freeze", "optimizer", "warmup", "head_rate",
                      "decay_all", "interpolation", "test_crop", "mean", "std"):  # fmt: skip
            assert getattr(recipe, field) == getattr(plain, field)
