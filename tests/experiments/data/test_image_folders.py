"""Folders of images: classes, parts, splits, links, and errors for wrong folders."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from loaded_data import message_of
from photo_folders import files_of, make_image


def make_images(path: Path, classes: dict[str, int]) -> None:
    for name, number in classes.items():
        for i in range(number):
            make_image(path / name / f"{i}.{'png' if i % 2 else 'jpg'}", (20, 30), i)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    make_images(tmp_path / "train", {"cat": 9, "dog": 6, "owl": 6})
    make_images(tmp_path / "val", {"dog": 4, "cat": 3})
    return tmp_path


def test_folder(photos: Path) -> None:
    data = files_of(photos)
    assert data.class_names == ("cat", "dog", "owl")
    assert data.num_classes == 3
    assert (len(data.train_files), len(data.test_files)) == (21, 7)
    for files, target in (
        (data.train_files, data.train_target),
        (data.test_files, data.test_target),
    ):
        assert [Path(f).parent.name for f in files] == [data.class_names[c] for c in target]
    (photos / "val").rename(photos / "test")
    assert len(files_of(photos).test_files) == 7


def test_folder_is_split_where_it_has_no_test_part(tmp_path: Path) -> None:
    make_images(tmp_path, {"cat": 15, "dog": 10, ".cache": 3})
    data = files_of(tmp_path)
    assert data.class_names == ("cat", "dog")
    assert data.train_target.bincount().tolist() == [12, 8]
    assert data.test_target.bincount().tolist() == [3, 2]
    assert len(set(data.train_files) | set(data.test_files)) == 25
    assert files_of(tmp_path).test_files == data.test_files


def test_folder_hold_out(photos: Path) -> None:
    data = files_of(photos)
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
    assert message_of(spec) == f"{tmp_path} has classes without images that PIL can read: dog"
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    assert message_of(spec) == f"{tmp_path} has classes without images that PIL can read: dog"
    make_images(tmp_path, {"owl": 1, "rat": 1})
    (tmp_path / "dog" / "notes.txt").rename(tmp_path / "dog" / "0.jpg")
    assert files_of(tmp_path).num_classes == 4  # no image, which is found when it is decoded
    assert "must have train/ and val/" in message_of("imagenet", root=tmp_path)


@pytest.mark.parametrize(
    "parts", [("Train", "Val"), ("training", "validation"), ("Training", "Testing")]
)
def test_names_of_the_parts(parts: tuple[str, str], photos: Path) -> None:
    expected = files_of(photos)
    for part, name in zip(("train", "val"), parts, strict=True):
        (photos / part).rename(photos / name)
    found = files_of(photos)
    assert found.class_names == expected.class_names
    assert (len(found.train_files), len(found.test_files)) == (21, 7)


def test_a_test_part_with_another_name(photos: Path) -> None:
    """Otherwise one training image in five would be tested instead."""
    (photos / "val").rename(photos / "eval")
    message = f"{photos} has folders of the same classes in train and eval: rename the one with the"
    assert message_of(f"imagefolder:{photos}").startswith(message)
    (photos / "eval" / "dog").rename(photos / "eval" / "emu")
    (photos / "eval" / "cat").rename(photos / "eval" / "yak")
    assert len(files_of(photos).test_files) == 4  # of 21 training images


def test_hidden_files_are_not_images(photos: Path) -> None:
    """As in archives made by macOS, and beside notebooks."""
    expected = files_of(photos)
    for name in ("._0.jpg", ".checkpoints/0.jpg"):
        path = photos / "train" / "cat" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert files_of(photos).train_files == expected.train_files


def test_parts_without_folders_of_classes(tmp_path: Path) -> None:
    """train and val would otherwise be taken for two classes."""
    make_images(tmp_path, {"train": 5, "val": 5})
    message = f"{tmp_path} must have train/ and val/ with one folder per class"
    assert message_of(f"imagefolder:{tmp_path}") == message
    make_images(tmp_path, {"bus": 5})  # train as the name of a class
    assert files_of(tmp_path).class_names == ("bus", "train", "val")
    (tmp_path / "val").rename(tmp_path / "van")
    make_images(tmp_path / "train", {"fast": 5})
    assert files_of(tmp_path).class_names == ("bus", "train", "van")
    shutil.rmtree(tmp_path / "train" / "fast")
    (tmp_path / "van").rename(tmp_path / "val")
    make_images(tmp_path / "train", {"cat": 5, "dog": 5})
    message = f"{tmp_path}/val must have one folder per class, like {tmp_path}/train"
    assert message_of(f"imagefolder:{tmp_path}") == message


def test_names_that_are_hard_to_show(tmp_path: Path) -> None:
    """Any name is a class; in a message it is one line."""
    names = {'<b title="cat">': 5, "two\nlines": 5, "été ☃": 5, "back\\slash": 5}
    make_images(tmp_path, names)
    assert files_of(tmp_path).class_names == tuple(sorted(names))
    (tmp_path / "no\nimages").mkdir()
    assert message_of(f"imagefolder:{tmp_path}").endswith(
        "without images that PIL can read: no\\nimages"
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
    data = files_of(photos)
    assert data.class_names == ("cat", "dog")
    files = [Path(file).relative_to(photos) for file in data.train_files + data.test_files]
    assert len(files) == len(set(files)) == 16
    assert sum(file.parts[:2] == ("dog", "more") for file in files) == 5
    (photos / "cat" / "loop.png").symlink_to(photos / "cat" / "loop.png")
    assert len(files_of(photos).train_files + files_of(photos).test_files) == 17  # unreadable


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
    files = files_of(tmp_path).train_files + files_of(tmp_path).test_files
    assert sorted({Path(file).stem for file in files}) == ["0", "1", "2", "3", "4", "broken"]


def test_a_class_of_one_image(tmp_path: Path) -> None:
    make_images(tmp_path, {"cat": 12, "dog": 12, "emu": 1})
    data = files_of(tmp_path)
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
    data = files_of(tmp_path)
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
