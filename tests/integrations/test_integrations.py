"""isda imports no framework by itself, and counts batches as the frameworks do."""

import subprocess
import sys

import pytest

from isda.integrations.steps import count_batches


def test_batches_of_a_training():
    def reference(updates: int, batches: int, accumulation: int) -> int:
        number = 0
        while updates:
            for start in range(0, batches, accumulation):
                number += min(accumulation, batches - start)
                updates -= 1
                if not updates:
                    break
        return number

    for updates in range(1, 12):
        for batches in range(1, 8):
            for accumulation in range(1, 6):
                expected = reference(updates, batches, accumulation)
                assert count_batches(updates, batches, accumulation) == expected
    assert count_batches(5, None, 3) == 15


@pytest.fixture(scope="module")
def imported_by_isda() -> list[str]:
    code = "import sys, isda, isda.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize("package", ["transformers", "lightning", "timm", "accelerate"])
def test_isda_imports_no_framework(package, imported_by_isda):
    assert package not in imported_by_isda
    assert "isda.integrations" in imported_by_isda
