"""Arguments that ISDALoss rejects: the error names them, and no state is changed."""

import re

import pytest
import reference
import torch
from criteria import A, C, N, assert_bits, batch, bits, call, make
from reference import Inputs

from isda import FullCovariance, ISDABCEWithLogitsLoss, ISDALoss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 0}, "num_features must be >= 1, got 0"),
        (
            {"num_classes": 1},
            "num_classes must be >= 2, got 1: with one logit, use isda.ISDABCEWithLogitsLoss",
        ),
        ({"lambda_0": -1.0}, "lambda_0 must be >= 0 and finite, got -1.0"),
        ({"lambda_0": float("nan")}, "lambda_0 must be >= 0 and finite, got nan"),
        ({"lambda_0": float("inf")}, "lambda_0 must be >= 0 and finite, got inf"),
        ({"total_steps": 0}, "total_steps must be a whole number >= 1, got 0"),
        ({"lambda_0": "0.5"}, "lambda_0 must be >= 0 and finite, got '0.5'"),
        ({"total_steps": "9"}, "total_steps must be a whole number >= 1, got '9'"),
        ({"max_shift": "9"}, "max_shift must be > 0 or None, got '9'"),
        ({"total_steps": 2.5}, "total_steps must be a whole number >= 1, got 2.5"),
        ({"total_steps": float("nan")}, "total_steps must be a whole number >= 1, got nan"),
        ({"total_steps": float("inf")}, "total_steps must be a whole number >= 1, got inf"),
        ({"covariance": FullCovariance}, "or an estimator with update and quadratic, got <class"),
        ({"covariance": None}, "or an estimator with update and quadratic, got None"),
        ({"ramp": "cosine"}, "ramp must be 'linear' or 'constant', got 'cosine'"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'none', got 'max'"),
        ({"decay": 0.0}, "decay must be in (0, 1], got 0.0"),
        (
            {"covariance": "low_rank"},
            "covariance must be one of full, diagonal, shared, identity, or an estimator with "
            "update and quadratic, got 'low_rank'",
        ),
        (
            {"covariance": FullCovariance(A, C), "decay": 0.9},
            "decay=0.9 must be set on the estimator, not passed to",
        ),
        (
            {"covariance": FullCovariance(A, C + 1)},
            f"covariance must have num_features={A} and num_classes={C}, "
            f"got FullCovariance({A}, {C + 1}",
        ),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ISDALoss(**{"num_features": A, "num_classes": C, **options})


def bad_arguments(x: Inputs) -> list[tuple[dict, str]]:
    return [
        ({"features": x.features[:, 1:]}, f"features must have shape (N, {A}), got ({N}, {A - 1})"),
        ({"features": x.features[0]}, f"features must have shape (N, {A}), got ({A},)"),
        ({"features": x.features.long()}, "features must be floating point, got torch.int64"),
        ({"weight": x.weight.T}, f"weight must have shape ({C}, {A}), got ({A}, {C})"),
        ({"bias": x.bias[1:]}, f"bias must have shape ({C},), got ({C - 1},)"),
        (
            {"logits": x.weight},
            f"logits for features of shape ({N}, {A}) must have shape ({N}, {C}), got ({C}, {A})",
        ),
        ({"target": x.target[1:]}, f"class indices must have shape ({N},), got ({N - 1},)"),
        ({"target": x.target[:, None]}, f"class indices must have shape ({N},), got ({N}, 1)"),
        ({"target": x.target.int()}, "target must be int64 class indices or"),
        ({"target": x.features}, f"probabilities must have shape ({N}, {C}), got ({N}, {A})"),
        ({"progress": 1.5}, "progress must be in [0, 1], got 1.5"),
        ({"progress": float("nan")}, "progress must be in [0, 1], got nan"),
        ({"progress": torch.tensor(1.5)}, "progress must be in [0, 1], got 1.5"),
        ({"progress": torch.rand(N)}, f"progress must be a scalar, got shape ({N},)"),
        ({"progress": "half"}, "progress must be a number or a tensor, got 'half'"),
    ]


@pytest.mark.parametrize("case", range(15))
def test_call_errors_change_nothing(case, device):
    criterion = make(device)
    call(criterion, batch(device, seed=1))
    before = bits(criterion)
    x = batch(device)
    arguments, message = bad_arguments(x)[case]
    good = {"features": x.features, "weight": x.weight, "target": x.target, "bias": x.bias}
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion(**{**good, **arguments})
    assert_bits(criterion, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, [1.0]) for name in ("features", "weight", "target", "bias", "logits")),
        *((name, None) for name in ("features", "weight", "target")),
    ],
)
def test_arguments_that_are_not_tensors(name, value, device):
    x = batch(device)
    good = {"features": x.features, "weight": x.weight, "target": x.target}
    message = f"{name} must be a tensor, got {type(value).__name__}"
    with pytest.raises(TypeError, match=message):
        make(device)(**{**good, name: value})


def test_missing_total_steps_changes_nothing(device):
    criterion = make(device, total_steps=None)
    before = bits(criterion)
    with pytest.raises(ValueError, match="total_steps must be set on the criterion, or progress"):
        call(criterion, batch(device))
    assert_bits(criterion, before)


@pytest.mark.parametrize("kind", [ISDALoss, ISDABCEWithLogitsLoss])
def test_unknown_reduction_that_is_set_later(kind, device):
    """An error, as in torch, not the sum."""
    criterion = kind(A, C, ramp="constant").to(device)
    criterion.reduction = "average"
    x = batch(device)
    target = x.target if kind is ISDALoss else torch.ones(N, C, device=device)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'averag"):
        criterion(x.features, x.weight, target)


def test_everything_on_one_device() -> None:
    x = reference.draw(7, 13, 5, dtype=torch.float32)
    criterion = ISDALoss(5, 13, total_steps=9)
    message = "target must be on the device of the features, cpu, got meta"
    with pytest.raises(ValueError, match=message):
        criterion(x.features, x.weight, x.target.to("meta"))
    with pytest.raises(ValueError, match="criterion must be on the device of the features, cpu"):
        criterion.to("meta")(x.features, x.weight, x.target)
