"""A worker's step joined with its servers': what a step takes in a row, and the order of pulls that suits it."""

from types import SimpleNamespace

import pytest

from distributed.training import batches, training
from hocket.checking import check
from hocket.distributed.job import captured_for
from hocket.distributed.parts import assigned, worker_part
from hocket.distributed.plans import cycle_of, in_order_of_arrival, machine_of, transfer_costs, worker_plan
from hocket.ir import Costs, Edge, Graph, Op

RATE = 1e8


def job(servers=1, op_us=100.0, **options):
    """A captured step, what a worker runs of it, who does what, and costs: every op takes the same."""
    of = training(**options)
    captured = captured_for(of.step, of.model, of.optimizer, batches(0, 1)[0])
    assignment = assigned(captured, servers, num_workers=1)
    costs = Costs({op.name: {"1": op_us} for op in captured.graph.ops})
    return captured, worker_part(captured, assignment), assignment, costs


def planned(order, rate=RATE, servers=1, **options):
    captured, part, assignment, costs = job(servers, **options)
    made = SimpleNamespace(captured=captured, assignment=assignment)
    return part, *worker_plan(made, part, costs, [rate] * servers, order)


def pulls_of(plan):
    return [op for lane in plan.lanes for op in lane.ops if op.startswith("pull:")]


@pytest.mark.parametrize("servers", [1, 2])
def test_the_cycle_has_each_op_once_and_pulls_wait_for_their_update(servers):
    captured, part, assignment, costs = job(servers)
    machine = machine_of(1, [RATE] * servers)
    costs = costs.merged(transfer_costs(assignment.pulls, assignment.pushes, machine))
    cycle = cycle_of(captured, part, assignment, costs, machine)
    transfers = [each.name for each in (*assignment.pulls, *assignment.pushes)]
    assert sorted(cycle.graph.by_name) == sorted([*captured.graph.by_name, *transfers])
    for pull in assignment.pulls:
        assert not cycle.graph.predecessors[pull.name]
        before = {src for src, dst in cycle.graph.carried if dst == pull.name}
        served = assignment.server_ops[pull.server]
        assert before & served, "the server's update"
        assert {op for op in part.graph.successors[pull.name] if op in part.graph.by_name} <= before | served
    for push in assignment.pushes:
        assert set(cycle.graph.successors[push.name]) <= assignment.server_ops[push.server]


@pytest.mark.parametrize("rate", [1e6, 1e8])
@pytest.mark.parametrize("servers", [1, 2])
def test_the_default_is_never_behind_the_planners_orders_in_a_row(rate, servers):
    part, auto, cycle, step_us = planned("auto", rate, servers)
    check(part.graph, auto)
    assert step_us == cycle.step_us(auto)
    assert sorted(pulls_of(auto)) == sorted(cycle.pulls)
    for order in ("layer", "tac", "reverse"):
        _, other, _, other_us = planned(order, rate, servers)
        assert step_us <= other_us * (1 + 1e-9)
        assert other_us == pytest.approx(cycle.step_us(other))
    busiest_us = sum(
        cycle.costs.duration_us(op.name, width=1) for op in part.graph.ops if op.role not in ("recv", "send")
    )
    assert step_us >= busiest_us * (1 - 1e-9)


def test_pulls_come_as_they_are_ready_where_the_wire_is_what_counts():
    """The last layer's gradient is the first one to be there."""
    _, auto, _, step_us = planned("auto", 1e6)
    _, layer, _, layer_us = planned("layer", 1e6)
    assert auto.planner == "transfers-readiness"
    assert step_us < layer_us
    assert pulls_of(auto) != pulls_of(layer)


def test_nothing_is_ordered_where_no_order_can_gain():
    """The wire takes next to no time."""
    _, auto, cycle, step_us = planned("auto", 1e12, op_us=1e6)
    assert auto.planner == "transfers-unordered"
    assert step_us == cycle.step_us(auto)


def test_one_shard_of_everything_keeps_the_order_of_first_use():
    """Clipping by the norm of all gradients: nothing can be pulled before the last gradient is there."""
    _, _, _, step_us = planned("auto", 1e6, clip=True)
    _, _, _, layer_us = planned("layer", 1e6, clip=True)
    assert step_us == pytest.approx(layer_us)


def test_updates_run_as_gradients_come():
    graph = Graph(
        (*map(Op, ("a", "b", "u", "v", "w", "free")),), (Edge("a", "u"), Edge("b", "v"), Edge("u", "w"), Edge("v", "w"))
    )
    ops = ("free", "u", "v", "w")
    assert in_order_of_arrival(graph, ops, ["b", "a"]) == ("free", "v", "u", "w")
    assert in_order_of_arrival(graph, ops, ["a", "b"]) == ("free", "u", "v", "w")
