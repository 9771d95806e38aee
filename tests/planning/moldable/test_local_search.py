"""Searching for shorter placements: legal ones, never longer, by the same seed the same."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.planning.moldable.instance import Instance, makespan_us
from hocket.planning.moldable.local_search import SMALL, improve
from hocket.planning.moldable.sgs import serial_sgs
from invariants import placement_faults
from strategies import decided_cases, instance_by

# Long enough never to be what ends a search of a few ops: then its number of tries does.
AMPLE_S = 3600.0


@settings(max_examples=50)
@given(decided_cases(max_ops=8), st.sampled_from([0.0, 0.01]))
def test_what_is_found_keeps_the_rules_and_is_not_longer(made, budget_s):
    _, instance, widths = made
    start = serial_sgs(instance, widths, instance.order)
    found = improve(instance, start, budget_s=budget_s)
    assert placement_faults(instance, found) == []
    assert instance.lower_us <= makespan_us(found) * (1 + 1e-9)
    assert makespan_us(found) <= makespan_us(start)


def step(count: int, cores: int, seed: int) -> Instance:
    """A random step: some ops scale, some do not, some need their time to start threads."""
    rng = random.Random(seed)
    names = [f"op{i}" for i in range(count)]
    edges = [(names[rng.randrange(max(0, i - 8), i)], names[i]) for i in range(1, count)]
    rows = {}
    for name in names:
        work, serial = rng.uniform(5, 100), rng.choice((0.0, 0.05, 0.3))
        rows[name] = [work * (serial + (1 - serial) / p) + 0.2 * p for p in range(1, cores + 1)]
    return instance_by(rows, *edges)


@pytest.mark.parametrize(("count", "cores"), [(10, 3), (SMALL + 6, 8)])
def test_the_same_seed_finds_the_same(count, cores):
    instance = step(count, cores, seed=1)
    start = serial_sgs(instance, instance.best_width, instance.order)
    one, again, other = (improve(instance, start, budget_s=AMPLE_S, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert makespan_us(one) < makespan_us(start)


@given(st.integers(0, 1000))
@settings(max_examples=10)
def test_a_large_step_is_climbed_by_the_rules(seed):
    instance = replace(step(SMALL + 20, 8, seed), wait_us=1.0)
    start = serial_sgs(instance, instance.best_width, instance.order)
    found = improve(instance, start, budget_s=0.05)
    assert placement_faults(instance, found) == []
    assert makespan_us(found) < makespan_us(start)


def test_what_is_as_short_as_can_be_is_left_as_it_is():
    instance = instance_by({op: [4.0, 2.0] for op in "ab"}, "ab")
    start = serial_sgs(instance, [2, 2], [0, 1])
    assert improve(instance, start, budget_s=AMPLE_S) == start


def test_no_budget_no_search():
    instance = step(30, 4, seed=2)
    start = serial_sgs(instance, instance.best_width, instance.order)
    assert improve(instance, start, budget_s=-1.0) == start


def test_an_order_that_lets_a_core_idle_is_found_where_it_is_better():
    """The best plan keeps both cores for c although d fits: what a list scheduler of priorities cannot do."""
    rows = {"a": [2.0, 9.0], "b": [3.0, 9.0], "c": [40.0, 10.0], "d": [12.0, 6.0]}
    instance = instance_by(rows, "ac", "bc")
    found = improve(instance, serial_sgs(instance, [1, 1, 2, 1], [3, 0, 1, 2]), budget_s=AMPLE_S)
    assert makespan_us(found) == 19.0


def test_no_more_lanes_than_it_takes():
    """Two plans of equal length: the one on fewer lanes."""
    instance = instance_by({op: [8.0, 4.0, 3.0, 2.0] for op in "abcd"})
    start = serial_sgs(instance, [1] * 4, range(4))
    found = improve(instance, start, budget_s=AMPLE_S)
    assert makespan_us(found) == makespan_us(start) == 8.0
    assert len({one.cores for one in found}) == 1
