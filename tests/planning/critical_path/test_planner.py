import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check, hazards
from hocket.ir import Buffer, Costs, Device, Edge, Graph, Machine, Op, Plan, Share
from hocket.planning import bounds, plan
from hocket.planning.critical_path import METHODS, CriticalPath, serial_peak_bytes
from hocket.planning.critical_path.memory import min_memory_order
from hocket.planning.critical_path.streams import METHODS as LEVELS
from hocket.simulation import simulate
from planning.critical_path.examples import branching, gpu_costs, network
from planning.critical_path.test_memory import most_held_bytes
from strategies import costs_of, graphs, touching_graphs
from support.refusals import refused

GPU = Machine((Device("gpu0", "cuda", 4, priorities=2, launch_us=2.0, graph_launch_us=0.2, event_us=0.5),))
COMPUTE = tuple(role for role in ("forward", "activation_grad", "weight_grad", "bias_grad", "update", "other"))


def made(graph: Graph, costs: Costs, machine: Machine = GPU, **options) -> Plan:
    return plan(graph, costs, machine, planner="critical-path", **options)


@given(data=st.data())
def test_plans_for_a_gpu_are_legal_and_free_of_hazards(data):
    graph = data.draw(st.one_of(touching_graphs(), graphs()))
    graph = Graph(
        tuple(op if op.role in COMPUTE else Op(op.name, reads=op.reads, writes=op.writes) for op in graph.ops),
        graph.edges,
        graph.carried,
        graph.buffers,
    )
    costs = gpu_costs(graph, {op.name: data.draw(st.floats(0, 50)) for op in graph.ops})
    machine = Machine((Device("gpu0", "cuda", 4, priorities=data.draw(st.integers(1, 6)), event_us=0.5),))
    found = made(
        graph,
        costs,
        machine,
        methods=METHODS[: data.draw(st.integers(0, 3))],
        launches=data.draw(st.sampled_from(["free", "eager", "graph"])),
    )
    check(graph, found, machine)
    if not any(buffer.life == "lasting" for buffer in graph.buffers) or graph.carried:
        hazards(graph, found)
    assert len(found.lanes) <= 8
    assert all(lane.kind == "stream" and 0 <= lane.priority < machine.devices[0].priorities for lane in found.lanes)
    assert Plan.parse(str(found)) == found


@given(data=st.data())
def test_plans_for_cores_are_legal_and_never_longer_than_the_serial_one(data):
    graph = data.draw(graphs(roles=COMPUTE))
    costs = data.draw(costs_of(graph, widths=4))
    machine = Machine.of(cores=data.draw(st.integers(1, 4)))
    wait_us = data.draw(st.sampled_from([0.0, 5.0]))
    found = made(graph, costs, machine, wait_us=wait_us)
    check(graph, found, machine)
    hazards(graph, found)
    limits = bounds(graph, costs, machine)
    makespan_us = simulate(graph, found, costs, machine, wait_us).makespan_us
    assert limits.lower_us * (1 - 1e-9) <= makespan_us <= limits.upper_us * (1 + 1e-9)


def test_weight_gradients_run_in_the_shadow_of_the_backward():
    graph = network(6)
    shares = {op.name: Share(0.5) for op in graph.ops}
    costs = gpu_costs(graph, shares=shares)
    takes_us = []
    for count in range(len(METHODS) + 1):
        found = made(graph, costs, methods=METHODS[:count], peak_limit_bytes=1e12)
        takes_us.append(simulate(graph, found, costs, GPU, launches="graph").makespan_us)
    one_stream, layers, asynchronous, full = takes_us
    assert one_stream > layers > asynchronous
    assert full <= asynchronous


def test_a_layers_tasks_run_side_by_side_and_the_next_layer_waits_for_all_of_them():
    graph = network(3)
    costs = gpu_costs(graph, {"dW3": 50.0})
    found = made(graph, costs, methods=("streams",), peak_limit_bytes=1e15)
    spans = simulate(graph, found, costs, GPU).by_op
    assert spans["dA3"].start_us == spans["dW3"].start_us == spans["dB3"].start_us
    assert spans["dA2"].start_us == spans["dW2"].start_us == spans["dW3"].end_us
    assert {lane.priority for lane in found.lanes} == {0}


def test_the_levels_that_simulate_shortest_are_taken():
    graph, durations = branching()
    shares = {op: Share(0.7) for op in durations}
    costs = gpu_costs(graph, durations, shares)
    takes_us = {
        levels: simulate(graph, made(graph, costs, levels=levels), costs, GPU, launches="graph").makespan_us
        for levels in ("auto", *LEVELS)
    }
    assert takes_us["auto"] == min(takes_us.values())
    assert len(set(takes_us.values())) > 1


@pytest.mark.parametrize("machine", [GPU, Machine.of(cores=3)], ids=["gpu", "cores"])
@pytest.mark.parametrize("ratio", [None, 1.0, 1.02, 1.5, 3.0])
def test_a_memory_limit_is_kept_and_both_peaks_are_stated(machine, ratio):
    graph = network(8)
    costs = Costs({op.name: {"gpu0": 10.0, "1": 10.0, "3": 9.0} for op in graph.ops})
    eager = serial_peak_bytes(graph)
    limit = None if ratio is None else ratio * eager * 1.002
    found = made(graph, costs, machine, peak_limit_bytes=limit)
    assert found.eager_peak_bytes == eager
    assert most_held_bytes(graph, found, random.Random(1)) <= found.peak_bytes <= (limit or 1.1 * eager)
    assert f"peak_bytes={found.peak_bytes} eager_peak_bytes={found.eager_peak_bytes}" in str(found).splitlines()[0]


@given(data=st.data())
def test_on_cores_too_a_limit_is_kept_in_whatever_order_is_tried(data):
    graph = data.draw(touching_graphs())
    graph = Graph(
        tuple(
            Op(op.name, role=data.draw(st.sampled_from(COMPUTE)), reads=op.reads, writes=op.writes) for op in graph.ops
        ),
        graph.edges,
        buffers=graph.buffers,
    )
    machine = Machine.of(cores=data.draw(st.integers(2, 4)))
    limit = serial_peak_bytes(graph) * data.draw(st.sampled_from([1.0, 1.1]))
    found = made(graph, data.draw(costs_of(graph, widths=4)), machine, peak_limit_bytes=limit)
    check(graph, found, machine)
    if graph.buffers:
        held = most_held_bytes(graph, found, random.Random(0))
        assert held <= found.peak_bytes <= limit * (1 + 1e-9) + 1


def test_on_cores_ops_that_take_no_time_keep_the_order_of_their_lane():
    touched = {0: "writes", 2: "writes", 7: "reads", 8: "reads"}
    ops = tuple(
        Op(f"op{n}", role="weight_grad" if n == 8 else "forward", **({touched[n]: ("b0",)} if n in touched else {}))
        for n in range(10)
    )
    edges = tuple(Edge(f"op{first}", f"op{second}") for first, second in ((0, 2), (0, 7), (0, 8), (2, 7), (2, 8)))
    graph = Graph(ops, edges, buffers=(Buffer("b0", 0.0, "step"),))
    costs = Costs({op.name: {"1": 1.0 if op.name in ("op8", "op9") else 0.0} for op in ops})
    check(graph, made(graph, costs, Machine.of(cores=2), peak_limit_bytes=0.0), Machine.of(cores=2))


def test_below_eagers_peak_another_order_helps_as_long_as_there_is_one():
    graph = network(8)
    costs = gpu_costs(graph)
    least = serial_peak_bytes(graph, min_memory_order(graph))
    assert least < serial_peak_bytes(graph)
    found = made(graph, costs, peak_limit_bytes=least * 1.002)
    assert most_held_bytes(graph, found, random.Random(1)) <= found.peak_bytes <= least * 1.002
    refused(
        r"no plan holds at most 100 bytes; the least that was found is [\d,]+, and eager",
        made,
        graph,
        costs,
        peak_limit_bytes=100,
    )


def test_without_buffers_nothing_is_limited_or_stated():
    graph = network(3, buffers=False)
    graph = Graph(tuple(Op(op.name, role=op.role, layer=op.layer) for op in graph.ops), graph.edges, graph.carried)
    found = made(graph, gpu_costs(graph), peak_limit_bytes=0)
    assert (found.peak_bytes, found.eager_peak_bytes) == (None, None)
    assert not found.after


def test_a_gpu_is_planned_for_only_where_costs_know_it():
    graph = network(2)
    both = Machine((Device("cpu0", cores=2), *GPU.devices))
    cores = Costs({op.name: {"1": 5.0} for op in graph.ops})
    assert {lane.kind for lane in made(graph, cores, both).lanes} == {"cores"}
    assert {lane.kind for lane in made(graph, cores.merged(gpu_costs(graph)), both).lanes} == {"stream"}
    refused("expected at least one cpu device", made, graph, cores, GPU)


def test_a_step_of_a_large_model_needs_few_streams():
    graph = network(60)
    found = made(graph, gpu_costs(graph))
    assert len(found.lanes) == 3


OPTIONS = {
    "expected the first of streams, asynchronous, priorities, in order, got asynchronous": {
        "methods": ("asynchronous",)
    },
    "expected the first of streams, asynchronous, priorities, in order, got fast": {"methods": ("fast",)},
    **{f"expected 1 to 8 streams, got {number!r}": {"max_streams": number} for number in (0, 9, 2.5, True)},
    "expected levels to be one of auto, order, waits, plain, flat, got 'some'": {"levels": "some"},
    "expected launches to be one of free, eager, graph, got 'lazy'": {"launches": "lazy"},
    "expected peak_limit_bytes >= 0, got -1": {"peak_limit_bytes": -1},
    "expected wait_us >= 0, got nan": {"wait_us": float("nan")},
}


@pytest.mark.parametrize("problem", OPTIONS)
def test_options_that_cannot_be(problem):
    refused(re.escape(problem), CriticalPath, **OPTIONS[problem])
