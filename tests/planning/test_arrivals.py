from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Costs, Edge, Graph, Link, Machine, Op
from hocket.planning import bounds, plan, planners
from hocket.planning.arrivals import arrivals_us, by_earliest, earliest_us, first_use, roots_of
from hocket.planning.concurrency.corun import corun
from hocket.planning.moldable.sgs import parallel_sgs, serial_sgs
from hocket.planning.phases import in_phases
from hocket.simulation import simulate
from invariants import placement_faults
from strategies import moldable_cases

TWO_CORES = Machine(Machine.of(cores=2).devices, (Link("server", "cpu0", 1e6), Link("cpu0", "server", 1e6)))

OPTIONS = {"concurrency": {"lookahead_ms": 20.0}, "exact": {"time_limit_s": 10.0}}


def graph_of(edges: str, *recvs: str, sends: str = "", size_bytes: float = 50.0) -> Graph:
    pairs = [pair.split(">") for pair in edges.split()]
    names = dict.fromkeys([*recvs, *(end for pair in pairs for end in pair)])
    role = {**dict.fromkeys(recvs, "recv"), **dict.fromkeys(sends.split(), "send")}
    ops = [Op(name, role=role.get(name, "forward"), size_bytes=size_bytes) for name in names]
    return Graph(tuple(ops), tuple(Edge(*pair) for pair in pairs))


def test_first_use_goes_by_the_graphs_order():
    graph = graph_of("a>x x>y b>y", "never", "b", "a")
    assert first_use(graph, ["never", "b", "a"]) == {"a": 0.0, "b": 1.0, "never": 2.0}


def test_roots_wait_for_nothing():
    graph = graph_of("a>x x>s s>back", "a", "back", sends="s")
    assert roots_of(graph, ["a", "back", "s"]) == ("a",)


def test_an_op_can_start_when_all_it_depends_on_has_arrived():
    graph = graph_of("a>x x>y b>y y>z", "a", "b")
    arrived = arrivals_us(graph, ("a", "b"), Costs({}), TWO_CORES, {"a": 1.0, "b": 0.0})
    assert arrived == {"b": 50.0, "a": 100.0}
    assert earliest_us(graph, {"a": 10.0, "b": 30.0}) == {"a": 10.0, "b": 30.0, "x": 10.0, "y": 30.0, "z": 30.0}
    assert by_earliest(graph, {"a": 50.0}) == ("b", "x", "y", "z", "a")
    assert by_earliest(graph, {}) == graph.order


@pytest.mark.parametrize("name", list(planners()))
def test_every_planner_starts_what_has_arrived(name):
    """The program has `late` first, but its parameter arrives last: whoever keeps the program's order waits for it."""
    graph = graph_of("late_w>late early_w>early", "early_w", "late_w")
    graph = Graph((*graph.ops[:2], graph["late"], graph["early"]), graph.edges)
    costs = Costs({name: {"1": 100.0} for name in ("late", "early")})
    machine = Machine(Machine.of(cores=1).devices, (Link("server", "cpu0", 1e6),))
    options = {"order": "fifo"} if name == "transfers" else OPTIONS.get(name, {})
    made = plan(graph, costs, machine, name, **options)
    check(graph, made, machine)
    (wire,) = [lane for lane in made.lanes if lane.kind == "channel"]
    us = simulate(graph, made, costs, machine).makespan_us
    assert us == 250.0, (wire.ops, made)  # one arrival, then both ops


@given(data=st.data())
@pytest.mark.parametrize("name", [name for name in planners() if name != "exact"])
def test_plans_of_any_planner_are_legal_and_within_the_bounds(name, data):
    chance = data.draw(st.randoms(use_true_random=False))
    recvs = [f"r{n}" for n in range(chance.randint(1, 5))]
    ops = [f"op{n}" for n in range(chance.randint(1, 8))]
    sends = [f"s{n}" for n in range(chance.randint(0, 3))]
    pairs = [f"{chance.choice(recvs + ops[:at])}>{op}" for at, op in enumerate(ops) for _ in range(2)]
    pairs += [f"{chance.choice(ops)}>{name}" for name in sends]
    graph = graph_of(" ".join(dict.fromkeys(pairs)), *recvs, sends=" ".join(sends))
    costs = Costs({op: {"1": chance.uniform(1, 90), "2": chance.uniform(1, 90)} for op in ops})
    made = plan(graph, costs, TWO_CORES, name, **OPTIONS.get(name, {}))
    check(graph, made, TWO_CORES)
    makespan_us = simulate(graph, made, costs, TWO_CORES).makespan_us
    limits = bounds(graph, costs, TWO_CORES)
    assert limits.lower_us <= makespan_us * (1 + 1e-9)
    if name == "serial":
        assert makespan_us <= limits.upper_us * (1 + 1e-9)


@given(case=moldable_cases(), data=st.data())
def test_no_placement_starts_before_its_earliest_start(case, data):
    graph, instance = case.graph, case.instance
    arrived = {op.name: data.draw(st.floats(0, 200)) for op in graph.ops if not graph.predecessors[op.name]}
    earliest = earliest_us(graph, arrived)
    later = replace(instance, earliest_us=[earliest.get(op.name, 0.0) for op in graph.ops])
    widths = instance.best_width
    placements = [
        parallel_sgs(later, widths, later.ranks_us),
        serial_sgs(later, widths, later.order),
        corun(later, widths, [[width] for width in widths]),
        in_phases(later, sorted(later.order, key=later.ready_us), 60.0),
    ]
    for placed in placements:
        assert not placement_faults(later, placed)
        assert all(one.start_us >= later.ready_us(one.op) * (1 - 1e-12) for one in placed)
