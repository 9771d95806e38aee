"""Random training programs end scheduled where they end eagerly; see `loops.programs`."""

from __future__ import annotations

import pytest

import hocket
from loops.programs import Program, program, smallest
from loops.runner import problems, run

STEPS = 60
QUICK = 16
MANY = 2000
CHUNK = 50


def faults(made: Program) -> list[str]:
    eager = run(made.build, steps=STEPS, seed=made.seed)
    options = {"guard": False, "planner": made.planner, "machine": hocket.Machine.of(cores=1)}
    scheduled = run(made.build, steps=STEPS, seed=made.seed, options=options)
    verdict, why = scheduled.verdicts[0]
    lines = problems(eager, scheduled)
    if made.planned and verdict != "planned":
        lines.append("the step is pure, and yet there is no plan")
    return [*lines, f"it ended {verdict}, because {why}"] if lines else []


def report(made: Program) -> str:
    less = smallest(made, lambda other: bool(faults(other)))
    return "\n".join([f"program {made.seed}, without the pieces that do not matter:", less.source, *faults(less)])


@pytest.mark.parametrize("seed", range(QUICK))
def test_program_ends_scheduled_where_it_ends_eagerly(seed):
    made = program(seed)
    if faults(made):
        pytest.fail(report(made), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, QUICK + MANY, CHUNK))
def test_many_programs(first):
    failing = [made for seed in range(first, first + CHUNK) if faults(made := program(seed))]
    if failing:
        seeds = ", ".join(str(made.seed) for made in failing)
        pytest.fail(f"{len(failing)} of {CHUNK} programs differ: {seeds}\n{report(failing[0])}", pytrace=False)


def test_programs_are_worth_running():
    """A third of them has to be planned; they compile, and run eagerly without an exception."""
    made = [program(seed) for seed in range(200)]
    assert 40 < sum(each.planned for each in made) < 160
    for each in made[::4]:
        assert not run(each.build, steps=30, seed=each.seed).trouble, each.source
