"""ISDABCEWithLogitsLoss rejects bad checkpoints, arguments and batches without side effects."""

import pytest
import torch
from label_batches import A, C, N, batch, make
from torch import Tensor

import isda
from isda import ISDABCEWithLogitsLoss


def test_refused_checkpoint_changes_nothing(device):
    criterion, other = make(device), ISDABCEWithLogitsLoss(A + 1, C, total_steps=9)
    other.step += 7
    with pytest.raises(ValueError, match="must have shape"):
        criterion.load_state_dict(other.state_dict())
    assert criterion.step == 0
    criterion.grow(C + 1)
    assert criterion.estimator.num_classes == C + 1


@pytest.mark.parametrize("option", ["weight", "pos_weight"])
def test_grow_with_weights_of_the_classes(option, device):
    """An immediate error, not one in the next step."""
    criterion = make(device, **{option: torch.ones(C)})
    criterion.grow(C)  # nothing changes
    with pytest.raises(ValueError, match="grow needs a criterion without"):
        criterion.grow(C + 1)
    assert criterion.estimator.num_classes == criterion.num_classes == C
    setattr(criterion, option, None)
    criterion.grow(C + 1)
    assert criterion.estimator.num_classes == criterion.num_classes == C + 1


def test_overflow_names_the_largest_term(device):
    """Not NaN, the product of an infinite term and a label of 0."""
    x, labels = batch(device)
    with pytest.raises(FloatingPointError, match="with a quadratic term of inf:"):
        make(device)(x.features, 1e20 * x.weight, labels)


def test_binary_cross_entropy_may_be_infinite(device):
    """At λ = 0, the loss is torch's, so it may be infinite."""
    x, labels = batch(device)
    infinite = torch.full_like(labels, torch.inf)
    loss = make(device, lambda_0=0.0)(x.features, x.weight, 0 * labels, logits=infinite)
    assert loss == torch.inf


def test_weights_of_the_positive_part_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"pos_weight must be a tensor of shape \(5,\), got \(4,\)"
    ):
        ISDABCEWithLogitsLoss(A, C, pos_weight=torch.ones(C - 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": torch.ones(N, A, 2)}, r"features must have shape \(N, A\), got \(7, 4, 2\)"),
        ({"weight": torch.ones(C, A + 1)}, r"weight must have shape \(5, 4\), got \(5, 5\)"),
        ({"bias": torch.ones(C + 1)}, r"bias must have shape \(5,\), got \(6,\)"),
        ({"logits": torch.ones(N, C + 1)}, r"logits .* must have shape \(7, 5\), got \(7, 6\)"),
        ({"progress": 1.5}, r"progress must be in \[0, 1\], got 1.5"),
    ],
)
def test_bad_arguments_change_nothing(arguments, message):
    criterion = make(torch.device("cpu"))
    x, labels = batch(torch.device("cpu"))
    good = {"features": x.features, "weight": x.weight, "target": labels}
    with pytest.raises(ValueError, match=message):
        criterion(**{**good, **arguments})
    assert not criterion.estimator.count.any()
    assert criterion.step == 0


@pytest.mark.parametrize("fault", ["nan", "above", "index", "shape"])
def test_bad_batches_change_nothing(fault, device):
    criterion = make(device)
    x, labels = batch(device)
    features = x.features.clone()
    message = {
        "nan": "features must be finite",
        "above": r"target must be in \[0, 1\]",
        "index": r"target must be floating point \(0 or 1\), got torch.int64: call .float\(\)",
        "shape": r"target of class probabilities must have shape \(7, 5\), got \(6, 5\)",
    }[fault]
    if fault == "nan":
        features[2, 1] = torch.nan
    labels = {"above": 2 * labels, "index": x.target, "shape": labels[1:]}.get(fault, labels)
    with pytest.raises(ValueError, match=message):
        criterion(features, x.weight, labels)
    assert not criterion.estimator.count.any()
    assert criterion.step == 0


def test_targets_that_are_not_tensors():
    x, labels = batch(torch.device("cpu"))
    for name, arguments in (
        ("target", (x.features, x.weight, labels.tolist())),
        ("features", (x.features.tolist(), x.weight, labels)),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
            make(torch.device("cpu"))(*arguments)


def test_estimators_that_do_not_fit():
    class Own:
        def update(self, features: Tensor, target: Tensor) -> None: ...

        def quadratic(self, weight: Tensor, target: Tensor) -> Tensor: ...

    sharded = isda.ShardedCovariance(A, C)
    ISDABCEWithLogitsLoss(A, C, covariance=sharded)  # of one rank
    sharded.world_size = 2
    for covariance in (Own(), sharded):
        with pytest.raises(ValueError, match="not sharded across ranks"):
            ISDABCEWithLogitsLoss(A, C, covariance=covariance)
