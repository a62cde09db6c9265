"""Data sets: splits, files on disk, and errors for invalid files."""

import errno
import hashlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor

from isda.experiments.data.arrays import (
    ImageArrays,
    load_data,
    normalize,
    rank_slice,
    split,
)
from isda.experiments.data.folders import FolderImages
from isda.experiments.errors import InputError

SIZE = 16


def arrays_of(spec: str, **options: object) -> ImageArrays:
    data = load_data(spec, **options)  # type: ignore[arg-type]
    assert isinstance(data, ImageArrays)
    return data


def folder_of(path: Path, **options: object) -> FolderImages:
    options = {"image_size": SIZE, "workers": 0} | options
    data = load_data(f"imagefolder:{path}", **options)  # type: ignore[arg-type]
    assert isinstance(data, FolderImages)
    return data


def message_of(spec: str, **options: object) -> str:
    """Error message of ``load_data``."""
    with pytest.raises(InputError) as caught:
        load_data(spec, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Digits and the functions on arrays


def test_digits(device: torch.device) -> None:
    from sklearn.datasets import load_digits

    digits = arrays_of("digits").to(device)
    assert digits.train_images.device.type == device.type
    assert digits.train_images.shape == (1438, 1, 8, 8)
    assert digits.test_images.shape == (359, 1, 8, 8)
    assert digits.train_images.dtype == torch.uint8
    assert digits.num_classes == 10
    assert digits.class_names == tuple("0123456789")

    original = load_digits()
    pairs = {(i.tobytes(), int(t)) for i, t in zip(original.images, original.target, strict=True)}
    found = []
    for part in ("train", "test"):
        images = getattr(digits, f"{part}_images")[:, 0].cpu().double() * (16 / 255)
        target = getattr(digits, f"{part}_target").tolist()
        found += [(i.round().numpy().tobytes(), t) for i, t in zip(images, target, strict=True)]
    assert len(found) == 1797
    assert set(found) == pairs
    # every class in proportion: 80 % of each to within one image
    for c in range(10):
        total = int((original.target == c).sum())
        assert abs(int((digits.test_target == c).sum()) - total / 5) <= 1
    assert torch.equal(arrays_of("digits").test_images, digits.test_images.cpu())

    scaled = normalize(digits.train_images, digits.mean, digits.std)
    assert abs(scaled.mean().item()) < 1e-5
    assert abs(scaled.std().item() - 1) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalize(dtype: torch.dtype, device: torch.device) -> None:
    images = torch.randint(0, 256, (5, 3, 4, 7), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)
    result = normalize(images.to(device), mean, std, dtype)
    expected = torchvision.transforms.functional.normalize(images.double() / 255, mean, std)
    assert result.dtype == dtype
    # rounding to the dtype, and a few float32 operations before
    tolerance = torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(result.cpu().double(), expected, rtol=tolerance, atol=4 * 1.2e-7)


@pytest.mark.gpu
def test_normalize_is_captured_in_a_cuda_graph() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 7), dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = normalize(images, (0.1, 0.5, 0.7), (0.2, 0.3, 0.4))
    graph.replay()
    assert torch.equal(result, normalize(images, (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)))


@pytest.mark.parametrize("number", [0, 1, 5, 128])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_rank_slices_cover_the_batch(number: int, world: int) -> None:
    parts = [range(number)[rank_slice(number, rank=r, world=world)] for r in range(world)]
    assert [i for part in parts for i in part] == list(range(number))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_hold_out_of_cifar(device: torch.device) -> None:
    target = torch.arange(50_000)[torch.randperm(50_000)] % 100
    place = torch.arange(50_000)  # every image contains its index
    images = torch.stack((place % 256, place // 256), 1).to(torch.uint8)[:, :, None, None]
    data = ImageArrays(
        "cifar100",
        images,
        target,
        images[:7],
        target[:7],
        (0.0,),
        (1.0,),
        tuple(map(str, range(100))),
    ).to(device)
    held, again = data.hold_out(5000), data.hold_out(5000)

    def places(images: Tensor) -> list[int]:
        return (images[:, 0, 0, 0].long() + 256 * images[:, 1, 0, 0].long()).tolist()

    validation, rest = places(held.test_images), places(held.train_images)
    assert len(validation) == 5000
    assert sorted(validation + rest) == list(range(50_000))
    assert held.test_target.bincount().tolist() == [50] * 100
    assert held.train_target.bincount().tolist() == [450] * 100
    assert target[validation].tolist() == held.test_target.tolist()
    assert target[rest].tolist() == held.train_target.tolist()
    assert places(again.test_images) == validation


def test_split_in_proportion() -> None:
    target = torch.tensor([0] * 40 + [1] * 10 + [3] * 50)  # class 2 is absent
    kept, held = split(target, 20)
    assert target[held].bincount().tolist() == [8, 2, 0, 10]
    assert sorted(kept.tolist() + held.tolist()) == list(range(100))
    # one image more than equal parts: some class gives one more
    _, held = split(torch.arange(60) % 6, 13)
    assert sorted((held % 6).bincount().tolist()) == [2, 2, 2, 2, 2, 3]
    for number in (0, 100, -1):
        with pytest.raises(InputError, match=f"between 1 and 99, got {number}"):
            split(target, number)


# CIFAR


def cifar_arrays(num_classes: int = 100) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "train_images": random.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8),
        "train_labels": random.integers(0, num_classes, 12),
        "test_images": random.integers(0, 256, (5, 32, 32, 3), dtype=np.uint8),
        "test_labels": random.integers(0, num_classes, 5),
        "train_coarse_labels": random.integers(0, 20, 12),
    }


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_from_npz(name: str, tmp_path: Path) -> None:
    num_classes = int(name[5:])
    stored = cifar_arrays(num_classes)
    np.savez(tmp_path / f"{name}.npz", **stored)
    data = arrays_of(name, root=tmp_path)
    for part, number in (("train", 12), ("test", 5)):
        images = getattr(data, f"{part}_images")
        assert images.shape == (number, 3, 32, 32)
        assert images.is_contiguous()
        for n, channel, y, x in ((0, 0, 0, 1), (4, 2, 31, 7), (number - 1, 1, 5, 30)):
            assert images[n, channel, y, x] == stored[f"{part}_images"][n, y, x, channel]
        assert getattr(data, f"{part}_target").tolist() == stored[f"{part}_labels"].tolist()
    assert data.num_classes == len(set(data.class_names)) == num_classes
    assert list(data.class_names) == sorted(data.class_names)
    np.testing.assert_allclose(np.array(data.mean) * 255, [125.3, 123.0, 113.9])
    np.testing.assert_allclose(np.array(data.std) * 255, [63.0, 62.1, 66.7])


def test_cifar_from_torchvision_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = cifar_arrays(10)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    digests = {}
    for part, file in (("train", "data_batch_1"), ("test", "test_batch")):
        rows = stored[f"{part}_images"].transpose(0, 3, 1, 2).reshape(-1, 3072)
        content = {"data": rows, "labels": stored[f"{part}_labels"].tolist()}
        (folder / file).write_bytes(pickle.dumps(content))
        digests[part] = [file, hashlib.md5((folder / file).read_bytes()).hexdigest()]
    names = [f"class {c}" for c in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    digest = hashlib.md5((folder / "batches.meta").read_bytes()).hexdigest()
    source = torchvision.datasets.CIFAR10
    monkeypatch.setattr(source, "train_list", [digests["train"]])
    monkeypatch.setattr(source, "test_list", [digests["test"]])
    monkeypatch.setattr(source, "meta", source.meta | {"md5": digest})

    data = arrays_of("cifar10", root=tmp_path)
    expected = torch.from_numpy(stored["train_images"]).permute(0, 3, 1, 2)
    assert torch.equal(data.train_images, expected)
    assert data.train_target.tolist() == stored["train_labels"].tolist()
    assert data.test_target.tolist() == stored["test_labels"].tolist()

    (folder / "data_batch_1").write_bytes(b"damaged")
    assert f"cifar10 in {folder} is damaged" in message_of("cifar10", root=tmp_path)


def test_cifar_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = message_of("cifar100", root=tmp_path)
    assert str(tmp_path / "cifar100.npz") in message
    assert str(tmp_path / "cifar-100-python") in message
    assert "--download" in message

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr(torchvision.datasets.CIFAR100, "download", offline)
    assert "cannot be downloaded: no network" in message_of(
        "cifar100", root=tmp_path, download=True
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"test_labels": None}, "lacks the arrays test_labels"),
        ({"train_images": np.zeros((12, 3, 32, 32), np.uint8)}, "must be uint8 (12, 32, 32, 3)"),
        ({"train_images": np.zeros((12, 32, 32, 3), np.float32)}, "got float32 (12, 32, 32, 3)"),
        ({"train_labels": np.zeros(11, np.int64)}, "must be uint8 (11, 32, 32, 3)"),
        ({"train_labels": np.zeros(12)}, "must be integers (N,), got float64 (12,)"),
        ({"train_labels": np.int64(3)}, "must be integers (N,), got int64 ()"),
        ({"test_labels": np.array([0, 1, 2, 3, 100])}, "must be in [0, 100), got 0 to 100"),
        ({"test_labels": np.array([0, -1, 2, 3, 4])}, "must be in [0, 100), got -1 to 4"),
        ({"train_images": np.array([{"a": 1}])}, "cannot be read: Object arrays"),
        ({"train_labels": np.full(12, 3)}, "must have two or more classes, got one"),
    ],
)
def test_wrong_npz(change: dict[str, np.ndarray], expected: str, tmp_path: Path) -> None:
    arrays = {k: v for k, v in (cifar_arrays() | change).items() if v is not None}
    np.savez(tmp_path / "cifar100.npz", **arrays)
    message = message_of("cifar100", root=tmp_path)
    assert expected in message
    assert str(tmp_path / "cifar100.npz") in message


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "cifar100.npz"
    np.savez(path, **cifar_arrays())
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[5000] ^= 255  # in the pixels, where the checksum of the archive detects it
    for content in (b"", b"no archive", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(content)
        assert f"{path} cannot be read" in message_of("cifar100", root=tmp_path)


def test_unknown_data_set() -> None:
    assert message_of("cifar11") == "unknown data set 'cifar11'; did you mean cifar10 or cifar100?"
    assert "needs a path" in message_of("imagefolder:")
    assert "needs --data-root" in message_of("imagenet")


def test_a_folder_without_its_kind(tmp_path: Path) -> None:
    assert message_of(str(tmp_path)).endswith(f"did you mean imagefolder:{tmp_path}?")


# Images in folders


def make_images(path: Path, classes: dict[str, int], *, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for name, number in classes.items():
        (path / name).mkdir(parents=True)
        for i in range(number):
            pixels = random.integers(0, 256, (20 + i % 3, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / name / f"{i}.{'png' if i % 2 else 'jpg'}")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_images(tmp_path / "train", {"cat": 9, "dog": 6, "owl": 6})
    make_images(tmp_path / "val", {"dog": 4, "cat": 3}, seed=1)
    return tmp_path


def test_folder(photos: Path) -> None:
    data = folder_of(photos)
    assert data.class_names == ("cat", "dog", "owl")
    assert data.num_classes == 3
    assert (len(data.train_files), len(data.test_files)) == (21, 7)
    for files, target in (
        (data.train_files, data.train_target),
        (data.test_files, data.test_target),
    ):
        assert [Path(f).parent.name for f in files] == [data.class_names[c] for c in target]
    (photos / "val").rename(photos / "test")
    assert len(folder_of(photos).test_files) == 7


def test_folder_is_split_where_it_has_no_test_part(tmp_path: Path) -> None:
    make_images(tmp_path, {"cat": 15, "dog": 10, ".cache": 3})
    data = folder_of(tmp_path)
    assert data.class_names == ("cat", "dog")
    assert data.train_target.bincount().tolist() == [12, 8]
    assert data.test_target.bincount().tolist() == [3, 2]
    assert len(set(data.train_files) | set(data.test_files)) == 25
    assert folder_of(tmp_path).test_files == data.test_files


def test_folder_hold_out(photos: Path) -> None:
    data = folder_of(photos)
    held = data.hold_out(7)
    assert held.test_target.bincount().tolist() == [3, 2, 2]
    assert sorted(held.train_files + held.test_files) == sorted(data.train_files)
    for files, target in (
        (held.train_files, held.train_target),
        (held.test_files, held.test_target),
    ):
        assert [Path(f).parent.name for f in files] == [data.class_names[c] for c in target]


def test_wrong_folders(tmp_path: Path) -> None:
    spec = f"imagefolder:{tmp_path}"
    assert message_of(f"{spec}/nowhere") == f"{tmp_path}/nowhere does not exist"
    (tmp_path / "file").write_text("")
    assert message_of(f"{spec}/file") == f"{tmp_path}/file is not a folder"
    (tmp_path / "file").unlink()
    assert "two or more classes, got 0" in message_of(spec)
    make_images(tmp_path, {"cat": 3})
    assert message_of(spec).endswith("two or more classes, got 1: cat")
    (tmp_path / "dog").mkdir()
    assert message_of(spec) == f"{tmp_path} has classes without images that PIL reads: dog"
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    assert message_of(spec) == f"{tmp_path} has classes without images that PIL reads: dog"
    make_images(tmp_path, {"owl": 1, "rat": 1})
    (tmp_path / "dog" / "notes.txt").rename(tmp_path / "dog" / "0.jpg")
    assert folder_of(tmp_path).num_classes == 4  # no image, which is found when it is decoded
    assert "must have train/ and val/" in message_of("imagenet", root=tmp_path)


@pytest.mark.parametrize(
    "parts", [("Train", "Val"), ("training", "validation"), ("Training", "Testing")]
)
def test_names_of_the_parts(parts: tuple[str, str], photos: Path) -> None:
    expected = folder_of(photos)
    for part, name in zip(("train", "val"), parts, strict=True):
        (photos / part).rename(photos / name)
    found = folder_of(photos)
    assert found.class_names == expected.class_names
    assert (len(found.train_files), len(found.test_files)) == (21, 7)


def test_a_test_part_with_another_name(photos: Path) -> None:
    """Otherwise one training image in five would be tested instead."""
    (photos / "val").rename(photos / "eval")
    message = f"{photos} has folders of the same classes in train and eval: rename that with the"
    assert message_of(f"imagefolder:{photos}").startswith(message)
    (photos / "eval" / "dog").rename(photos / "eval" / "emu")
    (photos / "eval" / "cat").rename(photos / "eval" / "yak")
    assert len(folder_of(photos).test_files) == 4  # of 21 training images


def test_hidden_files_are_not_images(photos: Path) -> None:
    """As in archives made by macOS, and beside notebooks."""
    expected = folder_of(photos)
    for name in ("._0.jpg", ".checkpoints/0.jpg"):
        path = photos / "train" / "cat" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert folder_of(photos).train_files == expected.train_files


def test_parts_without_folders_of_classes(tmp_path: Path) -> None:
    """train and val would otherwise be taken for two classes."""
    make_images(tmp_path, {"train": 5, "val": 5})
    message = f"{tmp_path} must have train/ and val/ with one folder per class"
    assert message_of(f"imagefolder:{tmp_path}") == message
    make_images(tmp_path, {"bus": 5})  # train as the name of a class
    assert folder_of(tmp_path).class_names == ("bus", "train", "val")
    (tmp_path / "val").rename(tmp_path / "van")
    make_images(tmp_path / "train", {"fast": 5})
    assert folder_of(tmp_path).class_names == ("bus", "train", "van")
    shutil.rmtree(tmp_path / "train" / "fast")
    (tmp_path / "van").rename(tmp_path / "val")
    make_images(tmp_path / "train", {"cat": 5, "dog": 5})
    message = f"{tmp_path}/val must have one folder per class, like {tmp_path}/train"
    assert message_of(f"imagefolder:{tmp_path}") == message


def test_names_that_are_hard_to_show(tmp_path: Path) -> None:
    """Any name is a class; in a message it is one line."""
    names = {'<b title="cat">': 5, "two\nlines": 5, "été ☃": 5, "back\\slash": 5}
    make_images(tmp_path, names)
    assert folder_of(tmp_path).class_names == tuple(sorted(names))
    (tmp_path / "no\nimages").mkdir()
    assert message_of(f"imagefolder:{tmp_path}").endswith(
        "without images that PIL reads: no\\nimages"
    )
    assert message_of(f"imagefolder:{tmp_path}/a\nb").endswith("a\\nb does not exist")


def test_links(tmp_path: Path) -> None:
    """Links to files and folders are followed, except to folders that contain the link."""
    photos = tmp_path / "photos"
    make_images(photos, {"cat": 5, "dog": 5})
    make_images(tmp_path, {"more": 5})
    for place, target in (
        (photos / "all", photos),  # not a class
        (photos / "itself", photos / "itself"),
        (photos / "cat" / "again", photos / "cat"),
        (photos / "cat" / "above", photos),
        (photos / "dog" / "root", Path("/")),
        (photos / "dog" / "more", tmp_path / "more"),
        (photos / "dog" / "one.png", photos / "cat" / "1.png"),
    ):
        place.symlink_to(target)
    data = folder_of(photos)
    assert data.class_names == ("cat", "dog")
    files = [Path(file).relative_to(photos) for file in data.train_files + data.test_files]
    assert len(files) == len(set(files)) == 16
    assert sum(file.parts[:2] == ("dog", "more") for file in files) == 5
    (photos / "cat" / "loop.png").symlink_to(photos / "cat" / "loop.png")
    assert len(folder_of(photos).train_files + folder_of(photos).test_files) == 17  # unreadable


def test_a_class_that_cannot_be_read(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def scandir(path: str) -> object:
        if Path(path).name == "dog":  # permissions do not stop root
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    message = f"{photos}/train/dog cannot be read: Permission denied"
    assert message_of(f"imagefolder:{photos}") == message


def test_pipes_are_not_images(tmp_path: Path) -> None:
    """Opening a named pipe would wait for a writer."""
    make_images(tmp_path, {"cat": 5, "dog": 5})
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    (tmp_path / "dog" / "link.png").symlink_to(tmp_path / "cat" / "pipe.png")
    (tmp_path / "dog" / "broken.png").symlink_to("nowhere")
    files = folder_of(tmp_path).train_files + folder_of(tmp_path).test_files
    assert sorted({Path(file).stem for file in files}) == ["0", "1", "2", "3", "4", "broken"]


def test_a_class_of_one_image(tmp_path: Path) -> None:
    make_images(tmp_path, {"cat": 12, "dog": 12, "emu": 1})
    data = folder_of(tmp_path)
    assert data.train_target.bincount().tolist() == [9, 10, 1]  # which class has 9 is random
    assert data.test_target.bincount(minlength=3).tolist() == [3, 2, 0]


def test_many_classes(tmp_path: Path) -> None:
    """Time is proportional to the number of classes: this takes a minute if it is quadratic."""
    make_images(tmp_path, {"one": 1})
    for part in ("train", "val"):
        for number in range(10_000):
            folder = tmp_path / part / f"{number:05}"
            folder.mkdir(parents=True)
            (folder / "0.jpg").hardlink_to(tmp_path / "one" / "0.jpg")
    data = folder_of(tmp_path)
    assert data.num_classes == 10_000
    assert data.train_target.tolist() == data.test_target.tolist() == list(range(10_000))


def test_too_few_images_to_split(tmp_path: Path) -> None:
    make_images(tmp_path, dict.fromkeys("abcde", 1))
    assert "too few images to hold out one in five: 5" in message_of(f"imagefolder:{tmp_path}")


def test_wrong_test_part(photos: Path) -> None:
    spec = f"imagefolder:{photos}"
    make_images(photos / "val", {"emu": 1})
    assert message_of(spec) == f"{photos}/val has classes that {photos}/train lacks: emu"
    (photos / "val").rename(photos / "old")
    (photos / "val" / "cat").mkdir(parents=True)
    assert message_of(spec) == f"{photos}/val has no images"
    assert message_of("imagenet", root=photos) == f"{photos}/val has no images"
    assert "image_size must be >= 1, got 0" in message_of(spec, image_size=0)
    assert "workers must be >= 0, got -1" in message_of(spec, workers=-1)


@pytest.mark.parametrize("rest", [False, True])
def test_draw_of_images_per_class(rest: bool) -> None:
    """The same number of every class, by seed; no image is in both sets."""
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    every = torch.cat((digits.train_images, digits.test_images)).flatten(1)
    drawn = [digits.draw(10, seed=seed, test_on_rest=rest) for seed in (0, 0, 1)]
    for one in drawn:
        assert torch.bincount(one.train_target).tolist() == [10] * 10
        images = torch.cat((one.train_images, one.test_images)).flatten(1)
        if rest:
            assert torch.equal(images.unique(dim=0), every.unique(dim=0))
            assert len(images) == len(every)
        else:
            assert one.test_images is digits.test_images
    assert torch.equal(drawn[0].train_images, drawn[1].train_images)
    assert not torch.equal(drawn[0].train_images, drawn[2].train_images)
    pool = (digits.train_images, digits.train_target)
    if rest:
        pool = tuple(
            map(torch.cat, zip(pool, (digits.test_images, digits.test_target), strict=True))
        )
    least = int(torch.bincount(pool[1]).min())
    largest = least - rest  # every class needs a test image
    assert len(digits.draw(largest, seed=0, test_on_rest=rest).train_target) == 10 * largest
    for wrong in (0, largest + 1):
        with pytest.raises(InputError, match=f"must be between 1 and {largest} for digits, got"):
            digits.draw(wrong, seed=0, test_on_rest=rest)


def test_images_keep_their_targets_in_a_draw() -> None:
    digits = load_data("digits")
    assert isinstance(digits, ImageArrays)
    drawn = digits.draw(3, seed=5, test_on_rest=True)
    target = {image.numpy().tobytes(): int(label) for images, labels in (
        (digits.train_images, digits.train_target), (digits.test_images, digits.test_target),
    ) for image, label in zip(images, labels, strict=True)}  # fmt: skip
    for images, labels in (
        (drawn.train_images, drawn.train_target), (drawn.test_images, drawn.test_target)
    ):  # fmt: skip
        for image, label in zip(images, labels, strict=True):
            assert target[image.numpy().tobytes()] == label
