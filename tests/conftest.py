"""Fixtures shared by all tests: the device and dtype under test, and seeded random numbers."""

import gc
import os

import process_settings  # noqa: F401 - threads and precision
import pytest
import torch

from isda import versions


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
