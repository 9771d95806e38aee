"""Actions in place of ops: no cycle, nothing too large, and a plan of actions is one of ops."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Carried, Costs, Device, Edge, Graph, Lane, Machine, Op, Plan
from hocket.planning.moldable.clustering import coarsen
from hocket.planning.moldable.instance import Placement, as_plan, tabled
from hocket.planning.moldable.sgs import serial_sgs
from hocket.simulation import simulate
from invariants import all_waits, illegality
from strategies import apart_in, moldable_cases

THRESHOLDS = st.sampled_from([3.0, 10.0, 30.0, 1e6])


@given(moldable_cases(max_ops=14), THRESHOLDS)
def test_each_op_is_in_one_action_and_no_action_is_too_long(case, below_us):
    coarse = coarsen(case.graph, case.costs, case.device, below_us)
    assert sorted(op for ops in coarse.members for op in ops) == sorted(case.graph.by_name)
    assert len(coarse.members) == len(coarse.graph)
    for action, ops in enumerate(coarse.members):
        assert all(coarse.action_of[op] == action for op in ops)
        if len(ops) == 1:
            assert coarse.graph.ops[action] == case.graph[ops[0]]
            continue
        least = [min(case.costs.durations_us[op].values()) for op in ops]
        assert sum(least) <= below_us * (1 + 1e-9)
        assert not {case.graph[op].role for op in ops} & {"recv", "send"}
    if below_us <= 3.0:
        assert coarse.members == tuple((op.name,) for op in case.graph.ops) or len(coarse.graph) < len(case.graph)


@given(moldable_cases(max_ops=14), THRESHOLDS)
def test_actions_wait_for_what_their_ops_wait_for_and_never_in_a_circle(case, below_us):
    """A circle would have been refused when the coarse graph was made; so would one through the ops' own order."""
    coarse = coarsen(case.graph, case.costs, case.device, below_us)
    action = {op: coarse.graph.ops[at].name for op, at in coarse.action_of.items()}
    wanted: dict[tuple[str, str], float] = {}
    for edge in case.graph.edges:
        pair = action[edge.src], action[edge.dst]
        if pair[0] != pair[1]:
            wanted[pair] = wanted.get(pair, 0.0) + edge.size_bytes
    found: dict[tuple[str, str], float] = {}
    for src, dst, size_bytes in coarse.graph.edges:
        found[src, dst] = found.get((src, dst), 0.0) + size_bytes
    assert found == wanted
    assert set(coarse.graph.carried) == {Carried(action[src], action[dst]) for src, dst in case.graph.carried}
    one_lane = Plan((Lane("all", tuple(op for name in coarse.graph.order for op in members_of(coarse, name))),))
    assert illegality(case.graph, one_lane, None) is None


def members_of(coarse, name: str) -> tuple[str, ...]:
    return coarse.members[coarse.graph.index[name]]


@given(moldable_cases(max_ops=14), THRESHOLDS)
def test_an_action_takes_what_its_ops_take(case, below_us):
    coarse = coarsen(case.graph, case.costs, case.device, below_us)
    for action, ops in zip(coarse.graph.ops, coarse.members, strict=True):
        for width in range(1, case.device.cores + 1):
            total_us = sum(case.costs.duration_us(op, width=width) for op in ops)
            assert coarse.table_us[coarse.graph.index[action.name], width] == pytest.approx(total_us)
        assert action.flops == pytest.approx(sum(case.graph[op].flops for op in ops))


@given(st.data())
def test_a_plan_of_actions_expands_to_a_legal_one_that_is_not_longer(data):
    case = data.draw(moldable_cases(max_ops=14))
    coarse = coarsen(case.graph, case.costs, case.device, data.draw(THRESHOLDS))
    assume(len(coarse.graph) < len(case.graph))
    wait_us = data.draw(st.sampled_from([0.0, 2.5]))
    instance = tabled(coarse.graph, coarse.table_us, wait_us=wait_us)
    widths = [data.draw(st.integers(1, instance.num_cores)) for _ in coarse.graph.ops]
    placed = serial_sgs(instance, widths, instance.order)
    plan = as_plan(coarse.graph, placed, case.device, "mine")
    expands_well(case, coarse, plan, wait_us)


@given(st.data())
def test_so_does_one_whose_lanes_are_not_pinned(data):
    """Lanes wider together than the device then count as sharing all of it."""
    case = data.draw(moldable_cases(max_ops=14))
    coarse = coarsen(case.graph, case.costs, case.device, data.draw(THRESHOLDS))
    assume(len(coarse.graph) < len(case.graph))
    widths = [data.draw(st.integers(1, case.device.cores)) for _ in range(3)]
    lanes: list[list[str]] = [[] for _ in widths]
    after, last = {}, None
    for name in coarse.graph.order:
        lane = data.draw(st.integers(0, len(lanes) - 1))
        if sum(widths) > case.device.cores and last is not None and last not in coarse.graph.predecessors[name]:
            after[name] = (last,)
        lanes[lane].append(name)
        last = name
    made = tuple(Lane(f"lane{n}", tuple(ops), width=widths[n]) for n, ops in enumerate(lanes))
    expands_well(case, coarse, Plan(made, after), 0.0)


def expands_well(case, coarse, plan, wait_us):
    assert illegality(coarse.graph, plan, case.machine) is None
    expanded = coarse.expand(plan)
    check(case.graph, expanded, case.machine)
    assert illegality(case.graph, expanded, case.machine) is None
    rows = zip(coarse.graph.by_name, coarse.table_us.tolist(), strict=True)
    costs = Costs({name: {str(width): us for width, us in enumerate(row) if width} for name, row in rows})
    coarse_us = simulate(coarse.graph, plan, costs, case.machine, wait_us).makespan_us
    fine_us = simulate(case.graph, expanded, case.costs, case.machine, wait_us).makespan_us
    assert fine_us <= coarse_us * (1 + 1e-9)
    assert [(lane.name, lane.cores, lane.width) for lane in expanded.lanes] == [
        (lane.name, lane.cores, lane.width) for lane in plan.lanes
    ]
    assert expanded.planner == plan.planner


@given(st.data())
def test_actions_kept_apart_stay_apart_when_expanded(data):
    case = data.draw(moldable_cases(max_ops=14))
    coarse = coarsen(case.graph, case.costs, case.device, data.draw(THRESHOLDS))
    apart = data.draw(apart_in(case))
    apart = {one: {o for o in others if o < len(coarse.graph)} for one, others in apart.items()}
    apart = {one: others for one, others in apart.items() if one < len(coarse.graph)}
    instance = tabled(coarse.graph, coarse.table_us, apart=apart)
    placed = serial_sgs(instance, [1] * len(coarse.graph), instance.order)
    expanded = coarse.expand(as_plan(coarse.graph, placed, case.device, "", apart), apart)
    waits = all_waits(case.graph, expanded)
    for one, others in apart.items():
        for other in others:
            for a in coarse.members[one]:
                for b in coarse.members[other]:
                    assert a in waits[b] or b in waits[a]


def test_an_edge_between_actions_does_not_keep_all_their_ops_apart():
    graph = Graph(tuple(map(Op, "abcd")), (Edge("a", "b"), Edge("c", "d"), Edge("a", "d")))
    costs = Costs({op: {"1": 8.0} for op in "abcd"})
    device = Device("cpu0", cores=2)
    coarse = coarsen(graph, costs, device, 20.0)
    assert coarse.members == (("a", "b"), ("c", "d"))
    placed = [Placement(0, (0,), 0.0, 16.0), Placement(1, (1,), 16.0, 32.0)]
    apart = {0: {1}, 1: {0}}
    plan = as_plan(coarse.graph, placed, device, "", apart)
    assert plan.after == {}
    assert coarse.expand(plan).after == {}, "c may run beside a and b"
    assert coarse.expand(plan, apart).after == {"c": ("b",)}


def test_what_is_merged_and_what_is_not():
    names = ("a", "b", "c", "d", "big", "t", "e", "f")
    edges = (Edge("a", "b"), Edge("a", "c"), Edge("b", "d"), Edge("c", "d"), Edge("d", "big"), Edge("big", "t"))
    roles = {"t": "recv"}
    graph = Graph(
        tuple(Op(name, role=roles.get(name, "other")) for name in names), (*edges, Edge("t", "e"), Edge("e", "f"))
    )
    costs = Costs({name: {"1": 90.0 if name == "big" else 4.0} for name in names})
    coarse = coarsen(graph, costs, Device("cpu0"), 20.0)
    assert coarse.members == (("a", "b", "c", "d"), ("big",), ("t",), ("e", "f"))
    assert [op.name for op in coarse.graph.ops] == ["a+3", "big", "t", "e+1"]
    assert coarsen(graph, costs, Device("cpu0"), 9.0).members[:2] == (("a", "c"), ("b", "d"))
    untouched = coarsen(graph, costs, Device("cpu0"), 0.0)
    assert untouched.graph is graph


def test_a_name_that_is_taken_is_not_given_again():
    graph = Graph((Op("a"), Op("b"), Op("a+1")), (Edge("a", "b"),))
    costs = Costs({"a": {"1": 1.0}, "b": {"1": 1.0}, "a+1": {"1": 99.0}})
    coarse = coarsen(graph, costs, Device("cpu0"), 20.0)
    assert [op.name for op in coarse.graph.ops] == ["a+1+", "a+1"]


def test_an_action_is_called_after_its_largest_op():
    graph = Graph((Op("a", "x", "forward"), Op("b", "y", "update", stateless=False)), (Edge("a", "b"),))
    coarse = coarsen(graph, Costs({"a": {"1": 1.0}, "b": {"1": 2.0}}), Device("cpu0"), 20.0)
    (action,) = coarse.graph.ops
    assert (action.name, action.target, action.role, action.stateless) == ("a+1", "y", "update", False)


@settings(max_examples=5)
@given(st.integers(0, 99))
def test_a_large_graph_shrinks(seed):
    rng = random.Random(seed)
    names = [f"op{i}" for i in range(400)]
    edges = [Edge(names[rng.randrange(max(0, i - 5), i)], names[i]) for i in range(1, 400)]
    graph = Graph(tuple(map(Op, names)), tuple(edges))
    costs = Costs({name: {"1": 2.0} for name in names})
    coarse = coarsen(graph, costs, Machine.of(cores=2).devices[0], 20.0)
    assert len(coarse.graph) < 150
