"""Hazards: against brute force over two unrolled steps, and with every event that is called needed taken away."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.checking import Events, check, events_of, hazards
from hocket.errors import PlanError
from hocket.ir import Buffer, Carried, Edge, Graph, Lane, Op, Plan
from invariants import lost_orders
from strategies import graphs, plans_of, touching_graphs
from support.events import all_but_one


@st.composite
def cases(draw, graph_strategy) -> tuple[Graph, Plan]:
    graph = draw(graph_strategy)
    return graph, draw(plans_of(graph))


def judged_rightly(graph: Graph, plan: Plan, events: Events) -> None:
    """`hazards` complains exactly where brute force finds an order that is lost."""
    if lost_orders(graph, plan, events.waits, events.carried):
        with pytest.raises(PlanError, match=r"RAW|WAR|WAW|depends on") as caught:
            hazards(graph, plan, events)
        assert repr(caught.value.op) in str(caught.value)
    else:
        hazards(graph, plan, events)


@settings(max_examples=100)
@given(case=cases(touching_graphs()), data=st.data())
def test_agrees_with_brute_force_whatever_events_there_are(case, data):
    graph, plan = case
    events = events_of(graph, plan)
    hazards(graph, plan, events)
    check(graph, plan)
    for fewer in all_but_one(events):
        judged_rightly(graph, plan, fewer)
    waits, carried = (
        {op: tuple(o for o in others if data.draw(st.booleans())) for op, others in table.items()}
        for table in (events.waits, events.carried)
    )
    judged_rightly(graph, plan, Events(waits, carried))


@given(case=cases(graphs(max_ops=8)))
def test_a_graph_without_buffers_has_its_edges_checked(case):
    graph, plan = case
    events = events_of(graph, plan)
    hazards(graph, plan, events)
    direct = {(edge.src, edge.dst) for edge in graph.edges}
    for op, others in events.waits.items():
        for other in others:
            if (other, op) in direct:
                fewer = {**events.waits, op: tuple(each for each in others if each != other)}
                with pytest.raises(PlanError, match="depends on"):
                    hazards(graph, plan, Events(fewer, events.carried))


TWO = Plan((Lane("one", ("a",)), Lane("two", ("b",))))
X = (Buffer("x", 4.0, "lasting"),)
PAIRS = {
    "RAW: op 'a' writes 'x', and op 'b' reads it": (Op("a", writes=("x",)), Op("b", reads=("x",))),
    "WAR: op 'a' reads 'x', and op 'b' writes it": (Op("a", reads=("x",)), Op("b", writes=("x",))),
    "WAW: op 'a' writes 'x', and op 'b' writes it": (Op("a", writes=("x",)), Op("b", writes=("x",))),
}


@pytest.mark.parametrize("problem", PAIRS)
def test_names_both_ops_the_buffer_and_the_lanes(problem):
    graph = Graph(PAIRS[problem], (Edge("a", "b"),), buffers=(Buffer("x", 4.0),))
    with pytest.raises(PlanError) as caught:
        hazards(graph, TWO, Events())
    assert str(caught.value) == f"{problem}; nothing orders lanes 'one' and 'two' here"
    hazards(graph, TWO, Events({"b": ("a",)}))


def test_an_order_that_the_graph_forgot_is_found_by_its_memory():
    graph = Graph((Op("a", writes=("x",)), Op("b", reads=("x",))), buffers=X)
    check(graph, TWO)
    with pytest.raises(PlanError, match="RAW: op 'a' writes 'x'"):
        hazards(graph, TWO)
    hazards(Graph(graph.ops, (Edge("a", "b"),), (Carried("b", "a"), Carried("a", "a")), X), TWO)


def test_the_next_step_may_not_overtake():
    ops = (Op("forward", reads=("w",)), Op("update", reads=("w",), writes=("w",)))
    graph = Graph(ops, (Edge("forward", "update"),), (Carried("update", "forward"),), (Buffer("w", 4.0, "lasting"),))
    plan = Plan((Lane("main", ("forward",)), Lane("side", ("update",))))
    assert events_of(graph, plan) == Events({"update": ("forward",)}, {"forward": ("update",)})
    with pytest.raises(PlanError) as caught:
        hazards(graph, plan, Events({"update": ("forward",)}))
    assert "RAW: op 'update' writes 'w', and op 'forward' of the next step reads it" in str(caught.value)


def test_a_lane_that_turns_two_ops_round_is_named():
    graph = Graph((Op("a", writes=("x",)), Op("b", reads=("x",))), buffers=(Buffer("x"),))
    with pytest.raises(PlanError, match="lane 'one' turns them round"):
        hazards(graph, Plan((Lane("one", ("b", "a")),)))


def test_an_event_for_a_turn_alone_is_no_hazard():
    graph = Graph((Op("a"), Op("b")))
    plan = Plan(TWO.lanes, {"b": ("a",)})
    assert events_of(graph, plan) == Events({"b": ("a",)}, {})
    hazards(graph, plan, Events())


def test_lanes_that_stop_are_named():
    with pytest.raises(PlanError, match="waits for an event of"):
        hazards(Graph((Op("a"), Op("b"))), TWO, Events({"a": ("b",), "b": ("a",)}))
