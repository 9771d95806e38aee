"""Lanes on sibling hardware threads of the same cores: how much they slow each other down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Costs, Device, Edge, Graph, Lane, Machine, Op, Plan
from hocket.simulation import simulate
from hocket.simulation.smt import sharing_of
from invariants import illegality, shared_core_simulation
from strategies import graphs
from support.refusals import refused


@st.composite
def shared(draw):
    """A legal plan of lanes that name threads of the same few cores, each thread of one lane."""
    graph = draw(graphs(max_ops=8))
    cores, smt = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    machine = Machine.of(cores=cores, smt=smt, smt_speedup=draw(st.floats(0.5, 4.0)))
    threads = draw(st.permutations(range(cores * smt)))
    cuts = sorted(draw(st.lists(st.integers(0, len(threads)), max_size=3)))
    pinned = [threads[a:b] for a, b in zip([0, *cuts], [*cuts, len(threads)], strict=True) if a < b]
    ops: list[list[str]] = [[] for _ in pinned]
    for op in graph.order:
        ops[draw(st.integers(0, len(pinned) - 1))].append(op)
    lanes = [
        Lane(f"lane{number}", tuple(ops[number]), width=len(mine), cores=tuple(mine))
        for number, mine in enumerate(pinned)
    ]
    whole = st.one_of(st.integers(0, 5).map(float), st.floats(0.0, 100.0))
    costs = Costs({op.name: {"1": draw(whole), str(cores * smt): draw(whole)} for op in graph.ops})
    return graph, Plan(tuple(lanes)), costs, machine


@given(shared(), st.sampled_from([0.0, 1.5]))
def test_agrees_with_the_naive_simulator(made, wait_us):
    graph, plan, costs, machine = made
    check(graph, plan, machine)
    assert illegality(graph, plan, machine) is None
    timeline = simulate(graph, plan, costs, machine, wait_us)
    naive = shared_core_simulation(graph, plan, costs, machine, wait_us)
    for span in timeline.spans:
        assert (span.start_us, span.end_us) == pytest.approx(naive[span.op], rel=1e-6, abs=1e-6)


@given(shared())
def test_siblings_that_do_everything_at_full_speed_slow_nobody_down(made):
    graph, plan, costs, machine = made
    full = Machine.of(cores=machine.cores, smt=machine.devices[0].smt, smt_speedup=float(machine.devices[0].smt))
    free = Machine.of(cores=machine.cores * machine.devices[0].smt)  # a core for each thread
    timeline = simulate(graph, plan, costs, free)
    for span in simulate(graph, plan, costs, full).spans:
        assert span.duration_us <= timeline.by_op[span.op].duration_us * (1 + 1e-9) + 1e-9


def two_ops(one: Lane, other: Lane, machine: Machine, *edges: Edge) -> dict[str, tuple[float, float]]:
    graph = Graph((Op("a"), Op("b")), edges)
    costs = Costs({"a": {"1": 100.0}, "b": {"1": 100.0}})
    return {span.op: span[2:] for span in simulate(graph, Plan((one, other)), costs, machine).spans}


def test_two_wide_ops_side_by_side_end_as_much_sooner_as_table_iii_says():
    """Liu et al., Table III: 1.03 times as fast as one after the other."""
    machine = Machine.of(cores=68, smt=4)
    lanes = [Lane("first", ("a",), width=68, cores=tuple(range(68)))]
    lanes += [Lane("second", ("b",), width=68, cores=tuple(range(68, 136)))]
    times = two_ops(*lanes, machine)
    assert times["a"] == times["b"] == (0.0, pytest.approx(200.0 / 1.03))


def test_only_while_both_run_and_only_on_a_core_they_share():
    machine = Machine.of(cores=2, smt=2, smt_speedup=1.25)
    graph = Graph((Op("a"), Op("b"), Op("c")))
    costs = Costs({"a": {"1": 100.0}, "b": {"1": 25.0}, "c": {"1": 70.0}})
    plan = Plan(
        (Lane("first", ("a",), cores=(0,)), Lane("sibling", ("b",), cores=(2,)), Lane("elsewhere", ("c",), cores=(1,)))
    )
    times = {span.op: span[2:] for span in simulate(graph, plan, costs, machine).spans}
    assert times == {"a": (0.0, pytest.approx(40.0 + 75.0)), "b": (0.0, pytest.approx(40.0)), "c": (0.0, 70.0)}


def test_an_op_is_as_slow_as_its_slowest_thread():
    machine = Machine.of(cores=2, smt=2, smt_speedup=1.0)
    times = two_ops(Lane("wide", ("a",), width=2, cores=(0, 1)), Lane("narrow", ("b",), cores=(3,)), machine)
    assert times == {"a": (0.0, pytest.approx(200.0)), "b": (0.0, pytest.approx(200.0))}


def test_three_threads_of_a_core_get_a_third_each():
    machine = Machine.of(cores=1, smt=4, smt_speedup=1.5)
    graph = Graph(tuple(map(Op, "abc")))
    costs = Costs({op: {"1": 10.0} for op in "abc"})
    plan = Plan(tuple(Lane(f"lane{core}", (op,), cores=(core,)) for core, op in enumerate("abc")))
    assert [span.end_us for span in simulate(graph, plan, costs, machine).spans] == pytest.approx([20.0] * 3)


def test_nobody_shares_where_no_lane_names_a_sibling():
    machine = Machine((Device("n0", cores=2, smt=2), Device("n1", cores=2, smt=2)))
    plan = Plan((Lane("x", ("a",), device="n0", cores=(0,)), Lane("y", ("b",), device="n1", cores=(2,))))
    sharing = sharing_of(plan, machine)
    assert sharing is not None
    assert [lane in sharing for lane in (0, 1)] == [False, True]
    assert sharing_of(Plan((Lane("x", ("a",), device="n0", cores=(0,)),)), machine) is None
    idle = Plan((Lane("x", ("a",), device="n0", cores=(0,)), Lane("y", (), device="n1", cores=(2,))))
    assert sharing_of(idle, machine) is None


def test_a_wake_up_cannot_be_negative():
    refused(r"expected wait_us >= 0, got -1\.0", simulate, Graph(()), Plan(()), Costs({}), Machine.of(cores=1), -1.0)
