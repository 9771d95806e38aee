from dataclasses import replace

import numpy as np
import pytest

from hocket.planning.partition import PartitionProblem
from hocket.planning.partition.constraints import partition_within
from hocket.planning.partition.evaluation import part_cycle
from hocket.planning.partition.search import Wanted, keeps_limits, limits

from .cases import all_partitions, random_problem

pytest.importorskip("ortools")


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("acyclic", [False, True])
def test_it_decides_as_trying_all_does(parts, acyclic):
    decided = set()
    for seed in range(16):
        problem = random_problem(seed, ops=7, parts=parts, density=0.3)
        if seed % 4 == 3:  # unequal devices, of which some have little memory
            speeds = np.linspace(1.0, 1.5, parts)
            room = np.where(np.arange(parts) == seed % parts, 2.0, np.inf)
            problem = replace(
                problem, duration_us=problem.duration_us * speeds, memory_bytes=np.ones(7), memory_limit_bytes=room
            )
        wanted = Wanted("cut", (0.01, 0.1, 0.3)[seed % 3], bool(seed & 2), acyclic=acyclic)
        exists, part = partition_within(problem, *limits(problem, wanted), 20.0, acyclic=wanted.acyclic)
        assert exists == any(True for _ in all_partitions(problem, wanted))
        decided.add(exists)
        if part is not None:
            assert keeps_limits(problem, wanted, part)
            assert not acyclic or part_cycle(problem, part.tolist()) is None
    assert decided == {True, False}


def test_groups_circles_and_memory_count():
    takes = np.ones((4, 2))
    ring = PartitionProblem(tuple("abcd"), takes, waits=((0, 1), (1, 0), (1, 2), (2, 3)))
    exists, part = partition_within(ring, np.full(2, 2.0), np.full(2, 2.0), 5.0, acyclic=True)
    assert exists is True
    assert part.tolist() == [0, 0, 1, 1]
    small = PartitionProblem(
        tuple("abcd"),
        takes,
        waits=((0, 1), (1, 2), (2, 3)),
        memory_bytes=np.array([1.0, 1.0, 5.0, 1.0]),
        memory_limit_bytes=np.full(2, 5.0),
    )
    assert partition_within(small, np.full(2, 2.0), np.full(2, 2.0), 5.0, acyclic=True) == (False, None)


def test_both_passes_may_be_crossed_in_orders_of_their_own():
    decided = set()
    for seed in range(16):
        draw = np.random.default_rng(seed)
        forward = [(a, b) for a in range(4) for b in range(a + 1, 4) if draw.random() < 0.6]
        backward = [(4 + a, 4 + b) for a in range(4) for b in range(4) if a > b and draw.random() < 0.6]
        if seed % 2:  # not the other way round, but in an order of its own
            backward = [(4 + (a - 4) % 3, 4 + (b - 4) % 3) for a, b in backward if (a - b) % 3]
            backward = [(a, b) for a, b in backward if a > b]
        problem = PartitionProblem(
            tuple(f"op{n}" for n in range(8)),
            np.repeat(draw.integers(1, 5, 8).astype(float)[:, None], 3, axis=1),
            waits=(*forward, (3, 4), *backward),
            group=np.array([0, 1, 2, 3, 0, 1, 2, 3]),
            backward=np.arange(8) >= 4,
        )
        assert problem.two_passes
        wanted = Wanted("cut", (0.1, 0.3, 0.5)[seed % 3], True, acyclic=True)
        exists, part = partition_within(problem, *limits(problem, wanted), 20.0, acyclic=wanted.acyclic)
        assert exists == any(True for _ in all_partitions(problem, wanted)), seed
        decided.add(exists)
        if part is not None:
            assert keeps_limits(problem, wanted, part)
    assert decided == {True, False}


def test_what_is_not_decided():
    many = PartitionProblem(tuple(f"op{n}" for n in range(60_000)), np.ones((60_000, 3)))
    assert partition_within(many, np.zeros(3), np.full(3, 1e5), 5.0, acyclic=True) == (None, None)
