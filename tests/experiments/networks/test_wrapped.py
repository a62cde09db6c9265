"""Models that are not ours: ``torchvision:NAME``, and your own as ``MODULE:FUNCTION``."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torchvision

from isda.experiments.errors import InputError, as_input_error
from isda.experiments.networks import create_network, require_network
from isda.experiments.networks.stochastic import Dropout, DropPath

# torchvision:NAME


def test_names_in_torchvision_s_files_of_densenets(tmp_path: Path) -> None:
    tensors = torchvision.models.densenet121().state_dict()
    old = {re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", name): value
           for name, value in tensors.items()}  # fmt: skip
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "weights.pth")
    network = create_network(
        "torchvision:densenet121", num_classes=3, weights=tmp_path / "weights.pth"
    )
    assert network.weights is not None
    assert network.weights.new == ("classifier.weight", "classifier.bias")


def test_random_layers_of_torchvision_draw_from_the_key() -> None:
    network = create_network("torchvision:convnext_tiny", num_classes=3)
    depths = [part.drop_rate for part in network.modules() if isinstance(part, DropPath)]
    assert len(depths) == 17  # of 18 blocks, the first of which has rate 0
    assert max(depths) == pytest.approx(0.1)
    network = create_network("torchvision:mobilenet_v3_small", num_classes=3)
    assert [p.drop_rate for p in network.modules() if isinstance(p, Dropout)] == [0.2]


@pytest.mark.filterwarnings("ignore:The default weight initialization of inception_v3")
def test_torchvision_models_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="unknown torchvision model 'resnet19'; did you mean"):
        create_network("torchvision:resnet19", num_classes=7)
    with pytest.raises(InputError, match=r"torchvision:inception_v3 cannot be used: .*AuxLogits"):
        create_network("torchvision:inception_v3", num_classes=7)
    with pytest.raises(InputError, match=r"squeezenet1_0 must end in an nn\.Linear"):
        create_network("torchvision:squeezenet1_0", num_classes=7)
    with pytest.raises(InputError, match="in_channels of torchvision:resnet18 must be 3, got 1"):
        create_network("torchvision:resnet18", num_classes=7, in_channels=1)


# MODULE:FUNCTION


MODELS = """
from torch import nn

def small(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, num_classes))

def grey(num_classes, in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(16 * in_channels, 8), nn.Linear(8, num_classes))

def changed(num_classes):
    return nn.Sequential(small(num_classes), nn.Softmax(1))

def fixed(num_classes):
    return small(10)

def nothing(num_classes):
    return None

def broken(num_classes):
    raise KeyError("no such file")

def maps(num_classes):
    return nn.Sequential(nn.Conv2d(3, num_classes, 1), nn.Flatten())

def alone(num_classes):
    return nn.Linear(48, num_classes)

def lazy(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

class Projected(nn.Module):  # a layer for another loss comes after the head
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(48, num_classes)
        self.projection = nn.Linear(48, 4)

    def forward(self, images):
        return self.head(images.flatten(1))

def projected(num_classes):
    return Projected(num_classes)

def transformer(num_classes):
    import timm

    return timm.create_model(
        "test_vit", num_classes=num_classes, img_size=32, drop_path_rate=0.5, attn_drop_rate=0.5
    )
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the current folder."""
    name = f"models_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return name


def test_a_model_of_ones_own(own_models: str, tmp_path: Path) -> None:
    images = torch.randn(5, 3, 4, 4)
    network = create_network(f"{own_models}:small", num_classes=7)
    assert network(images).shape == (5, 7)
    network.check(images, network(images))
    assert (network.num_features, network.num_classes) == (8, 7)
    grey = create_network(f"{own_models}:grey", num_classes=3, in_channels=1)
    assert grey(images[:, :1]).shape == (5, 3)
    dropped = create_network(f"{own_models}:small", num_classes=7, drop_rate=0.5)
    assert (dropped.forward_features(images) == 0).float().mean() > 0.3
    path = tmp_path / "weights.pth"
    module = import_module(own_models)
    model = module.small(7)
    torch.save(model.state_dict(), path)
    loaded = create_network(f"{own_models}:small", num_classes=7, weights=path)
    torch.testing.assert_close(loaded(images), model(images))
    torch.save(network.state_dict(), path)  # as in our checkpoints
    again = create_network(f"{own_models}:small", num_classes=7, weights=path)
    assert again.weights is not None
    assert (again.weights.tensors, again.weights.new) == (4, ())
    assert torch.equal(again(images), network(images))
    fewer = create_network(f"{own_models}:small", num_classes=5, weights=path)
    assert fewer.weights is not None
    assert fewer.weights.new == ("3.weight", "3.bias")
    with pytest.raises(
        InputError, match=r"does not fit .*:projected: 2 of 4 tensors are missing: p"
    ):
        create_network(f"{own_models}:projected", num_classes=7, weights=path)


def test_a_head_that_is_not_the_last_layer(own_models: str) -> None:
    network = create_network(f"{own_models}:projected", num_classes=7)
    images = torch.randn(5, 3, 4, 4)
    network.check(images, network(images))
    assert network.get_classifier().out_features == 7


def test_random_layers_of_ones_own(own_models: str) -> None:
    """timm's attention reads the rate of the dropout layer and drops by itself."""
    network = create_network(f"{own_models}:transformer", num_classes=3).train()
    depths = [part.drop_rate for part in network.modules() if isinstance(part, DropPath)]
    assert max(depths) == pytest.approx(0.5)
    rates = [part.attn_drop.p for part in network.modules() if hasattr(part, "attn_drop")]
    assert rates == [0.5] * len(rates) != []
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_models_of_ones_own_that_cannot_be_used(own_models: str) -> None:
    images = torch.randn(5, 3, 4, 4)
    for function, message in (
        ("fixed", "must end in an nn.Linear with 7 outputs, .* but ends in one with 10"),
        ("nothing", "must return an nn.Module, got NoneType"),
        ("broken", r"\(num_classes=7\) failed: KeyError: 'no such file'"),
        ("smal", "unknown function of .* 'smal'; did you mean small?"),
        ("maps", "must end in an nn.Linear, but ends in a Conv2d$"),
        ("alone", "must return a model that ends in an nn.Linear, got only that layer"),
        ("lazy", "must not have lazy layers: set their numbers of inputs"),
    ):
        with pytest.raises(InputError, match=message):
            create_network(f"{own_models}:{function}", num_classes=7)
    changed = create_network(f"{own_models}:changed", num_classes=7)
    with pytest.raises(InputError, match=r"must end in a linear layer: .* changes the logits"):
        changed.check(images, changed(images))
    with pytest.raises(InputError, match="must take in_channels for images with 1 channels"):
        create_network(f"{own_models}:small", num_classes=7, in_channels=1)
    with pytest.raises(InputError, match="network nowhere:model: cannot import nowhere"):
        create_network("nowhere:model", num_classes=7)
    with pytest.raises(InputError, match="network must be MODULE:FUNCTION, got 'module:'"):
        create_network("module:", num_classes=7)


def test_networks_are_refused_before_they_are_built(own_models: str) -> None:
    """A function of one's own is not called: it may depend on the number of classes."""
    for name in ("resnet32", "timm:test_vit", "torchvision:resnet18", f"{own_models}:broken"):
        require_network(name)
    for name in ("resnet33", "timm:test_vi", "torchvision:resnet19", f"{own_models}:smal"):
        with pytest.raises(InputError, match=f"unknown .*'{name.rpartition(':')[2]}'"):
            require_network(name)
    with pytest.raises(InputError, match=r"drop_rate of resnext29_8x64d must be 0, got 0\.3"):
        require_network("resnext29_8x64d", drop_rate=0.3)


def test_input_errors_stay_as_they_are() -> None:
    """A network that says what is wrong is not said to refuse the size of the images."""
    for error, message in (
        (InputError("it must return logits"), "it must return logits"),
        (ValueError("too small\nindeed"), "not accepted: too small"),
    ):
        with (
            pytest.raises(InputError, match=f"^{message}$"),
            as_input_error("not accepted"),
        ):
            raise error
