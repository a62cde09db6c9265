"""Pretrained networks: files of weights, preparation of images, recipes, frozen networks."""

import hashlib
import html
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

from isda.experiments.cli import main
from isda.experiments.commands import compare, train
from isda.experiments.commands.task import PlannedRuns
from isda.experiments.data import decoding, folder_cache
from isda.experiments.data.arrays import ImageArrays, load_data, normalize
from isda.experiments.data.decoding import decode_center_crop
from isda.experiments.data.features import FeatureArrays
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError, RunError
from isda.experiments.networks import Network, create_network, find_weights, own_preprocessing
from isda.experiments.networks.pretrained import read_tensors
from isda.experiments.networks.wrapped import WrappedNetwork
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import images as images_module
from isda.experiments.training import loop
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import ImageStore, require_fit
from isda.experiments.training.training_step import Lane

CPU = torch.device("cpu")
RESNET, VIT = "timm:test_resnet", "timm:test_vit"
HEADS = {RESNET: "fc", VIT: "head"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of images of several sizes that differ in colour."""
    folder, random = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for part, number in (("train", 6), ("val", 3)):
        for place, name in enumerate(("cat", "dog", "owl")):
            (folder / part / name).mkdir(parents=True)
            for i in range(number):
                pixels = random.integers(0, 120, (40 + 7 * i, 60, 3)) + 100 * np.eye(3)[place]
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{i}.png")
    return folder


def model_of(network: str, num_classes: int = 1000, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model(network.removeprefix("timm:"), num_classes=num_classes)
    with torch.no_grad():
        for value in model.state_dict().values():  # so that no tensor keeps its initial value
            value.add_(0.02 * torch.rand(value.shape) if value.is_floating_point() else 3)
    return model


def weights_of(network: str, folder: Path, num_classes: int = 1000, seed: int = 0) -> Path:
    path = folder / f"{network[5:]}-{num_classes}-{seed}.safetensors"
    save_file(model_of(network, num_classes, seed).state_dict(), path)
    return path


def timm_tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in network.state_dict().items()}


# Files


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
    assert "it is neither safetensors, by its name, nor a torch" in refusal(Path("text.pth"))
    torch.save([1, 2], "list.pth")
    assert "must hold the tensors of a network by name" in refusal(Path("list.pth"))
    message = refusal(good, VIT)
    assert "does not fit timm:test_vit" in message
    assert "tensors are missing: cls_token" in message
    assert "are unknown to it: bn1." in message
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
    both = r"are not on this machine: --download gets them, --weights PATH reads a file"
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


# Recipes


def test_preparation_is_the_model_s() -> None:
    vit = own_preprocessing(VIT)
    assert vit is not None
    assert (vit.image_size, vit.mean, vit.std) == (160, (0.5,) * 3, (0.5,) * 3)
    assert (vit.interpolation, vit.test_crop) == ("bicubic", 160 / 168)  # crop_pct 0.95
    resnet = own_preprocessing("torchvision:resnet18")
    assert resnet is not None
    assert (resnet.image_size, resnet.interpolation) == (224, "bilinear")
    assert resnet.test_crop == pytest.approx(224 / 256)
    assert resnet.mean == (0.485, 0.456, 0.406)
    assert own_preprocessing("mine:model") is None


@pytest.mark.parametrize("shape", [(375, 500), (131, 97), (500, 21), (224, 224), (7, 5)])
@pytest.mark.parametrize(
    "network",
    ["timm:resnet18", "timm:vit_tiny_patch16_224", "timm:efficientnet_b3", "timm:test_vit",
     "torchvision:resnet50", "torchvision:swin_v2_t"],
)  # fmt: skip
def test_test_images_are_those_of_the_model_s_own_transform(
    network: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    """Size, crop, interpolation, mean and standard deviation, against timm and torchvision."""
    coarse = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    photo = Image.fromarray(coarse).resize(shape[::-1], Image.Resampling.BILINEAR)
    photo.save(tmp_path / "photo.png")
    kind, _, name = network.partition(":")
    if kind == "timm":
        configuration = timm.data.resolve_data_config({}, model=timm.create_model(name))
        transform = timm.data.create_transform(**configuration)
    else:
        transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    own = own_preprocessing(network)
    assert own is not None
    image = decode_center_crop(
        str(tmp_path / "photo.png"),
        image_size=own.image_size,
        interpolation=own.interpolation,
        test_crop=own.test_crop,
    )
    found = normalize(image.permute(2, 0, 1)[None], own.mean, own.std)[0]
    expected = transform(photo)
    assert found.shape == expected.shape
    difference = (found - expected).abs() * torch.tensor(own.std).view(3, 1, 1) * 255
    # PIL and torchvision round the weights of their filters differently
    assert difference.max() < (2.01 if own.interpolation == "bicubic" else 1.01)
    assert difference.mean() < 0.05


def planned(*words: str) -> tuple[str, Recipe]:
    found = train.plan(["--data", "imagefolder:photos", "--device", "cpu", *words])
    ((name, recipe),) = found.recipes.items()
    return name, recipe


def test_recipe_of_a_network_with_batch_norm() -> None:
    name, recipe = planned("--network", RESNET, "--pretrained")
    assert name == "photos-timm_test_resnet_pretrained-isda"
    assert (recipe.optimizer, recipe.learning_rate, recipe.head_rate) == ("sgd", 0.01, 1)
    assert (recipe.warmup, recipe.weight_decay, recipe.decay_all) == (1, 1e-4, True)
    assert (recipe.image_size, recipe.interpolation) == (160, "bilinear")
    assert recipe.test_crop == 160 / 168  # 0.95 in timm, which rounds the side of 168.4 down
    assert Recipe.from_dict(recipe.as_dict()) == recipe


def test_recipe_of_a_transformer() -> None:
    _, recipe = planned("--network", VIT, "--pretrained")
    assert (recipe.optimizer, recipe.learning_rate, recipe.head_rate) == ("adamw", 5e-5, 10)
    assert (recipe.nesterov, recipe.decay_all, recipe.mean) == (False, False, (0.5,) * 3)
    name, changed = planned("--network", VIT, "--pretrained", "--epochs", "3", "--warmup", "0")
    assert changed == replace(recipe, epochs=3, warmup=0)
    assert name == "photos-timm_test_vit_pretrained-isda+epochs=3+warmup=0"


def test_which_networks_use_adamw() -> None:
    kinds = {"test_resnet": "sgd", "test_nfnet": "sgd", "test_convnext": "adamw",
             "test_vit3": "adamw"}  # fmt: skip
    for name, optimizer in kinds.items():
        assert planned("--network", f"timm:{name}", "--pretrained")[1].optimizer == optimizer
    for name, optimizer in (("resnet18", "sgd"), ("vit_b_16", "adamw")):
        _, recipe = planned("--network", f"torchvision:{name}", "--pretrained")
        assert recipe.optimizer == optimizer


def test_weights_and_freeze_imply_pretrained() -> None:
    _, recipe = planned("--network", RESNET, "--weights", "a.pth")
    assert (recipe.pretrained, recipe.weights, recipe.freeze) == (True, "a.pth", False)
    name, recipe = planned("--network", RESNET, "--freeze")
    assert name == "photos-timm_test_resnet_pretrained_frozen-isda"
    assert (recipe.pretrained, recipe.freeze, recipe.optimizer) == (True, True, "adamw")
    assert (recipe.head_rate, recipe.warmup, recipe.decay_all) == (1, 0, False)
    name, recipe = planned("--network", RESNET)
    assert name == "photos-timm_test_resnet-isda"
    assert (recipe.pretrained, recipe.interpolation, recipe.mean) == (False, "bilinear", ())
    with pytest.raises(InputError, match="weights must be empty without pretrained"):
        planned("--network", RESNET, "--weights", "a.pth", "--no-pretrained")


def test_a_comparison_has_the_same_training_on_both_sides() -> None:
    words = ["--data", "imagefolder:photos", "--network", VIT, "--pretrained", "--device", "cpu"]
    found = compare.plan(words)
    assert isinstance(found, PlannedRuns)
    baseline, isda = found.recipes.values()
    assert isda.baseline() == baseline
    assert list(found.recipes) == [f"photos-timm_test_vit_pretrained-{m}" for m in ("ce", "isda")]


def test_precision_of_own_images_on_a_gpu() -> None:
    on_gpu = train.plan(["--data", "imagefolder:photos", "--device", "cuda"]).recipes.values()
    assert [recipe.precision for recipe in on_gpu] == ["bf16"]
    assert planned()[1].precision == "fp32"


# Training


def fine_tuned(photos: Path, weights: Path, network: str = RESNET, **changes: Any) -> Recipe:
    _, recipe = planned("--network", network, "--weights", str(weights))
    return replace(
        recipe, data=f"imagefolder:{photos}",
        **({"epochs": 3, "batch_size": 8, "image_size": 32} | changes),
    )  # fmt: skip


def frozen(photos: Path, weights: Path, **changes: Any) -> Recipe:
    _, recipe = planned("--network", RESNET, "--weights", str(weights), "--freeze")
    fields = {"epochs": 4, "batch_size": 8, "image_size": 32} | changes
    return replace(recipe, data=f"imagefolder:{photos}", **fields)


def without_times(run: Any) -> list[dict[str, Any]]:
    times = ("seconds", "images_per_second")
    return [{k: v for k, v in line.items() if k not in times} for line in run.metrics()]


@pytest.mark.parametrize("kind", ["whole", "frozen"])
def test_a_run_says_what_it_started_from_and_resumes(
    kind: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(RESNET, tmp_path)
    recipe = (fine_tuned if kind == "whole" else frozen)(photos, weights)
    plan, options = Plan("photos", recipe, 0), Options(device="cpu", checkpoint_seconds=0)
    (whole,) = loop.train([plan], replace(options, out=tmp_path / "whole"), progress=False)
    assert "(SHA-256" in whole.pretrained
    assert whole.pretrained.endswith("tensors; not loaded: fc.weight, fc.bias")
    assert str(weights) in whole.pretrained
    rates = [line["learning_rate"] for line in whole.metrics()]
    assert rates == pytest.approx([recipe.learning_rate_at(e) for e in range(recipe.epochs)])

    class Crash(BaseException):
        pass

    step, steps = Lane.step, 0

    def crashing(self: Lane, size: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:  # in the second epoch
            raise Crash
        step(self, size)

    half = replace(options, out=tmp_path / "half")
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "step", crashing)
        with pytest.raises(Crash):
            loop.train([plan], half, progress=False)
    (resumed,) = loop.train([plan], half.changed(resume=True), progress=False)
    assert without_times(resumed) == without_times(whole)
    states = [run.load() for run in (whole, resumed)]
    for name, value in states[0]["network"].items():
        assert torch.equal(value, states[1]["network"][name])

    # the checkpoint is the whole network
    network = create_network(RESNET, num_classes=3)
    network.load_state_dict(states[0]["network"])
    moved = not torch.equal(network.state_dict()["model.conv1.0.weight"],
                            read_tensors(weights)["conv1.0.weight"])  # fmt: skip
    assert moved == (kind == "whole")


def test_images_are_prepared_as_the_recipe_says(photos: Path, tmp_path: Path) -> None:
    recipe = replace(fine_tuned(photos, weights_of(VIT, tmp_path), VIT, image_size=160), hold_out=0)
    data = ImageStore().get(recipe, Options(), CPU)
    transform = v2.Compose([
        v2.Resize(round(160 / 0.95), v2.InterpolationMode.BICUBIC, antialias=True),
        v2.CenterCrop(160),
    ])  # fmt: skip
    files = load_data(recipe.data, image_size=160).test_files
    images, _ = next(Lane(recipe, 0, data, CPU).images.test_batches())
    for file, found in zip(files, images, strict=True):
        pixels = transform(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1))
        torch.testing.assert_close(found, (pixels.float() / 255 - 0.5) / 0.5)


def test_mean_of_the_wrong_length(photos: Path) -> None:
    recipe = Recipe(data="digits", network="resnet8", epochs=1, batch_size=8, learning_rate=0.1,
                    weight_decay=0.0, mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    with pytest.raises(InputError, match="mean must have 1 values for digits"):
        ImageStore().get(recipe, Options(), CPU)
    one = ImageStore().get(replace(recipe, mean=(0.25,), std=(2.0,)), Options(), CPU)
    assert (one.mean, one.std) == ((0.25,), (2.0,))


# Frozen networks


def test_features_are_those_of_the_network(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = folder_cache.decode_center_crop

    def counting(file: str, **options: Any) -> Tensor:
        decoded.append(file)
        return decode(file, **options)

    monkeypatch.setattr(folder_cache, "decode_center_crop", counting)
    recipe = frozen(photos, weights_of(RESNET, tmp_path))
    store, options = ImageStore(), Options(workers=2)
    data = store.get(recipe, options, CPU)
    split = store.get(replace(recipe, hold_out=3), options, CPU)  # as in a search
    files = load_data(recipe.data)
    assert sorted(decoded) == sorted((*files.train_files, *files.test_files))  # each once
    assert isinstance(data, FeatureArrays)
    assert isinstance(split, FeatureArrays)
    assert isinstance(files, FolderImages)
    assert data.digest == split.digest == files.digest() != files.hold_out(3).digest()
    assert len(split.train_target) == len(data.train_target) - 3

    network = create_network(RESNET, num_classes=3, weights=find_weights(RESNET, recipe.weights))
    network.eval()
    for names, found in ((files.train_files, data.train_images), (files.test_files,
                                                                 data.test_images)):  # fmt: skip
        for file, row in zip(names, found, strict=True):
            image = decode(file, image_size=32, test_crop=0.95)
            scaled = image.permute(2, 0, 1)[None] / 255 - torch.tensor(recipe.mean).view(3, 1, 1)
            scaled = scaled / torch.tensor(recipe.std).view(3, 1, 1)
            expected = network.forward_features(scaled)[0]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_features_are_computed_in_the_layout_of_the_recipe(
    channels_last: bool, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: list[bool] = []
    create = images_module.create_network

    def watched(*args: Any, **options: Any) -> Network:
        network = create(*args, **options)
        convolution = next(part for part in network.modules() if isinstance(part, nn.Conv2d))
        convolution.register_forward_pre_hook(
            lambda _, inputs: layouts.append(
                inputs[0].is_contiguous(memory_format=torch.channels_last)
            )
        )
        return network

    monkeypatch.setattr(images_module, "create_network", watched)
    monkeypatch.setattr(images_module, "require_fit", lambda *_: None)  # it calls the network, too
    weights = weights_of(RESNET, tmp_path)
    ImageStore().get(frozen(photos, weights, channels_last=channels_last), Options(), CPU)
    assert set(layouts) == {channels_last}


def test_the_head_is_trained_on_the_features(photos: Path, tmp_path: Path) -> None:
    """Against a loop over features with torch's AdamW."""
    recipe = replace(frozen(photos, weights_of(RESNET, tmp_path)), method="ce", lambda_0=0.0,
                     batch_size=18, learning_rate=0.05)  # fmt: skip
    data = ImageStore().get(recipe, Options(), CPU)
    lane = Lane(recipe, 0, data, CPU)
    head = nn.Linear(lane.network.num_features, 3)
    head.load_state_dict(lane.network.get_classifier().state_dict())
    assert [parameter.shape for parameter in lane.parameters] == [(3, head.in_features), (3,)]
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=recipe.weight_decay)
    for epoch in range(recipe.epochs):
        lane.epoch = epoch
        lane.begin_epoch()
        lane.step(18)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(epoch)
        optimizer.zero_grad()
        F.cross_entropy(head(data.train_images), data.train_target).backward()
        optimizer.step()
    for found, expected in zip(lane.parameters, head.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    lane.evaluate()
    logits = F.linear(data.test_images, *lane.parameters)  # those that were rounded alike
    error = 100 * (logits.argmax(1) != data.test_target).float().mean()
    assert lane.results[0].item() == pytest.approx(error.item(), abs=1e-3)


@pytest.mark.parametrize("kind", ["whole", "frozen"])
def test_weights_that_have_changed_are_refused(kind: str, photos: Path, tmp_path: Path) -> None:
    weights = weights_of(RESNET, tmp_path)
    plan = Plan("photos", (fine_tuned if kind == "whole" else frozen)(photos, weights), 0)
    options = Options(device="cpu", out=tmp_path / "runs")
    loop.train([plan], options, progress=False)
    save_file(model_of(RESNET, seed=1).state_dict(), weights)
    with pytest.raises(RunError, match=r"photos.0 was started from weights .*: restore the file"):
        loop.train([plan], options.changed(resume=True), progress=False)


def test_the_record_of_a_frozen_network_says_that_its_head_is_new(
    photos: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "three.safetensors"
    save_file(model_of(RESNET, num_classes=3).state_dict(), weights)
    for recipe, new in ((fine_tuned(photos, weights), 0), (frozen(photos, weights), 2)):
        data = ImageStore().get(recipe, Options(device="cpu"), CPU)
        found = Lane.create_network(recipe, data, 0).weights
        assert found is not None
        assert found.new == ("fc.weight", "fc.bias")[:new]
        assert found.tensors == len(model_of(RESNET).state_dict()) - new


def test_unreadable_images_of_a_frozen_network(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "train" / "cat" / "bad.png").write_text("hello")
    recipe = frozen(folder, weights_of(RESNET, tmp_path))
    with pytest.raises(decoding.UnreadableFiles):
        ImageStore().get(recipe, Options(), CPU)
    with pytest.warns(UserWarning, match="skipped 1 image under"):
        data = ImageStore().get(recipe, Options(skip_unreadable=True), CPU)
    assert len(data.train_target) == 18


def test_frozen_network_on_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR works, too, and draws images by the seed."""
    images = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8)
    arrays = ImageArrays("cifar10", images, torch.arange(12) % 3, images[:5], torch.arange(5) % 3,
                         (0.5,) * 3, (0.2,) * 3, ("a", "b", "c"))  # fmt: skip
    monkeypatch.setattr("isda.experiments.training.images.load_data", lambda *_, **__: arrays)
    recipe = replace(frozen(Path("x"), weights_of(RESNET, tmp_path)), data="cifar10",
                     images_per_class=2)  # fmt: skip
    (run,) = loop.train(
        [Plan("cifar", recipe, 0)], Options(device="cpu", out=tmp_path), progress=False
    )
    assert len(run.metrics()) == 4


def test_images_that_do_not_fit_are_refused_before_there_are_folders(
    photos: Path, tmp_path: Path
) -> None:
    _, recipe = planned("--network", VIT, "--weights", str(weights_of(VIT, tmp_path)), "--freeze")
    recipe = replace(recipe, data=f"imagefolder:{photos}", image_size=30)
    with pytest.raises(InputError, match="timm:test_vit does not accept 30 x 30 images"):
        loop.train(
            [Plan("a", recipe, 0)], Options(device="cpu", out=tmp_path / "runs"), progress=False
        )
    assert not (tmp_path / "runs").exists()


# Commands


def words(photos: Path, weights: Path, *more: str) -> list[str]:
    return ["--data", f"imagefolder:{photos}", "--network", RESNET, "--weights", str(weights),
            "--device", "cpu", "--epochs", "2", "--batch-size", "8", "--image-size", "32",
            *more]  # fmt: skip


def test_the_page_says_what_was_used(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = weights_of(RESNET, tmp_path), tmp_path / "runs"
    given = words(photos, weights, "--freeze", "--seeds", "0", "1", "--out", str(out))
    assert main(["compare", *given]) == 0, capsys.readouterr().err
    (page,) = out.glob("*.html")
    text = html.unescape(page.read_text())
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    assert f"{weights} (SHA-256 {digest}…)" in text
    assert "not loaded: fc.weight, fc.bias" in text
    for field in ("optimizer", "head_rate", "warmup", "freeze", "interpolation", "mean"):
        assert f"<code>{field}</code>" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "timm:resnet1"], "unknown timm model 'resnet1'"),
        (["--network", "torchvision:resnet"], "unknown torchvision model 'resnet'"),
        (["--network", "torch.nn:Linea"], "unknown function of torch.nn 'Linea'"),
        (["--network", "timm:test_resnet", "--pretrained"], "are not on this machine"),
        (["--network", "resnet50", "--drop-rate", "0.5"], "drop_rate of resnet50 must be 0"),
    ],
)
def test_a_wrong_network_is_refused_before_images_are_decoded(
    words: list[str],
    message: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(images_module, "decode_folder", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    options = ["--data", f"imagefolder:{photos}", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["compare", *options, *words]) == 2
    assert message in capsys.readouterr().err


def test_help_prints_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--data", "imagefolder:x", "--network", VIT, "--pretrained", "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag, default in (("optimizer", "adamw"), ("learning-rate", "5e-05"), ("mean", "0.5 0.5"),
                          ("interpolation", "bicubic"), ("head-rate", "10.0")):  # fmt: skip
        assert re.search(rf"--{flag} .*?\(default: {default}", printed), flag


@pytest.mark.parametrize("freeze", [False, True])
def test_a_search_decodes_its_images_once(
    freeze: bool,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []
    owner = images_module if freeze else folder_cache
    name = "_features" if freeze else "_decode"
    function = getattr(owner, name)

    def counting(*arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    monkeypatch.setattr(owner, name, counting)
    given = words(photos, weights_of(RESNET, tmp_path), "--out", str(tmp_path / "runs"), "--cache",
                  "memory", "--candidates", "0.1", "0.5", "--final-seeds", "0", "1",
                  *["--freeze"] * freeze)  # fmt: skip
    assert main(["search", *given]) == 0, capsys.readouterr().err
    assert calls == [name]
