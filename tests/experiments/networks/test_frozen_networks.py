"""Frozen networks: features computed once, and a head that is trained on them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretrained_runs
import pytest
import torch
from pretrained_runs import CPU, RESNET, fine_tuned, frozen, model_of, weights_of
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.data import decoding, folder_cache
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.features import FeatureArrays
from isda.experiments.data.folders import FolderImages
from isda.experiments.networks import Network, create_network, find_weights
from isda.experiments.settings import Options
from isda.experiments.training import images as images_module
from isda.experiments.training import loop
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import ImageStore
from isda.experiments.training.training_step import Lane

# fixtures
no_network, photos = pretrained_runs.no_network, pretrained_runs.photos


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
