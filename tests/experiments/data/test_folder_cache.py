"""Decoded images of a folder: the file on disk, which is never stale, and where they are kept."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from photo_folders import (
    CPU,
    PLACES,
    SIZE,
    count_decoding,
    decoded,
    files_of,
    make_image,
)

from isda.experiments.data import cache_file, folder_cache
from isda.experiments.data.folder_cache import decode_folder
from isda.experiments.errors import InputError, RunError
from isda.experiments.settings import Options

# The file on disk


def cache_files(photos: Path) -> list[str]:
    return sorted(path.name for path in (photos / ".isda-cache").glob("*") if path.name != "lock")


def touch(file: Path) -> None:
    """Give a file a later time, whatever the clock of the disk shows."""
    found = file.stat()
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 2 * 10**9))


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

    def slow(*arguments: object) -> Iterator[torch.Tensor]:
        yield from decode(*arguments)  # type: ignore[arg-type]
        touch(photos / "train" / "cat" / "1.png")

    monkeypatch.setattr(folder_cache, "_decode", slow)
    with pytest.raises(InputError, match="changed while they were decoded"):
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
