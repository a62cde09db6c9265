"""The stages of a long computation: time limit, what is kept, damaged and left files."""

import os
import time
from pathlib import Path

import pytest
import torch

from isda.experiments.errors import InputError, TimeUp
from isda.experiments.generators.stages import Stages
from isda.experiments.settings import Options


class Number:
    """A state of one number."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.fixture
def stages(tmp_path: Path):
    """Create stages in the folder of the test, with some options."""
    return lambda **options: Stages(
        tmp_path, "work", {"settings": {"width": 3}}, Options(**options)
    )


def count(stages: Stages, name: str, total: int, **rest) -> int:
    """Add 1 in every iteration."""
    part = Number()

    def step(done: int, number: int) -> None:
        part.value += number

    stages.run(name, total, step, {"part": part}, **rest)
    return part.value


def test_the_next_iterations_are_expected_to_last_as_long_each(stages, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    work, done = stages(minutes=5 / 60), []

    def step(before: int, number: int) -> None:  # a second for each iteration
        done.append(number)
        now[0] += number

    with pytest.raises(TimeUp, match="2 of 10 iterations of first done"):
        work.run("first", 10, step, {}, size=lambda done: 1 if done < 2 else 8)
    assert done == [1, 1]


def test_sizes_may_differ_in_the_next_process(stages) -> None:
    """A CPU does one iteration at a time, a GPU several."""
    with pytest.raises(TimeUp, match="1 of 20"):
        count(stages(minutes=1e-9), "first", 20)
    work = stages(resume=True)
    assert count(work, "first", 20, size=lambda done: min(8, 20 - done)) == 20
    assert work.is_finished("first", 20)


def test_helpers_are_kept_until_the_stage_is_finished(stages, tmp_path) -> None:
    def saved() -> dict[str, set[str]]:
        state = torch.load(tmp_path / "work.pt", weights_only=True)
        return {name: {*one["parts"]} for name, one in state["stages"].items()}

    once, helper = {"minutes": 1e-9, "resume": True}, Number()
    for _ in range(2):
        with pytest.raises(TimeUp):
            count(stages(**once), "first", 3, helpers={"helper": helper})
        assert saved() == {"first": {"part", "helper"}}
    work = stages(**once)
    assert not work.is_finished("first", 3)
    assert count(work, "first", 3, helpers={"helper": helper}) == 3
    with pytest.raises(TimeUp):
        count(work, "second", 2)
    assert saved() == {"first": {"part"}, "second": {"part"}}
    work = stages(**once)
    assert work.is_finished("first", 3)
    assert count(work, "first", 3, helpers={"helper": helper}) == 3


@pytest.mark.parametrize(
    "change",
    [{"stages": None}, {"stages": [1]}, {"stages": {"first": 1}}, {"stages": {"first": {}}},
     {"stages": {"first": {"done": 4, "parts": {"part": {"value": 1}}}}},
     {"stages": {"first": {"done": 1, "parts": {}}}}, {"arguments": {}}, {"arguments": 1}],
)  # fmt: skip
def test_damaged_states(change: dict, stages, tmp_path) -> None:
    path = tmp_path / "work.pt"
    with pytest.raises(TimeUp):
        count(stages(minutes=1e-9), "first", 3)
    state = {**torch.load(path, weights_only=True), **change}
    if change == {"stages": None}:
        del state["stages"]
    torch.save(state, path)
    with pytest.raises(InputError, match=r"work\.pt is damaged \(.*\): delete it to start again"):
        count(stages(resume=True), "first", 3)


@pytest.mark.parametrize("create", [Path.mkdir, os.mkfifo])
def test_a_state_must_be_a_file(create, stages, tmp_path) -> None:
    create(tmp_path / "work.pt")
    with pytest.raises(InputError, match=r"work\.pt is not a file"):
        stages(resume=True)


def test_nothing_but_picture_and_record_is_left(stages, tmp_path) -> None:
    """Not what processes left that were killed while they wrote one of the three files, either."""
    with pytest.raises(TimeUp):
        count(stages(minutes=1e-9), "first", 3)
    for name in ("work.new.pt", ".work.png.0123abcd.new", ".work.json.0123abcd.new"):
        (tmp_path / name).write_bytes(b"half")
    work = stages(resume=True)
    count(work, "first", 3)
    record = work.end({"result": 1}, lambda path: path.write_bytes(b"picture"))
    assert record == {"settings": {"width": 3}, "result": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work.json", "work.png"]


def test_a_record_is_never_beside_the_picture_of_another_one(stages, tmp_path) -> None:
    stages().end({"result": 1}, lambda path: path.write_bytes(b"picture"))
    assert stages(resume=True).record is not None

    def killed(path: Path) -> None:
        path.write_bytes(b"another picture")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages().end({"result": 2}, killed)
    assert not (tmp_path / "work.json").exists()
    assert stages(resume=True).record is None
    stages().end({"result": 1}, lambda path: path.write_bytes(b"picture"))
    (tmp_path / "work.png").unlink()
    assert stages(resume=True).record is None
