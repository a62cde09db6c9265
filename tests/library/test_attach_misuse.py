"""Misuse of an attached criterion: logits of another batch or layer, a missing or reused pass."""

import copy
import re

import attached
import pytest
import torch
from attached import C, LargestFeature, N, options
from torch import Tensor, nn

from isda import ISDALoss, attach

# fixtures
images, model, target = attached.images, attached.model, attached.target


class HalfLoss(ISDALoss):
    """A user-defined subclass that overrides forward()."""

    def forward(self, features, weight, target, *, bias=None, logits=None) -> Tensor:
        return super().forward(features, weight, target, bias=bias, logits=logits) / 2


@pytest.mark.parametrize("kind", [LargestFeature, HalfLoss])
def test_another_criterion_looks_at_the_logits(kind, model, images, target):
    loss = kind(model[-1].in_features, C, **options()) if kind is HalfLoss else kind()
    criterion = attach(model, loss)
    assert criterion(model(images), target).isfinite()
    logits = model(images)
    model(images + 1)
    with pytest.raises(ValueError, match="logits must be the output of the attached layer"):  # noqa: PT012
        criterion(logits, target)
        criterion.check()  # a GPU reports it later


def test_a_capture_is_used_once(model, images, target):
    criterion = attach(model, **options())
    logits = model(images)
    criterion(logits, target)
    before = copy.deepcopy(criterion.state_dict())
    with pytest.raises(ValueError, match="its last pass has already been used"):
        criterion(logits, target)
    for name, tensor in criterion.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_no_pass_before(model, target, device):
    with pytest.raises(ValueError, match="the layer has run no forward pass since attach"):
        attach(model, **options())(torch.zeros(N, C, device=device), target)


def test_layer_replaced_after_attach(model, images, target, device):
    criterion = attach(model, **options())
    model[-1] = nn.Linear(model[-1].in_features, C).to(device)
    with pytest.raises(ValueError, match="the layer was replaced after attach, call attach again"):
        criterion(model(images), target)


def test_logits_of_another_batch_size(model, images, target):
    criterion = attach(model, **options())
    model(images)
    with pytest.raises(ValueError, match="last batch of the model, 6 samples, got shape"):
        criterion(torch.zeros(3, C, device=images.device), target[:3])


def check_mismatch(criterion, logits, target, *, deferred: bool) -> None:
    """A CPU raises immediately; on a GPU, the loss is NaN and the next check raises."""
    before = {name: t.clone() for name, t in criterion.criterion.estimator.named_buffers()}
    message = "logits must be the output of the attached layer in the last forward pass"
    if deferred:
        assert criterion(logits, target).isnan()
        with pytest.raises(ValueError, match=message):
            criterion.state_dict()
        criterion.state_dict()  # reported only once
    else:
        with pytest.raises(ValueError, match=message):
            criterion(logits, target)
    for name, tensor in criterion.criterion.estimator.named_buffers():
        assert torch.equal(tensor, before[name])
    assert criterion.criterion.step == 0


@pytest.mark.parametrize("deferred", [False, True])
def test_logits_of_another_batch_of_the_same_size(
    model, images, target, deferred, device, monkeypatch
):
    if device.type == "cuda" and not deferred:
        pytest.skip("a GPU always tells later")
    if device.type == "cpu" and deferred:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    criterion = attach(model, **options())
    logits = model(images)
    model(images + 1)
    check_mismatch(criterion, logits, target, deferred=deferred)


def test_many_classes_looked_at_later(device, monkeypatch):
    """Only the first classes are compared."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model = nn.Linear(4, 100).to(device)
    x, target = torch.randn(N, 4, device=device), torch.randint(100, (N,), device=device)
    criterion = attach(model, **options())
    logits = model(x)
    model(x + 1)
    check_mismatch(criterion, logits, target, deferred=True)
    assert criterion(model(x), target).isfinite()


def test_logits_changed_after_the_head(model, images, target, device):
    criterion = attach(model, **options())
    check_mismatch(criterion, 2 * model(images), target, deferred=device.type != "cpu")


def test_logits_in_another_order(model, images, target, device):
    """The first sample is at its original position."""
    if device.type == "cuda":
        pytest.skip("a GPU compares one sample, and tells later")
    criterion = attach(model, **options())
    with pytest.raises(ValueError, match="logits must be the output of the attached layer"):
        criterion(model(images)[[0, 2, 1, 3, 4, 5]], target)


@pytest.mark.parametrize("classes", [2, 3])
def test_small_logits_in_bfloat16_are_no_mismatch(classes, device):
    """Some of many samples have logits near 0, whose rounding errors exceed their size."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(32, 512), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(512, classes)).to(device)
    criterion = attach(model, **options())
    for _ in range(8):
        x, target = torch.randn(1000, 32), torch.randint(classes, (1000,))
        with torch.autocast(device.type, torch.bfloat16):
            criterion(model(x.to(device)), target.to(device))
    criterion.check()
    if device.type == "cpu":
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x)
        with pytest.raises(ValueError, match="logits must be the output of the attached layer"):
            criterion(logits[torch.randperm(1000)], target)


def test_layer_that_is_not_the_head(target, device):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, C)
            self.body = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model = Model().to(device)
    criterion = attach(model, **options())
    message = "logits must have 8 classes, like the attached layer of 4 features, got shape (6, 5)"
    with pytest.raises(ValueError, match=re.escape(message) + "; pass head="):
        criterion(model(torch.randn(N, 4, device=device)), target)


def test_output_that_is_not_a_tensor(model, images, target):
    criterion = attach(model, **options())
    with pytest.raises(TypeError, match=r"logits must be a tensor, got dict: .* output\.logits"):
        criterion({"logits": model(images)}, target)


def test_mixed_up_target(model, images, target):
    criterion = attach(model, **options())
    with pytest.raises(ValueError, match=re.escape("class indices must have shape (6,), got (5,)")):
        criterion(model(images), target[1:])


def test_logits_of_a_copy_while_the_attached_model_is_in_eval_mode(model, images, target):
    """Such as the restored best copy: the warning says that nothing is augmented."""
    criterion = attach(model, **options())
    criterion(model(images), target)
    trained = copy.deepcopy(model).train()
    model.eval()
    with torch.no_grad():
        criterion(model(images), target)
    with pytest.warns(UserWarning, match="these logits come from another model, such as a copy"):
        criterion(trained(images), target)


def test_a_hook_that_is_called_without_keywords(model, images, target):
    """Copies of a layer that ignore with_kwargs, such as those made by torch.ao."""
    criterion = attach(model, **options())
    (hook,) = model[-1]._forward_pre_hooks.values()
    features = model[:-1](images)
    model[-1]._forward_pre_hooks.clear()
    hook(model[-1], (features,))
    assert criterion(model[-1](features), target).isfinite()
