"""Every example in a docstring of the package runs, and gives what it shows."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
RUNS = re.compile(r">>> (?!.*doctest: \+SKIP)")  # jobs of several processes and private internals are only shown
NAMES = sorted(
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in (SRC / "hocket").rglob("*.py")
    if RUNS.search(path.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
