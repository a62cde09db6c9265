"""What the tests of the command line share: a folder, image files, and refused commands."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from isda.experiments.cli import main
from isda.experiments.records import Run, load_runs, summary

__all__ = ["QUICK", "contents", "elsewhere", "image_folder", "only_run", "refused"]

QUICK = ["--epochs", "2", "--batch-size", "128", "--hold-out", "1200"]  # for the digits


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Error message of a command, which must be one line, with exit code 2 and no folders."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.endswith("\n")
        *others, error = printed.err.splitlines()
        assert all(" training images, " in line for line in others)  # what was found in a folder
        assert error.startswith("isda: ")
        assert "Traceback" not in printed.err
        assert not Path("runs").exists()
        return error.removeprefix("isda: ")

    return run


def image_folder(path: Path, *, classes: int = 3, images: int = 10) -> Path:
    """Image files in which every class has its own colour."""
    for number in range(classes):
        folder = path / f"class{number}"
        folder.mkdir(parents=True)
        for i in range(images):
            colour = torch.tensor([40 + 60 * number, 200 - 60 * number, 90])
            pixels = (colour + torch.randint(-40, 41, (40, 48, 3))).clamp(0, 255)
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / f"{i}.png")
    return path


def contents(folder: str) -> dict[str, list[object]]:
    """Metrics of the finished runs in a folder, except times."""
    return {
        f"{run.name}/{run.seed}": [
            {key: value for key, value in line.items() if "second" not in key}
            for line in run.metrics()
        ]
        for run in load_runs(folder)
        if summary(run).finished
    }


def only_run(out: Path = Path("runs")) -> Run:
    (run,) = load_runs(out)
    return run
