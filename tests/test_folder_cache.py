"""Folders of images: decoded once, kept in any place, with the same results from each of them."""

import gc
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import START_METHOD
from PIL import ExifTags, Image, ImageOps
from programs import PATIENCE
from torch import Tensor
from torchvision.transforms import v2

from isda.experiments.cli import main
from isda.experiments.data import cache_file, folder_cache
from isda.experiments.data.arrays import ImageArrays, load_data
from isda.experiments.data.batch_feed import BatchFeed
from isda.experiments.data.decoding import (
    ImageFiles,
    UnreadableFiles,
    _to_rgb,
    decode_image,
    decode_resized,
    stored_sizes,
)
from isda.experiments.data.folder_cache import DecodedImages, decode_folder
from isda.experiments.data.folders import FolderImages
from isda.experiments.data.resized_crop import PackedImages
from isda.experiments.errors import InputError, RunError
from isda.experiments.settings import Options, Recipe
from isda.experiments.training import loop
from isda.experiments.training.groups import Plan, own_images
from isda.experiments.training.images import ImageStore, kept_images
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

SIZE = 16  # of the crops; images are stored with a shorter side of 18
CPU = torch.device("cpu")
PLACES = ("device", "memory", "disk", "off")


def make_image(path: Path, shape: tuple[int, int], seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Noise of different sizes: some are stored as they are, others are resized."""
    shapes = [(20, 30), (12, 17), (37, 25), (18, 18), (16, 60)]
    for part, number in (("train", 7), ("val", 3)):
        for c, name in enumerate(("cat", "dog", "owl")):
            for i in range(number):
                kind = "png" if i % 2 else "jpg"
                path = tmp_path / "photos" / part / name / f"{i}.{kind}"
                make_image(path, shapes[(i + c) % 5], 100 * c + i + 50 * (part == "val"))
    return tmp_path / "photos"


def files_of(path: Path, **options: object) -> FolderImages:
    data = load_data(f"imagefolder:{path}", **{"image_size": SIZE, "workers": 2} | options)
    assert isinstance(data, FolderImages)
    return data


def decoded(path: Path, cache: str = "memory", device: torch.device = CPU) -> DecodedImages:
    return decode_folder(files_of(path), cache=cache, device=device)


def image_of(data: DecodedImages, number: int) -> Tensor:
    """Stored training image (H, W, 3)."""
    images = data.train_images
    assert isinstance(images, PackedImages)
    height, width = images.size[number].tolist()
    first = int(images.offset[number])
    return images.pixels[first : first + height * width].view(height, width, 3)


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
        "val/dog/1.png": "not an image that PIL reads",
        "val/owl/2.jpg": "not an image that PIL reads",
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


# The same results from every place

RECIPE = Recipe(
    data="imagefolder:photos", network="resnet8", epochs=2, batch_size=5, learning_rate=0.05,
    weight_decay=5e-4, lambda_0=1.0, image_size=SIZE,
)  # fmt: skip


def train(lanes: list[Lane], epochs: int = 2) -> list[list[list[float]]]:
    runner, results = SideBySide(lanes, capture=False), []
    for _ in range(epochs):
        runner.train_epoch()
        results.append(runner.evaluate())
        for lane in lanes:
            lane.epoch += 1
    return results


def test_the_place_does_not_change_the_results(photos: Path, device: torch.device) -> None:
    lanes = {cache: Lane(RECIPE, 3, decoded(photos, cache, device), device) for cache in PLACES}
    results = {cache: train([lane]) for cache, lane in lanes.items()}
    assert lanes["off"].images.is_fed
    assert not lanes["device"].images.is_fed
    assert lanes["memory"].images.is_fed == lanes["disk"].images.is_fed == (device.type == "cuda")
    for cache in PLACES:
        assert results[cache] == results["device"], cache
        for one, other in zip(lanes[cache].tensors(), lanes["device"].tensors(), strict=True):
            assert torch.equal(one, other)
    # several runs, each with a feed of its own
    together = [Lane(RECIPE, seed, decoded(photos, "off"), CPU) for seed in (3, 4)]
    alone = Lane(RECIPE, 4, decoded(photos), CPU)
    pairs = train(together)
    assert [[row[1]] for row in pairs] == train([alone])
    for one, other in zip(together[1].tensors(), alone.tensors(), strict=True):
        assert torch.equal(one, other)


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


def test_every_seed_draws_its_own_images(photos: Path, device: torch.device) -> None:
    whole = decoded(photos, device=device)
    numbers = torch.arange(21, dtype=torch.uint8).view(21, 1, 1, 1)  # in place of images
    target = whole.train_target.cpu()
    arrays = ImageArrays("", numbers, target, numbers, target, (0.0,), (1.0,), whole.class_names)
    recipe = replace(RECIPE, images_per_class=4)
    results = []
    for cache in PLACES:
        data, lanes = decoded(photos, cache, device), []
        for seed in (3, 4):
            drawn = own_images(data, Plan("few", recipe, seed))
            kept = arrays.draw(4, seed=seed, test_on_rest=False)
            assert torch.equal(drawn.train_target.cpu(), kept.train_target)
            assert isinstance(drawn, DecodedImages)
            assert drawn.test_images is data.test_images
            chosen = kept.train_images.flatten().tolist()
            if isinstance(drawn.train_images, ImageFiles):
                files = files_of(photos).train_files
                assert drawn.train_images.files == tuple(files[i] for i in chosen)
            else:
                for place, number in enumerate(chosen):
                    assert torch.equal(image_of(drawn, place), image_of(data, number))
            lanes.append(Lane(recipe, seed, drawn, device))
        results.append(train(lanes))
    assert results == [results[0]] * len(PLACES)
    with pytest.raises(InputError, match="images_per_class must be between 1 and 7 for imagefold"):
        own_images(whole, Plan("few", replace(recipe, images_per_class=8), 0))


@pytest.mark.parametrize("cache", ["memory", "off"])
def test_ranks_divide_a_batch(cache: str, photos: Path) -> None:
    """The parts of the ranks are those of one process; the last of 21 images is a single one."""
    data = decoded(photos, cache)

    def batches(lane: Lane) -> list[tuple[Tensor, Tensor]]:
        lane.begin_epoch()
        found = []
        for number, size in enumerate(lane.images.batch_sizes()):
            lane.images.load()
            part = slice(size * lane.rank // lane.world, size * (lane.rank + 1) // lane.world)
            steps = torch.tensor(number)
            found.append(lane.images.batch(part, 5 * steps, steps)[:2])
        return [(images.clone(), target.clone()) for images, target in found]

    whole = batches(Lane(RECIPE, 0, decoded(photos), CPU))
    lanes = [Lane(RECIPE, 0, data, CPU) for _ in range(3)]
    parts = []
    for rank, lane in enumerate(lanes):
        lane.rank = lane.images.rank = rank
        lane.world = lane.images.world = 3
        parts.append(batches(lane))
    assert [len(target) for _, target in parts[0]] == [1, 1, 1, 1, 0]
    for number, (images, target) in enumerate(whole):
        assert torch.equal(torch.cat([part[number][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[number][1] for part in parts]), target)
    tested = [[target for _, target in lane.images.test_batches()] for lane in lanes]
    assert torch.equal(torch.cat([t for targets in tested for t in targets]), data.test_target)


@pytest.mark.parametrize("cache", ["disk", "off"])
def test_resumed_from_a_checkpoint(cache: str, photos: Path) -> None:
    """A killed run goes on with the same numbers, also with images from another place."""
    whole = Lane(RECIPE, 1, decoded(photos), CPU)
    expected = train([whole])
    first = Lane(RECIPE, 1, decoded(photos, cache), CPU)
    results = train([first], 1)
    first.begin_epoch()  # killed in the second epoch
    first.images.load()
    second = Lane(RECIPE, 1, decoded(photos, cache), CPU)
    buffer = io.BytesIO()
    first.epoch = 1
    state = first.state_dict()
    torch.save(state, buffer)
    second.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert results + train([second], 1) == expected
    for one, other in zip(second.tensors(), whole.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", ["name", "class", "size", "class names"])
def test_not_resumed_on_other_images(change: str, photos: Path) -> None:
    """As many images and classes as before, but not the same."""
    state = Lane(RECIPE, 1, decoded(photos), CPU).state_dict()
    copy = photos.parent / "copy"
    shutil.copytree(photos, copy)
    Lane(RECIPE, 1, decoded(copy), CPU).load_state_dict(state)
    cat, dog = (copy / "train" / name for name in ("cat", "dog"))
    if change == "name":
        (cat / "0.jpg").rename(cat / "00.jpg")
    elif change == "class":
        (cat / "0.jpg").rename(dog / "10.jpg")
        (dog / "2.jpg").rename(cat / "12.jpg")
    elif change == "size":
        shutil.copy(cat / "1.png", cat / "3.png")
    else:
        for part in ("train", "val"):  # the second class becomes the last one
            (copy / part / "dog").rename(copy / part / "zebra")
    with pytest.raises(InputError, match="names or sizes of files have changed: restore the"):
        Lane(RECIPE, 1, decoded(copy), CPU).load_state_dict(state)
    del state["images"]  # a checkpoint of version 0.2
    Lane(RECIPE, 1, decoded(copy), CPU).load_state_dict(state)


# The feed


def feed_of(photos: Path, cache: str, device: torch.device = CPU) -> BatchFeed:
    data = decoded(photos, cache)
    assert not isinstance(data.train_images, Tensor)
    return BatchFeed(data.train_images, data.train_target, batch_size=4, device=device)


BATCHES = [(0, [3, 1, 20]), (1, [5]), (0, []), (2, [7, 8]), (0, [0, 0, 19, 2]), (0, [11])]


@pytest.mark.parametrize("cache", ["memory", "disk", "off"])
def test_feed(cache: str, photos: Path, device: torch.device) -> None:
    data, feed = decoded(photos), feed_of(photos, cache, device)
    for _ in range(2):
        feed.begin(BATCHES)
        feed.load()
        feed.begin(BATCHES)  # the batches that have not been loaded do not appear later
        for start, numbers in BATCHES:
            feed.load()
            for place, number in enumerate(numbers, start):
                height, width = feed.images.size[place].tolist()
                first = int(feed.images.offset[place])
                pixels = feed.images.pixels[first : first + height * width].cpu()
                assert torch.equal(pixels.view(height, width, 3), image_of(data, number))
                assert feed.target[place] == data.train_target[number]


def test_the_thread_of_a_feed_ends_with_it(photos: Path) -> None:
    before = set(threading.enumerate())  # of which some may end meanwhile

    def started() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    feed = feed_of(photos, "off")
    feed.begin(BATCHES)
    feed.load()
    assert started()
    del feed
    gc.collect()
    assert not started()
    lane = Lane(RECIPE, 0, decoded(photos, "off"), CPU)
    lane.begin_epoch()
    lane.images.load()
    assert started()
    del lane
    gc.collect()
    assert not started()


@pytest.mark.parametrize("change", ["gone", "damaged", "another size"])
def test_an_image_that_changes_while_training(change: str, photos: Path) -> None:
    data = decoded(photos, "off")
    file = photos / "train" / "owl" / "1.png"
    if change == "gone":
        file.unlink()
    elif change == "damaged":
        file.write_bytes(b"no image")
    else:
        make_image(file, (5, 6), 0)
    with pytest.raises(InputError) as caught:
        train([Lane(RECIPE, 0, data, CPU)])
    assert str(caught.value).startswith(f"{file} cannot be read: ")
    assert "\n" not in str(caught.value)
    (photos / "val" / "cat" / "0.jpg").unlink()
    with pytest.raises(InputError, match=r"val/cat/0.jpg cannot be read: No such file"):
        next(Lane(RECIPE, 0, data, CPU).images.test_batches())


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_an_image_that_vanishes_before_it_is_decoded(cache: str, photos: Path) -> None:
    files = files_of(photos)
    (photos / "train" / "owl" / "1.png").unlink()
    with pytest.raises(UnreadableFiles, match=r"owl/1.png \(No such file or directory\)"):
        decode_folder(files, cache=cache, device=CPU)


# The file on disk


def cache_files(photos: Path) -> list[str]:
    return sorted(path.name for path in (photos / ".isda-cache").glob("*") if path.name != "lock")


def touch(file: Path) -> None:
    """Give a file a later time, whatever the clock of the disk shows."""
    found = file.stat()
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 2 * 10**9))


def count_decoding(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    decode = folder_cache._decode

    def counting(*arguments: object) -> None:
        calls.append("decoded")
        decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(folder_cache, "_decode", counting)
    return calls


def test_a_file_is_used_again(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_decoding(monkeypatch)
    first = decoded(photos, "disk")
    (name,) = cache_files(photos)
    for cache in ("disk", "auto"):
        second = decoded(photos, cache)
        assert torch.equal(second.train_images.pixels, first.train_images.pixels)
        assert torch.equal(second.train_images.size, first.train_images.size)
        assert torch.equal(second.test_images, first.test_images)
        assert second.place.endswith("on disk")
    assert calls == ["decoded"]
    assert cache_files(photos) == [name]
    assert files_of(photos).class_names == ("cat", "dog", "owl")  # the cache is not a class
    moved = photos.rename(photos.with_name("moved"))  # with the times of all files
    decoded(moved, "disk")
    assert calls == ["decoded"]


CHANGES = ("touched", "replaced", "renamed", "added", "removed", "size", "split")


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_is_never_stale(change: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = photos / "train" / "cat" / "1.bmp"
    make_image(file, (20, 20), 0)
    decoded(photos, "disk")
    calls = count_decoding(monkeypatch)
    files = files_of(photos)
    if change == "replaced":  # same size and time of modification
        found, content = file.stat(), bytearray(file.read_bytes())
        content[-20] ^= 1
        while file.stat().st_ctime_ns == found.st_ctime_ns:  # until the clock of the disk ticks
            file.write_bytes(bytes(content))
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
        files = files_of(photos)
    elif change == "touched":
        touch(file)
    elif change == "renamed":
        file.rename(file.with_name("other.bmp"))
        files = files_of(photos)
    elif change == "added":
        shutil.copy2(file, file.with_name("9.bmp"))
        files = files_of(photos)
    elif change == "removed":
        file.unlink()
        files = files_of(photos)
    elif change == "size":
        files = files_of(photos, image_size=SIZE + 1)
    else:
        files = files_of(photos).hold_out(6)
    decode_folder(files, cache="disk", device=CPU)
    assert calls == ["decoded"]
    # files for images that have changed are deleted, those of other settings are not
    assert len(cache_files(photos)) == (2 if change == "size" else 1)


def test_an_incomplete_file_is_written_again(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decoded(photos, "disk").train_images.pixels.clone()
    (name,) = cache_files(photos)
    path = photos / ".isda-cache" / name
    whole = path.read_bytes()
    calls = count_decoding(monkeypatch)
    for content in (b"", whole[:3], whole[:-1], whole + b"x", bytes(len(whole))):
        path.write_bytes(content)
        assert torch.equal(decoded(photos, "disk").train_images.pixels, expected)
    assert len(calls) == 5
    # what a killed process has left is removed
    (photos / ".isda-cache" / "x.new").write_bytes(b"")
    path.unlink()
    decoded(photos, "disk")
    assert cache_files(photos) == [name]


def test_files_that_change_while_they_are_decoded(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = folder_cache._decode

    def slow(*arguments: object) -> None:
        decode(*arguments)  # type: ignore[arg-type]
        touch(photos / "train" / "cat" / "1.png")

    monkeypatch.setattr(folder_cache, "_decode", slow)
    with pytest.raises(InputError, match="have changed while they were decoded"):
        decoded(photos, "disk")
    assert cache_files(photos) == []


def test_a_disk_without_room(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file.os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*\.bytes: No space left on device"):
        decoded(photos, "disk")
    assert cache_files(photos) == []


def test_processes_wait_for_each_other(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: locks belong to open files."""
    calls = count_decoding(monkeypatch)
    files, found = files_of(photos), []

    def run() -> None:
        found.append(decode_folder(files, cache="disk", device=CPU))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert calls == ["decoded"]


# Where the images go


def test_auto(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place that has room for twice as many bytes."""
    room = {"cuda": 1000, "cpu": 1000, "disk": 1000}
    monkeypatch.setattr(folder_cache, "_free_memory", lambda device: room[device.type])
    monkeypatch.setattr(folder_cache, "_free_disk", lambda _: room["disk"])
    gpu = torch.device("cuda:0")

    def chosen(device: torch.device, *, on_disk: bool = False, cache: str = "auto") -> str:
        return folder_cache._choose(cache, 500, device, photos, on_disk=on_disk)

    assert (chosen(gpu), chosen(CPU)) == ("device", "memory")
    room["cuda"] = 999
    assert chosen(gpu) == "memory"
    assert (chosen(gpu, on_disk=True), chosen(CPU, on_disk=True)) == ("disk", "disk")
    room["cpu"] = 999
    assert (chosen(gpu), chosen(CPU)) == ("disk", "disk")
    room["disk"] = 999
    assert (chosen(gpu), chosen(CPU)) == ("off", "off")
    for cache in PLACES:  # an explicit choice needs room for the images alone
        assert chosen(gpu, cache=cache) == cache
    room |= {"cuda": 499, "disk": 499}
    for cache in ("device", "disk"):
        with pytest.raises(InputError, match=f"got {cache} with 0.0 MiB free: use --cache auto"):
            chosen(gpu, cache=cache)


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = folder_cache._free_memory(CPU)
    assert 0 < whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(
        folder_cache,
        "_lines",
        lambda path: iter(["MemAvailable: 4000 kB"] if path.name == "meminfo" else []),
    )
    assert folder_cache._free_memory(CPU) == 4000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert folder_cache._free_memory(CPU) == 1000 * 1024


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "3000"}, 3000),  # a container
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, None),
        (
            {
                "proc/self/cgroup": "0::/slurm/job:1/step",
                "sys/fs/cgroup/slurm/job:1/step/memory.max": "max",
                "sys/fs/cgroup/slurm/job:1/memory.max": "5000",
                "sys/fs/cgroup/slurm/memory.max": "7000",
                "sys/fs/cgroup/other/memory.max": "1000",
            },
            5000,
        ),
        (
            {
                "proc/self/cgroup": "9:cpu:/a\n4:hugetlb,memory:/b\n0::/",  # version 1
                "sys/fs/cgroup/memory/b/memory.limit_in_bytes": "4000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000",
            },
            4000,
        ),
    ],
)
def test_memory_of_a_job(
    files: dict[str, str], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files |= {"proc/meminfo": "MemAvailable: 8 kB"}
    monkeypatch.setattr(
        folder_cache, "_lines", lambda path: iter(files.get(str(path)[1:], "").splitlines())
    )
    assert folder_cache._free_memory(CPU) == (8192 if limit is None else limit)


def test_a_folder_that_is_read_only(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*folders: Path) -> None:
        monkeypatch.setattr(folder_cache.os, "access", lambda path, _: path not in folders)

    cache = photos / ".isda-cache"
    read_only(photos)
    assert folder_cache._free_disk(photos) == 0
    with pytest.raises(InputError, match=r"disk, because .*photos is read-only: use --cache auto"):
        decoded(photos, "disk")
    read_only(cache)
    decoded(photos, "disk")  # there is no such folder yet
    assert folder_cache._free_disk(photos) == 0  # made by another user
    decoded(photos, "disk")  # a file that exists is used
    read_only(photos)
    assert folder_cache._free_disk(photos) > 0


def test_unknown_place() -> None:
    with pytest.raises(InputError, match="cache must be one of auto, device, memory, disk, off"):
        Options(cache="tape")  # type: ignore[arg-type]


def test_no_images_for_this_rank(photos: Path) -> None:
    data = decoded(photos, "off")
    assert isinstance(data.test_images, ImageFiles)
    assert data.test_images[3:3].shape == (0, 3, SIZE, SIZE)


def train_and_die(number: int, words: list[str]) -> None:
    """Run a command that is killed before the next step after a number of them."""
    calls, step = itertools.count(), Lane.step

    def counted(lane: Lane, size: int) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        step(lane, size)

    Lane.step = counted  # this process is used for nothing else
    main(words)


def test_killed_and_resumed(photos: Path, tmp_path: Path) -> None:
    """Killed without a cache and resumed with one, a run ends with the same numbers."""
    command = ["train", "--network", "resnet8"]
    command += ["--data", f"imagefolder:{photos}", "--image-size", "16", "--batch-size", "5"]
    command += ["--epochs", "8", "--device", "cpu", "--checkpoint-seconds", "0"]

    def metrics(out: Path) -> list[dict[str, float]]:
        times = ("seconds", "images_per_second", "check")  # the checksum includes the times
        lines = [line for path in out.glob("*/0/metrics.jsonl") for line in path.open()]
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [{key: row[key] for key in row if key not in times} for row in rows]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    words = [*command, "--out", str(killed), "--cache", "off"]
    # batches of 5, 5, 5, 5 and 1: in the third step of the fourth epoch
    process = multiprocessing.get_context(START_METHOD).Process(
        target=train_and_die, args=(3 * 5 + 2, words)
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert len(metrics(killed)) == 3
    for flags in (
        ["--out", str(killed), "--cache", "disk", "--resume"],
        ["--out", str(whole), "--cache", "memory"],
    ):
        assert main([*command, *flags]) == 0
    assert len(metrics(whole)) == 8
    assert metrics(killed) == metrics(whole)


# One data set at a time


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

    def spying(*arguments: object) -> None:
        alive.append(first())
        decode(*arguments)  # type: ignore[arg-type]

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
