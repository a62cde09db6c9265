"""``isda.attach``: the same loss as an explicit call, on anybody's model; misuse is refused."""

import copy
import functools
import inspect
import io
import pickle
import re
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isda
from isda import ISDALoss, attach
from isda.heads import find_head

N, C = 6, 5


class TokenClassifier(nn.Module):
    """A label for every token: logits (N, L, C) of a linear head, transposed for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.classifier = nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x).relu()).mT  # (N, C, L)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, C))


def timm_model() -> nn.Module:
    return pytest.importorskip("timm").create_model("test_resnet", num_classes=C)


def timm_transformer() -> nn.Module:
    return pytest.importorskip("timm").create_model("test_vit", num_classes=C, img_size=32)


def torchvision_model() -> nn.Module:
    return pytest.importorskip("torchvision").models.resnet18(num_classes=C)


def hugging_face_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=C,
    )
    return transformers.ViTForImageClassification(config)


MODELS = {
    "sequential": (sequential, (3, 2, 2)),
    "timm": (timm_model, (3, 32, 32)),
    "timm_transformer": (timm_transformer, (3, 32, 32)),
    "torchvision": (torchvision_model, (3, 32, 32)),
    "hugging_face": (hugging_face_model, (3, 8, 8)),
}


def logits_of(output: Tensor) -> Tensor:
    return getattr(output, "logits", output)


@pytest.fixture
def model(device) -> nn.Sequential:
    return sequential().to(device)


@pytest.fixture
def images(device) -> Tensor:
    return torch.randn(N, 3, 2, 2, device=device)


@pytest.fixture
def target(device) -> Tensor:
    return torch.tensor([0, 4, 2, 2, 1, 2], device=device)


def options(**changes) -> dict:
    return {"lambda_0": 3.0, "ramp": "constant", **changes}


# The same as an explicit call


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_explicit_call(name, device, target):
    """Loss, gradients and statistics, over two steps, on the models of several libraries."""
    make, shape = MODELS[name]
    model = make().to(device)
    state = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    criterion = attach(model, **options())
    head = find_head(model)
    explicit = ISDALoss(head.in_features, C, **options()).to(device)
    assert not list(criterion.parameters())
    assert list(model.state_dict()) == list(state)  # checkpoints are as before
    # cuDNN may take another algorithm, with TF32 products, for the second of two equal networks
    tolerance = {} if device.type == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
    captured: list[Tensor] = []
    find_head(plain).register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0]))
    for _ in range(2):
        x = torch.randn(N, *shape, device=device)
        loss = criterion(logits_of(model(x)), target)
        logits = logits_of(plain(x))
        layer = find_head(plain)
        expected = explicit(captured.pop(), layer.weight, target, bias=layer.bias, logits=logits)
        torch.testing.assert_close(loss, expected, **tolerance)
        assert loss > F.cross_entropy(logits, target)  # augmentation is on
        loss.backward()
        expected.backward()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, **tolerance)
    for left, right in zip(criterion.criterion.buffers(), explicit.buffers(), strict=True):
        torch.testing.assert_close(left, right, **tolerance)


def test_progress_is_passed_on(model, images, target):
    criterion = attach(model, lambda_0=3.0)
    logits = model(images)
    loss = criterion(logits, target, progress=0.0)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))


def test_probabilities(model, images, target, device):
    probabilities = torch.randn(N, C, device=device).softmax(1)
    criterion = attach(model, **options())
    explicit = ISDALoss(8, C, **options()).to(device)
    logits = model(images)
    head = model[-1]
    expected = explicit(model[:-1](images), head.weight, probabilities, bias=head.bias)
    torch.testing.assert_close(criterion(logits, probabilities), expected)


@pytest.mark.parametrize("soft", [False, True])
def test_convolution_as_head(soft, device):
    """Dense prediction with a 1×1 convolution: features (N, A, H, W)."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, C, 1)).to(device)
    criterion = attach(model, head=model[-1], **options(ignore_index=255))
    explicit = ISDALoss(4, C, **options(ignore_index=255)).to(device)
    images = torch.randn(2, 3, 4, 3, device=device)
    if soft:
        target = torch.randn(2, C, 4, 3, device=device).softmax(1)
    else:
        target = torch.randint(C, (2, 4, 3), device=device)
        target[0, 0] = 255
    features = model[:-1](images)
    head = model[-1]
    weight = head.weight.flatten(1)
    expected = explicit(features, weight, target, bias=head.bias, logits=head(features))
    loss = criterion(model(images), target)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(each, model.parameters()) for each in (loss, expected)]
    torch.testing.assert_close(*gradients)
    for left, right in zip(criterion.criterion.buffers(), explicit.buffers(), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("soft", [False, True])
def test_token_classification(soft, device):
    """A linear head on (N, L, A), its logits in torch's order (N, C, L)."""
    model = TokenClassifier().to(device)
    criterion = attach(model, **options())
    explicit = ISDALoss(4, C, **options()).to(device)
    x = torch.randn(2, 7, 3, device=device)
    target = torch.randint(C, (2, 7), device=device)
    if soft:
        target = torch.randn(2, C, 7, device=device).softmax(1)
    else:
        target[1, 5:] = -100
    head = model.classifier
    features = model.body(x).relu().mT  # (N, A, L)
    expected = explicit(features, head.weight, target, bias=head.bias)
    torch.testing.assert_close(criterion(model(x), target), expected)
    torch.testing.assert_close(
        criterion.criterion.estimator.covariance, explicit.estimator.covariance
    )


def test_autocast(model, images, target, device):
    criterion = attach(model, **options())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(images)
        loss = criterion(logits, target)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


class LargestFeature(nn.Module):
    """Some other loss with the same call: cross entropy and a term that pulls on the features."""

    def forward(self, features, weight, target, *, bias=None, logits=None, scale=1.0) -> Tensor:
        return F.cross_entropy(logits, target) + scale * features.square().sum()


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


class HalfLoss(ISDALoss):
    """A kind of one's own, with its own forward."""

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
        criterion.check()  # a GPU tells later


# The life of a model around it


def test_model_in_eval_mode_means_cross_entropy(model, images, target):
    criterion = attach(model, **options(reduction="none", ignore_index=2))
    criterion(model(images), target)
    before = copy.deepcopy(criterion.state_dict())
    model.eval()
    logits = model(images)
    expected = F.cross_entropy(logits, target, reduction="none", ignore_index=2)
    with pytest.warns(UserWarning, match="in eval mode"):
        losses = [criterion(logits, target) for _ in range(2)]  # nothing to be used once
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
    twin = copy.deepcopy(model)  # such as an average of the weights
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
    loss = other_criterion(other_model(images), target)  # a pass of the copy, not of the original
    torch.testing.assert_close(loss, criterion(model(images), target))
    with pytest.raises(ValueError, match="its last pass was used already"):
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


# Misuse


def test_a_capture_is_used_once(model, images, target):
    criterion = attach(model, **options())
    logits = model(images)
    criterion(logits, target)
    before = copy.deepcopy(criterion.state_dict())
    with pytest.raises(ValueError, match="its last pass was used already"):
        criterion(logits, target)
    for name, tensor in criterion.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_no_pass_before(model, target, device):
    with pytest.raises(ValueError, match="the layer has made no forward pass since attach"):
        attach(model, **options())(torch.zeros(N, C, device=device), target)


def test_sharded_weight_and_a_criterion(device):
    """As under ZeRO-3, which empties the weight outside of the forward pass."""
    head = nn.Linear(8, C)
    head.weight.data = torch.empty(0)
    for criterion in (None, ISDALoss(8, C, total_steps=10)):
        attached = attach(head, criterion)
        assert (attached.criterion.num_features, attached.criterion.num_classes) == (8, C)


def test_layer_replaced_after_attach(model, images, target, device):
    criterion = attach(model, **options())
    model[-1] = nn.Linear(model[-1].in_features, C).to(device)
    with pytest.raises(ValueError, match="If the layer was replaced after attach, attach again"):
        criterion(model(images), target)


def test_logits_of_another_batch_size(model, images, target):
    criterion = attach(model, **options())
    model(images)
    with pytest.raises(ValueError, match="last batch of the model, 6 samples, got shape"):
        criterion(torch.zeros(3, C, device=images.device), target[:3])


def check_mismatch(criterion, logits, target, *, deferred: bool) -> None:
    """Refused at once on a CPU; on a GPU the loss is NaN and the next look raises."""
    before = {name: t.clone() for name, t in criterion.criterion.estimator.named_buffers()}
    message = "logits must be the output of the attached layer in the last forward pass"
    if deferred:
        assert criterion(logits, target).isnan()
        with pytest.raises(ValueError, match=message):
            criterion.state_dict()
        criterion.state_dict()  # told once
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
    """Of which the first are compared."""
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
    """The first sample is where it was."""
    if device.type == "cuda":
        pytest.skip("a GPU compares one sample, and tells later")
    criterion = attach(model, **options())
    with pytest.raises(ValueError, match="logits must be the output of the attached layer"):
        criterion(model(images)[[0, 2, 1, 3, 4, 5]], target)


@pytest.mark.parametrize("classes", [2, 3])
def test_small_logits_in_bfloat16_are_no_mismatch(classes, device):
    """Of many samples some have logits near 0, which are then off by more than their size."""
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


def test_pooled_features_of_a_convolution(target, device):
    """As some models of timm end: a 1×1 convolution, flattened behind it."""
    body, head = nn.Sequential(nn.Conv2d(3, 4, 2), nn.AdaptiveAvgPool2d(1)), nn.Conv2d(4, C, 1)
    model = nn.Sequential(body, head, nn.Flatten()).to(device)
    criterion = attach(model, head=head, **options())
    explicit = ISDALoss(4, C, **options()).to(device)
    images = torch.randn(N, 3, 4, 4, device=device)
    expected = explicit(body(images).flatten(1), head.weight.flatten(1), target, bias=head.bias)
    torch.testing.assert_close(criterion(model(images), target), expected)


def test_head_called_by_keyword(target, device):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(input=x)

    model = Model().to(device)
    criterion, explicit = attach(model, **options()), ISDALoss(4, C, **options()).to(device)
    x = torch.randn(N, 4, device=device)
    expected = explicit(x, model.head.weight, target, bias=model.head.bias)
    torch.testing.assert_close(criterion(model(x), target), expected)


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
    with pytest.raises(TypeError, match=r"logits must be a tensor, got dict; .* as \.logits"):
        criterion({"logits": model(images)}, target)


def test_the_hook_goes_with_the_criterion(model, images):
    def hooks(model: nn.Sequential) -> int:
        return len(model[-1]._forward_pre_hooks)

    criterion = attach(model, **options())
    model(images)
    assert hooks(model) == 1
    criterion = attach(model, **options())  # and the first one is gone
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
    """A checkpoint computes it again within backward(): nothing new to be used."""
    model = sequential().to(device)
    criterion = attach(model, **options())
    logits = checkpoint(model, images, use_reentrant=False)
    criterion(logits, target).backward()
    with pytest.raises(ValueError, match="its last pass was used already"):
        criterion(logits, target)
    loss = checkpoint(lambda x: criterion(model(x), target), images, use_reentrant=False)
    with pytest.raises(ValueError, match="called outside of a checkpointed function"):
        loss.backward()


def test_mixed_up_target(model, images, target):
    criterion = attach(model, **options())
    with pytest.raises(ValueError, match=re.escape("class indices must have shape (6,), got (5,)")):
        criterion(model(images), target[1:])


def test_head_by_hand(images, target, device):
    """Two layers of C outputs: which one is final must be said."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, C), nn.ReLU(), nn.Linear(C, C)).to(device)
    with pytest.raises(
        ValueError,
        match=r"one final linear layer, found 2 with 5 outputs \(1, 3\); pass head= with the name",
    ):
        attach(model)
    criterion = attach(model, head=model[-1], **options())
    assert criterion.criterion.num_features == C
    criterion(model(images), target)


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
            "lambda_0 must be set on the criterion that is passed, not on attach",
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


def test_tokens_keep_their_shape_without_reduction(device):
    """In training and in evaluation the losses have the shape of the target."""
    model = nn.Linear(4, 3).to(device)
    criterion = isda.attach(model, ramp="constant", reduction="none")
    x, target = torch.randn(2, 6, 4, device=device), torch.randint(3, (2, 6), device=device)
    soft = torch.randn(2, 3, 6, device=device).softmax(1)
    for each in (target, soft):
        assert criterion(model(x).movedim(-1, 1), each).shape == target.shape
    model.eval()
    with pytest.warns(UserWarning, match="in eval mode"):
        losses = [criterion(model(x).movedim(-1, 1), each) for each in (target, soft)]
    assert [loss.shape for loss in losses] == [target.shape] * 2


def test_evaluation_of_half_precision_logits(device):
    """A sum of 60,000 losses does not fit into float16."""
    model = nn.Linear(4, 3).to(device)
    criterion = isda.attach(model, ramp="constant")
    model.eval()
    logits = torch.randn(60_000, 3, device=device).half()
    target = torch.randint(3, (60_000,), device=device)
    expected = nn.functional.cross_entropy(logits.float(), target)
    torch.testing.assert_close(criterion(logits, target), expected)


def test_training_in_eval_mode_warns_once(model, images, target):
    """As with frozen batch norm: it would be cross entropy without a word."""
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
    assert seen[0].filename == __file__  # the line of the user, not one of torch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(model(images), target)
        model[-1].train()  # as the warning says
        criterion(model(images), target)
    assert criterion.estimator.count.sum() == len(target)


def test_strength_and_total_steps_of_a_model():
    model = nn.Linear(4, 3)
    criterion = attach(model, lambda_0=0.5)
    with pytest.raises(ValueError, match="total_steps must be given to the criterion"):
        _ = criterion.strength
    with pytest.raises(ValueError, match="total_steps must be a whole number >= 1, got 0"):
        criterion.total_steps = 0
    criterion.total_steps = 4
    assert criterion.criterion.total_steps == criterion.total_steps == 4
    for step in range(6):
        assert criterion.strength == pytest.approx(0.5 * min(step / 4, 1))
        criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0]))
    assert attach(model, lambda_0=0.3, ramp="constant").strength == 0.3


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
    """15.6 GiB for a ResNet-50 with 1000 classes: said before they are allocated."""
    with torch.device("meta"):
        with pytest.raises(ValueError, match=r"model on the meta device after to_empty\(\)"):
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


def test_tokens_with_a_covariance_index(device):
    model = nn.Linear(4, 3).to(device)
    criterion = attach(model, ramp="constant", reduction="none")
    x, target = torch.randn(2, 6, 4, device=device), torch.randint(3, (2, 6), device=device)
    first = criterion(model(x).movedim(-1, 1), target)
    second = criterion(model(x).movedim(-1, 1), target, covariance_index=target, update=False)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_options_beside_a_criterion_where_attach_is_decorated(monkeypatch):
    """Such as by a library that checks the types of all functions."""
    module, function = sys.modules["isda.attach"], isda.attach
    monkeypatch.setattr(
        module, "attach", functools.wraps(function)(lambda *a, **b: function(*a, **b))
    )
    model = nn.Linear(3, 2)
    assert isinstance(function(model, isda.ISDALoss(3, 2, total_steps=5)).criterion, isda.ISDALoss)
    with pytest.raises(ValueError, match="lambda_0 must be set on the criterion"):
        function(model, isda.ISDALoss(3, 2, total_steps=5), lambda_0=1.0)
