"""Hazards: against brute force over two unrolled steps, with edges of the graph taken away."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.checking import check, hazards
from hocket.errors import PlanError
from hocket.ir import Buffer, Carried, Edge, Graph, Lane, Op, Plan
from invariants import direct_waits, lost_orders
from strategies import plans_of, touching_graphs
from support.refusals import fails


@st.composite
def cases(draw) -> tuple[Graph, Plan]:
    graph = draw(touching_graphs())
    return graph, draw(plans_of(graph))


def judged_rightly(graph: Graph, plan: Plan) -> None:
    """`hazards` complains exactly where brute force finds an order that is lost."""
    carried = {op: [src for src, dst in graph.carried if dst == op] for op in graph.by_name}
    if lost_orders(graph, plan, direct_waits(graph, plan), carried):
        with pytest.raises(PlanError, match=r"RAW|WAR|WAW") as caught:
            hazards(graph, plan)
        assert repr(caught.value.op) in str(caught.value)
    else:
        hazards(graph, plan)


@settings(max_examples=100)
@given(case=cases(), data=st.data())
def test_agrees_with_brute_force_whatever_edges_there_are(case, data):
    graph, plan = case
    hazards(graph, plan)
    check(graph, plan)
    for field in ("edges", "carried"):
        pairs = getattr(graph, field)
        for at in range(len(pairs)):
            judged_rightly(replace(graph, **{field: pairs[:at] + pairs[at + 1 :]}), plan)
    edges, carried = (
        tuple(pair for pair in pairs if data.draw(st.booleans())) for pairs in (graph.edges, graph.carried)
    )
    judged_rightly(replace(graph, edges=edges, carried=carried), plan)


TWO = Plan((Lane("one", ("a",)), Lane("two", ("b",))))
X = (Buffer("x", 4.0, "lasting"),)
PAIRS = {
    "RAW: op 'a' writes 'x', and op 'b' reads it": (Op("a", writes=("x",)), Op("b", reads=("x",))),
    "WAR: op 'a' reads 'x', and op 'b' writes it": (Op("a", reads=("x",)), Op("b", writes=("x",))),
    "WAW: op 'a' writes 'x', and op 'b' writes it": (Op("a", writes=("x",)), Op("b", writes=("x",))),
}


@pytest.mark.parametrize("problem", PAIRS)
def test_names_both_ops_the_buffer_and_the_lanes(problem):
    graph = Graph(PAIRS[problem], buffers=(Buffer("x", 4.0),))
    with pytest.raises(PlanError) as caught:
        hazards(graph, TWO)
    assert str(caught.value) == f"{problem}; nothing orders lanes 'one' and 'two' here"
    hazards(replace(graph, edges=(Edge("a", "b"),)), TWO)
    hazards(graph, Plan(TWO.lanes, {"b": ("a",)}))


def test_an_order_that_the_graph_forgot_is_found_by_its_memory():
    graph = Graph((Op("a", writes=("x",)), Op("b", reads=("x",))), buffers=X)
    check(graph, TWO)
    fails(PlanError, "RAW: op 'a' writes 'x'", hazards, graph, TWO)
    hazards(Graph(graph.ops, (Edge("a", "b"),), (Carried("b", "a"), Carried("a", "a")), X), TWO)


def test_the_next_step_may_not_overtake():
    ops = (Op("forward", reads=("w",)), Op("update", reads=("w",), writes=("w",)))
    graph = Graph(ops, (Edge("forward", "update"),), (Carried("update", "forward"),), (Buffer("w", 4.0, "lasting"),))
    plan = Plan((Lane("main", ("forward",)), Lane("side", ("update",))))
    hazards(graph, plan)
    with pytest.raises(PlanError) as caught:
        hazards(replace(graph, carried=()), plan)
    assert "RAW: op 'update' writes 'w', and op 'forward' of the next step reads it" in str(caught.value)


def test_a_lane_that_turns_two_ops_round_is_named():
    graph = Graph((Op("a", writes=("x",)), Op("b", reads=("x",))), buffers=(Buffer("x"),))
    fails(PlanError, "lane 'one' turns them round", hazards, graph, Plan((Lane("one", ("b", "a")),)))


def test_lanes_that_stop_are_named():
    fails(PlanError, "deadlock", hazards, Graph((Op("a"), Op("b"))), Plan(TWO.lanes, {"a": ("b",), "b": ("a",)}))
