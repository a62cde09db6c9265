"""The examples in the library's docstrings run."""

import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import isda

MODULES = [
    module.name
    for package in (isda, isda.functional)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    if not module.ispkg
]


@pytest.mark.parametrize("name", ["isda", *MODULES])
def test_docstrings(name):
    module = importlib.import_module(name)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    names = {
        **vars(module),
        "isda": isda,
        "torch": torch,
        "nn": nn,
        "model": model,
        "x": torch.randn(5, 4),
        "y": torch.tensor([0, 1, 2, 1, 0]),
    }
    result = doctest.testmod(module, extraglobs=names)
    assert result.failed == 0


def test_the_entry_points_have_examples():
    finder = doctest.DocTestFinder()
    for thing in (isda, isda.attach, isda.ISDALoss, isda.functional.batch_moments, isda.sample):
        tests = finder.find(thing, getattr(thing, "__name__", "isda"), module=False)
        assert any(test.examples for test in tests), thing
