"""Forwards that look at Python state and write it: fused models see what plain ones see. See `loops.fuzz_looks`.

By which plan ``backend="auto"`` runs is left to chance, so that every way in which models may run has its turn.
"""

from __future__ import annotations

import itertools
import random

import pytest

from hocket.fusion import calls
from hocket.fusion.contest import plans_for
from loops.fuzz_looks import judge, report
from loops.held_numbers import HOLDERS, PLACEMENTS, held_number
from loops.looking_programs import Program, looking_program, program_of
from loops.looks import PIECES

QUICK = 20
MANY = 5000
CHUNK = 50
TOGETHER = 4

WAYS = {f"{piece.group}: {piece.name}": piece for piece in PIECES}
for place, holder in enumerate(HOLDERS):
    placements = [each for each in PLACEMENTS if held_number(holder, each) is not None]
    held = held_number(holder, placements[place % len(placements)])
    assert held is not None
    WAYS[f"{held.group}: {held.name}"] = held


@pytest.fixture(autouse=True)
def chance(request, monkeypatch):
    draw = random.Random(request.node.name)
    monkeypatch.setattr(calls, "plans_for", lambda *given, **options: [draw.choice(plans_for(*given, **options))])


def check(program: Program) -> None:
    if judge(program).is_failure:
        pytest.fail(report(program), pytrace=False)


def together() -> list[tuple[str, ...]]:
    """Some ways of one group at a time; a program that raises, or is refused, shows nothing of others."""
    found: list[tuple[str, ...]] = []
    for group, names in itertools.groupby(WAYS, lambda name: name.partition(":")[0]):
        left, count = list(names), 1 if group in ("loud", "raises") else TOGETHER
        found += [tuple(left[place : place + count]) for place in range(0, len(left), count)]
    return found


@pytest.mark.parametrize(("number", "names"), [pytest.param(n, each, id=each[0]) for n, each in enumerate(together())])
def test_ways_of_looking(number, names):
    check(program_of([WAYS[name] for name in names], number))


@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("rate")])
def test_rates_of_models_by_vmap(name):
    check(program_of([WAYS[name]], 1, "vmap"))


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_program(seed):
    check(looking_program(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, QUICK + MANY, CHUNK))
def test_many_programs(first):
    failing = [made for seed in range(first, first + CHUNK) if judge(made := looking_program(seed)).is_failure]
    if failing:
        seeds = ", ".join(str(made.seed) for made in failing)
        pytest.fail(f"{len(failing)} of {CHUNK} programs fail: {seeds}\n{report(failing[0])}", pytrace=False)
