"""The meaning of a plan, against the independent definitions of `invariants`."""

import pytest
from hypothesis import given

from hocket.errors import PlanError
from hocket.ir import Device, Lane, execution_order, hardware_threads, waits_of
from invariants import all_waits, direct_waits
from ir.test_waits import graphs_and_plans
from support.refusals import fails


@given(graphs_and_plans())
def test_an_op_waits_for_its_edges_its_lane_and_what_it_is_told(case):
    graph, plan = case
    assert {op: set(others) for op, others in waits_of(graph, plan).items()} == {
        op: set(others) for op, others in direct_waits(graph, plan).items()
    }


@given(graphs_and_plans())
def test_an_order_respects_every_wait_or_there_is_none(case):
    graph, plan = case
    stuck = any(op in before for op, before in all_waits(graph, plan).items())
    if stuck:
        fails(PlanError, "deadlock", execution_order, graph, plan)
        return
    place = {op: at for at, op in enumerate(execution_order(graph, plan))}
    assert place.keys() == plan.lane_of.keys()
    assert all(place[other] < place[op] for op, others in direct_waits(graph, plan).items() for other in others)


@pytest.mark.parametrize(
    ("cores", "width", "threads"),
    [
        ((0, 1), 2, (0, 1)),
        ((0, 1), 1, (0, 1)),
        ((0, 1), 3, (0, 1, 4)),
        ((1, 2), 4, (1, 2, 5, 6)),
        ((5, 2), 2, (5, 2)),
        ((), 3, ()),
    ],
)
def test_hardware_threads_of_a_lane(cores, width, threads):
    assert hardware_threads(Lane("x", cores=cores, width=width), Device("cpu0", cores=4, smt=2)) == threads
