"""Decoding of image files: every format, the sizes that crops need, and unreadable files."""

import os
import pickle
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from photo_folders import (
    CPU,
    PLACES,
    RECIPE,
    SIZE,
    decoded,
    files_of,
    image_of,
    make_image,
)
from PIL import ExifTags, Image, ImageOps
from torchvision.transforms import v2

from isda.experiments.data import folder_cache
from isda.experiments.data.decoding import (
    ImageFiles,
    UnreadableFiles,
    _to_rgb,
    decode_image,
    decode_resized,
    stored_sizes,
)
from isda.experiments.data.folder_cache import decode_folder
from isda.experiments.settings import Options
from isda.experiments.training.images import ImageStore

DECODE = """
import sys
from photo_folders import decoded
decoded(sys.argv[1])
"""


def test_threads_do_not_import_torchvision_at_the_same_time(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for part in ("train", "val"):
        for number in range(8):  # each format needs another part of torchvision
            name = f"{number}.{'png' if number % 2 else 'jpg'}"
            make_image(photos / part / str(number // 4) / name, (40, 40), number)
    command = [sys.executable, "-c", DECODE, str(photos)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths)
    assert done.returncode == 0, done.stderr


def test_stored_images_are_those_of_torchvision(photos: Path) -> None:
    files, data = files_of(photos), decoded(photos)
    for number, file in enumerate(files.train_files):
        with Image.open(file) as opened:
            image = v2.functional.pil_to_tensor(opened.convert("RGB"))
        if min(image.shape[1:]) > 18:
            image = v2.functional.resize(image, [18])
        assert torch.equal(image_of(data, number), image.permute(1, 2, 0))
    transform = v2.Compose([v2.Resize(18), v2.CenterCrop(SIZE)])
    test_images = data.test_images[:]
    for number, file in enumerate(files.test_files):
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
        assert torch.equal(test_images[number], transform(v2.functional.pil_to_tensor(picture)))
        # torchvision's resize of a PIL image rounds differently
        other = np.asarray(transform(picture)).transpose(2, 0, 1).astype(int)
        assert np.abs(test_images[number].numpy() - other).max() <= 1
    assert data.train_target.tolist() == files.train_target.tolist()
    assert data.test_target.tolist() == files.test_target.tolist()
    stored = sum(image_of(data, n).numel() for n in range(21)) + 9 * 3 * SIZE**2
    assert data.place == f"{stored / 2**20:.1f} MiB in memory"


def test_formats(tmp_path: Path) -> None:
    """Every kind of file that PIL reads, as RGB; of an animation, the first frame."""
    rgb = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (18, 17, 3), dtype=np.uint8), "RGB"
    )
    palette = rgb.quantize(16)
    frames = [rgb.transpose(Image.Transpose.ROTATE_180).quantize(16), palette]
    saved = {
        "grey.jpg": (rgb.convert("L"), {}),
        "cmyk.jpg": (rgb.convert("CMYK"), {}),
        "progressive.jpeg": (rgb, {"progressive": True}),
        "named_wrongly.jpg": (rgb, {"format": "PNG"}),
        "palette.png": (palette, {}),
        "transparent.png": (palette, {"transparency": bytes(range(16))}),
        "alpha.png": (rgb.convert("RGBA"), {}),
        "grey_alpha.png": (rgb.convert("LA"), {}),
        "bilevel.png": (rgb.convert("1"), {}),
        "animated.webp": (frames[0], {"save_all": True, "append_images": frames[1:]}),
        "photo.tiff": (rgb, {}),
        "photo.jfif": (rgb, {}),
        "animated.gif": (frames[0], {"save_all": True, "append_images": frames[1:]}),
        "photo.bmp": (rgb, {}),
        "photo.JP2": (rgb, {}),
        "photo.pgm": (rgb.convert("L"), {}),
        "photo.tga": (rgb, {}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for name, (image, options) in saved.items():
            file = tmp_path / name
            image.save(file, **options)
            with Image.open(file) as opened:
                expected = np.asarray(opened.convert("RGBA").convert("RGB"))
            found = decode_resized(str(file), image_size=SIZE)
            assert found.shape == (18, 17, 3)
            assert np.abs(found.numpy().astype(int) - expected).max() <= (
                1 if "cmyk" in name else 0
            )
            (size,) = stored_sizes([str(file)], image_size=SIZE, threads=0)
            assert size == (18, 17)
    classes = [tmp_path / "cat", tmp_path / "dog"]
    for folder in classes:
        folder.mkdir()
        for name in saved:
            shutil.copy(tmp_path / name, folder)
        (folder / "photo.heic").write_bytes(b"")  # found, but not decoded
    files = files_of(tmp_path)
    assert len(files.train_files + files.test_files) == 2 * (len(saved) + 1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # PIL, of the last file
@pytest.mark.parametrize("kind", ["jpg", "webp", "png", "tiff"])
def test_photos_are_turned_upright(kind: str, tmp_path: Path) -> None:
    """As PIL's ``exif_transpose`` does it; sizes are known from the header."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 23, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels)
    file = tmp_path / f"photo.{kind}"
    for orientation in range(10):  # 0 and 9 mean nothing
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        photo.save(file, exif=exif)
        with Image.open(file) as opened:
            expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
        assert np.array_equal(decode_image(str(file)).numpy(), expected)
        (size,) = stored_sizes([str(file)], image_size=SIZE, threads=0)
        assert size == decode_resized(str(file), image_size=SIZE).shape[:2]
    photo.save(file, exif=b"Exif\0\0II*\0damaged")
    assert decode_image(str(file)).shape == (40, 23, 3)


def test_images_of_more_than_8_bits(tmp_path: Path) -> None:
    """16-bit images are scaled, not clipped; images of unknown range are refused."""
    for name in "ab":
        for i in range(3):
            make_image(tmp_path / name / f"{i}.png", (24, 24), i)
    values = np.random.default_rng(0).integers(0, 2**16, (24, 24), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a" / "deep.png")
    image = _to_rgb(Image.open(tmp_path / "a" / "deep.png"))
    assert np.array_equal(np.asarray(image), np.repeat(values[..., None] // 256, 3, axis=2))
    assert not np.asarray(_to_rgb(Image.fromarray(0 * values))).any()  # black
    wrong = (values.astype(np.float32), values.astype(np.int32) * 2, values // 256)
    for number, pixels in enumerate(wrong):
        Image.fromarray(pixels).save(tmp_path / "b" / f"wrong{number}.tif")
    for cache in ("memory", "off"):
        with pytest.raises(UnreadableFiles, match="3 of 10 images") as caught:
            decoded(tmp_path, cache)
        for number, reason in enumerate(("floating-point", "more than 16 bits", "fit in 8 bits")):
            assert reason in caught.value.reasons[str(tmp_path / "b" / f"wrong{number}.tif")]


def spoil(photos: Path) -> dict[str, str]:
    """Damage some files; returns the expected reasons."""
    jpeg = (photos / "train" / "cat" / "0.jpg").read_bytes()
    (photos / "train" / "cat" / "0.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (photos / "val" / "dog" / "1.png").write_bytes(b"no image")
    (photos / "val" / "owl" / "2.jpg").write_bytes(b"")
    make_image(photos / "train" / "owl" / "9.png", (2, 300), 0)
    (photos / "train" / "owl" / "gone.png").symlink_to("nowhere")
    return {
        "train/cat/0.jpg": "runcated",
        "val/dog/1.png": "not an image that PIL can read",
        "val/owl/2.jpg": "not an image that PIL can read",
        "train/owl/9.png": "100 times as long",
        "train/owl/gone.png": "No such file",
    }


@pytest.mark.parametrize("cache", PLACES)
def test_unreadable_images(cache: str, photos: Path) -> None:
    expected = spoil(photos)
    with pytest.raises(UnreadableFiles) as caught:
        decoded(photos, cache)
    message = str(caught.value)
    assert message.startswith("5 of 32 images cannot be decoded (use --skip-unreadable")
    assert "\n" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # as from --processes
    found = {str(Path(f).relative_to(photos)): r for f, r in caught.value.reasons.items()}
    assert found.keys() == expected.keys()
    for file, reason in expected.items():
        assert reason in found[file]
    assert not [*photos.glob(".isda-cache/*.bytes"), *photos.glob(".isda-cache/*.new")]

    recipe = replace(RECIPE, data=f"imagefolder:{photos}")
    options = Options(cache=cache, workers=2)
    with pytest.raises(UnreadableFiles):
        ImageStore().get(recipe, options, CPU)
    options = replace(options, skip_unreadable=True)
    with pytest.warns(UserWarning, match="skipped 5 images under .* that cannot be decoded"):
        data = ImageStore().get(recipe, options, CPU)
    assert (len(data.train_target), len(data.test_target)) == (20, 7)


def test_only_an_image_that_is_decoded_is_unreadable(photos: Path) -> None:
    """Reading the headers is not enough: a damaged body is found, too."""
    for file in ("train/cat/0.jpg", "train/owl/2.jpg", "val/cat/0.jpg"):
        content = (photos / file).read_bytes()
        (photos / file).write_bytes(content[:-40])
    with pytest.raises(UnreadableFiles, match="3 of 30 images"):
        decoded(photos)


def test_files_are_skipped_once(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further runs of a command neither decode the others again nor warn again."""
    names = spoil(photos)
    store, recipe = ImageStore(), replace(RECIPE, data=f"imagefolder:{photos}")
    options = Options(skip_unreadable=True, workers=0)
    with pytest.warns(UserWarning, match=f"skipped {len(names)} images"):
        first = store.get(recipe, options, CPU)
    monkeypatch.setattr(folder_cache, "_decode", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert store.get(recipe, options, CPU).train_images is first.train_images
        held_out = store.get(replace(recipe, hold_out=5), options, CPU)
    assert len(held_out.test_target) == 5
    files = store.files(recipe, options)
    assert files is not None
    assert not {str(photos / name) for name in names} & {*files.train_files, *files.test_files}
    assert store.files(replace(recipe, data="digits"), options) is None


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_an_image_that_vanishes_before_it_is_decoded(cache: str, photos: Path) -> None:
    files = files_of(photos)
    (photos / "train" / "owl" / "1.png").unlink()
    with pytest.raises(UnreadableFiles, match=r"owl/1.png \(No such file or directory\)"):
        decode_folder(files, cache=cache, device=CPU)


def test_no_images_for_this_rank(photos: Path) -> None:
    data = decoded(photos, "off")
    assert isinstance(data.test_images, ImageFiles)
    assert data.test_images[3:3].shape == (0, 3, SIZE, SIZE)
