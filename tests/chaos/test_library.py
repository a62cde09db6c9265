"""Random calls of the criteria, good and bad: a refused call changes nothing.

Two criteria get the same good calls; one of them also gets bad ones in between. In the end both
have the same bits. See ``test_records.py`` for the seed and the scale.
"""

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isda

SEED = int(os.environ.get("ISDA_CHAOS_SEED", "0"))
SCALE = int(os.environ.get("ISDA_CHAOS_SCALE", "1"))
CALLS = 500 * SCALE
PER_CRITERION = 25  # calls
Call = dict[str, Any]  # arguments of a call


def criterion_options(draw: random.Random, num_classes: int) -> dict[str, Any]:
    return {
        "lambda_0": draw.choice([0.0, 0.1, 0.5, 3.0]),
        "ramp": draw.choice(["linear", "constant"]),
        "total_steps": draw.choice([1, 10, 1000]),
        "covariance": draw.choice(["full", "diagonal", "shared", "identity"]),
        "decay": draw.choice([1.0, 0.9]),
        "weight": draw.choice([None, torch.rand(num_classes) + 0.1]),
        "label_smoothing": draw.choice([0.0, 0.0, 0.2]),
        "reduction": draw.choice(["mean", "sum", "none"]),
        "max_shift": draw.choice([None, 5.0]),
        "frozen": draw.random() < 0.1,
    }


def good_call(draw: random.Random, width: int, num_classes: int) -> Call:
    samples = draw.choice([0, 1, 2, 7])
    shape = draw.choice([(), (), (3,), (2, 3)])
    features = torch.randn(samples, width, *shape) * draw.choice([1e-3, 1.0, 30.0])
    target = torch.randint(num_classes, (samples, *shape))
    if draw.random() < 0.3:
        target[torch.rand(target.shape) < 0.3] = -100
    if draw.random() < 0.2:
        target = torch.randn(samples, num_classes, *shape).softmax(1)
    call: Call = {
        "features": features.to(draw.choice([torch.float32, torch.float64, torch.bfloat16])),
        "weight": torch.randn(num_classes, width),
        "target": target,
        "bias": draw.choice([None, torch.randn(num_classes)]),
        "progress": draw.choice([None, 0.0, 0.3, 1.0, torch.tensor(0.7)]),
        "update": draw.random() < 0.8,
    }
    call["features"] = call["features"].to(torch.float32) if call["bias"] is not None else features
    if draw.random() < 0.2:
        call["covariance_index"] = torch.randint(num_classes, (samples, *shape))
    return call


def spoilt(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[torch.randint(tensor.numel(), ())] = value
    return tensor


FAULTS: dict[str, Callable[[Call], Any]] = {
    "features": lambda call: random.choice(
        [
            spoilt(call["features"], random.choice([torch.nan, torch.inf, -1e16])),
            call["features"][:, :-1],
            call["features"].flatten(),
            call["features"].long(),
            call["features"].cfloat(),
            call["features"].tolist(),
            None,
        ]
    ),
    "target": lambda call: random.choice(
        [
            call["target"][:-1],
            spoilt(call["target"], 99),
            call["target"].int(),
            call["target"].bool(),
            call["target"].cfloat(),
            call["target"].tolist(),
            None,
        ]
    ),
    "weight": lambda call: random.choice(
        [
            call["weight"][:-1],
            call["weight"].T[:1],
            call["weight"].long(),
            call["weight"].cfloat(),
            3.0,
        ]
    ),
    "bias": lambda call: random.choice([torch.zeros(99), torch.zeros(()), "bias"]),
    "logits": lambda call: random.choice(
        [torch.zeros(1, 99), torch.zeros(len(call["features"])), torch.zeros(2, 2).long(), [1.0]]
    ),
    "progress": lambda call: random.choice(
        [-0.1, 1.5, torch.nan, "half", torch.tensor([0.1, 0.2]), torch.tensor(7.0), 1j]
    ),
    "covariance_index": lambda call: random.choice(
        [torch.full_like(call["target"], 99), call["target"][:-1].long(), call["target"].float(), 0]
    ),
}


def is_hidden(call: Call, name: str) -> bool:
    """Whether a fault may be invisible: a spoilt value of a sample that is ignored."""
    target = call["target"]
    ignored = not target.is_floating_point() and bool((target == -100).any())
    soft_target = target.is_floating_point() and name in ("target", "covariance_index")
    return ignored or soft_target or not target.numel()


def bits(criterion: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in criterion.named_buffers()}


def same_bits(one: nn.Module, other: dict[str, Tensor]) -> bool:
    return all(torch.equal(buffer, other[name]) for name, buffer in one.named_buffers())


def check_loss(criterion: isda.ISDALoss, call: Call, loss: Tensor) -> None:
    assert loss.isfinite().all()
    assert all(buffer.isfinite().all() for buffer in criterion.buffers())
    if criterion.reduction == "none":
        assert loss.shape == call["features"].shape[:1] + call["features"].shape[2:]
    features = call["features"]
    logits = F.linear(features.movedim(1, -1), call["weight"], call["bias"]).movedim(-1, 1)
    plain = criterion.evaluate(logits, call["target"])
    if call["features"].numel() and not criterion.label_smoothing:
        slack = 1e-4 * (1 + plain.abs())
        assert (loss >= plain - slack).all()  # the quadratic terms are not negative


def test_refused_calls_change_nothing() -> None:
    print(f"\nISDA_CHAOS_SEED={SEED} ISDA_CHAOS_SCALE={SCALE}")
    draw = random.Random(f"{SEED} library")
    torch.manual_seed(SEED)
    random.seed(SEED)
    seen: Counter[str] = Counter()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the criterion has counted")  # more steps than total_steps
    for _ in range(CALLS // PER_CRITERION):
        width, num_classes = draw.choice([1, 3, 6]), draw.choice([2, 5])
        options = criterion_options(draw, num_classes)
        attacked, twin = (isda.ISDALoss(width, num_classes, **options) for _ in range(2))
        for _ in range(PER_CRITERION):
            call = good_call(draw, width, num_classes)
            name = draw.choice(list(FAULTS))
            if draw.random() < 0.5 and not is_hidden(call, name):
                before = bits(attacked)
                bad = call | {name: FAULTS[name](call)}
                with pytest.raises((ValueError, TypeError)) as raised:
                    attacked(**bad)
                assert name in str(raised.value), (name, bad[name], raised.value)
                assert same_bits(attacked, before), (name, bad)
                seen[name] += 1
            loss = attacked(**call)
            assert torch.equal(loss, twin(**call))
            check_loss(attacked, call, loss)
            seen["good"] += 1
        assert same_bits(attacked, bits(twin))
    print(f"{seen.total()} calls: {dict(seen)}")
    assert {"good", *FAULTS} == set(seen)
