"""Queues on Ray workers: the same results as without Ray, also after a worker was killed."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import contents

from isda.experiments.cli import main
from isda.experiments.commands import queue, queue_workers
from isda.experiments.commands.queue_workers import Job, Workers
from isda.experiments.errors import InputError, RunLocked, TimeUp
from isda.experiments.recipes import get_recipe
from isda.experiments.records import load_runs
from isda.experiments.settings import Options
from isda.experiments.training.groups import Plan

QUICK = "--epochs 8 --batch-size 128 --hold-out 1200 --checkpoint-seconds 0"
QUEUE = f"""
compare {QUICK} --seeds 0
train digits-resnet8-ce {QUICK} --seeds 0 1
calibrate {QUICK} --methods ce --seeds 0
train digits-resnet8-isda {QUICK} --lambda-0 1e30 --ramp constant
"""
RAY = ["--engine", "ray", "--device", "cpu", "--processes", "2"]


DIE = """
import os
import signal
from pathlib import Path

marker, checkpoint, rename = Path({marker!r}), {checkpoint!r}, os.replace


def rename_and_die(source, target):
    rename(source, target)
    if str(target).endswith(checkpoint) and not marker.exists():
        marker.write_bytes(Path(target).with_name("metrics.jsonl").read_bytes())
        os.kill(os.getpid(), signal.SIGKILL)


os.replace = rename_and_die
"""
"""For every process of Python: the one that writes the first checkpoint of a run is killed."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_a_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("queue").write_text(QUEUE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    assert main(["queue", "queue", "--device", "cpu", "--out", "alone"]) == 2
    torch.set_num_threads(threads)
    capfd.readouterr()
    run = Path("digits-resnet8-ce+epochs=8+batch_size=128+hold_out=1200") / "0"
    first, marker = tmp_path / "runs" / run, tmp_path / "killed"
    (tmp_path / "site").mkdir()
    Path("site/sitecustomize.py").write_text(
        DIE.format(marker=str(marker), checkpoint=str(run / "checkpoint.pt"))
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # the path of a socket has at most 107 bytes
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # Ray kills no worker by itself
    assert main(["queue", "queue", *RAY]) == 2  # the last line diverges
    shown = capfd.readouterr()
    (line,) = marker.read_bytes().splitlines()  # killed after one epoch
    assert shown.err.count("queue:2: a worker was lost, another one continues") == 1
    assert shown.err.splitlines()[-1] == "isda: 1 of 4 lines failed: queue:5"
    assert "3 of 4 runs finished" in shown.err  # of the view, which has one run per name and seed
    assert len(contents("runs")) == 3
    assert contents("runs") == contents("alone")
    assert (first / "calibration.json").exists()
    # resumed and not started again: the first epoch is that of the killed worker, with its time
    assert (first / "metrics.jsonl").read_bytes().splitlines()[0] == line


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("queue").write_text(QUEUE)
    assert main(["queue", "queue", "--address", "auto"]) == 2
    assert "add --engine ray" in capsys.readouterr().err
    assert main(["queue", "queue", "--engine", "ray", "--device", "cuda:1"]) == 2
    assert "device must be auto, cpu or cuda with --engine ray" in capsys.readouterr().err
    assert not Path("runs").exists()


class Lost(Exception):
    """A process that does not exist any more."""


def fake_ray(started: list[Any], lost: Callable[[], bool] = lambda: False) -> SimpleNamespace:
    """Ray whose workers are objects of this process, and whose calls end at once."""

    class Method:
        def __init__(self, method: Callable[..., Any]) -> None:
            self.method = method

        def remote(self, *arguments: Any) -> Any:
            result = Lost("it died") if lost() else self.method(*arguments)
            return _Ref(result)

    class Handle:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            worker = queue_workers._Worker(*arguments, **{**options, "one_thread": False})
            self.ready, self.run = Method(worker.ready), Method(worker.run)
            started.append(self)

    def get(ref: _Ref) -> Any:
        if isinstance(ref.result, Lost):
            raise ref.result
        return ref.result

    return SimpleNamespace(
        init=lambda *_, **__: None,
        shutdown=lambda: None,
        cluster_resources=lambda: {"CPU": 2.0},
        remote=lambda **_: lambda kind: SimpleNamespace(remote=Handle),
        wait=lambda refs, timeout: (refs[:1], refs[1:]),
        get=get,
        exceptions=SimpleNamespace(RayActorError=Lost),
    )


class _Ref:
    def __init__(self, result: Any) -> None:
        self.result = result


def fail(message: str, kind: type[Exception]) -> None:
    raise kind(message)


def job(name: str, work: Callable[[], None]) -> Job:
    return Job(name, lambda: work)


def test_errors_and_the_time_limit(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    started: list[Any] = []
    monkeypatch.setattr(queue_workers, "import_module", lambda name: fake_ray(started))
    ran: list[str] = []
    with Workers(None, "auto", 1) as workers:
        assert (workers.device, workers.number) == ("cpu", 2)
        wrong, broken = (
            job("wrong", lambda: fail("no such data", InputError)),
            job("broken", lambda: fail("a bug", KeyError)),
        )
        good = job("good", lambda: ran.append("good"))
        assert workers.run([wrong, broken, good]) == ["wrong", "broken"]
        reasons = ["isda: wrong: no such data", "isda: broken: KeyError: 'a bug'"]
        errors = capsys.readouterr().err.splitlines()
        assert [line for line in errors if line.startswith("isda: ")] == reasons
        assert ran == ["good"]
        late = job("late", lambda: fail("time limit of 1 min reached", TimeUp))
        with pytest.raises(TimeUp, match="time limit of 1 min"):
            workers.run([wrong, late, *[good] * 5])
        assert reasons[0] in capsys.readouterr().err
        assert len(ran) < 6  # nothing was started after the first
        assert len(started) == 2  # the workers of the first call were used again
        assert workers.run([]) == []


def test_jobs_that_need_the_same_run(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(queue_workers, "import_module", lambda name: fake_ray([]))
    ran: list[str] = []

    def second() -> None:
        ran.append("second")
        if ran.count("second") == 1:  # while the first one works
            raise RunLocked("runs/isda/0 is being trained by another process")

    first, locked = job("first", lambda: ran.append("first")), job("second", second)
    with Workers(None, "cpu", 2) as workers:
        assert workers.run([locked, first]) == []
        assert sorted(ran) == ["first", "second", "second"]
        outside = job("outside", lambda: fail("runs/ce/0 is being trained", RunLocked))
        assert workers.run([outside, first]) == ["outside"]
        assert workers.run([outside, outside]) == ["outside", "outside"]
    assert capsys.readouterr().err.count("isda: outside: runs/ce/0 is being trained\n") == 3


def test_a_task_that_loses_every_worker(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    calls = iter([False, True, False, True, False, True, False, False])  # ready, run, ready, …
    started: list[Any] = []
    monkeypatch.setattr(
        queue_workers, "import_module", lambda name: fake_ray(started, lambda: next(calls))
    )
    with Workers(None, "cpu", 1) as workers:
        poison = job("poison", lambda: None)
        assert workers.run([poison]) == ["poison"]
    errors = capsys.readouterr().err
    assert errors.count("poison: a worker was lost, another one continues") == 2
    assert "isda: poison: lost 3 workers, perhaps for lack of memory\n" in errors
    assert len(started) == 4


def test_workers_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_workers, "import_module", lambda name: fake_ray([], lambda: True))
    workers = Workers(None, "cpu", 2)
    with pytest.raises(InputError, match="no worker can be started: it died"):
        workers.run([job("any", lambda: None)] * 2)


def test_the_same_runs_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without Ray, a line with its own --out trains its own runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(queue_workers, "import_module", lambda name: fake_ray([]))
    quick = QUICK.replace("--epochs 8", "--epochs 1")
    Path("queue").write_text("\n".join(
        f"train digits-resnet8-ce {quick} --out {out}" for out in ("one", "other", "one")
    ))  # fmt: skip
    assert main(["queue", "queue", *RAY]) == 0
    assert [len(load_runs(out)) for out in ("one", "other")] == [1, 1]


def test_shares_of_the_workers() -> None:
    """On GPUs equal shares, at most as many as train side by side; on CPUs one run at a time."""
    recipes = [get_recipe(f"cifar100-resnet110-{method}") for method in ("ce", "isda")]
    plans = [Plan(recipe.method, recipe, seed) for seed in range(5) for recipe in recipes]
    plans.append(Plan("other", get_recipe("cifar100-resnet32-ce"), 0))

    def sizes(device: str, number: int, side_by_side: int = 0) -> list[int]:
        workers: Any = SimpleNamespace(device=device, number=number)
        options = Options(side_by_side=side_by_side)
        parts = list(queue._worker_groups(plans, options, workers))
        assert [plan for part in parts for plan in part] == plans
        return [len(part) for part in parts]

    assert sizes("cuda", 1) == [6, 4, 1]
    assert sizes("cuda", 4) == [3, 3, 3, 1, 1]
    assert sizes("cuda", 2, side_by_side=2) == [2, 2, 2, 2, 2, 1]
    assert sizes("cpu", 2) == [1] * 11


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_workers, "import_module", lambda name: fail(name, ImportError))
    with pytest.raises(InputError, match=r"--engine ray needs the package ray: pip install"):
        Workers(None, "auto", 1)
