"""The lines of metrics.jsonl: their checksums, values out of range, damage and failed writes."""

import builtins
import errno
import hashlib
import json
import os

import pytest
import run_folders
from run_folders import RECIPE, Crash, change_config, line

from isda.experiments.errors import InputError, RunError
from isda.experiments.records import summary
from isda.experiments.training.run_folder import RunFolder

finished, run = run_folders.finished, run_folders.run  # fixtures


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([line(0), line(1), line(1)], 3),  # twice
        ([line(0), line(2)], 2),  # one is missing
        ([line(epoch) for epoch in range(13)], 13),  # more than the recipe has
        ([line(0), {"epoch": 1, "test_error": float("nan")}], 2),
        ([line(0), {"epoch": 1, "test_loss": 0.1}], 2),
    ],
)
def test_epochs_that_do_not_follow_one_another(run, lines, wrong):
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(InputError, match=f"damaged: line {wrong} is not the record of epoch"):
        summary(run)


def test_line_that_is_not_json(run):
    text = "".join(json.dumps(line(epoch)) + "\n" for epoch in range(3))
    (run.folder / "metrics.jsonl").write_text(text.replace('{"epoch": 1', '{"ep'))
    with pytest.raises(InputError, match="damaged: line 2 is not the record of epoch 1"):
        summary(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_error": -5.57}, "has test_error -5.57, which must be from 0 to 100"),
        ({"test_error": 500}, "has test_error 500, which must be from 0 to 100"),
        ({"test_error": True}, "is not the record of epoch 1"),
        ({"test_error": 10**400}, "is not the record of epoch 1"),
        ({"test_top5_error": 101.0}, "has test_top5_error 101.0"),
        ({"test_ece": 1.5}, "has test_ece 1.5, which must be from 0 to 1"),
        ({"train_loss": -1.0}, "has train_loss -1.0, which must be >= 0"),
        ({"test_loss": float("inf")}, "is not the record of epoch 1"),
        ({"a\nb": 1.0}, "is not the record of epoch 1"),
        ({"epoch": 1.0}, "is not the record of epoch 1"),
        ({"epoch": True}, "is not the record of epoch 1"),
        ({"side_by_side": 1.5}, "has side_by_side 1.5, which must be an integer"),
    ],
)
def test_values_out_of_range_are_refused(run, change, message):
    """In reading and in writing."""
    with pytest.raises(RunError, match="the next line of the metrics "):
        run.append(line(0) | change | {"epoch": change.get("epoch", 0)})
    path = run.folder / "metrics.jsonl"
    assert not path.exists()
    path.write_text("".join(json.dumps(one) + "\n" for one in (line(0), line(1) | change)))
    with pytest.raises(InputError, match=f"metrics.jsonl is damaged: line 2 {message}") as caught:
        summary(run)
    assert len(str(caught.value)) < 600


def test_nested_metrics_are_refused(run):
    text = json.dumps(line(0))[:-1] + ', "deep": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    (run.folder / "metrics.jsonl").write_text(text)
    with pytest.raises(InputError, match="damaged: line 1 is not the record of epoch 0"):
        run.metrics()


def test_every_flipped_bit_of_the_last_ten_epochs_is_found(finished):
    """None changes a result: the record is refused, or it lacks its last line."""
    assert finished.verified
    path, expected = finished.folder / "metrics.jsonl", finished.metrics()
    content = path.read_bytes()
    first = len(b"".join(content.splitlines(keepends=True)[:2]))
    for where in range(first, len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[where] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(InputError, match=r"metrics\.jsonl is damaged: line \d+ "):
                RunFolder(finished.folder).metrics()
    path.write_bytes(content)
    assert RunFolder(finished.folder).metrics() == expected


def test_checksum_covers_recipe_and_order(finished, tmp_path):
    path = finished.folder / "config.json"
    text = path.read_text()
    change_config(finished.folder, {"recipe": json.loads(text)["recipe"] | {"lambda_0": 0.7}})
    with pytest.raises(InputError, match="line 1 does not match its checksum"):
        RunFolder(finished.folder).metrics()
    path.write_text(text)
    path = finished.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    other = RunFolder.create(tmp_path / "other", finished.name, RECIPE, 3)
    for epoch in range(12):
        other.append(line(epoch, test_error=5.0))
    strange = (other.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:11], strange[11]]))
    with pytest.raises(InputError, match="line 12 does not match its checksum"):
        RunFolder(finished.folder).metrics()


def test_checksum_by_hand(finished):
    """The checksum is that of the documented bytes."""
    config = json.loads((finished.folder / "config.json").read_text())
    begin = json.dumps([config["name"], config["seed"], config["recipe"]], sort_keys=True)
    content = (finished.folder / "metrics.jsonl").read_text()
    last = content.rindex(', "check": ')
    digest = hashlib.sha256((begin + content[:last]).encode()).hexdigest()
    assert json.loads(content.splitlines()[-1])["check"] == digest[:16]


def test_a_run_without_checksums_goes_on(finished):
    """Lines of an earlier version stay as they are; later checksums cover them."""
    path = finished.folder / "metrics.jsonl"
    content = "".join(json.dumps(line(epoch)) + "\n" for epoch in range(3))
    path.write_text(content)
    run = RunFolder(finished.folder)
    assert not run.verified
    run.rewind(2)
    for epoch in range(2, 5):
        run.append(line(epoch))
    assert run.metrics() == [line(epoch) for epoch in range(5)]
    assert not run.verified
    path.write_text(path.read_text().replace("20.0", "10.0"))
    with pytest.raises(InputError, match="line 3 does not match its checksum"):
        RunFolder(finished.folder).metrics()


def test_metrics_that_cannot_be_read(run):
    (run.folder / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics.jsonl is not a file"):
        summary(run)


def test_metrics(run):
    assert run.metrics() == []
    for epoch in range(3):
        run.append(line(epoch))
    assert run.metrics() == [line(epoch) for epoch in range(3)]


def test_torn_last_line_is_dropped(run):
    run.append(line(0))
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "test_er')
    assert run.metrics() == [line(0)]
    run.rewind(1)
    run.append(line(1))
    assert run.metrics() == [line(0), line(1)]


def test_damage_before_the_last_line_is_not_hidden(run):
    run.append(line(0))
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "test_er\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged"):
        run.metrics()


def test_rewind(run, monkeypatch):
    for epoch in range(5):
        run.append(line(epoch))

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            run.rewind(2)
    assert len(run.metrics()) == 5  # all or nothing
    run.rewind(2)
    assert run.metrics() == [line(0), line(1)]
    with pytest.raises(InputError, match="lacks epochs before 4"):
        run.rewind(4)
    run.rewind(0)
    assert run.metrics() == []


def test_intact_is_said_only_after_a_look(run, monkeypatch):
    """A file that could not be restored is not called intact, nor is one that did not exist."""
    real = builtins.open

    class Disk:
        def __init__(self, *arguments, **options):
            self.file = real(*arguments, **options)

        def write(self, data):
            self.file.write(data[:5])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def truncate(self, end):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    def failing() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", Disk)
            with pytest.raises(RunError) as caught:
                run.append(line(len(run.metrics())))
        return str(caught.value)

    assert failing().endswith("metrics.jsonl: Input/output error")
    run.rewind(0)
    run.append(line(0))
    assert failing().endswith("Input/output error; the file may be incomplete")
    run.rewind(1)
    assert run.metrics() == [line(0)]


def test_half_written_line_is_taken_back(run, monkeypatch):
    run.append(line(0))
    real = builtins.open

    def limited(*arguments, **options):
        file = real(*arguments, **options)
        writes = []

        class Disk:
            def write(self, data):
                if writes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                writes.append(data)
                return file.write(data[:5])

            def __getattr__(self, name):
                return getattr(file, name)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                file.close()

        return Disk()

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", limited)
        with pytest.raises(RunError, match="No space left"):
            run.append(line(1))
    run.append(line(1))
    assert run.metrics() == [line(0), line(1)]
