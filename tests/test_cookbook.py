"""The cookbook: every entry runs, is short, is printed in the documentation, and is exact.

Each loss is compared with its formula in float64, one sample and one class at a time.
"""

import ast
import importlib.util
import math
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from reference import class_moments, draw
from torch import Tensor, nn
from torch.testing import assert_close

import isda

ROOT = Path(__file__).parents[1]
ENTRIES = sorted(path.stem for path in (ROOT / "examples" / "cookbook").glob("*.py"))
PAGE = (ROOT / "docs" / "cookbook.md").read_text()

# functional entries in float64: sums of some hundred terms, in another order
EXACT = {"rtol": 1e-9, "atol": 1e-11}
# statistics and quadratic terms are float32, split into two bfloat16 (2⁻¹⁶) on a GPU; gradients sum
# up to a hundred of them
SINGLE = {"rtol": 2e-4, "atol": 2e-5}


@cache
def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"cookbook_{name}", ROOT / "examples" / "cookbook" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def user_code(name: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of an entry that users copy: those in ``__all__``."""
    tree = ast.parse((ROOT / "examples" / "cookbook" / f"{name}.py").read_text())
    return [node for node in tree.body if getattr(node, "name", None) in load(name).__all__]


def bound(
    logits: list[Tensor], weight: Tensor, label: int, matrix: Tensor, strength: float
) -> Tensor:
    """log Σ_j exp(z_j + (λ/2) (w_j − w_k)ᵀ Σ (w_j − w_k)) − z_k for one sample and label k."""
    total = torch.zeros((), dtype=torch.float64)
    for j in range(len(weight)):
        margin = weight[j] - weight[label]
        total = total + torch.exp(logits[j] + strength / 2 * (margin @ matrix @ margin))
    return torch.log(total) - logits[label]


def linear(feature: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    """Logits of one sample."""
    return [weight[j] @ feature + (0.0 if bias is None else bias[j]) for j in range(len(weight))]


def softmax(logits: list[Tensor]) -> list[float]:
    total = sum(math.exp(z.item()) for z in logits)
    return [math.exp(z.item()) / total for z in logits]


def largest(values: list[float]) -> int:
    return max(range(len(values)), key=lambda k: values[k])


def twins(*tensors: Tensor, device: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
    """Leaves with the same values for the entry and for the naive loop."""
    rounded = [tensor.detach().to(dtype) for tensor in tensors]
    return [
        [tensor.to(device).clone().requires_grad_() for tensor in rounded],
        [tensor.double().cpu().clone().requires_grad_() for tensor in rounded],
    ]


def create_head(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with given leaves as its parameters."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(weight)
    if bias is not None:
        head.bias = nn.Parameter(bias)
    return head


def assert_same(
    loss: Tensor,
    expected: Tensor,
    leaves: list[Tensor],
    expected_leaves: list[Tensor],
    tolerance: dict[str, float],
) -> None:
    """Equal values and equal gradients."""
    assert_close(loss.double().cpu(), expected, **tolerance)
    gradients = torch.autograd.grad(loss, leaves)
    expected_gradients = torch.autograd.grad(expected, expected_leaves)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.abs().max() > 0
        assert_close(gradient.double().cpu(), expected_gradient, **tolerance)


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_runs_and_its_loss_falls(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    output = capsys.readouterr().out
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) >= 4
    assert losses[-1] < 0.75 * losses[0] or name == "incremental"


def test_incremental_entry_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    load("incremental").main()
    errors = re.findall(r"error ([\d.]+) % of (\d)", capsys.readouterr().out)
    assert [number for _, number in errors] == ["2", "4", "6"]
    assert float(errors[-1][0]) < 30  # a network that forgets knows 2 of 6 classes: 67 %


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_has_at_most_25_lines(name: str) -> None:
    lines = (ROOT / "examples" / "cookbook" / f"{name}.py").read_text().splitlines()
    counted = 0
    for node in user_code(name):
        docstrings: set[int] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
                docstrings |= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
        for number in range(node.lineno, node.end_lineno + 1):
            line = lines[number - 1].strip()
            counted += bool(line) and not line.startswith("#") and number not in docstrings
    assert 5 <= counted <= 25


@pytest.mark.parametrize("name", ENTRIES)
def test_page_prints_the_code_of_the_entry(name: str) -> None:
    source = (ROOT / "examples" / "cookbook" / f"{name}.py").read_text()
    code = "\n\n\n".join(ast.get_source_segment(source, node) for node in user_code(name))
    section = PAGE.split(f"`examples/cookbook/{name}.py`")[1].split("\n## ")[0]
    assert re.findall(r"```python\n(.*?)\n```", section, re.DOTALL) == [code]
    imports = re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(f"{imports}\n{code}", names)  # the imports on the page are enough
    assert set(load(name).__all__) <= names.keys()


def test_margins_and_class_weights(device: torch.device) -> None:
    entry = load("long_tail")
    earlier, inputs = draw(40, 13, 5, seed=1), draw(7, 13, 5)
    count = torch.arange(3, 3 + 13 * 7, 7)
    ours, theirs = twins(
        inputs.features, inputs.weight, inputs.bias, device=device, dtype=torch.float32
    )

    weights, margins = [], []
    for n in count.tolist():
        weights.append((1 - 0.999) / (1 - 0.999**n))
        margins.append(0.4 * (min(count.tolist()) / n) ** 0.25)
    average = sum(weights) / len(weights)
    weights = [value / average for value in weights]
    assert_close(entry.balanced_weight(count, beta=0.999), torch.tensor(weights))
    everything = torch.cat([earlier.features.float(), theirs[0].detach()])
    _, _, matrices = class_moments(everything, torch.cat([earlier.target, inputs.target]), 13)
    total, share = torch.zeros((), dtype=torch.float64), 0.0
    for i, y in enumerate(inputs.target.tolist()):
        logits = linear(theirs[0][i], *theirs[1:])
        logits[y] = logits[y] - margins[y]
        total = total + weights[y] * bound(logits, theirs[1], y, matrices[y], 0.8 * 0.7)
        share += weights[y]

    criterion = isda.ISDALoss(
        5, 13, lambda_0=0.8, weight=entry.balanced_weight(count, beta=0.999)
    ).to(device)
    criterion.estimator.update(earlier.features.float().to(device), earlier.target.to(device))
    loss = entry.MarginLoss(criterion, entry.ldam_margin(count, 0.4).to(device)).to(device)
    head = create_head(ours[1], ours[2])
    attached = isda.attach(nn.Sequential(nn.Identity(), head), loss)
    target = inputs.target.to(device)
    value = attached(head(ours[0]), target, progress=0.7)
    assert_same(value, total / share, [ours[0], head.weight, head.bias], theirs, SINGLE)


def test_margins_are_for_training_only(device: torch.device) -> None:
    entry = load("long_tail")
    inputs = draw(7, 13, 5, dtype=torch.float32, device=device)
    criterion = isda.ISDALoss(5, 13).to(device)
    loss = entry.MarginLoss(criterion, torch.rand(13, device=device)).eval()
    logits = nn.functional.linear(inputs.features, inputs.weight)
    expected = nn.functional.cross_entropy(logits, inputs.target)
    assert_close(loss(inputs.features, inputs.weight, inputs.target, logits=logits), expected)
    assert_close(loss.evaluate(logits, inputs.target), expected)


def test_means_and_covariances_mixed_by_confusion(device: torch.device) -> None:
    inputs = draw(7, 13, 5)
    mean, confusion = torch.randn(13, 5).double(), torch.rand(13, 13).double()
    confusion[2] = torch.eye(13)[2]  # a class that is never confused
    ours, theirs = twins(
        inputs.features, inputs.weight, inputs.bias, device=device, dtype=torch.float64
    )

    total, share = torch.zeros((), dtype=torch.float64), 0.0
    weights = [1 + c / 13 for c in range(13)]
    for i, y in enumerate(inputs.target.tolist()):
        shift, matrix = -mean[y], torch.zeros(5, 5, dtype=torch.float64)
        for k in range(13):
            part = confusion[y, k] / sum(confusion[y].tolist())
            shift = shift + part * mean[k]
            matrix = matrix + part * inputs.covariance[k]
        logits = linear(theirs[0][i], *theirs[1:])
        for j in range(13):  # the common shift of all logits of a sample makes no difference
            logits[j] = logits[j] + 0.6 * (theirs[1][j] - theirs[1][y]) @ shift
        total = total + weights[y] * bound(logits, theirs[1], y, matrix, 0.9)
        share += weights[y]

    head = create_head(ours[1], ours[2])
    moments = isda.functional.Moments(torch.ones(13), mean, inputs.covariance)
    loss = load("risda").risda_loss(
        ours[0],
        head,
        inputs.target.to(device),
        isda.functional.Moments(*(value.to(device) for value in moments)),
        confusion.to(device),
        alpha=0.6,
        beta=0.9,
        class_weight=torch.tensor(weights, dtype=torch.float64, device=device),
    )
    assert_same(loss, total / share, [ours[0], head.weight, head.bias], theirs, EXACT)


def test_covariances_improved_by_a_meta_gradient(device: torch.device) -> None:
    strength, lr, meta_lr = 0.9, 0.5, 30.0
    batch, balanced = draw(7, 5, 4), draw(6, 5, 4, seed=1)
    body_weight, body_bias = torch.randn(4, 4).double() / 2, torch.randn(4).double()
    parameters = (body_weight, body_bias, batch.weight, batch.bias)
    ours, theirs = twins(*parameters, device=device, dtype=torch.float64)
    weights = [1.0, 2.0, 0.5, 1.5, 1.0]

    def forward(row: Tensor, values: list[Tensor]) -> list[Tensor]:
        hidden = torch.tanh(torch.stack(linear(row, values[0], values[1])))
        return linear(hidden, values[2], values[3])

    def augmented(matrices: Tensor, values: list[Tensor]) -> Tensor:
        total, share = torch.zeros((), dtype=torch.float64), 0.0
        for i, y in enumerate(batch.target.tolist()):
            logits = forward(batch.features[i], values)
            total = total + weights[y] * bound(logits, values[2], y, matrices[y], strength)
            share += weights[y]
        return total / share

    def balanced_loss(matrices: Tensor) -> Tensor:
        slopes = torch.autograd.grad(augmented(matrices, theirs), theirs, create_graph=True)
        values = [value - lr * slope for value, slope in zip(theirs, slopes, strict=True)]
        total = torch.zeros((), dtype=torch.float64)
        for i, y in enumerate(balanced.target.tolist()):
            logits = forward(balanced.features[i], values)
            total = total + torch.log(sum(torch.exp(z) for z in logits)) - logits[y]
        return total / len(balanced.target)

    matrices = batch.covariance.clone().requires_grad_()
    (slope,) = torch.autograd.grad(balanced_loss(matrices), matrices)
    direction, step = torch.randn_like(slope), 1e-6
    difference = balanced_loss(matrices + step * direction) - balanced_loss(
        matrices - step * direction
    )
    # central differences: rounding of 1e-16 divided by the step
    assert_close(difference / (2 * step), (slope * direction).sum(), rtol=1e-6, atol=1e-9)
    expected = augmented(matrices.detach() - meta_lr * slope, theirs)
    assert abs(expected - augmented(batch.covariance, theirs)) > 1e-3  # the test sees the step

    head, layer = create_head(ours[2], ours[3]), create_head(ours[0], ours[1])
    body = nn.Sequential(layer, nn.Tanh())
    loss = load("metasaug").metasaug_loss(
        nn.Sequential(body, head),
        head,
        body(batch.features.to(device)),
        batch.target.to(device),
        (balanced.features.to(device), balanced.target.to(device)),
        batch.covariance.to(device),
        strength=strength,
        lr=lr,
        meta_lr=meta_lr,
        class_weight=torch.tensor(weights, dtype=torch.float64, device=device),
    )
    leaves = [layer.weight, layer.bias, head.weight, head.bias]
    assert_same(loss, expected, leaves, theirs, EXACT)


def test_consistency_of_unlabelled_samples(device: torch.device) -> None:
    inputs, other = draw(7, 13, 5), draw(6, 13, 5, seed=1)
    ours, theirs = twins(
        inputs.features,
        inputs.weight / 2,
        inputs.bias,
        other.features,
        device=device,
        dtype=torch.float32,
    )
    features, weight, bias, unlabelled = theirs
    earlier = draw(40, 13, 5, seed=2)
    everything = torch.cat([earlier.features.float(), features.detach()])
    _, _, matrices = class_moments(everything, torch.cat([earlier.target, inputs.target]), 13)
    expected = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(inputs.target.tolist()):
        logits = linear(features[i], weight, bias)
        expected = expected + bound(logits, weight, y, matrices[y], 0.8 * 0.7) / 7
    for i in range(6):
        logits = linear(unlabelled[i], weight, bias)
        probabilities = softmax(logits)
        matrix = matrices[largest(probabilities)]
        for k in range(13):
            part = bound(logits, weight, k, matrix, 0.8 * 0.7)
            expected = expected + 0.3 * probabilities[k] * part / 6

    criterion = isda.ISDALoss(5, 13, lambda_0=0.8).to(device)
    criterion.estimator.update(earlier.features.float().to(device), earlier.target.to(device))
    head = create_head(ours[1], ours[2])
    loss = load("semi_supervised").semi_supervised_loss(
        criterion,
        head,
        ours[0],
        inputs.target.to(device),
        ours[3],
        progress=0.7,
        consistency=0.3,
    )
    assert_same(loss, expected, [ours[0], head.weight, head.bias, ours[3]], theirs, SINGLE)
    assert int(criterion.estimator.count.sum()) == 47  # without the unlabelled ones
    assert int(criterion.step) == 1


def test_adaptation_without_the_source_data(device: torch.device) -> None:
    source, inputs = draw(40, 13, 5, seed=1), draw(7, 13, 5)
    ours, theirs = twins(
        inputs.features, inputs.weight / 2, inputs.bias, device=device, dtype=torch.float32
    )
    features, weight, bias = theirs
    _, _, matrices = class_moments(source.features.float(), source.target, 13)
    rows = [linear(features[i], weight, bias) for i in range(7)]
    probabilities = [softmax(row) for row in rows]
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        cosines = []
        for n in range(7):
            scale = features[i].norm() * features[n].norm()
            cosines.append(((features[i] @ features[n] / scale).item(), n))
        nearest = [n for _, n in sorted(cosines, reverse=True) if n != i][:2]
        matrix = matrices[largest(probabilities[i])]
        for k in range(13):
            share = sum(probabilities[n][k] for n in nearest) / 2
            expected = expected + share * bound(rows[i], weight, k, matrix, 0.8) / 7

    estimator = isda.FullCovariance(5, 13)
    criterion = isda.ISDALoss(
        5, 13, lambda_0=0.8, covariance=estimator, ramp="constant", frozen=True
    ).to(device)
    estimator.update(source.features.float().to(device), source.target.to(device))
    before = [value.clone() for value in estimator.moments]
    head = create_head(ours[1], ours[2])
    loss = load("source_free").adaptation_loss(criterion, head, ours[0], neighbours=2)
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)
    for value, old in zip(estimator.moments, before, strict=True):
        assert torch.equal(value, old)


def test_replay_of_class_means(device: torch.device) -> None:
    entry = load("incremental")
    old, new = draw(40, 8, 5, seed=1), draw(7, 13, 5)
    estimator = isda.FullCovariance(5, 8)
    criterion = isda.ISDALoss(
        5, 8, lambda_0=0.8, covariance=estimator, ramp="constant", frozen=True
    ).to(device)
    estimator.update(old.features.float().to(device), old.target.to(device))
    criterion.grow(13)
    head = entry.grow_head(create_head(old.weight.float(), old.bias.float()).to(device), 13)
    assert torch.equal(head.weight[:8].cpu(), old.weight.float())
    assert torch.equal(head.bias[:8].cpu(), old.bias.float())

    ours, theirs = twins(new.features, head.weight, head.bias, device=device, dtype=torch.float32)
    features, weight, bias = theirs
    _, means, matrices = class_moments(old.features.float(), old.target, 8)
    old_features = (new.features + 0.5).float()
    expected, distance = torch.zeros((), dtype=torch.float64), 0.0
    for i, y in enumerate(new.target.tolist()):
        nothing = torch.zeros(5, 5, dtype=torch.float64)
        logits = linear(features[i], weight, bias)
        expected = expected + bound(logits, weight, y, nothing, 0.0) / 7
        for a in range(5):
            distance = distance + (features[i, a] - old_features[i, a].double()) ** 2
    old_target = torch.tensor([7, 2, 2, 5])
    for c in old_target.tolist():
        logits = linear(means[c], weight, bias)
        expected = expected + 0.4 * bound(logits, weight, c, matrices[c], 0.8) / 4
    expected = expected + 0.2 * distance.sqrt()

    head = create_head(ours[1], ours[2])
    loss = entry.il2a_loss(
        criterion,
        head,
        ours[0],
        old_features.to(device),
        new.target.to(device),
        old_target.to(device),
        estimator.moments.mean.float(),
        gamma=0.4,
        eta=0.2,
    )
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)
    assert int(estimator.count.sum()) == 40


def test_cosine_classifier(device: torch.device) -> None:
    inputs = draw(7, 13, 5)
    head = load("cosine").create_cosine_head(5, 13, scale=3.0).to(device)
    scale, raw = (
        head[1].parametrizations.weight[0].log_scale,
        (head[1].parametrizations.weight.original),
    )
    ours, theirs = twins(inputs.features, raw, scale, device=device, dtype=torch.float32)
    features, weight, log_scale = theirs
    directions = [row / (row @ row).sqrt() for row in weight]
    rows = torch.stack([log_scale.exp() * row for row in directions])
    units = [row / (row @ row).sqrt() for row in features]
    _, _, matrices = class_moments(torch.stack(units).detach(), inputs.target, 13)
    expected = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(inputs.target.tolist()):
        expected = expected + bound(linear(units[i], rows), rows, y, matrices[y], 4.0) / 7

    model = nn.Sequential(head)
    criterion = isda.attach(model, lambda_0=4.0, ramp="constant")
    loss = criterion(model(ours[0]), inputs.target.to(device))
    assert_same(loss, expected, [ours[0], raw, scale], theirs, SINGLE)


def test_variances_of_each_sample(device: torch.device) -> None:
    earlier, inputs = draw(40, 13, 5, seed=1), draw(7, 13, 5)
    estimator = load("sample_variance").SampleVariance(5, 13).to(device)
    criterion = isda.ISDALoss(
        5, 13, lambda_0=0.8, ramp="constant", covariance=estimator, synchronize=False
    ).to(device)
    with torch.no_grad():
        estimator.network.weight.normal_().div_(4)
        estimator.network.bias.normal_().div_(4)
    network = estimator.network
    ours, theirs = twins(
        inputs.features,
        inputs.weight,
        inputs.bias,
        network.weight,
        network.bias,
        device=device,
        dtype=torch.float32,
    )
    features, weight, bias, network_weight, network_bias = theirs
    everything = torch.cat([earlier.features.float(), features.detach()])
    _, _, matrices = class_moments(everything, torch.cat([earlier.target, inputs.target]), 13)
    expected = divergence = torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(inputs.target.tolist()):
        ratio = linear(features[i].detach(), network_weight, network_bias)
        variances = [matrices[y, a, a] * torch.exp(ratio[a]) for a in range(5)]
        logits = linear(features[i], weight, bias)
        expected = expected + bound(logits, weight, y, torch.diag(torch.stack(variances)), 0.8) / 7
        for a in range(5):  # KL divergence of two normal distributions of mean 0
            share = variances[a] / matrices[y, a, a] if matrices[y, a, a] else torch.exp(ratio[a])
            divergence = divergence + 0.5 * (share - 1 - torch.log(share)) / 7

    estimator.update(earlier.features.float().to(device), earlier.target.to(device))
    head = create_head(ours[1], ours[2])
    loss = criterion(ours[0], head.weight, inputs.target.to(device), bias=head.bias)
    leaves = [ours[0], head.weight, head.bias, network.weight, network.bias]
    loss, expected = loss + 0.1 * estimator.divergence(), expected + 0.1 * divergence
    assert_same(loss, expected, leaves, theirs, SINGLE)


def test_segmentation_with_upsampled_logits(device: torch.device) -> None:
    (n, a, c), (h, w), (height, width) = (2, 5, 4), (3, 4), (7, 9)
    inputs = draw(n * h * w, c, a)
    ours, theirs = twins(
        inputs.features.view(n, h, w, a).movedim(-1, 1),
        inputs.weight[:, :, None, None],
        inputs.bias,
        device=device,
        dtype=torch.float32,
    )
    features, bias = theirs[0], theirs[2]
    weight = theirs[1][:, :, 0, 0]
    target = torch.randint(c, (n, height, width))
    target[0, 2:4] = 255  # ignored
    target[1, :, 5] = 255

    rows, labels = [], []
    for i in range(n):
        for y in range(h):
            for x in range(w):
                label = int(target[i, y * height // h, x * width // w])  # nearest neighbour
                if label != 255:
                    rows.append(features[i, :, y, x].detach())
                    labels.append(label)
    _, _, matrices = class_moments(torch.stack(rows), torch.tensor(labels), c)

    def source(position: int, size: int, full: int) -> tuple[int, int, float]:
        """Two neighbours and the share of the second, in bilinear interpolation."""
        place = max((position + 0.5) * size / full - 0.5, 0.0)
        return int(place), min(int(place) + 1, size - 1), place - int(place)

    losses = []
    for i in range(n):
        for y in range(height):
            for x in range(width):
                label = int(target[i, y, x])
                if label == 255:
                    continue
                top, bottom, down = source(y, h, height)
                left, right, along = source(x, w, width)
                feature = (1 - down) * (
                    (1 - along) * features[i, :, top, left] + along * features[i, :, top, right]
                ) + down * (
                    (1 - along) * features[i, :, bottom, left]
                    + along * features[i, :, bottom, right]
                )
                logits = linear(feature, weight, bias)
                losses.append(bound(logits, weight, label, matrices[label], 0.8))
    expected = torch.stack(losses).mean()

    head = nn.Conv2d(a, c, 1, device="meta")
    head.weight, head.bias = nn.Parameter(ours[1]), nn.Parameter(ours[2])
    estimator = isda.FullCovariance(a, c).to(device)
    loss = load("segmentation").segmentation_loss(
        estimator, head, ours[0], target.to(device), strength=0.8
    )
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)


def test_several_labels(device: torch.device) -> None:
    inputs = draw(7, 13, 5)
    target = (torch.rand(7, 13) < 0.3).float()
    target[3] = 0  # a sample without labels
    target[:, 4] = 0  # a label without samples
    ours, theirs = twins(
        inputs.features, inputs.weight, inputs.bias, device=device, dtype=torch.float32
    )
    features, weight, bias = theirs
    pairs = [(i, c) for i in range(7) for c in range(13) if target[i, c]]
    rows = torch.stack([features[i].detach() for i, _ in pairs])
    _, _, matrices = class_moments(rows, torch.tensor([c for _, c in pairs]), 13)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        own = [c for c in range(13) if target[i, c]]
        for k, logit in enumerate(linear(features[i], weight, bias)):
            number = sum(float(target[n, k]) for n in range(7))
            quadratic = sum(weight[k] @ matrices[c] @ weight[k] / len(own) for c in own)
            if target[i, k]:
                part = (7 - number) / number * torch.log(1 + torch.exp(-logit + 0.4 * quadratic))
            else:
                part = torch.log(1 + torch.exp(logit + 0.4 * quadratic))
            expected = expected + part / (7 * 13)

    criterion = load("multi_label").create_multi_label_loss(
        5, target, lambda_0=0.8, ramp="constant"
    )
    head = create_head(ours[1], ours[2])
    loss = criterion.to(device)(ours[0], head.weight, target.to(device), bias=head.bias)
    assert_same(loss, expected, [ours[0], head.weight, head.bias], theirs, SINGLE)
