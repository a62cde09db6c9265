"""Images that the runs of a command train on: counted, decoded once, and freed before the next."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lanes import train
from photo_folders import (
    CPU,
    RECIPE,
    SIZE,
    count_decoding,
    files_of,
    make_image,
)

from isda.experiments.data import folder_cache
from isda.experiments.data.arrays import load_data
from isda.experiments.data.folder_cache import decode_folder
from isda.experiments.settings import Options
from isda.experiments.training import loop
from isda.experiments.training.groups import Plan
from isda.experiments.training.images import ImageStore, kept_images
from isda.experiments.training.training_step import Lane


def test_the_images_are_counted(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that it can be seen where the test images come from."""
    for part, counts in ((photos, f"21 training images, 9 test images ({photos}/val)"),
                         (photos / "train", "17 training images, 4 test images (one in five of "
                                            "each class)")):  # fmt: skip
        recipe = replace(RECIPE, data=f"imagefolder:{part}")
        ImageStore().get(recipe, Options(), CPU)
        assert capsys.readouterr().err == f"isda: {recipe.data}: 3 classes, {counts}\n"


def test_several_processes_count_the_images_once(photos: Path, tmp_path: Path, capfd) -> None:
    recipe = replace(RECIPE, data=f"imagefolder:{photos}")
    plans = [Plan("run", recipe, seed) for seed in range(4)]
    loop.train(plans, Options(out=tmp_path / "runs", device="cpu", processes=2))
    assert capfd.readouterr().err.count("3 classes, 21 training images") == 1


def test_a_split_decodes_only_what_is_held_out(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_decoding(monkeypatch)
    recipe = replace(RECIPE, data=f"imagefolder:{photos}")
    for cache in ("memory", "disk", "off"):
        calls.clear()
        options, split = Options(cache=cache), replace(recipe, hold_out=6)
        with kept_images() as store:  # as in a search: held-out images, then the test images
            held = store.get(split, options, CPU)
            assert store.get(split, options, CPU) is held
            with kept_images() as inner:
                whole = inner.get(recipe, options, CPU)
                assert inner.get(recipe, options, CPU) is whole
        assert calls == ["decoded"] * (cache != "off")
        expected = decode_folder(files_of(photos).hold_out(6), cache="memory", device=CPU)
        assert torch.equal(held.train_target, expected.train_target)
        assert torch.equal(held.test_target, expected.test_target)
        assert torch.equal(held.test_images[0:6], expected.test_images)
        one, other = (Lane(split, 1, data, CPU) for data in (held, expected))
        assert train([one], 1) == train([other], 1)
        assert len(whole.train_target) == len(held.train_target) + 6


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_runs_of_a_command_train_on_the_same_images(
    cache: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if files change meanwhile; the next command sees the change."""
    calls = count_decoding(monkeypatch)
    recipe, options = replace(RECIPE, data=f"imagefolder:{photos}"), Options(cache=cache)
    store = ImageStore()
    before = store.get(recipe, options, CPU)
    make_image(photos / "train" / "cat" / "new.png", (20, 20), 3)
    (photos / "train" / "owl" / "0.jpg").unlink()
    assert store.get(recipe, options, CPU).train_images is before.train_images
    assert calls == ["decoded"]
    assert len(store.get(replace(recipe, hold_out=3), options, CPU).test_target) == 3
    other = store.get(replace(recipe, image_size=SIZE - 1), options, CPU)
    assert other.image_shape == (3, SIZE - 1, SIZE - 1)
    make_image(photos / "train" / "cat" / "newer.png", (20, 20), 3)
    after = ImageStore().get(recipe, options, CPU)
    assert len(after.train_target) == len(before.train_target) + 1


def test_images_are_freed_before_the_next_are_loaded(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, options, store = replace(RECIPE, data=f"imagefolder:{photos}"), Options(), ImageStore()
    first = weakref.ref(store.get(recipe, options, CPU))
    alive: list[object] = []
    decode = folder_cache._decode

    def spying(*arguments: object) -> Iterator[torch.Tensor]:
        alive.append(first())
        yield from decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(folder_cache, "_decode", spying)
    store.get(replace(recipe, image_size=SIZE + 4), options, CPU)
    assert alive == [None]


def test_arrays_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(spec: str, **options: object) -> object:
        calls.append(spec)
        return load_data(spec, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("isda.experiments.training.images.load_data", counting)
    recipe, options, store = replace(RECIPE, data="digits"), Options(), ImageStore()
    whole = store.get(recipe, options, CPU)
    assert store.get(recipe, options, CPU) is whole
    held = store.get(replace(recipe, hold_out=100), options, CPU)
    assert len(held.train_target) == len(whole.train_target) - 100
    assert store.get(replace(recipe, mean=(0.5,), std=(0.5,)), options, CPU).mean == (0.5,)
    assert calls == ["digits"]
