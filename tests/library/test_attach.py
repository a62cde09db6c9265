"""``isda.attach``: the same loss as an explicit call, for models of several libraries."""

import copy

import attached
import pytest
import torch
from attached import C, N, options, sequential
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda import ISDALoss, attach
from isda.heads import find_head

# fixtures
images, model, target = attached.images, attached.model, attached.target


class TokenClassifier(nn.Module):
    """Token classifier: logits (N, L, C) of a linear head, transposed for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.classifier = nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x).relu()).mT  # (N, C, L)


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
    assert list(model.state_dict()) == list(state)  # checkpoints do not change
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
    """A linear head on (N, L, A) with logits in torch's order (N, C, L)."""
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


def test_pooled_features_of_a_convolution(target, device):
    """A 1×1 convolution followed by flatten, as in some timm models."""
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
    """The sum of 60,000 losses overflows float16."""
    model = nn.Linear(4, 3).to(device)
    criterion = isda.attach(model, ramp="constant")
    model.eval()
    logits = torch.randn(60_000, 3, device=device).half()
    target = torch.randint(3, (60_000,), device=device)
    expected = nn.functional.cross_entropy(logits.float(), target)
    torch.testing.assert_close(criterion(logits, target), expected)


def test_tokens_with_a_covariance_index(device):
    model = nn.Linear(4, 3).to(device)
    criterion = attach(model, ramp="constant", reduction="none")
    x, target = torch.randn(2, 6, 4, device=device), torch.randint(3, (2, 6), device=device)
    first = criterion(model(x).movedim(-1, 1), target)
    second = criterion(model(x).movedim(-1, 1), target, covariance_index=target, update=False)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
