"""The examples in the docstrings of the modules that need no torch, and of the public functions."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest


def modules(*packages: str) -> list[str]:
    found = []
    for package in packages:
        path = importlib.import_module(package).__path__
        found += [package, *(module.name for module in pkgutil.walk_packages(path, f"{package}."))]
    return found


@pytest.mark.parametrize(
    "name",
    [
        "hocket.errors",
        "hocket.distributed.pipelines.split",
        "hocket.fusion",
        "hocket.profiling",
        "hocket.profiling.gpu",
        "hocket.session",
        "hocket.tracing",
        "hocket.zoo",
        *modules("hocket.loading"),
        *modules("hocket.ir", "hocket.planning", "hocket.checking", "hocket.simulation", "hocket.adaptation"),
    ],
)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
