"""Random changes between the steps of random programs. See `loops.fuzz_changes`."""

from __future__ import annotations

import pytest

from loops.changing import changing_program
from loops.fuzz_changes import faults, report, run

QUICK = 30
MANY = 3000
CHUNK = 50


@pytest.mark.parametrize("seed", range(QUICK))
def test_each_call_is_as_eager_s(seed):
    made = changing_program(seed)
    if faults(made):
        pytest.fail(report(made), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, QUICK + MANY, CHUNK))
def test_each_call_of_many_programs(first):
    failing = [made for seed in range(first, first + CHUNK) if faults(made := changing_program(seed))]
    if failing:
        seeds = ", ".join(str(made.seed) for made in failing)
        pytest.fail(f"{len(failing)} of {CHUNK} programs differ: {seeds}\n{report(failing[0])}", pytrace=False)


def test_programs_are_worth_running():
    """Most of their eager calls raise nothing, some do, and a run shows the same when it is made again."""
    made = [changing_program(seed) for seed in range(40)]
    raised = [n for program in made for n in run(program, None).trouble]
    assert 0 < len(raised) < 0.5 * sum(program.num_calls for program in made)
    assert not any(changing_program(program.seed) != program for program in made)
