"""What a forward looks at, and what it writes: fused models see what plain ones see. See `loops.fuzz_looks`."""

from __future__ import annotations

import pytest

from loops.fuzz_looks import judge, report
from loops.held_numbers import HOLDERS, PLACEMENTS, held_number
from loops.looking_programs import Program, looking_program, single
from loops.looks import PIECES

QUICK = 20
MANY = 5000
CHUNK = 50

WAYS = {f"{piece.group}: {piece.name}": piece for piece in PIECES}
for place, holder in enumerate(HOLDERS):
    placements = [each for each in PLACEMENTS if held_number(holder, each) is not None]
    held = held_number(holder, placements[place % len(placements)])
    assert held is not None
    WAYS[f"{held.group}: {held.name}"] = held


def check(program: Program) -> None:
    if judge(program).is_failure:
        pytest.fail(report(program), pytrace=False)


@pytest.mark.parametrize(("number", "name"), list(enumerate(WAYS)), ids=list(WAYS))
def test_a_way_of_looking(number, name):
    check(single(WAYS[name], number))


@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("rate")])
def test_rates_of_models_by_vmap(name):
    check(single(WAYS[name], 1, "vmap"))


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
