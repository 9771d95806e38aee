from itertools import pairwise

import pytest

from hocket.errors import InputError
from hocket.ir import Costs, Edge, Graph, Machine, Op
from hocket.planning import plan
from hocket.planning.moldable.instance import instance_of
from hocket.planning.phases import divide
from hocket.simulation import simulate


def forward_and_backward(layers: int) -> tuple[Graph, Costs]:
    """A chain that scales well, then two chains side by side that scale badly."""
    forward = [f"f{n}" for n in range(layers)]
    inputs = [f"dx{n}" for n in reversed(range(layers))]
    weights = [f"dw{n}" for n in reversed(range(layers))]
    chain = [*pairwise(forward), (forward[-1], inputs[0]), *pairwise(inputs)]
    edges = [*chain, *zip(inputs, weights, strict=True)]
    costs = {name: {"1": 1000.0, "2": 500.0} for name in forward}
    costs |= {name: {"1": 100.0, "2": 110.0} for name in (*inputs, *weights)}
    backward = [name for pair in zip(inputs, weights, strict=True) for name in pair]
    return Graph(tuple(map(Op, (*forward, *backward))), tuple(Edge(*pair) for pair in edges)), Costs(costs)


def test_a_wide_forward_pass_and_a_narrow_backward_pass():
    graph, costs = forward_and_backward(6)
    made = plan(graph, costs, Machine.of(cores=2), planner="phases")
    wide = next(lane for lane in made.lanes if lane.width == 2)
    assert set(wide.ops) == {f"f{n}" for n in range(6)}
    assert all(lane.width == 1 for lane in made.lanes if lane is not wide)
    # 6 x 500 wide; then both chains, the last dw behind the last dx.
    assert simulate(graph, made, costs, Machine.of(cores=2)).makespan_us == pytest.approx(3000 + 700)


@pytest.mark.parametrize(("switch_us", "phases"), [(0.0, 2), (200.0, 2), (2000.0, 1)])
def test_a_change_is_made_only_where_it_pays(switch_us, phases):
    graph, costs = forward_and_backward(6)
    instance = instance_of(graph, costs, Machine.of(cores=2).devices[0])
    assert len(divide(instance, list(instance.order), switch_us)) == phases


def test_never_longer_than_everything_wide_or_everything_narrow_when_switching_costs_nothing():
    graph, costs = forward_and_backward(4)
    machine = Machine.of(cores=2)
    made = simulate(graph, plan(graph, costs, machine, planner="phases", switch_us=0.0, wait_us=0.0), costs, machine)
    serial = simulate(graph, plan(graph, costs, machine, planner="serial"), costs, machine)
    narrow = simulate(graph, plan(graph, costs, machine, planner="list", lanes=2), costs, machine)
    assert made.makespan_us <= min(serial.makespan_us, narrow.makespan_us)


@pytest.mark.parametrize("option", ["switch_us", "wait_us"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(option, value):
    with pytest.raises(InputError, match=f"planner phases: expected {option} >= 0"):
        plan(Graph((Op("a"),)), Costs({"a": {"1": 1.0}}), Machine.of(cores=1), planner="phases", **{option: value})
