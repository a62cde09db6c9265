"""The Python code of the pages runs, given what the text says of its names."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import isda

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {"api.md", "cookbook.md"}  # run by test_docs.py and test_cookbook.py
PAGES = sorted(
    page.name
    for page in DOCS.glob("*.md")
    if "```python" in page.read_text() and page.name not in ELSEWHERE
)
C, A = 4, 8
COLUMNS = 100
"""The width that ``docs/extra.css`` makes room for."""


def code_blocks(page: str, language: str = r"\w+") -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def create_model(num_features: int = A, num_classes: int = C) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, num_features), nn.ReLU(), nn.Linear(num_features, num_classes)
    )


class Net:
    """What ``docs/frameworks.md`` uses of ``skorch.NeuralNetClassifier``."""

    def __init__(self, module: nn.Module, **_options: Any) -> None:
        self.module_ = module


@pytest.fixture
def names() -> dict[str, Any]:
    """What the pages take for granted: a model, a batch, the number of steps."""
    x, y = torch.randn(6, 3), torch.arange(6) % C
    body, head = nn.Linear(3, A), nn.Linear(A, C)
    return {
        "DistributedDataParallel": DistributedDataParallel,
        "T": 10,
        "args": SimpleNamespace(lambda_0=0.5),
        "body": body,
        "class_num": C,
        "epoch": 1,
        "epochs": 2,
        "fc": head,
        "feature_num": A,
        "head": head,
        "isda": isda,
        "model": create_model(),
        "nn": nn,
        "num_classes": C,
        "num_features": A,
        "target": y,
        "torch": torch,
        "x": x,
        "y": y,
    }


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_page_with_code_is_run() -> None:
    run = {"baselines.md", "distributed.md", "frameworks.md", "index.md", "method.md"}
    assert set(PAGES) == run | {"migrating.md", "speed.md"}


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_code_fits_the_page(page: str) -> None:
    for line in "\n".join(code_blocks(page)).splitlines():
        assert len(line) <= COLUMNS, line


def test_layout_names_what_exists() -> None:
    """Every file of the library has a place in the table of CONTRIBUTING.md."""
    root = DOCS.parent
    rows = re.findall(r"^\| (`src.*?`) \|", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    listed = set()
    for row in rows:
        first, *others = re.findall(r"`(.*?)`", row)
        listed |= {root / first, *((root / first).parent / name for name in others)}
    assert all(path.exists() for path in listed)
    modules = {path for path in (root / "src" / "isda").iterdir() if path.name[0] != "_"}
    assert modules - {root / "src" / "isda" / "py.typed"} <= listed


@pytest.mark.parametrize("page", ["baselines.md", "method.md"])
def test_attached(page: str, names: dict[str, Any]) -> None:
    (text,) = code_blocks(page, "python")
    exec(text, names)
    assert names["loss"].requires_grad


def test_index(names: dict[str, Any]) -> None:
    _, text = code_blocks("index.md", "python")  # the first is run by test_docs.py
    exec(text.replace("640, 100", f"{A}, {C}"), names)
    assert names["loss"].requires_grad


def test_distributed(names: dict[str, Any], one_rank: None) -> None:
    for text in code_blocks("distributed.md", "python"):
        exec(text, names)
    assert isinstance(names["criterion"].estimator, isda.ShardedCovariance)
    assert names["loss"].requires_grad


def test_speed(names: dict[str, Any], one_rank: None) -> None:
    for text in code_blocks("speed.md", "python"):
        exec(text.replace("2048, 1000", f"{A}, {C}"), names)
    assert names["covariance"].precision == "medium"


def test_migrating(
    names: dict[str, Any], one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics of a pickled criterion of the authors come into an attached one."""
    explicit, wrapped, load = code_blocks("migrating.md", "python")
    exec(explicit, names)
    assert names["loss"].requires_grad
    exec(wrapped, names)
    names["criterion"] = isda.attach(names["model"], lambda_0=0.5)
    factor = torch.rand(C, A, A)
    old = SimpleNamespace(
        Amount=torch.arange(C).float(), Ave=torch.rand(C, A), CoVariance=factor @ factor.mT
    )
    monkeypatch.chdir(tmp_path)
    torch.save({"isda_criterion": SimpleNamespace(estimator=old)}, "checkpoint.pth.tar")
    exec(load, names)
    count, mean, covariance = names["criterion"].estimator.moments
    assert count.tolist() == list(range(C))
    torch.testing.assert_close(mean, old.Ave, check_dtype=False)
    torch.testing.assert_close(covariance, old.CoVariance, check_dtype=False)


@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed as a dependency")
def test_frameworks(names: dict[str, Any], tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    hugging_face, classifier, prepare, shard, net = code_blocks("frameworks.md", "python")
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    values = {"Trainer": transformers.Trainer, "arguments": arguments, "dataset": [0]}
    exec(hugging_face, {**names, **values})
    values = {"L": lightning, "create_model": create_model}
    exec(classifier, {**names, **values})
    loader = torch.utils.data.DataLoader(torch.zeros(4, 3))
    optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    values = {"accelerator": accelerate.Accelerator(cpu=True), "loader": loader}
    exec(prepare, names := {**names, **values, "optimizer": optimizer})
    assert names["criterion"].total_steps == 8
    exec(shard, {**names, "fully_shard": nn.Module.train})  # with FSDP2: examples/frameworks
    exec(net, names := {**names, "NeuralNetClassifier": Net})
    criterion = names["net"].initialize_criterion().criterion_
    assert criterion(names["model"](names["x"]), names["y"]).requires_grad
