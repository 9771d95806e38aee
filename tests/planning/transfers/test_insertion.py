from __future__ import annotations

import pytest

from hocket.planning.transfers.insertion import improved, searched_order
from hocket.planning.transfers.orders import exact_order, random_order, tac_order
from hocket.planning.transfers.receives import receives_of
from planning.transfers.examples import random_step, resnet_step, step


def test_what_pays_only_together_is_found():
    """TAC takes c, which unblocks something by itself; a and b together unblock ten times as much."""
    found = step({"a": 3.0, "b": 3.0, "c": 5.0}, {"ab": (30.0, "a b"), "c1": (1.0, "c"), "end": (1.0, "ab c1")})
    receives = receives_of(found.graph, found.costs, found.machine)
    tac_us = receives.makespan_us(tac_order(receives))
    searched_us = receives.makespan_us(searched_order(receives))
    assert (tac_us, searched_us) == (42.0, 38.0)
    assert searched_us == receives.makespan_us(exact_order(receives))


@pytest.mark.parametrize("seed", range(30))
def test_never_worse_than_where_it_began(seed):
    found = random_step(seed, most_recvs=14)
    receives = receives_of(found.graph, found.costs, found.machine)
    start = random_order(receives, seed)
    order = improved(receives, start)
    assert sorted(order) == sorted(start)
    assert receives.makespan_us(order) <= receives.makespan_us(start)
    best_us = min(receives.makespan_us(tac_order(receives)), receives.makespan_us(receives.by_first_use))
    assert receives.makespan_us(searched_order(receives)) <= best_us


def test_a_large_step_ends_within_its_tries():
    found = resnet_step((3, 4, 6, 3))
    receives = receives_of(found.graph, found.costs, found.machine)
    order = searched_order(receives)
    assert sorted(order) == list(range(161))
    assert receives.makespan_us(order) <= receives.makespan_us(tac_order(receives))
