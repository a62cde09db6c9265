"""Logits that the model resizes after its final layer, as in segmentation."""

import itertools

import pytest
import torch
from paired_heads import OPTIONS, A, C, Then, check
from torch import Tensor, nn
from torch.nn import functional as F

from isda import attach

RESIZINGS = [
    *itertools.product([1], ["linear"], [False, True]),
    *itertools.product([2], ["bilinear", "bicubic"], [False, True]),
    *itertools.product([3], ["trilinear"], [False, True]),
    *itertools.product([1, 2, 3], ["nearest", "nearest-exact"], [None]),
]


@pytest.mark.parametrize(("dimensions", "mode", "align_corners"), RESIZINGS)
def test_resized_logits(dimensions, mode, align_corners, device):
    """As in most segmentation models: equals the loss of resized features."""
    head = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions](A, C, 1).to(device)
    size = (7, 9, 5)[:dimensions]

    def resize(maps: Tensor) -> Tensor:
        return F.interpolate(maps, size, mode=mode, align_corners=align_corners)

    x = torch.randn(2, A, *(3, 4, 2)[:dimensions], device=device)
    target = torch.randint(C, (2, *size), device=device)
    target[0, :2] = 255
    rows = resize(x).movedim(1, -1).reshape(-1, A)
    criterion = check(
        Then(head, resize), head, x, target, rows, target.flatten(), device, ignore_index=255
    )
    assert [*criterion._resizing.values()] == [(mode, align_corners)]


def test_resized_logits_of_a_linear_layer_on_maps(device):
    """Channels last, as in segmentation models of transformers."""
    head = nn.Linear(A, C).to(device)
    model = Then(head, lambda maps: F.interpolate(maps.movedim(-1, 1), (6, 8), mode="bilinear"))
    x = torch.randn(2, 3, 4, A, device=device)
    target = torch.randint(C, (2, 6, 8), device=device)
    rows = F.interpolate(x.movedim(-1, 1), (6, 8), mode="bilinear").movedim(1, -1).reshape(-1, A)
    check(model, head, x, target, rows, target.flatten(), device)


def test_resized_logits_of_another_batch(device):
    head = nn.Conv2d(A, C, 1).to(device)
    model = Then(head, lambda maps: F.interpolate(maps, (6, 8), mode="bilinear"))
    criterion = attach(model, **OPTIONS)
    x, target = torch.randn(2, A, 3, 4, device=device), torch.randint(C, (2, 6, 8), device=device)
    criterion(model(x), target)
    logits = model(x)
    model(x + 1)
    with pytest.raises(ValueError, match="logits must be the output of the attached layer"):  # noqa: PT012
        criterion(logits, target)
        criterion.check()


def test_resized_logits_in_eval_mode_and_unreduced(device):
    head = nn.Conv2d(A, C, 1).to(device)
    model = Then(head, lambda maps: F.interpolate(maps, (6, 8), mode="bilinear"))
    criterion = attach(model, reduction="none", **OPTIONS)
    x, target = torch.randn(2, A, 3, 4, device=device), torch.randint(C, (2, 6, 8), device=device)
    assert criterion(model(x), target).shape == target.shape
    model.eval()
    expected = F.cross_entropy(model(x), target, reduction="none")
    with pytest.warns(UserWarning, match="in eval mode"):
        loss = criterion(model(x), target)
    torch.testing.assert_close(loss, expected)


SEGMENTATION = {
    "fcn_resnet50": ("classifier.4", "aux_classifier.4"),
    "deeplabv3_mobilenet_v3_large": ("classifier.4", "aux_classifier.4"),
    "lraspp_mobilenet_v3_large": (
        ["classifier.low_classifier", "classifier.high_classifier"],
        None,
    ),
}


@pytest.mark.parametrize("name", SEGMENTATION)
def test_segmentation_models_of_torchvision(name, device):
    """Upsampled logits, auxiliary heads, and two heads whose outputs are summed."""
    segmentation = pytest.importorskip("torchvision").models.segmentation
    head, auxiliary = SEGMENTATION[name]
    options = {"weights": None, "weights_backbone": None, "num_classes": C}
    if auxiliary is not None:
        options["aux_loss"] = True
    model = getattr(segmentation, name)(**options).to(device)
    settings = {"covariance": "diagonal", "ignore_index": 255, **OPTIONS}
    criteria = {"out": attach(model, head=head, **settings)}
    if auxiliary is not None:
        with pytest.raises(ValueError, match=r"found 2 with 5 outputs \(classifier\.4, aux_class"):
            attach(model)
        criteria["aux"] = attach(model, head=auxiliary, **settings)
    images = torch.randn(2, 3, 64, 64, device=device)
    target = torch.randint(C, (2, 64, 64), device=device)
    target[:, :8] = 255
    outputs = model(images)
    with pytest.raises(TypeError, match=r'got OrderedDict: .*output\["out"\] of a'):
        criteria["out"](outputs, target)
    for key, criterion in criteria.items():
        loss = criterion(outputs[key], target)
        plain = F.cross_entropy(outputs[key], target, ignore_index=255)
        assert loss > plain
        assert criterion.estimator.count.sum() == 2 * 56 * 64
        assert [*criterion._resizing.values()] == [("bilinear", False)]
    loss.backward()


@pytest.mark.compiled
def test_resized_logits_in_a_compiled_criterion(device):
    """One eager call is needed first, to find out how the logits are resized."""
    head = nn.Conv2d(A, C, 1).to(device)
    x, target = torch.randn(2, A, 3, 4, device=device), torch.randint(C, (2, 6, 8), device=device)
    nearest = Then(head, lambda maps: F.interpolate(maps, (6, 8)))
    criterion = attach(nearest, **OPTIONS)
    compiled = torch.compile(criterion, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="must see a batch of resized logits before it is compiled"):
        compiled(nearest(x), target)
    torch.compiler.reset()
    criterion(nearest(x), target)
    assert compiled(nearest(x), target).isfinite()
    criterion.check()


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "nearest-exact", "bicubic"])
def test_the_resizing_may_be_unknown_at_first(mode, device):
    """A zero weight fits every mode and one pixel fits most: the next batch decides."""
    head = nn.Conv2d(A, C, 1).to(device)
    model = Then(head, lambda maps: F.interpolate(maps, (7, 9), mode=mode))
    criterion, target = attach(model, **OPTIONS), torch.randint(C, (2, 7, 9), device=device)
    nn.init.zeros_(head.weight)
    criterion(model(torch.randn(2, A, 3, 4, device=device)), target)
    assert not criterion._resizing
    nn.init.normal_(head.weight)
    for size in ((1, 1), (3, 4), (5, 3), (3, 4)):
        assert criterion(model(torch.randn(2, A, *size, device=device)), target).isfinite()
        criterion.check()


def test_a_kind_of_resizing_that_changes(device):
    """A CPU searches again; a GPU, which does not search in every step, reports it."""
    head = nn.Conv2d(A, C, 1).to(device)
    mode = ["bilinear"]
    model = Then(head, lambda maps: F.interpolate(maps, (7, 9), mode=mode[0]))
    criterion, target = attach(model, **OPTIONS), torch.randint(C, (2, 7, 9), device=device)
    x = torch.randn(2, A, 3, 4, device=device)
    criterion(model(x), target)
    mode[0] = "nearest"
    criterion(model(x), target)
    if device.type == "cpu":
        assert [*criterion._resizing.values()] == [("nearest", None)]
        criterion.check()
    else:
        with pytest.raises(ValueError, match="logits must be the output of the attached layer"):
            criterion.check()


@pytest.mark.parametrize("size", [(C + 1, C), (C, C)], ids=str)
def test_maps_as_wide_as_the_classes_in_eval_mode(size, device):
    """The target determines the order unless the map is square; training determines it, too."""
    head = nn.Linear(A, C).to(device)
    model = Then(head, lambda x: F.interpolate(x.movedim(-1, 1), size, mode="bilinear"))
    target = torch.randint(C, (2, *size), device=device)
    for shape, trained in ((size, size == (C, C)), ((3, 4), True)):
        x = torch.randn(2, *shape, A, device=device)
        criterion = attach(model, **OPTIONS)
        model.train()
        if trained:
            criterion(model(x), target)
        model.eval()
        logits = model(x)
        with pytest.warns(UserWarning, match="in eval mode"):
            loss = criterion(logits, target)
        torch.testing.assert_close(loss, F.cross_entropy(logits, target))
        criterion.remove()
