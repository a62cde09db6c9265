"""Fixtures of the tests of reports: runs on digits, and records that fill cells of the tables."""

import pytest
from made_runs import make_cells, make_digits_runs

out = pytest.fixture(make_digits_runs)
records = pytest.fixture(scope="module")(make_cells)
