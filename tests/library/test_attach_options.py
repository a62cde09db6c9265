"""Options of attach: the criterion, the head, errors and warnings."""

import copy
import functools
import inspect
import re
import sys
import warnings

import attached
import pytest
import torch
from attached import C, LargestFeature, options, sequential
from torch import nn
from torch.nn import functional as F

import isda
from isda import ISDALoss, attach

# fixtures
images, model, target = attached.images, attached.model, attached.target


def test_another_criterion_can_be_attached(model, images, target):
    twin = copy.deepcopy(model)
    criterion = attach(model, LargestFeature())
    criterion(model(images), target, scale=0.5).backward()
    features = twin[:-1](images)
    (F.cross_entropy(twin[-1](features), target) + 0.5 * features.square().sum()).backward()
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)
    assert not criterion.state_dict()
    criterion.check()
    model.eval()
    logits = model(images)
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(logits, target)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))


def test_head_by_hand(images, target, device):
    """Two layers with C outputs: the final one must be specified."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, C), nn.ReLU(), nn.Linear(C, C)).to(device)
    with pytest.raises(
        ValueError,
        match=r"one final linear layer, found 2 with 5 outputs \(1, 3\); pass head= with the name",
    ):
        attach(model)
    criterion = attach(model, head=model[-1], **options())
    assert criterion.criterion.num_features == C
    criterion(model(images), target)


def test_sharded_weight_and_a_criterion(device):
    """ZeRO-3 leaves an empty weight outside of the forward pass."""
    head = nn.Linear(8, C)
    head.weight.data = torch.empty(0)
    for criterion in (None, ISDALoss(8, C, total_steps=10)):
        attached = attach(head, criterion)
        assert (attached.criterion.num_features, attached.criterion.num_classes) == (8, C)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: attach(nn.Sequential(nn.Conv2d(3, 4, 3))),
            "model must end in a linear layer, an nn.Linear or a 1×1 convolution (stride 1, no "
            "padding, one group); found none in Sequential",
        ),
        (
            lambda: attach(sequential(), head=nn.Linear(8, C)),
            "head must be a module of the model, got Linear(",
        ),
        (
            lambda: attach(model := sequential(), head=model[2]),
            "convolution (stride 1, no padding, one group), got ReLU()",
        ),
        (
            lambda: attach(model := nn.Sequential(nn.Conv2d(3, 4, 3)), head=model[0]),
            "convolution (stride 1, no padding, one group), got Conv2d(",
        ),
        (
            lambda: attach(sequential(), LargestFeature(), lambda_0=1.0),
            "lambda_0 must be set on the criterion, not passed to attach",
        ),
        (lambda: attach(sequential(), lambda_0=-1.0), "lambda_0 must be >= 0 and finite, got -1.0"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_failed_attach_leaves_no_hook():
    model = sequential()
    with pytest.raises(ValueError, match="lambda_0"):
        attach(model, lambda_0=-1.0)
    assert not model[-1]._forward_pre_hooks


def test_public_names():
    assert all(hasattr(isda, name) for name in isda.__all__)


def test_strength_and_total_steps_of_a_model():
    model = nn.Linear(4, 3)
    criterion = attach(model, lambda_0=0.5)
    with pytest.raises(ValueError, match="total_steps must be set on the criterion"):
        _ = criterion.strength
    with pytest.raises(ValueError, match="total_steps must be a whole number >= 1, got 0"):
        criterion.total_steps = 0
    criterion.total_steps = 4
    assert criterion.criterion.total_steps == criterion.total_steps == 4
    for step in range(6):
        assert criterion.strength == pytest.approx(0.5 * min(step / 4, 1))
        criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0]))
    assert attach(model, lambda_0=0.3, ramp="constant").strength == 0.3


def test_reduction_of_an_attached_criterion(device):
    """Frameworks such as fastai set it on ``nn.CrossEntropyLoss``."""
    model, plain = nn.Linear(4, 3).to(device), nn.CrossEntropyLoss()
    criterion = attach(model, lambda_0=0.0, ramp="constant")
    x, target = torch.randn(5, 4, device=device), torch.tensor([0, 1, 2, 1, 0], device=device)
    for mode in (True, False):
        criterion.train(mode)
        for reduction in ("none", "sum", "mean"):
            criterion.reduction = plain.reduction = reduction
            assert criterion.reduction == reduction
            torch.testing.assert_close(criterion(model(x), target), plain(model(x), target))
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'max'"):
        criterion.reduction = "max"


def test_unknown_options_are_refused_in_eval_mode(device):
    model = nn.Linear(4, 3).to(device)
    criterion = attach(model, ramp="constant").eval()
    x, target = torch.randn(5, 4, device=device), torch.tensor([0, 1, 2, 1, 0], device=device)
    assert criterion(model(x), target, progress=0.5, update=False).isfinite()
    for training in (False, True):
        criterion.train(training)
        with pytest.raises(TypeError, match="unexpected keyword argument 'reduction'"):
            criterion(model(x), target, reduction="none")


def test_every_option_reaches_the_loss():
    options = {
        "lambda_0": 0.3,
        "total_steps": 7,
        "covariance": "diagonal",
        "decay": 0.9,
        "ramp": "constant",
        "weight": torch.ones(2),
        "label_smoothing": 0.1,
        "ignore_index": 1,
        "reduction": "sum",
        "max_shift": 9.0,
        "frozen": True,
        "synchronize": False,
    }
    arguments = inspect.signature(attach).parameters.keys()
    assert arguments - options.keys() == {"model", "criterion", "head", "process_group"}
    found, plain = (str(attach(nn.Linear(3, 2), **given).criterion) for given in (options, {}))
    assert found == str(ISDALoss(3, 2, **options))
    assert all(f"{name}=" in found for name in options.keys() - {"covariance"})
    assert found != plain


def test_large_statistics_are_announced():
    """15.6 GiB for a ResNet-50 with 1000 classes: the warning precedes the allocation."""
    with torch.device("meta"):
        with pytest.raises(ValueError, match=r"call to_empty\(\) on a model on the meta device"):
            attach(nn.Linear(2048, 1000))
        with pytest.warns(
            UserWarning, match=r"take 15\.6 GiB; .*\"diagonal\" takes 7\.8 MiB"
        ) as seen:
            ISDALoss(2048, 1000)
        assert seen[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ISDALoss(2048, 1000, covariance="diagonal")
            ISDALoss(640, 100)


def test_options_beside_a_criterion_where_attach_is_decorated(monkeypatch):
    """For example by a library that checks the types of all arguments."""
    module, function = sys.modules["isda.attach"], isda.attach
    monkeypatch.setattr(
        module, "attach", functools.wraps(function)(lambda *a, **b: function(*a, **b))
    )
    model = nn.Linear(3, 2)
    assert isinstance(function(model, isda.ISDALoss(3, 2, total_steps=5)).criterion, isda.ISDALoss)
    with pytest.raises(ValueError, match="lambda_0 must be set on the criterion"):
        function(model, isda.ISDALoss(3, 2, total_steps=5), lambda_0=1.0)
