"""The oldest supported torch: ``make test-oldest`` runs this file with it."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import isda
from isda import versions

ROOT = Path(__file__).parents[2]
old = pytest.mark.skipif(versions.COMPILES, reason="torch compiles the criteria")


def test_one_oldest_version_everywhere() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = re.findall(r"torch>=([\d.]+)", metadata["dependencies"][0])
    assert f"torch=={oldest}.0" in (ROOT / "Makefile").read_text()
    assert f"torch {oldest} " in (ROOT / "docs" / "index.md").read_text()
    assert f"than the {oldest} that" in (versions.__doc__ or "")


def test_what_this_version_of_torch_can_do() -> None:
    release = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    assert release >= (2, 6)
    assert (release >= (2, 9)) == versions.COMPILES
    assert (release >= (2, 11)) == versions.HAS_KERNELS


def create(*, total_steps: int = 4) -> tuple[nn.Module, isda.AttachedLoss]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    return model, isda.attach(model, lambda_0=0.5, total_steps=total_steps)


@old
def test_a_compiled_step_runs_the_criterion_eagerly() -> None:
    x, y = torch.randn(13, 5), torch.randint(3, (13,))
    values = []
    for compiled in (False, True):
        model, criterion = create()

        def step(x, y, model=model, criterion=criterion):
            return criterion(model(x), y)

        run = torch.compile(step, backend="eager") if compiled else step
        losses = [run(x, y) for _ in range(3)]
        losses[-1].backward()
        values.append([*losses, model[2].weight.grad, criterion.estimator.covariance])
        assert criterion.estimator.count.sum() == 3 * 13
    for eager, traced in zip(*values, strict=True):
        torch.testing.assert_close(traced, eager)


@old
@pytest.mark.parametrize("attached", [True, False])
def test_full_graphs_are_refused_with_the_reason(attached: bool) -> None:
    model, criterion = create()
    x, y = torch.randn(13, 5), torch.randint(3, (13,))

    def step(x, y):
        if attached:
            return criterion(model(x), y)
        return criterion.criterion(x[:, :1].expand(-1, 7), model[2].weight, y)

    with pytest.raises(Exception, match=r"torch.compile needs torch 2.9 or newer, got 2\."):
        torch.compile(step, backend="eager", fullgraph=True)(x, y)
    assert not criterion.estimator.count.any()
