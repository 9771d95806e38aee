import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Costs, Device, Edge, Graph, Lane, Machine, Op
from hocket.planning import plan
from hocket.planning.list_scheduler import list_schedule
from hocket.planning.ranks import graph_ranks
from hocket.simulation import simulate
from invariants import longest_path_us, optimum_us
from strategies import MACHINES, costs_of, graphs
from support.refusals import refused


@given(data=st.data())
def test_legal_and_never_longer_than_serial(data):
    graph, machine = data.draw(graphs()), data.draw(MACHINES)
    costs = data.draw(costs_of(graph, devices=("cpu0",)))
    made = {name: plan(graph, costs, machine, planner=name) for name in ("serial", "list")}
    check(graph, made["list"], machine)
    assert made["list"].planner == "list"
    makespans = {name: simulate(graph, p, costs, machine).makespan_us for name, p in made.items()}
    assert makespans["list"] <= makespans["serial"]


@given(data=st.data())
def test_upward_rank_is_the_longest_path(data):
    graph = data.draw(graphs())
    durations = [data.draw(st.integers(0, 9)) for _ in graph.ops]
    by_name = {op.name: float(us) for op, us in zip(graph.ops, durations, strict=True)}
    assert max(graph_ranks(graph, durations)) == longest_path_us(graph, by_name)


@settings(max_examples=40)
@given(data=st.data())
def test_within_grahams_bound_of_the_optimum(data):
    graph = data.draw(graphs(max_ops=5))
    costs = Costs({op.name: {"1": float(data.draw(st.integers(0, 9)))} for op in graph.ops})
    count = data.draw(st.integers(1, 2))
    machine = Machine.of(cores=count)
    lanes = [Lane(f"lane{i}", cores=(i,)) for i in range(count)]
    makespan_us = simulate(graph, list_schedule(graph, costs, lanes, {}), costs, machine).makespan_us
    best_us = optimum_us(graph, costs, lanes)
    assert best_us <= makespan_us <= (2 - 1 / count) * best_us


@given(data=st.data())
def test_no_lane_idles_while_an_op_is_ready(data):
    graph = data.draw(graphs())
    costs = Costs({op.name: {"1": float(data.draw(st.integers(1, 5)))} for op in graph.ops})
    made = plan(graph, costs, Machine.of(cores=3), lanes=3)
    timeline = simulate(graph, made, costs, Machine.of(cores=3))
    for span in timeline.spans:
        ready_us = max((timeline.by_op[op].end_us for op in graph.predecessors[span.op]), default=0.0)
        for lane in timeline.lanes:
            busy_us = sum(
                min(other.end_us, span.start_us) - max(other.start_us, ready_us)
                for other in timeline.by_lane[lane]
                if other.end_us > ready_us and other.start_us < span.start_us
            )
            assert busy_us == span.start_us - ready_us


def test_the_longest_chain_goes_first():
    graph = Graph(tuple(Op(name) for name in "abcd"), (Edge("c", "d"),))
    costs = Costs({"a": {"1": 4.0}, "b": {"1": 4.0}, "c": {"1": 4.0}, "d": {"1": 4.0}})
    timeline = simulate(graph, made := plan(graph, costs, MACHINE2), costs, MACHINE2)
    assert timeline.makespan_us == 8.0
    assert made.lane_of["c"].ops[0] == "c"


MACHINE2 = Machine.of(cores=2)


def test_wide_or_narrow_as_the_costs_say():
    graph = Graph(tuple(Op(f"op{i}") for i in range(8)))
    scales = Costs({op.name: {"1": 40.0, "2": 19.0, "4": 9.0} for op in graph.ops})
    does_not = Costs({op.name: {"1": 40.0, "2": 39.0, "4": 38.0} for op in graph.ops})
    between = Costs({op.name: {"1": 40.0, "2": 19.0, "4": 18.0} for op in graph.ops})
    machine = Machine.of(cores=4)
    for costs, lanes in ((scales, 1), (between, 2), (does_not, 4)):
        made = plan(graph, costs, machine)
        assert len(made.lanes) == lanes
        assert [lane.width for lane in made.lanes] == [4 // lanes] * lanes


def test_all_cpu_devices_and_uneven_lanes():
    machine = Machine((Device("n0", cores=3), Device("n1", cores=2), Device("gpu0", "cuda")))
    graph = Graph(tuple(Op(f"op{i}") for i in range(20)))
    costs = Costs({op.name: {"1": 10.0, "2": 9.0, "3": 8.0} for op in graph.ops})
    made = plan(graph, costs, machine)
    assert [(lane.device, lane.cores) for lane in made.lanes] == [
        ("n0", (0,)),
        ("n0", (1,)),
        ("n0", (2,)),
        ("n1", (0,)),
        ("n1", (1,)),
    ]
    made = plan(graph, costs, machine, lanes=2)
    assert [(lane.name, lane.width) for lane in made.lanes] == [("n0.0", 2), ("n0.1", 1), ("n1.0", 1), ("n1.1", 1)]
    check(graph, made, machine)


def test_no_op_is_promised_a_lane_before_the_lane_is_idle():
    graph = Graph((Op("a"), Op("low"), Op("high")), (Edge("a", "high"),))
    costs = Costs({"a": {"1": 1.0}, "low": {"1": 2.0}, "high": {"1": 9.0}})
    made = plan(graph, costs, Machine.of(cores=1), lanes=1)
    assert made.lanes[0].ops == ("a", "high", "low")


def test_ties_go_by_program_order():
    graph = Graph(tuple(Op(f"op{i}") for i in range(6)))
    costs = Costs({op.name: {"1": 10.0} for op in graph.ops})
    made = plan(graph, costs, MACHINE2, lanes=2)
    assert [lane.ops for lane in made.lanes] == [("op0", "op2", "op4"), ("op1", "op3", "op5")]
    assert made == plan(graph, costs, MACHINE2, lanes=2)


def test_options_and_costs_that_do_not_fit():
    graph, costs = Graph((Op("a"), Op("b"))), Costs({"a": {"1": 1.0}})
    refused("no duration for op 'b'", plan, graph, costs, MACHINE2)
    for lanes in (0, -1, 1.5, True):
        refused(f"expected lanes to be a whole number >= 1, got {lanes!r}", plan, graph, costs, MACHINE2, lanes=lanes)
    refused("3 lanes do not fit 'cpu0', which has 2 cores", plan, graph, costs, MACHINE2, lanes=3)


def test_a_larger_graph_comes_close_to_its_bound():
    rng = random.Random(0)
    ops = [f"op{i}" for i in range(2000)]
    edges = [Edge(ops[rng.randrange(max(0, i - 50), i)], ops[i]) for i in range(1, 2000)]
    graph = Graph(tuple(map(Op, ops)), tuple(edges))
    costs = Costs({op: {"1": (us := rng.uniform(10, 20)), "4": us * 0.6} for op in ops})
    machine = Machine.of(cores=4)
    timeline = simulate(graph, plan(graph, costs, machine), costs, machine)
    assert timeline.utilisation > 0.99
