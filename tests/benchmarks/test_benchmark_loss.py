"""The benchmark's direct form is an oracle for the library; its command line gives a CSV."""

import csv
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from programs import run_program
from scripts import FOLDER, RECORDS, load, table_of
from torch import nn

import isda
from isda.experiments.settings import Method

COLUMNS = "device,form,structure,N,C,A,milliseconds,extra_mebibytes,torch,threads,note"
PEER = """
import torch
from torch import nn

class Estimator:
    def __init__(self, a, c):
        self.CoVariance = torch.zeros({shape}).cuda()

class ISDALoss(nn.Module):
    def __init__(self, feature_num, class_num):
        super().__init__()
        self.estimator = Estimator(feature_num, class_num)

    def forward({arguments}):
        {body}
        return nn.functional.cross_entropy(y, target_x) + 0 * ratio, y
"""


@pytest.fixture
def loss() -> ModuleType:
    return load("loss")


@pytest.fixture
def table() -> ModuleType:
    return load("loss_table")


@pytest.fixture
def direct() -> ModuleType:
    return load("direct")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_program(FOLDER / "loss.py", *arguments)


def recorded(name: str, table: ModuleType) -> list[Any]:
    """Rows of a record in results/."""
    return load("rows").read_rows(RECORDS / f"{name}.csv", table.Row)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("structure", ["full", "diagonal", "shared", "identity"])
@pytest.mark.parametrize("shape", [(7, 13, 5), (33, 4, 9), (1, 3, 2)])
def test_direct_form_equals_library(
    direct: ModuleType, structure: str, shape: tuple[int, int, int], device: torch.device
) -> None:
    samples, classes, width = shape
    plain = direct.DirectLoss(width, classes, lambda_0=0.7, covariance=structure).to(device)
    library = isda.ISDALoss(width, classes, lambda_0=0.7, covariance=structure).to(device)
    for step in range(5):
        head = nn.Linear(width, classes).to(device)
        features = (3 + torch.randn(samples, width)).to(device).requires_grad_()
        target = torch.randint(classes, (samples,)).to(device)
        results = []
        for criterion in (library, plain):
            value = criterion(features, head.weight, target, bias=head.bias, progress=step / 4)
            inputs = (features, head.weight, head.bias)
            results.append((value, *torch.autograd.grad(value, inputs)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    buffers = [list(criterion.buffers()) for criterion in (library.estimator, plain)]
    for found, expected in zip(*buffers, strict=True):
        torch.testing.assert_close(
            found.to(expected), expected.view_as(found), rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_command_line_writes_table_and_plot(tmp_path: Path, device: torch.device) -> None:
    samples, classes, width = 32, 200, 512
    out = tmp_path / "deep" / "loss.csv"
    done = run(
        *("--shapes", f"{samples},{classes},{width}", f"{2**20},{2**20},2"),
        *("--structures", "diagonal", "--repeat", 2, "--threads", 1),
        *("--forms", "library", "direct", "--device", device.type, "--out", out),
    )
    assert done.returncode == 0, done.stderr
    rows = read(out)
    assert ",".join(rows[0]) == COLUMNS
    assert [(row["form"], row["structure"]) for row in rows] == 2 * [
        ("library", "diagonal"),
        ("direct", "diagonal"),
    ]
    extra = {row["form"]: float(row["extra_mebibytes"]) for row in rows[:2]}
    expanded = samples * classes * width * 4 / 2**20  # one (N, C, A) tensor
    assert extra["direct"] > 2 * expanded  # the backward pass holds two at once
    assert extra["library"] < extra["direct"]
    for row in rows[:2]:
        assert (row["N"], row["C"], row["A"], row["threads"]) == ("32", "200", "512", "1")
        assert float(row["milliseconds"]) > 0
        assert row["torch"] == torch.__version__
        assert row["note"] == ""
    for row in rows[2:]:  # logits of 4 TiB
        assert row["milliseconds"] == row["extra_mebibytes"] == ""
        assert "memory" in row["note"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    table = run("--table", out, "--plot", tmp_path / "again.png")
    assert table.stdout.count("\n| ") == 2
    assert "does not fit in memory" in table.stdout
    assert (tmp_path / "again.png").is_file()


def test_table_divides_direct_by_library(table: ModuleType) -> None:
    rows = [
        table.Row("cpu", form, structure, 7, 13, 5, milliseconds, extra, "2.15", 2, "")
        for form, structure, milliseconds, extra in [
            ("ce", "none", 0.5, 1.0),
            ("library", "full", 20.0, 30.0),
            ("direct", "full", 250.0, 900.0),
        ]
    ]
    line = table.markdown(rows).splitlines()[-1]
    assert line == (
        "| 7, 13, 5 | full | 0.5 ms, 1 MiB | 20 ms, 30 MiB | 250 ms, 900 MiB | "
        "12.5× time, 30.0× memory |"
    )


def test_baselines_have_a_table_of_their_own(table: ModuleType, tmp_path: Path) -> None:
    isda_rows, baseline_rows = (
        [
            table.Row("cpu", form, structure, 7, 13, 5, milliseconds, 1.0, "2.15", 2, "")
            for form, structure, milliseconds in values
        ]
        for values in (
            [("ce", "none", 0.5), ("library", "full", 20.0), ("direct", "full", 250.0)],
            [("focal", "none", 0.75), ("center", "none", 3.0)],
        )
    )
    first, second = table.markdown(isda_rows + baseline_rows).split("\n\n")
    assert first == table.markdown(isda_rows)
    assert second.splitlines() == [
        "| N, C, A | cross entropy | focal | center |",
        "|---|---|---|---|",
        "| 7, 13, 5 | 0.5 ms, 1 MiB | 0.75 ms, 1 MiB | 3 ms, 1 MiB |",
    ]
    assert table.markdown([isda_rows[0], *baseline_rows]) == second
    assert table.markdown(isda_rows[:1]).count("\n| ") == 1  # cross entropy alone
    table.draw(isda_rows + baseline_rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_every_baseline_of_the_recipes_is_timed(loss: ModuleType, table: ModuleType) -> None:
    # label smoothing is an option of cross entropy
    assert set(loss.BASELINES) == set(get_args(Method)) - {"ce", "label_smoothing", "isda"}
    rows = recorded("baselines_cpu", table)
    found = [(row.form, (row.N, row.C, row.A)) for row in rows]
    assert found == [(form, shape) for shape in loss.SHAPES for form in ("ce", *loss.BASELINES)]
    assert all(row.milliseconds for row in rows)


@pytest.mark.slow
def test_forms_can_be_chosen(tmp_path: Path, device: torch.device) -> None:
    forms = ["center", "focal"]
    samples, classes, width = 64, 400, 4096
    out = tmp_path / "loss.csv"
    done = run(
        *("--shapes", f"{samples},{classes},{width}", "--repeat", 2, "--threads", 1),
        *("--device", device.type, "--forms", *forms, "--out", out),
    )
    assert done.returncode == 0, done.stderr
    rows = read(out)
    assert sorted(row["form"] for row in rows) == forms
    assert all(float(row["milliseconds"]) > 0 for row in rows)
    assert {row["structure"] for row in rows} == {"none"}
    extra = {row["form"]: float(row["extra_mebibytes"]) for row in rows}
    centers = classes * width * 4 / 2**20  # their update is one more tensor of this size
    assert extra["center"] > extra["focal"] + 0.9 * centers
    assert run("--table", out).stdout.startswith("| N, C, A | focal | center |")


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "loss_cpu"), ("docs/baselines.md", "baselines_cpu")]
)
def test_pages_show_the_recorded_numbers(table: ModuleType, page: str, name: str) -> None:
    assert table_of(page, name) == table.markdown(recorded(name, table))


def test_peer_needs_a_gpu(tmp_path: Path) -> None:
    peer = tmp_path / "ISDA.py"
    peer.write_text(PEER)
    done = run("--peer", peer, "--device", "cpu")
    assert done.returncode == 2
    assert "--peer needs --device cuda" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("structure", "shape", "arguments", "body"),
    [
        ("full", "c, a, a", "self, model, fc, x, target_x, ratio", "y = fc(model(x))"),
        ("diagonal", "c, a", "self, model, x, target_x, ratio", "y, _ = model(x, isda=True)"),
    ],
)
def test_peer_is_timed(
    tmp_path: Path, structure: str, shape: str, arguments: str, body: str
) -> None:
    peer, out = tmp_path / "ISDA.py", tmp_path / "loss.csv"
    peer.write_text(PEER.format(shape=shape, arguments=arguments, body=body))
    done = run(
        *("--shapes", "7,13,5", "--structures", structure, "--repeat", 2),
        *("--device", "cuda", "--peer", peer, "--out", out),
    )
    assert done.returncode == 0, done.stderr
    last = read(out)[-1]
    assert (last["form"], last["structure"]) == ("peer", structure)
    assert float(last["milliseconds"]) > 0
