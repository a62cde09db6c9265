"""The examples and the code in README.md run, and the documentation is complete."""

import difflib
import pkgutil
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import run_program
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import ImageFolder

import isda
from isda.criterion import Criterion

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CIFAR10_CLASSES = [
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
]  # fmt: skip


def run(path: Path, folder: Path, **options: Any) -> str:
    done = run_program(path, folder=folder, **options)
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


def test_cifar_as_image_files(tmp_path: Path) -> None:
    """The first training and test images of every class, unchanged."""
    random = np.random.default_rng(0)
    arrays = {
        "train_images": random.integers(256, size=(40, 32, 32, 3), dtype=np.uint8),
        "train_labels": np.arange(40) % 10,
        "test_images": random.integers(256, size=(13, 32, 32, 3), dtype=np.uint8),
        "test_labels": np.arange(13) % 10,
    }
    np.savez(tmp_path / "cifar10.npz", **arrays)
    words = ["cifar10", tmp_path / "photos", "--images-per-class", 3,
             "--test-images-per-class", 1, "--data-root", tmp_path]  # fmt: skip
    program = ROOT / "examples" / "cifar_folders.py"
    missing = run_program(program, *words[:2], folder=tmp_path)
    assert missing.stderr.splitlines()[-1].startswith("cifar_folders.py: error: cifar10 not found:")
    done = run_program(program, *words, folder=tmp_path)
    assert done.stdout.endswith("30 training and 10 test images\n"), done.stderr
    classes = sorted(CIFAR10_CLASSES)
    data = ImageFolder(str(tmp_path / "photos" / "train"))
    assert data.classes == classes
    found = {(np.asarray(image).tobytes(), data.classes[label]) for image, label in data}
    assert found == {
        (arrays["train_images"][i].tobytes(), CIFAR10_CLASSES[i % 10]) for i in range(30)
    }
    assert len(ImageFolder(str(tmp_path / "photos" / "test"))) == 10


ON_TWO_RANKS = ["accelerate", "fsdp2"]
ALONE = ["lightning", "timm", "transformers"]


@pytest.mark.parametrize("framework", ALONE)
def test_example_of_a_framework(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    values = losses(run(ROOT / "examples" / "frameworks" / f"{framework}_isda.py", tmp_path))
    assert len(values) == 2
    assert values[1] < 0.75 * values[0]


@pytest.mark.ddp
@pytest.mark.parametrize("framework", ON_TWO_RANKS)
def test_example_of_a_framework_on_two_ranks(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.fsdp" if framework == "fsdp2" else framework)
    path = ROOT / "examples" / "frameworks" / f"{framework}_isda.py"
    values = losses(run(path, tmp_path, ranks=2))
    assert len(values) == 2  # printed by one rank
    assert values[1] < 0.75 * values[0]


def test_frameworks_need_five_lines_or_fewer() -> None:
    """Lines of the example with ISDA that the one without it does not have."""
    page = (ROOT / "docs" / "frameworks.md").read_text()
    rows = re.findall(r"^\| .* \| (\d+) \| `(\S+)` \| `(\S+)` \|$", page, re.MULTILINE)
    plain_names = [f"{framework}_plain.py" for framework in ON_TWO_RANKS + ALONE]
    assert [plain for _, plain, _ in rows] == plain_names
    for number, *names in rows:
        plain, ours = (code_of(ROOT / "examples" / "frameworks" / name) for name in names)
        changed = [line for line in difflib.ndiff(plain, ours) if line.startswith("+ ")]
        assert len(changed) == int(number) <= 5, changed


def code_of(path: Path) -> list[str]:
    """Lines without the docstring of the file and without blank ones."""
    lines = path.read_text().split('"""', 2)[2].splitlines()
    return [line for line in lines if line.strip()]


def test_segmentation_example(tmp_path: Path) -> None:
    output = run(ROOT / "examples" / "segment_shapes.py", tmp_path)
    scores = [float(value) for value in re.findall(r"mean IoU ([\d.]+)", output)]
    assert len(scores) == 2
    assert min(scores) > 0.5  # a network that predicts the background alone has less than 0.25


def test_first_code_of_readme_runs_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(
        blocks[1] + "\nprint(isinstance(criterion, isda.AttachedLoss), loss.item())\n"
    )
    *steps, last = run(script, tmp_path).splitlines()
    truth, value = last.split()
    assert truth == "True"
    assert 0 < float(value) < 10
    assert [line.split(":")[0] for line in steps] == [f"step {step}" for step in range(5)]
    assert f"{float(value):.3f}" == steps[-1].split()[-1]


def test_tables_of_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.split("## What you get")[1].split("\n## ")[0]
    tables = section.split("\n### ")[1:]
    assert len(tables) == 3
    monkeypatch.chdir(tmp_path)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for table in tables:
            names = create_names(attached=not table.startswith("The statistics"))
            lines = re.findall(r"\| `([^`]*)` \|$", table, re.MULTILINE)
            assert len(lines) == table.count("\n| ") - 1  # all rows but the heading
            for line in lines:
                names.pop("loss", None)
                exec(line, names)
                if "loss" in names:
                    names["loss"].backward()
    finally:
        torch.distributed.destroy_process_group()
    assert names["augmented"].shape == (16, 6, 64)
    assert names["criterion"].estimator.count.shape == (12,)


def test_readme_names_existing_functions() -> None:
    section = README.split("## Where to find each equation")[1].split("\n## ")[0]
    names = re.findall(r"`(?:isda\.functional\.|isda\.)?([A-Za-z_]+)`", section)
    assert len(names) > 12
    for name in names:
        assert hasattr(isda.functional, name) or hasattr(isda, name), name


def test_api_page_lists_everything_public() -> None:
    paths = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    listed = [pkgutil.resolve_name(path) for path in paths]  # a module wins over a function
    public = {getattr(isda, name) for name in isda.__all__} - {isda.__version__, isda.functional}
    public |= {getattr(isda.functional, name) for name in isda.functional.__all__}
    assert set(listed) == public
    assert len(listed) == len(public)


def test_api_page_lists_what_criteria_inherit() -> None:
    """What has a docstring, except the method for the other ranks."""
    page = (ROOT / "docs" / "api.md").read_text()
    pattern = r"^::: isda\.(\w+)\n    options:\n      inherited_members: \[(.*)\]$"
    found = re.findall(pattern, page, re.MULTILINE)
    assert [name for name, _ in found] == ["ISDALoss", "ISDABCEWithLogitsLoss"]
    shared = {name for name, value in vars(Criterion).items() if getattr(value, "__doc__", None)}
    public = {name for name in shared if not name.startswith("_")} - {"notify_ranks"}
    for _, names in found:
        assert set(names.split(", ")) == public


class UnitVariance:
    """A minimal custom estimator: every feature has variance 1."""

    def update(self, features: Tensor, target: Tensor) -> None:
        pass

    def quadratic(self, weight: Tensor, target: Tensor) -> Tensor:
        return isda.functional.identity_quadratic(weight, target)


def create_names(*, attached: bool) -> dict[str, Any]:
    """The variables that the tables of the README use."""
    torch.manual_seed(0)
    head = nn.Linear(64, 10)
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), head)
    segmenter = nn.Sequential()
    segmenter.add_module("body", nn.Conv2d(3, 8, 3, padding=1))
    segmenter.add_module("head", nn.Conv2d(8, 4, 1))
    return {
        "DistributedDataParallel": DistributedDataParallel,
        "T": 100,
        "class_weight": torch.rand(10),
        "criterion": (
            isda.attach(model, total_steps=100)
            if attached
            else isda.ISDALoss(64, 10, total_steps=100)
        ),
        "epoch": 3,
        "epochs": 10,
        "estimator": UnitVariance(),
        "features": torch.randn(6, 64, requires_grad=True),
        "head": head,
        "images": torch.randn(2, 3, 5, 5),
        "isda": isda,
        "label_map": torch.randint(4, (2, 5, 5)).index_fill_(1, torch.tensor(0), 255),
        "labels": torch.randint(2, (6, 10)).float(),
        "model": model,
        "probabilities": torch.randn(6, 10).softmax(1),
        "pseudo_label": torch.randint(10, (6,)),
        "segmenter": segmenter,
        "torch": torch,
        "x": torch.randn(6, 5),
        "y": torch.randint(10, (6,)),
    }
