"""The dynamic programme over ideals against all partitions without a cycle."""

from __future__ import annotations

import numpy as np
import pytest
from tests.planning.partition.cases import all_partitions, random_problem

from hocket.planning.partition import ideals
from hocket.planning.partition.evaluation import loads_us
from hocket.planning.partition.ideals import ideal_start
from hocket.planning.partition.search import Wanted, keeps_limits

WANTED = Wanted("load", None, acyclic=True)


def load(problem, part):
    return float(loads_us(problem, np.asarray(part).tolist()).max())


def varied(seed):
    """Devices of different speed, price and memory, and ops that stay together."""
    draw = np.random.default_rng(seed)
    fields = {}
    if seed % 2:
        fields["transfer_price"] = np.array([1.0, 1.0, 0.0])
    if seed % 3 == 0:
        fields |= {"memory_bytes": np.ones(7), "memory_limit_bytes": np.array([3.0, 4.0, 2.0])}
    if seed % 4 == 0:
        fields["group"] = np.array([0, 1, 1, 2, 3, 3, 4], np.int32)
    problem = random_problem(seed, ops=7, parts=3, ratio=0.5, density=draw.uniform(0.2, 0.6), **fields)
    problem.duration_us[:, 2] *= draw.choice([1.0, 3.0])
    return problem


@pytest.mark.parametrize("seed", range(24))
def test_it_is_the_best_of_all_partitions_without_a_cycle(seed):
    problem = varied(seed)
    found = ideal_start(problem)
    able = list(all_partitions(problem, WANTED))
    assert (found is None) == (not able)
    if found is not None:
        assert keeps_limits(problem, WANTED, found)
        assert load(problem, found) == pytest.approx(min(load(problem, part) for part in able))
        assert ideal_start(problem, 0.999 * load(problem, found)) is None


def test_too_many_ideals_are_left_to_other_starts(monkeypatch):
    problem = varied(1)
    monkeypatch.setattr(ideals, "MAX_IDEALS", 5)
    assert ideal_start(problem) is None
    monkeypatch.setattr(ideals, "MAX_IDEALS", 10_000)
    monkeypatch.setattr(ideals, "MAX_LOADS", 10)
    assert ideal_start(problem) is None
