"""Waits that a plan needs: against brute force on random graphs and plans."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hocket.errors import PlanError
from hocket.ir import Edge, Graph, Lane, Op, Plan, launch_order, synchronisation
from invariants import all_waits, direct_waits
from strategies import graphs, plans_of
from support.refusals import fails


@st.composite
def graphs_and_plans(draw) -> tuple[Graph, Plan]:
    """A graph, and its ops on up to four lanes in some order: with luck, one that can run."""
    graph = draw(graphs(max_ops=9))
    order = list(draw(st.one_of(st.just(graph.order), st.permutations(graph.order))))
    lanes: list[list[str]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for op in order:
        lanes[draw(st.integers(0, len(lanes) - 1))].append(op)
    after = {}
    if draw(st.booleans()):
        after[draw(st.sampled_from(order))] = (draw(st.sampled_from(order)),)
    return graph, Plan(tuple(Lane(f"lane{n}", tuple(ops)) for n, ops in enumerate(lanes)), after)


def implied(plan: Plan, waits: dict[str, tuple[str, ...]]) -> dict[str, set[str]]:
    """For each op all that surely comes before it, if lanes keep their order and `waits` are waited for."""
    edges = tuple(Edge(before, op) for op, others in waits.items() for before in others)
    return all_waits(Graph(tuple(Op(op) for op in plan.lane_of), edges), Plan(plan.lanes))


@given(graphs_and_plans())
def test_the_waits_suffice_and_none_is_implied_by_the_others(case):
    graph, plan = case
    needed = all_waits(graph, plan)
    assume(not any(op in before for op, before in needed.items()))
    waits = synchronisation(graph, plan).waits
    assert implied(plan, waits) == needed, "what the plan demands is what the waits enforce"
    for op, others in waits.items():
        assert others, "no empty entries"
        for other in others:
            assert plan.lane_of[other] is not plan.lane_of[op], "a lane keeps its own order"
            fewer = {**waits, op: tuple(each for each in others if each != other)}
            assert implied(plan, fewer) != needed, f"{op} need not wait for {other}"


@given(graphs_and_plans())
def test_before_is_what_brute_force_says(case):
    graph, plan = case
    needed = all_waits(graph, plan)
    assume(not any(op in before for op, before in needed.items()))
    sync = synchronisation(graph, plan)
    for op in needed:
        for other in needed:
            assert sync.before(other, op) == (other in needed[op] or other == op)


@given(graphs_and_plans(), st.data())
def test_the_last_of_several_ops_is_the_one_that_all_others_come_before(case, data):
    graph, plan = case
    needed = all_waits(graph, plan)
    assume(not any(op in before for op, before in needed.items()))
    some = data.draw(st.lists(st.sampled_from(sorted(needed)), min_size=1, unique=True))
    lasts = [op for op in some if set(some) - {op} <= needed[op]]
    assert synchronisation(graph, plan).last_of(some) == (lasts[0] if lasts else None)


@given(graphs_and_plans())
def test_a_plan_that_cannot_run_is_refused_with_an_op_that_never_starts(case):
    graph, plan = case
    needed = all_waits(graph, plan)
    assume(any(op in before for op, before in needed.items()))
    with pytest.raises(PlanError, match="deadlock") as caught:
        synchronisation(graph, plan)
    stuck = caught.value.op
    assert stuck in needed[stuck] or any(other in needed[other] for other in needed[stuck])
    assert plan.lane_of[stuck].name == caught.value.lane
    assert repr(stuck) in str(caught.value)


def test_an_op_too_few_or_too_many_is_named():
    graph = Graph((Op("a"), Op("b")))
    with pytest.raises(PlanError, match="'b'") as caught:
        synchronisation(graph, Plan((Lane("main", ("a",)),)))
    assert caught.value.op == "b"
    with pytest.raises(PlanError, match="'c'") as caught:
        synchronisation(graph, Plan((Lane("main", ("a", "b", "c")),)))
    assert caught.value.op == "c"


def test_a_wait_over_a_third_lane_implies_the_direct_one():
    graph = Graph(tuple(Op(name) for name in "abc"), (Edge("a", "b"), Edge("b", "c"), Edge("a", "c")))
    plan = Plan((Lane("x", ("a",)), Lane("y", ("b",)), Lane("z", ("c",))))
    assert synchronisation(graph, plan).waits == {"b": ("a",), "c": ("b",)}
    assert direct_waits(graph, plan)["c"] == {"a", "b"}


@given(st.data())
def test_ops_are_launched_level_by_level(data):
    graph = data.draw(graphs(max_ops=8))
    plan = data.draw(plans_of(graph))
    order = launch_order(graph, plan)
    assert sorted(order) == sorted(plan.lane_of)
    waits = direct_waits(graph, plan)
    level: dict[str, int] = {}
    for op in order:
        level[op] = 1 + max((level[other] for other in waits[op]), default=0)
    assert [level[op] for op in order] == sorted(level.values())


def test_what_cannot_run_cannot_be_launched():
    graph = Graph((Op("a"), Op("b")), (Edge("a", "b"),))
    fails(PlanError, "deadlock: op 'b' depends on", launch_order, graph, Plan((Lane("x", ("b", "a")),)))
    fails(PlanError, "op 'b' of the graph is run by no lane", launch_order, graph, Plan((Lane("x", ("a",)),)))
    fails(PlanError, "runs op 'c'", launch_order, graph, Plan((Lane("x", ("a", "b", "c")),)))
