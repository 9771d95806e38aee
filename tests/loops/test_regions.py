"""Loops that no graph can be end with regions where they end eagerly: bits, Python state, results, text and errors."""

from __future__ import annotations

import importlib

import pytest
import torch

import hocket
from loops.loop import CASES
from loops.regional import TABLE
from loops.runner import builder, compared
from loops.test_loops import KINDS
from support.step_regions import regions_at_once

pytestmark = pytest.mark.filterwarnings("ignore:::torch")
for kind in KINDS:
    importlib.import_module(f"loops.{kind}")

# Two models and more, or parts of a model of which each has its graphs, take longer to be searched.
STEPS = 150


def with_regions(build) -> list[tuple[str, str]]:
    """The verdicts of a loop with regions, which ends as the eager one does."""
    torch._dynamo.reset()
    options = {"machine": hocket.Machine.of(cores=1), "guard": False, "cache": False}
    with regions_at_once():
        return compared(build, options, steps=STEPS, counted=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if place % 3 else ()) for place, name in enumerate(TABLE)]
)
def test_it_ends_where_eager_ends(name):
    ((verdict, why),) = with_regions(TABLE[name])
    assert verdict == "regions", why[-300:]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.planned])
def test_loops_that_are_refused_end_where_eager_ends(name, tmp_path):
    with_regions(builder(CASES[name], tmp_path))
