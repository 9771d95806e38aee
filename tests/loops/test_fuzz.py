"""Random programs end scheduled where they end eagerly, and each call is as eager's where their state changes.

See `loops.programs`, and `loops.fuzz_changes` for programs with changes between their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import hocket
from loops import fuzz_changes
from loops.changing import changing_program
from loops.programs import Program, program, smallest
from loops.runner import problems, run

STEPS = 60
CHUNK = 50


def faults(made: Program) -> list[str]:
    counted = made.seed % 3 == 0  # which takes longer than the call
    eager = run(made.build, steps=STEPS, seed=made.seed, counted=counted)
    options = {"guard": False, "planner": made.planner, "machine": hocket.Machine.of(cores=1)}
    scheduled = run(made.build, steps=STEPS, seed=made.seed, options=options, counted=counted)
    verdict, why = scheduled.verdicts[0]
    lines = problems(eager, scheduled)
    if made.planned and verdict != "planned":
        lines.append("the step is pure, and yet there is no plan")
    return [*lines, f"it ended {verdict}, because {why}"] if lines else []


def report(made: Program) -> str:
    less = smallest(made, lambda other: bool(faults(other)))
    return "\n".join([f"program {made.seed}, without the pieces that do not matter:", less.source, *faults(less)])


@dataclass(frozen=True)
class Fuzzer:
    """Programs by seed: the first `quick` ones in the quick tests, `many` more in the slow ones."""

    make: Callable[[int], Any]
    faults: Callable[[Any], Any]
    report: Callable[[Any], str]
    quick: int
    many: int


FUZZERS = {
    "loops": Fuzzer(program, faults, report, 8, 2000),
    "changes": Fuzzer(changing_program, fuzz_changes.faults, fuzz_changes.report, 10, 3000),
}


def seeds() -> Iterator[Any]:
    """One quick seed at a time, and the others in chunks."""
    for name, fuzzer in FUZZERS.items():
        for seed in range(fuzzer.quick):
            yield pytest.param(fuzzer, seed, 1, id=f"{name}-{seed}")
        for first in range(fuzzer.quick, fuzzer.quick + fuzzer.many, CHUNK):
            yield pytest.param(fuzzer, first, CHUNK, id=f"{name}-from-{first}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("fuzzer", "first", "count"), list(seeds()))
def test_programs_end_scheduled_where_they_end_eagerly(fuzzer, first, count):
    failing = [made for seed in range(first, first + count) if fuzzer.faults(made := fuzzer.make(seed))]
    if failing:
        numbers = ", ".join(str(made.seed) for made in failing)
        pytest.fail(f"programs {numbers} differ\n{fuzzer.report(failing[0])}", pytrace=False)


def test_programs_are_worth_running():
    """A third of them has to be planned. They compile, and run eagerly without an exception."""
    made = [program(seed) for seed in range(200)]
    assert 40 < sum(each.planned for each in made) < 160
    for each in made[::4]:
        assert not run(each.build, steps=30, seed=each.seed).trouble, each.source


def test_programs_that_change_are_worth_running():
    """Most of their eager calls raise nothing, some do, and a run shows the same when it is made again."""
    made = [changing_program(seed) for seed in range(20)]
    raised = [n for each in made for n in fuzz_changes.run(each, None).trouble]
    assert 0 < len(raised) < 0.5 * sum(each.num_calls for each in made)
    assert not any(changing_program(each.seed) != each for each in made)
