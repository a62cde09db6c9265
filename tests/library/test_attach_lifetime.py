"""Attached criteria and their models: modes, copies, devices, checkpoints, hooks."""

import copy
import io
import pickle
import warnings

import attached
import pytest
import torch
from attached import N, options, sequential
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from isda import attach

# fixtures
images, model, target = attached.images, attached.model, attached.target


def test_model_in_eval_mode_means_cross_entropy(model, images, target):
    criterion = attach(model, **options(reduction="none", ignore_index=2))
    criterion(model(images), target)
    before = copy.deepcopy(criterion.state_dict())
    model.eval()
    logits = model(images)
    expected = F.cross_entropy(logits, target, reduction="none", ignore_index=2)
    with pytest.warns(UserWarning, match="in eval mode"):
        losses = [criterion(logits, target) for _ in range(2)]  # both calls work in eval mode
    torch.testing.assert_close(losses, [expected] * 2)
    model.train()
    logits = model(images)
    torch.testing.assert_close(criterion.eval()(logits, target), expected)
    for name, tensor in criterion.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_validation_clears_what_was_captured(model, images, target):
    criterion = attach(model, **options())
    logits = model(images)  # a pass without a loss
    model.eval()
    model(images)
    model.train()
    with pytest.raises(ValueError, match="its last pass was in eval mode"):
        criterion(logits, target)


def test_copies_and_pickles_with_a_capture_pending(model, images, target):
    criterion = attach(model, **options())
    logits = model(images)
    twin = copy.deepcopy(model)  # as for weight averaging
    thawed = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    for other in (twin, thawed):
        torch.testing.assert_close(other(images), logits)
        other(torch.zeros_like(images))  # must not reach the criterion
    criterion(logits, target).backward()


def test_copy_of_model_and_criterion_together(model, images, target):
    criterion = attach(model, **options())
    criterion(model(images), target)
    other_model, other_criterion = copy.deepcopy((model, criterion))
    loss = other_criterion(
        other_model(images), target
    )  # uses the pass of the copy, not of the original
    torch.testing.assert_close(loss, criterion(model(images), target))
    with pytest.raises(ValueError, match="its last pass has already been used"):
        criterion(other_model(images), target)


def test_moved_after_attach(target, device):
    """The statistics follow the model to another device or precision."""
    model = sequential()
    criterion = attach(model, **options())
    model.to(device, torch.float64)
    loss = criterion(model(torch.randn(N, 3, 2, 2, device=device, dtype=torch.float64)), target)
    assert loss.device.type == device.type
    assert loss.dtype == torch.float64
    for buffer in criterion.buffers():
        assert buffer.device.type == device.type
    assert criterion.criterion.estimator.covariance.dtype == torch.float32


def test_attached_on_the_models_device(model, device):
    assert all(buffer.device.type == device.type for buffer in attach(model).buffers())


def test_state_survives_a_checkpoint(model, images, target):
    criterion = attach(model, **options())
    criterion(model(images), target)
    file = io.BytesIO()
    torch.save(criterion.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    other = attach(twin, **options())
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(criterion(model(images), target), other(twin(images), target))


def test_remove(model, images, target):
    criterion = attach(model, **options())
    criterion.remove()
    assert not model[-1]._forward_pre_hooks
    logits = model(images)
    with pytest.raises(ValueError, match=r"remove\(\) was called"):
        criterion(logits, target)


def test_two_criteria_on_one_model(model, images, target):
    first, second = attach(model, **options()), attach(model, **options(covariance="identity"))
    logits = model(images)
    assert first(logits, target) != second(logits, target)
    first.remove()
    second(model(images), target)


def test_the_hook_goes_with_the_criterion(model, images):
    def hooks(model: nn.Sequential) -> int:
        return len(model[-1]._forward_pre_hooks)

    criterion = attach(model, **options())
    model(images)
    assert hooks(model) == 1
    criterion = attach(model, **options())  # the first one is deleted
    assert hooks(model) == 1
    for duplicate in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other, its_own = duplicate((model, criterion))
        assert hooks(other) == 1
        del its_own
        assert hooks(other) == 0
    assert hooks(model) == 1
    del criterion
    assert hooks(model) == 0


def test_head_that_is_computed_once_more(images, target, device):
    """Gradient checkpointing recomputes it within backward(), which captures nothing."""
    model = sequential().to(device)
    criterion = attach(model, **options())
    logits = checkpoint(model, images, use_reentrant=False)
    criterion(logits, target).backward()
    with pytest.raises(ValueError, match="its last pass has already been used"):
        criterion(logits, target)
    loss = checkpoint(lambda x: criterion(model(x), target), images, use_reentrant=False)
    with pytest.raises(ValueError, match="called outside of a checkpointed function"):
        loss.backward()


def test_training_in_eval_mode_warns_once(model, images, target):
    """As with frozen batch norm, where the loss would silently be cross entropy."""
    criterion = attach(model, **options())
    model.eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(model(images), target)  # validation
    criterion.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(model(images), target)
    criterion.train()
    with pytest.warns(UserWarning, match="ordinary cross entropy without augmentation") as seen:
        criterion(model(images), target)
    assert seen[0].filename == __file__  # the user's line, not one in torch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(model(images), target)
        model[-1].train()  # as the warning says
        criterion(model(images), target)
    assert criterion.estimator.count.sum() == len(target)
