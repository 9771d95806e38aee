"""Loops with bookkeeping end scheduled where they end eagerly, and nearly all of them are planned.

Parameters, gradients, optimizer state, Python state, random state, results, errors and text are compared bit by bit
over more than 60 steps from one seed.
"""

from __future__ import annotations

import importlib

import pytest

import hocket
from loops.bookkeeping.table import TABLE
from loops.runner import problems, run
from quick import some

for kind in ("shown", "kept", "rates", "drawn", "parted", "trainers"):
    importlib.import_module(f"loops.bookkeeping.{kind}")

STEPS = 63  # the last one does nothing that is done in every so many


@pytest.mark.parametrize("name", some(TABLE))
def test_it_ends_where_eager_ends(name):
    case = TABLE[name]
    eager = run(case.build, steps=STEPS, counted=False)
    options = {"machine": hocket.Machine.of(cores=1), "guard": False, "cache": False}
    scheduled = run(case.build, steps=STEPS, counted=False, options=options)
    lines = problems(eager, scheduled)
    ((verdict, why),) = scheduled.verdicts
    if verdict != ("planned" if case.planned else "eager") or case.word not in why:
        lines.append(f"expected {case.word or 'a plan'}")
    if lines:
        pytest.fail("\n".join([f"{name}: {verdict}: {why}", *lines]), pytrace=False)


def test_nearly_all_are_planned():
    assert len(TABLE) >= 70
    assert sum(not case.planned for case in TABLE.values()) <= len(TABLE) // 20
