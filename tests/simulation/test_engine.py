import gc
import json
import weakref
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import run
from hocket.checking import check
from hocket.errors import InputError, PlanError
from hocket.ir import Carried, Costs, Edge, Graph, Lane, Link, Machine, Op, Plan
from hocket.simulation import simulate, step_us, unrolled
from invariants import illegality, naive_simulation
from strategies import costs_of, legal_cases, mutated_plans
from support.refusals import refused

MACHINE = Machine.of(cores=4)


def chain(*names: str) -> Graph:
    edges = [Edge(src, dst) for src, dst in pairwise(names)]
    return Graph(tuple(Op(name) for name in names), tuple(edges))


@settings(max_examples=100)
@given(case=legal_cases(), wait_us=st.sampled_from([0.0, 2.5, 1e3]))
def test_agrees_with_the_naive_simulator_to_the_last_bit(case, wait_us):
    timeline = simulate(case.graph, case.plan, case.costs, case.machine, wait_us)
    naive = naive_simulation(case.graph, case.plan, case.costs, case.machine, wait_us)
    assert {span.op: (span.start_us, span.end_us) for span in timeline.spans} == naive
    assert [span.lane for span in timeline.spans] == [case.plan.lane_of[span.op].name for span in timeline.spans]
    assert (timeline.source, timeline.lanes) == ("simulated", tuple(lane.name for lane in case.plan.lanes))
    assert len(timeline.spans) == len(case.plan)


@given(data=st.data())
def test_stops_at_a_deadlock_and_never_elsewhere(data):
    case = data.draw(legal_cases())
    plan = data.draw(mutated_plans(case))
    costs = data.draw(costs_of(case.graph))
    why = illegality(case.graph, plan, None)
    if why in ("deadlock", "does not run each op once"):
        with pytest.raises(PlanError) as caught:
            simulate(case.graph, plan, costs, case.machine)
        assert repr(caught.value.op) in str(caught.value)
    else:
        simulate(case.graph, plan, costs, case.machine)


def test_ops_missing_in_plan_graph_or_costs_are_named():
    costs = Costs({"a": {"1": 1.0}})
    with pytest.raises(PlanError, match="lane 'x' runs op 'b', which the graph does not have"):
        simulate(chain("a"), Plan((Lane("x", ("a", "b")),)), costs, MACHINE)
    with pytest.raises(PlanError, match="op 'b' of the graph is run by no lane"):
        simulate(chain("a", "b"), Plan((Lane("x", ("a",)),)), costs, MACHINE)
    with pytest.raises(InputError, match="no duration for op 'b', which lane 'x' runs"):
        simulate(chain("a", "b"), Plan((Lane("x", ("a", "b")),)), costs, MACHINE)
    with pytest.raises(InputError, match="op 'a' has no duration for device 'cpu0'"):
        simulate(chain("a"), Plan((Lane("x", ("a",)),)), Costs({"a": {"gpu0": 1.0}}), MACHINE)
    with pytest.raises(InputError, match="no link from 's' to 'w'"):
        simulate(chain("a"), Plan((Lane("x", ("a",), "channel", "s->w"),)), costs, MACHINE)


def test_durations_by_width_device_and_link():
    graph = Graph((Op("wide"), Op("kernel"), Op("sent", size_bytes=2000.0), Op("timed", size_bytes=2000.0)))
    costs = Costs({"wide": {"1": 8.0, "3": 4.0}, "kernel": {"1": 9.0, "gpu0": 2.0}, "timed": {"s->w": 7.0}})
    machine = Machine(MACHINE.devices, (Link("s", "w", 1e6, latency_us=50.0, channels=None),))
    plan = Plan(
        (
            Lane("cores", ("wide",), width=2),
            Lane("stream", ("kernel",), "stream", "gpu0"),
            Lane("up", ("sent", "timed"), "channel", "s->w"),
            Lane("idle"),
        )
    )
    timeline = simulate(graph, plan, costs, machine)
    assert {span.op: span.duration_us for span in timeline.spans} == {
        "wide": 6.0,
        "kernel": 2.0,
        "sent": 2050.0,
        "timed": 7.0,
    }
    assert timeline.lanes == ("cores", "stream", "up", "idle")


def test_an_op_with_many_dependencies_waits_for_the_last():
    names = [f"op{i}" for i in range(20)]
    graph = Graph((Op("sum"), *map(Op, names)), tuple(Edge(name, "sum") for name in names))
    costs = Costs({"sum": {"1": 1.0}, **{name: {"1": float(i)} for i, name in enumerate(names)}})
    lanes = [Lane(name, (name,)) for name in names]
    timeline = simulate(graph, Plan((Lane("main", ("sum",)), *lanes)), costs, MACHINE)
    assert timeline.by_op["sum"].start_us == 19.0


def test_nothing_to_run():
    assert simulate(Graph(()), Plan((Lane("x"),)), Costs({}), MACHINE).makespan_us == 0.0
    assert simulate(Graph(()), Plan(()), Costs({}), MACHINE).spans == ()


def test_what_was_remembered_of_a_plan_goes_with_it():
    graph, costs = chain("a", "b"), Costs({"a": {"1": 1.0}, "b": {"1": 1.0}})
    plan = Plan((Lane("x", ("a", "b")),))
    first = simulate(graph, plan, costs, MACHINE)
    assert simulate(graph, plan, costs, MACHINE) == first
    assert simulate(graph, plan, Costs({"a": {"1": 2.0}, "b": {"1": 2.0}}), MACHINE).makespan_us == 4.0
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_no_op_starts_before_its_earliest_start():
    graph = chain("a", "b", "c")
    costs = Costs({op: {"1": 5.0} for op in "abc"})
    plan = Plan((Lane("x", ("a", "b", "c")),))
    found = simulate(graph, plan, costs, MACHINE, earliest_us={"b": 20.0, "c": 1.0})
    assert [(span.op, span.start_us) for span in found.spans] == [("a", 0.0), ("b", 20.0), ("c", 25.0)]
    with pytest.raises(InputError, match="earliest_us names op 'd', which the graph does not have"):
        simulate(graph, plan, costs, MACHINE, earliest_us={"d": 1.0})
    with pytest.raises(InputError, match=r"op 'a': expected earliest_us >= 0, got -1\.0"):
        simulate(graph, plan, costs, MACHINE, earliest_us={"a": -1.0})


@given(case=legal_cases(), at_us=st.floats(0, 100))
def test_earliest_starts_keep_the_rule_of_a_plan(case, at_us):
    first = case.graph.order[:1]
    found = simulate(case.graph, case.plan, case.costs, case.machine, earliest_us=dict.fromkeys(first, at_us))
    assert all(found.by_op[op].start_us >= at_us for op in first)
    for op, others in case.graph.predecessors.items():
        assert all(found.by_op[other].end_us <= found.by_op[op].start_us for other in others)


@settings(max_examples=6)
@given(num_ops=st.integers(1, 60), num_lanes=st.integers(1, 5), seed=st.integers(0, 99))
def test_both_engines_agree(num_ops, num_lanes, seed):
    pytest.importorskip("simpy")
    figures = run(num_ops, num_lanes, repeats=1, seed=seed)  # which compares the makespans
    assert figures["makespan_us"] > 0.0


def test_figures_are_json_and_name_what_was_measured():
    pytest.importorskip("simpy")
    figures = json.loads(json.dumps(run(500, 3, repeats=2)))
    assert set(figures["questions"]) == {"again", "again_spans", "new_plan", "first"}
    for question in figures["questions"].values():
        for summary in question.values():
            assert 0.0 < summary["min"] <= summary["median"] <= summary["max"]
    assert {"python", "simpy", "numpy"} <= set(figures["versions"])


TWO_CORES = Machine.of(cores=2)


@given(case=legal_cases())
def test_a_row_of_steps_is_a_plan_that_waits_for_what_is_carried(case):
    graph, plan, costs = unrolled(case.graph, case.plan, case.costs, 3)
    check(graph, plan)
    assert len(graph) == 3 * len(case.graph)
    timeline = simulate(graph, plan, costs, case.machine)
    for src, dst in case.graph.carried:
        for step in (0, 1):
            assert timeline.by_op[f"{src}@{step}"].end_us <= timeline.by_op[f"{dst}@{step + 1}"].start_us
    assert unrolled(case.graph, case.plan, case.costs, 1)[0].edges == tuple(
        Edge(f"{edge.src}@0", f"{edge.dst}@0", edge.size_bytes) for edge in case.graph.edges
    )


def test_the_next_steps_forward_runs_beside_this_ones_weight_gradient():
    graph = Graph(
        (Op("forward"), Op("backward"), Op("weight"), Op("update")),
        (Edge("forward", "backward"), Edge("forward", "weight"), Edge("weight", "update")),
    )
    costs = Costs({op: {"1": 10.0} for op in graph.by_name})
    ops = {"main": ("forward", "backward"), "side": ("weight", "update")}
    plan = Plan(tuple(Lane(name, of_lane, "stream", "gpu0") for name, of_lane in ops.items()))
    assert simulate(graph, plan, costs, TWO_CORES).makespan_us == 30.0
    assert step_us(graph, plan, costs, TWO_CORES) == 20.0
    held = Graph(graph.ops, graph.edges, (Carried("update", "forward"),))
    assert step_us(held, plan, costs, TWO_CORES) == 30.0
    threads = Plan(tuple(Lane(name, of_lane) for name, of_lane in ops.items()))
    assert step_us(graph, threads, costs, TWO_CORES) == 30.0


def test_too_few_steps():
    graph, plan, costs = Graph((Op("a"),)), Plan((Lane("x", ("a",)),)), Costs({"a": {"1": 1.0}})
    refused("expected at least one step, got 0", unrolled, graph, plan, costs, 0)
