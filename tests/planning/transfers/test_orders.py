import random
from itertools import permutations

import pytest

from hocket.ir import Costs, Link, Machine
from hocket.planning.transfers.orders import (
    exact_order,
    improved,
    in_units,
    random_order,
    searched_order,
    tac_order,
    tic_order,
)
from hocket.planning.transfers.receives import Receives, receives_of
from planning.transfers.examples import FIGURE_1, FIGURE_4A, FIGURE_4B, Step, random_step, resnet_step, step
from support.refusals import refused


def receives(of: Step) -> Receives:
    return receives_of(of.graph, of.costs, of.machine)


def named(found: Receives, order) -> list[str]:
    return [found.names[recv] for recv in order]


@pytest.mark.parametrize(
    ("example", "expected"),
    [(FIGURE_1, ["recv1", "recv2"]), (FIGURE_4A, ["A", "B"]), (FIGURE_4B, ["A", "B", "C", "D"])],
)
@pytest.mark.parametrize("order", [tic_order, tac_order, exact_order])
def test_the_papers_figures(example, expected, order):
    found = receives(example)
    assert named(found, order(found)) == expected


def test_tac_weighs_what_is_unblocked_against_the_time_on_the_wire():
    """Figure 4(a) turned round: min(P_B, M_A) = 2 is now above min(P_A, M_B) = 1, so B goes first."""
    found = receives(step({"A": 7.0, "B": 1.0}, {"a": (5.0, "A"), "b": (2.0, "B")}))
    assert named(found, tac_order(found)) == ["B", "A"]
    assert named(found, tic_order(found)) == ["A", "B"]  # which knows no times, and goes by name


def test_tic_puts_what_nothing_needs_together_with_another_last():
    found = receives(step({"a": 1.0, "b": 1.0, "c": 1.0}, {"x": (1.0, "a"), "y": (1.0, "b c")}))
    assert named(found, tic_order(found)) == ["b", "c", "a"]


def naive_tac(of: Step) -> list[str]:
    """Algorithm 1 and 3 as the paper prints them, with the comparator of its Eq. 6."""
    graph = of.graph
    time = {op.name: op.size_bytes if op.role == "recv" else of.costs.duration_us(op.name) for op in graph.ops}
    outstanding = sorted(op.name for op in graph.ops if op.role == "recv")
    dep = {}
    for name in graph.order:
        dep[name] = {name} if graph[name].role == "recv" else set()
        for before in graph.predecessors[name]:
            dep[name] |= dep[before]
    order = []
    while outstanding:
        load = dict.fromkeys(outstanding, 0.0)
        impending = dict.fromkeys(outstanding, float("inf"))
        for op in graph.ops:
            if op.role == "recv":
                continue
            left = dep[op.name] & set(outstanding)
            for recv in left:
                if len(left) == 1:
                    load[recv] += time[op.name]
                else:
                    impending[recv] = min(impending[recv], sum(time[other] for other in left))

        def first(a, b, load=load, impending=impending):
            mine, its = min(load[b], time[a]), min(load[a], time[b])
            return mine < its or (mine == its and impending[a] < impending[b])

        best = outstanding[0]
        for recv in outstanding[1:]:
            if first(recv, best):
                best = recv
        order.append(best)
        outstanding.remove(best)
    return order


def whole_times(seed: int) -> Step:
    """A random step with small whole numbers as times, so that there are many ties and sums are exact."""
    rng = random.Random(seed)
    found = random_step(seed)
    ops = {
        op.name: (float(rng.randint(0, 4)), " ".join(found.graph.predecessors[op.name]))
        for op in found.graph.ops
        if op.role != "recv"
    }
    return step({op.name: float(rng.randint(1, 4)) for op in found.graph.ops if op.role == "recv"}, ops)


@pytest.mark.parametrize("seed", range(60))
def test_tac_is_the_papers_algorithm(seed):
    example = whole_times(seed)
    found = receives(example)
    assert named(found, tac_order(found)) == naive_tac(example)


def test_tac_on_steps_of_the_size_of_resnets():
    small = resnet_step((1, 2, 2, 1))
    assert named(receives(small), tac_order(receives(small))) == naive_tac(small)
    found = receives(resnet_step((3, 8, 36, 3)))
    assert len(found) == 467
    assert sorted(tac_order(found)) == list(range(467))


def two_links(of: Step) -> Step:
    links = (Link("server0", "cpu0", 1e6), Link("server1", "cpu0", 2e6))
    return Step(of.graph, of.costs, Machine(of.machine.devices, links))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("linked", "links"), [(lambda of: of, 1), (two_links, 2)])
def test_exact_is_the_best_of_all_orders(linked, links, seed):
    found = receives(linked(random_step(seed, most_recvs=6)))
    assert len(found.channels) == links
    best_us = min(found.makespan_us(order) for order in permutations(range(len(found))))
    assert found.makespan_us(exact_order(found)) == pytest.approx(best_us, rel=1e-12)


def test_exact_refuses_what_would_take_forever():
    many = step({f"r{n:02}": 1.0 for n in range(17)}, {"op": (1.0, " ".join(f"r{n:02}" for n in range(17)))})
    refused("17 recvs, and order='exact' looks at up to 16", exact_order, receives(many))
    refused("orders of the recvs of 2 links", exact_order, receives(two_links(many)))


def test_random_orders_repeat_by_seed():
    found = receives(random_step(5))
    assert random_order(found, 3) == random_order(found, 3)
    assert len({random_order(found, seed) for seed in range(20)}) > 1
    assert sorted(random_order(found, 1)) == list(range(len(found)))


def test_no_recvs():
    nothing = receives(Step(FIGURE_1.graph.__class__(()), Costs({})))
    assert tac_order(nothing) == tic_order(nothing) == exact_order(nothing) == ()


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


def test_units_are_as_fine_as_they_can_be_and_keep_what_is_equal_equal():
    (one, other), (large,) = in_units([0.1, 0.1 + 0.2], [1e15])
    assert one > 0
    assert large > 2**60 > other
    (small, tiny), _ = in_units([3e-9, 1e-9], [])
    assert abs(small - 3 * tiny) <= 2
    assert in_units([0.0], [0.0]) == [[0], [0]]
