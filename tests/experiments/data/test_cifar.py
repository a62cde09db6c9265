"""CIFAR from an archive or from torchvision's files, and errors for damaged ones."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from loaded_data import arrays_of, cifar_arrays, message_of


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
