"""The examples run, the code in README.md runs as printed, and the documentation is complete."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isda

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def run(path: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r": loss ([\d.]+)$", output, re.MULTILINE)]


def test_attached_example_trains(tmp_path: Path) -> None:
    values = losses(run(ROOT / "examples" / "attach.py", tmp_path))
    assert len(values) == 4
    assert values[-1] < 0.75 * values[0]


def test_explicit_example_trains_and_resumes(tmp_path: Path) -> None:
    output = run(ROOT / "examples" / "explicit.py", tmp_path)
    values = losses(output)
    assert len(values) == 6
    assert values[-1] < 0.75 * values[0]
    assert "statistics of 5391 samples" in output  # three epochs of 1,797 digits
    assert not list(tmp_path.iterdir())


def test_first_code_of_readme_runs_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(
        blocks[0] + "\nprint(isinstance(criterion, isda.AttachedLoss), loss.item())\n"
    )
    truth, value = run(script, tmp_path).split()
    assert truth == "True"
    assert 0 < float(value) < 10


def test_lines_of_readme_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.split("## What you get")[1].split("\n## ")[0]
    lines = re.findall(r"\| `([^`]*)` \|$", section, re.MULTILINE)
    assert len(lines) == section.count("\n| ") - 1  # all rows but the heading
    monkeypatch.chdir(tmp_path)
    names = create_names()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for line in lines:
            names.pop("loss", None)
            exec(line, names)
            if "loss" in names:
                names["loss"].backward()
    finally:
        torch.distributed.destroy_process_group()
    assert names["augmented"].shape == (16, 6, 64)


def test_readme_names_existing_functions() -> None:
    section = README.split("## Where each equation lives")[1].split("\n## ")[0]
    names = re.findall(r"`(?:isda\.functional\.|isda\.)?([A-Za-z_]+)`", section)
    assert len(names) > 12
    for name in names:
        assert hasattr(isda.functional, name) or hasattr(isda, name), name


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)


def test_api_page_lists_everything_public() -> None:
    listed = set(re.findall(r"^::: isda\.(\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M))
    public = {f"functional.{name}" for name in isda.functional.__all__}
    public |= set(isda.__all__) - {"functional", "__version__", "sample", "monte_carlo_loss"}
    assert listed == public


def create_names() -> dict[str, object]:
    """What the lines of the README take for granted."""
    torch.manual_seed(0)
    head = nn.Linear(64, 10)
    segmenter = nn.Sequential()
    segmenter.add_module("body", nn.Conv2d(3, 8, 3, padding=1))
    segmenter.add_module("head", nn.Conv2d(8, 4, 1))
    spread = torch.randn(10, 64, 64)
    return {
        "DistributedDataParallel": DistributedDataParallel,
        "T": 100,
        "covariance": spread @ spread.mT,
        "epoch": 3,
        "epochs": 10,
        "features": torch.randn(6, 64, requires_grad=True),
        "head": head,
        "images": torch.randn(2, 3, 5, 5),
        "isda": isda,
        "label_map": torch.randint(4, (2, 5, 5)).index_fill_(1, torch.tensor(0), 255),
        "model": nn.Sequential(nn.Linear(5, 64), nn.ReLU(), head),
        "probabilities": torch.randn(6, 10).softmax(1),
        "segmenter": segmenter,
        "torch": torch,
        "x": torch.randn(6, 5),
        "y": torch.randint(10, (6,)),
    }
