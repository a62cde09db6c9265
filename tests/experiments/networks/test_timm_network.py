"""timm models as ``timm:NAME``: output, random layers, head, image size, and what is refused."""

import pytest
import timm
import torch
from random_keys import bind
from torch import nn

from isda.experiments.errors import InputError
from isda.experiments.networks import bind_keys, create_network, own_image_size


def test_timm_model_keeps_its_output(device: torch.device) -> None:
    network = create_network("timm:resnet10t", num_classes=7, in_channels=1, drop_rate=0.5)
    network.to(device)
    images = torch.randn(2, 1, 32, 32).to(device)
    network.eval()
    assert network.num_features == 512
    assert network.forward_features(images).shape == (2, 512)
    torch.testing.assert_close(network(images), network.model(images))
    network.train()
    assert len(bind(network, 1, device)) == 1
    dropped = (network.forward_features(images) == 0).float().mean()
    assert dropped >= 0.4  # 5 σ below 0.5 for 1024 elements


def test_random_layers_of_timm_draw_from_their_keys() -> None:
    """As in our networks, random numbers depend on the keys of the step, on any rank."""
    network = create_network("timm:swin_tiny_patch4_window7_224", num_classes=3).train()
    keys = bind(network, 5)
    assert len(keys) > 10
    images = torch.randn(4, 3, 224, 224)
    with torch.no_grad():
        one, again = network(images), network(images)
        bind_keys(network, keys, offset=2)  # a rank with the last two images
        part = network(images[2:])
        keys += 1
        other = network(images[2:])
    assert torch.equal(one, again)
    torch.testing.assert_close(part, one[2:])
    assert not torch.allclose(other, part, atol=1e-2)


def test_timm_model_that_adds_to_its_head() -> None:
    """An auxiliary head, or a layer between features and head, contributes to the output."""
    for name, adds in (
        ("timm:volo_d1_224", True),
        ("timm:efficientvit_m0", True),  # batch norm, which is still the identity
        ("timm:test_resnet", False),
        ("timm:deit_tiny_patch16_224", False),  # has parameters outside its layers
    ):
        network = create_network(name, num_classes=3).eval()
        images = torch.randn(1, 3, 224, 224)
        with torch.no_grad():
            logits = network(images)
            if not adds:
                network.check(images, logits)
                continue
            with pytest.raises(InputError, match=f"{name} must end in a linear layer: ISDA needs"):
                network.check(images, logits)


def test_timm_models_that_cannot_be_built() -> None:
    with pytest.raises(InputError, match=r"timm:gemma4_vit_167m_enc cannot be built: .*drop_rate"):
        create_network("timm:gemma4_vit_167m_enc", num_classes=3)


@pytest.mark.parametrize("name", ["resnetv2_18", "dla46_c", "dpn48b"])
def test_timm_head_that_is_a_convolution(name: str, device: torch.device) -> None:
    """The head becomes linear; weights, output and gradients are the same."""
    torch.manual_seed(0)
    network = create_network(f"timm:{name}", num_classes=7).to(device).eval()
    head = network.get_classifier()
    assert isinstance(head, nn.Linear)
    assert (network.num_features, network.num_classes) == (head.in_features, 7)
    oracle = timm.create_model(name, num_classes=7).to(device).eval()
    state = network.model.state_dict()
    shapes = {key: tensor.shape for key, tensor in oracle.state_dict().items()}
    oracle.load_state_dict({key: state[key].view(shape) for key, shape in shapes.items()})
    images = torch.randn(2, 3, 64, 64).to(device)
    logits, expected = network(images), oracle(images)
    assert network.forward_features(images).shape == (2, network.num_features)
    torch.testing.assert_close(logits, expected)
    network.check(images, logits)
    logits.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(head.weight.grad, oracle.get_classifier().weight.grad.flatten(1))


def test_weights_of_a_convolution_head_are_timm_s() -> None:
    seed = int(torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(seed)
    weight = timm.create_model("dla46_c", num_classes=7).get_classifier().weight
    network = create_network(
        "timm:dla46_c", num_classes=7, generator=torch.Generator().manual_seed(3)
    )
    assert torch.equal(network.get_classifier().weight, weight.flatten(1))


def test_own_image_size() -> None:
    names = ("timm:swinv2_tiny_window8_256", "timm:resnet18", "timm:nonsense", "resnet50")
    assert [own_image_size(name) for name in names] == [256, 224, None, None]


def test_timm_model_without_a_linear_head_is_refused() -> None:
    name = "timm:deit_tiny_distilled_patch16_224"
    with pytest.raises(InputError, match=f"{name} must end in an nn.Linear .* ends in a tuple"):
        create_network(name, num_classes=10)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("botnet26t_256", "designed for size 256"), ("vit_tiny_patch16_224", "doesn't match model")],
)
def test_timm_model_tells_which_size_it_takes(name: str, reason: str) -> None:
    with torch.device("meta"):
        network = create_network(f"timm:{name}", num_classes=10)
        with pytest.raises(ValueError, match=reason):
            network(torch.zeros(2, 3, 192, 192))
