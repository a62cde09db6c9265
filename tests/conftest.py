"""Fixtures shared by all tests: the device and dtype under test, and seeded random numbers."""

import gc
import os

import pytest
import torch

from isda import versions

# the suite runs one process per core; its subprocesses also have one thread
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as --deterministic; read at the first use
torch.backends.cudnn.allow_tf32 = False  # tolerances are those of float32
torch.backends.cudnn.deterministic = True


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Device of the suite: ``ISDA_TEST_DEVICE``, a CPU by default."""
    return torch.device(os.environ.get("ISDA_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    """Dtype of the modules under test: ``ISDA_TEST_DTYPE``, float32 by default."""
    return getattr(torch, os.environ.get("ISDA_TEST_DTYPE", "float32"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands print is neither split nor wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")


def pytest_collection_finish() -> None:
    """Modules and tests stay, so that the garbage collector need not visit them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that objects are freed at exit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not versions.COMPILES:
        missing["compiled"] = "needs a newer torch"
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    for item in items:
        for marker in item.iter_markers():
            if marker.name in missing:
                item.add_marker(pytest.mark.skip(reason=missing[marker.name]))
