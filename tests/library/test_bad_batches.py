"""Bad batches: an immediate error on a CPU; masked and reported later on a GPU."""

import re

import pytest
import torch
from criteria import C, N, assert_bits, assert_same, batch, bits, call, close, make, structures
from reference import Inputs
from torch.nn import functional as F


def spoil(x: Inputs, fault: str) -> tuple[Inputs, str]:
    """The batch with a fault, and the expected error message."""
    features, target = x.features.clone(), x.target.clone()
    if fault in ("nan", "inf", "-1e16"):  # the sum of squares of -1e16 overflows
        features[3, 2] = float(fault)
        return x._replace(features=features), "features must be finite: found NaN or magnitudes"
    if fault == "soft":
        soft = F.one_hot(target, C).float()
        soft[1, 2] = torch.nan
        return x._replace(target=soft), "target must be in"
    target[4] = {"above": C, "below": -1}[fault]
    return x._replace(target=target), f"target must be in [0, {C}) or equal ignore_index=-100"


faults = pytest.mark.parametrize("fault", ["nan", "inf", "-1e16", "above", "below", "soft"])


@faults
@structures
def test_bad_batch_on_a_cpu_raises_at_once(fault, structure):
    device = torch.device("cpu")
    criterion = make(device, covariance=structure)
    call(criterion, batch(device, seed=1))
    before = bits(criterion)
    bad, message = spoil(batch(device), fault)
    with pytest.raises(ValueError, match=re.escape(message)):
        call(criterion, bad)
    assert_bits(criterion, before)
    call(criterion, batch(device))  # training continues


def test_overflow_on_a_cpu_raises_at_once():
    x = batch(torch.device("cpu"))
    with pytest.raises(FloatingPointError, match=r"no longer finite at λ = 0\.5,"):
        make(torch.device("cpu"), ramp="constant")(x.features, 1e20 * x.weight, x.target)


@faults
@structures
def test_bad_batch_is_masked_where_the_host_does_not_look(fault, structure, device, monkeypatch):
    """Deferred errors; on a CPU, is_compiling() is patched to return True."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    class_weight = torch.ones(C) if structure == "shared" else None
    criterion, clean = (
        make(device, covariance=structure, decay=0.9, weight=class_weight) for _ in range(2)
    )
    for each in (criterion, clean):
        call(each, batch(device, seed=1))
    before = bits(criterion)
    bad, message = spoil(batch(device), fault)
    weight = bad.weight.clone().requires_grad_()
    loss = criterion(bad.features, weight, bad.target, bias=bad.bias)
    assert loss.isnan()
    assert criterion.problem > 0
    before["problem"] = criterion.problem.clone()
    assert_bits(criterion, before)
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion.state_dict()
    assert set(criterion.state_dict()) == set(clean.state_dict())  # reported once
    criterion.check()
    close(*(call(each, batch(device, seed=2)) for each in (criterion, clean)))
    assert_same(criterion, clean)


@structures
def test_large_features_do_not_spoil_the_statistics(structure, device):
    """The largest accepted features, in every sample."""
    criterion = make(device, covariance=structure, ramp="constant")
    x = batch(device)
    huge = torch.full_like(x.features, 0.99e15)
    huge[::2] *= -1
    assert call(criterion, x._replace(features=huge)).isfinite()
    assert all(buffer.isfinite().all() for buffer in criterion.buffers())


def test_problem_stays_until_someone_looks(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    criterion = make(device)
    call(criterion, spoil(batch(device), "nan")[0])
    call(criterion, batch(device))  # a good batch does not hide it
    with pytest.raises(ValueError, match="features must be finite"):
        criterion.check()
    criterion.check()


def test_values_of_ignored_samples_do_not_matter_to_statistics(device):
    """Ignored samples do not enter the statistics, whatever their features are."""
    x = batch(device)
    target = x.target.clone()
    target[0] = -100
    one, other = make(device), make(device)
    call(one, x, target)
    x.features[0] += 100
    call(other, x, target)
    assert_same(one, other)


@pytest.mark.gpu
@structures
@pytest.mark.parametrize("soft", [False, True])
def test_no_step_waits_for_the_host(structure, soft):
    device = torch.device("cuda")
    criterion = make(device, covariance=structure, decay=0.9)
    x = batch(device)
    target = torch.randn(N, C).softmax(1).to(device) if soft else x.target
    weight = x.weight.requires_grad_()
    bad = spoil(batch(device), "nan")[0]
    criterion(x.features, weight, target, bias=x.bias).backward()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        criterion(x.features, weight, target, bias=x.bias).backward()
        call(criterion, bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match="features must be finite"):
        criterion.check()
