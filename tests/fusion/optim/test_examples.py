"""The examples in the docstrings of the optimizers and schedulers."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from hocket.fusion import lr_scheduler, optim

MODULES = [
    name
    for package in (optim, lr_scheduler)
    for name in (
        package.__name__,
        *(f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)),
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
