"""The examples in the docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import hocket.search

NAMES = ["hocket.tuning", *(each.name for each in pkgutil.iter_modules(hocket.search.__path__, "hocket.search."))]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
