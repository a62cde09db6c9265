"""Logits that the model reshapes or selects after its final layer: tokens, rows, maps."""

import copy
import re

import pytest
import torch
from paired_heads import OPTIONS, A, C, N, Then, check
from torch import Tensor, nn
from torch.nn import functional as F

import isda
from isda import ISDALoss, attach, checks


@pytest.mark.parametrize("length", [7, C])
@pytest.mark.parametrize("classes_last", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_tokens(length, classes_last, soft, device):
    """Logits (N, L, C) as in transformers and (N, C, L) as in torch, also if L = C."""
    head = nn.Linear(A, C).to(device)
    model = head if classes_last else Then(head, lambda logits: logits.mT)
    x = torch.randn(N, length, A, device=device)
    target = torch.randint(C, (N, length), device=device)
    target[1, 3:] = -100
    rows = target.flatten()
    if soft:
        rows = torch.randn(N * length, C, device=device).softmax(1)
        target = rows.view(N, length, C) if classes_last else rows.view(N, length, C).mT
    criterion = check(model, head, x, target, x.flatten(0, 1), rows, device)
    model.eval()
    logits = model(x)
    flat = logits.flatten(0, 1) if classes_last else logits.mT.flatten(0, 1)
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(logits, target)
    torch.testing.assert_close(loss, F.cross_entropy(flat, rows))


@pytest.mark.parametrize("classes_last", [True, False])
@pytest.mark.parametrize("soft", [True, False])
def test_as_many_classes_as_tokens_on_a_device(classes_last, soft, device, monkeypatch):
    """The host must not read the values, so the order is chosen on the device."""
    head = nn.Linear(A, C).to(device)
    model = head if classes_last else Then(head, lambda logits: logits.mT)
    x, target = torch.randn(N, C, A, device=device), torch.randint(C, (N, C), device=device)
    rows = target.flatten()
    if soft:
        rows = torch.randn(N * C, C, device=device).softmax(1)
        target = rows.view(N, C, C) if classes_last else rows.view(N, C, C).mT
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    criterion = check(model, head, x, target, x.flatten(0, 1), rows, device)
    monkeypatch.undo()
    criterion.check()


@pytest.mark.parametrize("classes_last", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_order_is_kept_once_it_is_known(classes_last, on_host, device, monkeypatch):
    """Logits of 0, from a layer initialised with 0, do not determine the order."""
    monkeypatch.setattr(checks, "known_on_host", lambda tensor: on_host and not tensor.is_cuda)
    head = nn.Linear(A, C).to(device)
    model = head if classes_last else Then(head, lambda logits: logits.mT)
    criterion = isda.attach(model, lambda_0=0.0, total_steps=10)
    x, target = torch.randn(N, C, A, device=device), torch.randint(C, (N, C), device=device)
    weight, bias = (parameter.detach().clone() for parameter in head.parameters())
    for scale in (0.0, 1.0, 0.0):
        with torch.no_grad():
            head.weight.copy_(scale * weight)
            head.bias.copy_(scale * bias)
        expected = F.cross_entropy(head(x).flatten(0, 1), target.flatten())
        loss = criterion(model(x), target)
        torch.testing.assert_close(loss, expected)
        if (criterion._classes_last, classes_last) != (None, False):  # otherwise unknown
            gradients = (torch.autograd.grad(one, head.parameters()) for one in (loss, expected))
            torch.testing.assert_close(*gradients)
    criterion.check()
    with torch.no_grad():
        head.weight.copy_(weight)
    model.eval()
    expected = F.cross_entropy(head(x).flatten(0, 1), target.flatten())
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(model(x), target)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("classes_last", [True, False])
def test_maps_of_a_linear_layer_with_all_sizes_equal(classes_last, device):
    head = nn.Linear(A, C).to(device)
    model = head if classes_last else Then(head, lambda logits: logits.movedim(-1, 1))
    x, target = torch.randn(2, C, C, A, device=device), torch.randint(C, (2, C, C), device=device)
    check(model, head, x, target, x.flatten(0, 2), target.flatten(), device)


@pytest.mark.parametrize("dimensions", [0, 1, 2, 3])
def test_rows_of_tokens(dimensions, device):
    """Flattened by the user, as for F.cross_entropy(logits.view(-1, C), target.view(-1))."""
    head = nn.Linear(A, C).to(device)
    x = torch.randn(N, *(2, 3, 4)[:dimensions], A, device=device)
    target = torch.randint(C, x.shape[:-1], device=device).flatten()
    model = Then(head, lambda logits: logits.reshape(-1, C))
    check(model, head, x, target, x.reshape(-1, A), target, device)


def test_position_of_a_sequence(device):
    for bias in (False, True):
        head = nn.Linear(A, C, bias=bias).to(device)
        last = torch.tensor([4, 0, 2], device=device)
        model = Then(head, lambda logits, last=last: logits[torch.arange(N), last])
        x, target = torch.randn(N, 6, A, device=device), torch.tensor([1, 4, 4], device=device)
        rows = x[torch.arange(N), last]
        check(model, head, x, target, rows, target, device)
    criterion = attach(model.bfloat16(), head=head, **OPTIONS)
    explicit = ISDALoss(A, C, **OPTIONS).to(device)
    logits = model(x.bfloat16())
    expected = explicit(rows.bfloat16(), head.weight, target, logits=logits)
    torch.testing.assert_close(criterion(logits, target), expected)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequence_classifiers_of_transformers(kind, dtype, device):
    """They return the logits of the last token that is not padding."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "num_labels": C, "pad_token_id": 0}
    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, **sizes)
        model = transformers.GPT2ForSequenceClassification(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            **sizes,
        )
        model = transformers.LlamaForSequenceClassification(config)
    model = model.to(device).to(dtype)
    captured = []
    model.score.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0]))
    criterion = attach(model, **OPTIONS)
    explicit = ISDALoss(8, C, **OPTIONS).to(device)
    tokens = torch.randint(1, 11, (N, 6), device=device)
    tokens[0, 4:], tokens[1, 1:] = 0, 0
    target = torch.tensor([2, 0, 2], device=device)
    logits = model(tokens, attention_mask=(tokens != 0).long()).logits
    rows = captured[0][torch.arange(N), torch.tensor([3, 0, 5])]
    loss = criterion(logits, target)
    expected = explicit(rows, model.score.weight, target, logits=logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(criterion.estimator.mean, explicit.estimator.mean)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_of_any_dimension(dimensions, device):
    head = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions](A, C, 1).to(device)
    size = (4, 3, 2)[:dimensions]
    x = torch.randn(2, A, *size, device=device)
    target = torch.randint(C, (2, *size), device=device)
    target[0, 0] = 255
    rows = x.movedim(1, -1).reshape(-1, A)
    check(head, head, x, target, rows, target.flatten(), device, ignore_index=255)


@pytest.mark.parametrize("bias", [True, False])
def test_two_heads_that_are_summed(bias, device):
    """Equivalent to one linear layer on the concatenated features."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Conv2d(1, C, 1, bias=bias), nn.Conv2d(3, C, 1, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.low(x[:, :1]) + self.high(x[:, 1:])

    model = Model().to(device)
    criterion = attach(model, head=["low", model.high], **OPTIONS)
    explicit = ISDALoss(A, C, **OPTIONS).to(device)
    x = torch.randn(2, A, 3, 3, device=device)
    target = torch.randint(C, (2, 3, 3), device=device)
    weight = torch.cat([model.low.weight, model.high.weight], 1).flatten(1)
    total = model.low.bias + model.high.bias if bias else None
    expected = explicit(x, weight, target, bias=total)
    loss = criterion(model(x), target)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(each, model.parameters()) for each in (loss, expected)]
    torch.testing.assert_close(*gradients)
    other = Model().to(device)
    other.forward = lambda x: (
        other.low(x[:, :1]).mean((2, 3), keepdim=True)
        + other.high(x[:, 1:].mean((2, 3), keepdim=True))
    )
    criterion = attach(other, head=["low", "high"], **OPTIONS)
    with pytest.raises(ValueError, match=r"of equal size, got \(2, 1, 3, 3\), \(2, 3, 1, 1\)"):
        criterion(other(x), target)


@pytest.mark.parametrize(
    ("shape", "logits", "target", "message"),
    [
        ((3, 7, A), (3, 7, C), (3,), "target of class indices must have shape (3, 7), like the"),
        ((3, 7, A), (2, 7, C), (2, 7), "the last batch of the model, 3 samples, got shape (2,"),
        ((3, 7, A), (3, 7, C + 1), (3, 7), "logits must have 5 classes, like the attached layer"),
        (
            (3, 7, A),
            (3, 4, C),
            (3, 4),
            "include all positions, shape (3, 7, 5) for features of shape (3, 7, 4), got shape "
            "(3, 4, 5); to merge dimensions, pass rows (M, 5); to exclude positions, label them",
        ),
        ((3, 7, A), (13, C), (13,), "include all positions, shape (3, 7, 5) for features of"),
        ((3, 7, A), (7, 3, C), (7, 3), "include all positions, shape (3, 7, 5) for features of"),
        ((3, A), (2, C), (2,), "the last batch of the model, 3 samples, got shape (2, 5); if"),
        (
            (3, A),
            (),
            (3,),
            "logits must have shape (3, 5) for features of shape (3, 4), got shape ()",
        ),
        ((A,), (C,), (), "must have a batch dimension, got shape (4,)"),
        ((3, 2, 2, 2, 2, A), (3, C, 4, 4, 4, 4), (3, 4, 4, 4, 4), "4 spatial dimensions cannot be"),
    ],
)
def test_shapes_that_do_not_fit(shape, logits, target, message, device):
    head = nn.Linear(A, C).to(device)
    criterion = attach(head, **OPTIONS)
    head(torch.randn(shape, device=device))
    before = copy.deepcopy(criterion.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion(torch.randn(logits, device=device), torch.zeros(target, device=device, dtype=int))
    for name, tensor in criterion.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_multi_label_tokens(device):
    """Labels (N, L, C) for a linear head on tokens."""
    head = nn.Linear(A, C).to(device)
    criterion = attach(head, isda.ISDABCEWithLogitsLoss(A, C, **OPTIONS))
    explicit = isda.ISDABCEWithLogitsLoss(A, C, **OPTIONS).to(device)
    x = torch.randn(N, 7, A, device=device)
    labels = torch.randint(2, (N, 7, C), device=device).float()
    rows = explicit(x.flatten(0, 1), head.weight, labels.flatten(0, 1), bias=head.bias)
    torch.testing.assert_close(criterion(head(x), labels), rows)


@pytest.mark.parametrize("positions", [(7,), (C,), (3, 4)], ids=str)
@pytest.mark.parametrize("classes_last", [True, False])
def test_losses_of_labels_have_the_shape_of_the_logits(positions, classes_last, device):
    """In training and in eval mode, as with nn.BCEWithLogitsLoss."""
    head = nn.Linear(A, C).to(device)
    model = head if classes_last else Then(head, lambda logits: logits.movedim(-1, 1))
    loss = isda.ISDABCEWithLogitsLoss(A, C, lambda_0=0, ramp="constant", reduction="none")
    criterion = attach(model, loss)
    logits = model(torch.randn(N, *positions, A, device=device))
    labels = torch.randint(2, logits.shape, device=device).float()
    expected = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    torch.testing.assert_close(criterion(logits, labels), expected)
    criterion.eval()
    torch.testing.assert_close(criterion(logits, labels), expected)


@pytest.mark.parametrize("trained", [False, True])
def test_as_many_classes_as_tokens_in_eval_mode(trained, device):
    """The order is (N, L, C), as in the layer's output, unless training used another one."""
    head = nn.Linear(A, C).to(device)
    x, target = torch.randn(N, C, A, device=device), torch.randint(C, (N, C), device=device)
    criterion = attach(head, **OPTIONS)
    if trained:
        criterion(head(x), target)
    head.eval()
    logits = head(x)
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(logits, target)
    torch.testing.assert_close(loss, F.cross_entropy(logits.mT, target))


def test_crops_in_eval_mode(device):
    """The input of the layer has no positions, so torch's order is assumed."""
    head = nn.Linear(A, C).to(device)
    criterion = attach(head, **OPTIONS)
    head.eval()
    logits = head(torch.randn(N * C, A, device=device)).view(N, C, C).mT  # (N, classes, crops)
    target = torch.randint(C, (N, C), device=device)
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(logits, target)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))


def test_tokens_of_a_convolution_in_eval_mode(device):
    head = nn.Conv1d(A, C, 1).to(device)
    criterion = attach(head, **OPTIONS)
    head.eval()
    logits, target = head(torch.randn(N, A, C).to(device)), torch.randint(C, (N, C)).to(device)
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(logits, target)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target))
