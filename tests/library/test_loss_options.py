"""Options and arguments of ISDALoss and attach: signatures, repr, errors, later changes."""

import inspect
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from bounds import A, C, N, inputs, make
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda import ISDALoss


def test_attach_and_isdaloss_have_the_same_options():
    """Explicit signatures: editors show all options, and none is missing."""
    ours, theirs = (inspect.signature(f).parameters for f in (isda.attach, ISDALoss))
    options = [name for name in theirs if name not in ("num_features", "num_classes")]
    assert [name for name in ours if name not in ("model", "criterion", "head")] == options
    for name in options:
        assert ours[name].default == theirs[name].default
        assert ours[name].annotation == theirs[name].annotation


def test_repr_shows_every_option():
    for kind in (ISDALoss, isda.ISDABCEWithLogitsLoss):
        text = repr(kind(A, C, weight=torch.ones(C)))
        for name in inspect.signature(kind).parameters:
            if name in ("num_features", "num_classes", "covariance"):
                continue
            assert f"{name}=" in text, name
        assert "FullCovariance" in text
        assert "tensor of shape (5,)" in text

    class Constant:  # not a module, which would be shown as a child
        def update(self, features: Tensor, target: Tensor) -> None: ...

        def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
            return torch.ones(len(target), len(weight))

    criterion = ISDALoss(A, C, covariance=Constant())
    assert "covariance=<" in repr(criterion)
    with pytest.raises(ValueError, match=r"grow needs an isda\.Covariance, got <"):
        criterion.grow(C + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": torch.ones(C + 1)}, r"weight must be a tensor of shape \(5,\), got \(6,\)"),
        ({"weight": [1.0] * C}, r"weight must be a tensor of shape \(5,\), got list"),
        ({"weight": torch.ones(C).long()}, "weight must be floating point, got torch.int64"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"label_smoothing": float("nan")}, r"label_smoothing must be in \[0, 1\], got nan"),
        ({"label_smoothing": "0.1"}, r"label_smoothing must be in \[0, 1\], got '0.1'"),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ISDALoss(A, C, **options)


@pytest.mark.parametrize("name", ["weight", "target", "bias", "logits", "covariance_index"])
def test_wrong_device_of_any_argument(name):
    x = inputs(torch.device("cpu"))
    arguments = {
        "features": x.features,
        "weight": x.weight,
        "target": x.target,
        "bias": x.bias,
        "logits": torch.zeros(N, C),
        "covariance_index": x.target,
    }
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must be on the device of the features, cpu, got"):
        make(torch.device("cpu"))(**arguments)


@pytest.mark.parametrize("name", ["weight", "bias", "logits"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_numbers_that_are_not_floating_point(name, dtype, device):
    x, criterion = inputs(device), make(device)
    arguments = {"weight": x.weight, "bias": x.bias, "logits": torch.zeros(N, C, device=device)}
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(ValueError, match=f"{name} must be floating point, got {dtype}"):
        criterion(x.features, target=x.target, **arguments)
    assert not criterion.estimator.count.any()


def test_bad_values_of_ignored_samples_do_not_matter(device):
    x, criterion = inputs(device), make(device)
    x.features[0] = torch.nan
    target = x.target.clone()
    target[0] = -100
    logits = torch.zeros(N, C, device=device)
    assert criterion(x.features, x.weight, target, logits=logits).isfinite()
    criterion.check()
    assert criterion.estimator.count.sum() == N - 1


def test_probabilities_that_sum_to_zero_are_refused(device):
    x, criterion = inputs(device), make(device)
    target = F.one_hot(x.target, C).float()
    target[1] = 0
    with pytest.raises(ValueError, match="probabilities that are not finite or sum to 0"):  # noqa: PT012
        criterion(x.features, x.weight, target)
        criterion.check()  # a GPU reports it later
    assert not criterion.estimator.count.any()


def test_a_step_makes_few_calls(device):
    """A step is easy to follow: at most 30 calls of our functions."""
    if device.type != "cpu":
        pytest.skip("counts the calls of the plain implementation")
    model = nn.Linear(A, C)
    criterion = isda.attach(model, total_steps=10)
    x = inputs(device)
    criterion(model(x.features), x.target)
    logits, calls = model(x.features), []
    ours = str(Path(isda.__file__).parent)

    def count(frame, event, _argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        criterion(logits, x.target)
    finally:
        sys.setprofile(None)
    assert 10 < len(calls) <= 30, calls


def test_more_steps_than_total_steps_warn_once(device):
    x = inputs(device)
    labels = F.one_hot(x.target, C).float()
    for kind, target in ((ISDALoss, x.target), (isda.ISDABCEWithLogitsLoss, labels)):
        criterion = kind(A, C, total_steps=2).to(device)
        call = partial(criterion, x.features, x.weight, target)
        if kind is ISDALoss:
            criterion.update(x.features, target)  # counts no step
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
            call()
            for _ in range(3):  # none of these counts a step
                call(update=False)
                criterion.eval()
                call()
                criterion.train()
        with pytest.warns(UserWarning, match="has counted 3 steps, more than total_steps=2"):  # noqa: PT031
            call()
            getattr(criterion, "check", int)()  # a GPU reports it later
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
            criterion.state_dict()


@pytest.mark.parametrize(
    ("options", "progress"),
    [({"ramp": "constant"}, None), ({"ramp": "constant", "total_steps": 1}, None),
     ({"total_steps": 1}, 0.5)],
)  # fmt: skip
def test_any_number_of_steps_without_a_ramp_or_with_progress(options, progress, device):
    x, criterion = inputs(device), ISDALoss(A, C, **options).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            criterion(x.features, x.weight, x.target, progress=progress)
        criterion.check()


def test_options_of_an_attached_criterion_can_be_changed(device):
    model = nn.Linear(A, C).to(device)
    criterion = isda.attach(model, lambda_0=0.5, total_steps=10)
    criterion.lambda_0, criterion.frozen, criterion.total_steps = 2.0, True, 4.0
    x = inputs(device)
    criterion(model(x.features), x.target)
    assert (criterion.criterion.lambda_0, criterion.criterion.frozen) == (2.0, True)
    assert not criterion.estimator.count.any()
    assert criterion.strength == 0.5  # one of four steps
    assert criterion.criterion.total_steps == 4
    for name, value in (("lambda_0", -1.0), ("total_steps", 0), ("total_steps", "10")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            setattr(criterion, name, value)


@pytest.mark.parametrize(
    "options",
    [{"lambda_0": "0.5"}, {"lambda_0": None}, {"total_steps": "9"}, {"label_smoothing": "a"},
     {"max_shift": "1"}],
)  # fmt: skip
def test_options_of_a_wrong_type(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be .*, got "):
        ISDALoss(A, C, **options)


def test_attach_with_a_criterion_and_default_options():
    model = nn.Linear(A, C)
    isda.attach(model, ISDALoss(A, C), ignore_index=int("-100"), lambda_0=float("0.5"))
    with pytest.raises(ValueError, match="ignore_index must be set on the criterion"):
        isda.attach(model, ISDALoss(A, C), ignore_index=-1)
