"""Files of pretrained weights: what is loaded, forms, caches, downloads, refusals."""

import hashlib
from pathlib import Path
from typing import Any

import pretrained_runs
import pytest
import timm
import timm.data
import torch
from pretrained_runs import CPU, RESNET, VIT, model_of, weights_of
from safetensors.torch import save_file
from torch import Tensor, nn

from isda.experiments.errors import InputError
from isda.experiments.networks import create_network, find_weights
from isda.experiments.networks.pretrained import read_tensors
from isda.experiments.networks.wrapped import WrappedNetwork
from isda.experiments.settings import Recipe
from isda.experiments.training.images import require_fit

no_network = pretrained_runs.no_network  # fixture

HEADS = {RESNET: "fc", VIT: "head"}


def timm_tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in network.state_dict().items()}


@pytest.mark.parametrize("network", [RESNET, VIT])
@pytest.mark.parametrize("num_classes", [5, 1000])
def test_the_backbone_is_that_of_the_file(network: str, num_classes: int, tmp_path: Path) -> None:
    path = weights_of(network, tmp_path)
    tensors, head = read_tensors(path), HEADS[network]
    found = create_network(network, num_classes=num_classes, weights=path)
    new = {name for name, value in timm_tensors(found).items()
           if not torch.equal(value, tensors[name])}  # fmt: skip
    expected = {f"{head}.weight", f"{head}.bias"} if num_classes == 5 else set()
    assert found.weights is not None
    assert new == expected == set(found.weights.new)
    assert found.weights.tensors == len(tensors) - len(new)
    assert found.weights.file == str(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.weights.sha256 == digest


@pytest.mark.parametrize("network", [RESNET, VIT])
def test_a_new_head_is_zero(network: str, tmp_path: Path) -> None:
    path = weights_of(network, tmp_path)
    new = create_network(network, num_classes=5, weights=path).get_classifier()
    assert new.weight.shape[0] == 5
    assert not new.weight.any()
    assert not new.bias.any()
    known = create_network(network, num_classes=1000, weights=path).get_classifier()
    assert known.weight.all()
    random = create_network(network, num_classes=5).get_classifier()
    assert random.weight.any()


class Scaled(nn.Module):
    """A model that changes its logits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = timm.create_model("test_resnet", num_classes=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return 10 * self.body(x)


def test_changed_logits_are_found_with_a_new_head(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(Scaled(1000).state_dict(), weights)
    network = WrappedNetwork("scaled", Scaled(5), num_classes=5, weights=weights)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    recipe = Recipe(data="imagefolder:photos", network="scaled", epochs=1, batch_size=1,
                    learning_rate=0.1, weight_decay=0.0)  # fmt: skip
    with pytest.raises(InputError, match="scaled must end in a linear layer"):
        require_fit(network.eval(), recipe, torch.Size((3, 64, 64)), CPU)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("form", ["plain", "state_dict", "ddp", "own checkpoint", "headless"])
def test_forms_of_a_torch_file(form: str, tmp_path: Path) -> None:
    tensors = model_of(RESNET, 7).state_dict()
    content: dict[str, Any] = dict(tensors)
    if form == "state_dict":
        content = {"epoch": 3, "state_dict": content}
    elif form == "ddp":
        content = {"model": {f"module.{name}": value for name, value in content.items()}}
    elif form == "own checkpoint":
        content = {"network": {f"model.{name}": value for name, value in content.items()}}
    elif form == "headless":
        content = {name: value for name, value in content.items() if not name.startswith("fc.")}
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    found = create_network(RESNET, num_classes=7, weights=path)
    assert found.weights is not None
    assert found.weights.new == (("fc.weight", "fc.bias") if form == "headless" else ())
    assert torch.equal(timm_tensors(found)["conv1.0.weight"], tensors["conv1.0.weight"])


def test_counters_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    tensors = model_of(RESNET, 7).state_dict()
    counters = [name for name in tensors if name.endswith("num_batches_tracked")]
    path = tmp_path / "weights.safetensors"
    save_file({name: v for name, v in tensors.items() if name not in counters}, path)
    found = create_network(RESNET, num_classes=7, weights=path)
    assert found.weights is not None
    assert found.weights.new == tuple(counters)


def test_a_file_that_timm_converts(tmp_path: Path) -> None:
    """Early files of vision transformers have patches as rows."""
    tensors = dict(model_of(VIT).state_dict())
    expected = tensors["patch_embed.proj.weight"]
    tensors["patch_embed.proj.weight"] = expected.flatten(1)
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    found = create_network(VIT, num_classes=5, weights=path)
    assert torch.equal(timm_tensors(found)["patch_embed.proj.weight"], expected)
    assert found.weights is not None
    assert found.weights.new == ("head.weight", "head.bias")


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("malicious"),))


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = weights_of(RESNET, tmp_path)

    def refusal(path: Path, network: str = RESNET) -> str:
        with pytest.raises(InputError) as caught:
            create_network(network, num_classes=5, weights=find_weights(network, str(path)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refusal(Path("no.pth")).endswith("but no.pth does not exist")
    assert refusal(tmp_path).endswith("is not a file")
    torch.save({"a": Malicious()}, "code.pth")
    assert "holds Python objects other than tensors: save it as safetensors" in refusal(
        Path("code.pth")
    )
    assert not Path("malicious").exists()
    Path("short.safetensors").write_bytes(good.read_bytes()[:-100])
    assert "is not a file of tensors" in refusal(Path("short.safetensors"))
    Path("text.pth").write_text("hello")
    assert "it is neither a .safetensors file nor a torch" in refusal(Path("text.pth"))
    for content in ([1, 2], {0: torch.zeros(3)}):
        torch.save(content, "other.pth")
        assert "must hold the tensors of a network by name" in refusal(Path("other.pth"))
    message = refusal(good, VIT)
    assert "does not fit timm:test_vit" in message
    assert "tensors are missing: cls_token" in message
    assert "are not in the network: bn1." in message
    tensors = dict(read_tensors(good))
    tensors["bn1.weight"] = torch.zeros(3)
    save_file(tensors, "shape.safetensors")
    assert "bn1.weight (3,) instead of (" in refusal(Path("shape.safetensors"))
    torch.save(timm.create_model("levit_128s").state_dict(), "levit.pth")
    assert "must end in an nn.Linear" in refusal(Path("levit.pth"), "timm:levit_128s")
    with pytest.raises(InputError, match=r"mine:model is a function of your own.*--weights PATH"):
        find_weights("mine:model")


def test_files_in_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    both = r"are not on this machine: use --download, or give a file with --weights PATH"
    for network in (RESNET, "torchvision:resnet18"):
        with pytest.raises(InputError, match=f"pretrained weights of {network} {both}"):
            find_weights(network)
    with pytest.raises(InputError, match="timm has no pretrained weights of resnet14t"):
        find_weights("timm:resnet14t.nonsense")

    repository = tmp_path / "hub" / "models--timm--test_resnet.r160_in1k"
    file = repository / "snapshots" / "abc" / "model.safetensors"
    file.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    weights_of(RESNET, tmp_path).rename(file)
    assert find_weights(RESNET) == file

    hub = tmp_path / "torch" / "checkpoints" / "resnet18-f37072fd.pth"
    hub.parent.mkdir(parents=True)
    hub.touch()
    assert find_weights("torchvision:resnet18") == hub


def test_downloads_happen_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    asked: list[tuple[str, str]] = []

    def download(repository: str, file: str, **_: object) -> str:
        asked.append((repository, file))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert find_weights(VIT, download=True) == tmp_path / "model.safetensors"
    assert asked == [("timm/test_vit.r160_in1k", "model.safetensors")]

    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    for network in (VIT, "torchvision:resnet18"):
        with pytest.raises(InputError, match="cannot be downloaded: no route to host"):
            find_weights(network, download=True)
