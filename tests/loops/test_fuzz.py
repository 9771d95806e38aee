"""Random programs whose state changes between their steps end scheduled, call by call, as they do eagerly.

See `loops.fuzz_changes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loops.changing import changing_program
from loops.fuzz_changes import faults, report, run

QUICK, ALL, CHUNK = 7, 3000, 50


def seeds() -> Iterator[Any]:
    """One quick seed at a time, and the others in chunks."""
    for seed in range(QUICK):
        yield pytest.param(seed, 1, id=str(seed))
    for first in range(QUICK, ALL, CHUNK):
        yield pytest.param(first, CHUNK, id=f"from-{first}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("first", "count"), list(seeds()))
def test_programs_end_scheduled_where_they_end_eagerly(first, count):
    failing = [made for seed in range(first, first + count) if faults(made := changing_program(seed))]
    if failing:
        numbers = ", ".join(str(made.seed) for made in failing)
        pytest.fail(f"programs {numbers} differ\n{report(failing[0])}", pytrace=False)


def test_programs_that_change_are_worth_running():
    """Most of their eager calls raise nothing, some do, and a run shows the same when it is made again."""
    made = [changing_program(seed) for seed in range(10)]
    raised = [n for each in made for n in run(each, None).trouble]
    assert 0 < len(raised) < 0.5 * sum(each.num_calls for each in made)
    assert not any(changing_program(each.seed) != each for each in made)
