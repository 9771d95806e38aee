"""Sixty loops with bookkeeping end scheduled where they end eagerly, and nearly all of them are planned.

Parameters, gradients, optimizer state, Python state, random state, results, errors and text are compared bit by bit
over more than 60 steps from one seed.
"""

from __future__ import annotations

import importlib

import pytest

import hocket
from loops.runner import problems, run
from loops.sixty.table import TABLE

for kind in ("shown", "kept", "drawn", "trainers"):
    importlib.import_module(f"loops.sixty.{kind}")

STEPS = 63  # the last one does nothing that is done in every so many


@pytest.mark.parametrize("name", TABLE)
def test_it_ends_where_eager_ends(name):
    row = TABLE[name]
    eager = run(row.build, steps=STEPS, counted=False)
    options = {"machine": hocket.Machine.of(cores=1), "guard": False, "cache": False}
    scheduled = run(row.build, steps=STEPS, counted=False, options=options)
    lines = problems(eager, scheduled)
    ((verdict, why),) = scheduled.verdicts
    if verdict != ("planned" if row.word is None else "eager") or (row.word or "") not in why:
        lines.append(f"expected {'a plan' if row.word is None else row.word}")
    if lines:
        pytest.fail("\n".join([f"{name}: {verdict}: {why}", *lines]), pytrace=False)


def test_there_are_sixty_of_which_fifty_are_planned():
    refused = [name for name, row in TABLE.items() if row.word is not None]
    assert len(TABLE) >= 60
    assert len(refused) <= 3
