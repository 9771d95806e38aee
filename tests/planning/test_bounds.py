import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hocket.errors import InputError
from hocket.ir import Costs, Device, Edge, Graph, Lane, Link, Machine, Op, Plan, Share, Span, Timeline
from hocket.planning import Bounds, bounds, efficiency, plan, potential
from hocket.simulation import simulate
from invariants import longest_path_us, optimum_us
from strategies import Case, costs_of, gpu_cases, graphs, legal_cases
from support.refusals import refused

ROUNDING = 1 + 1e-9


def with_costs(case: Case) -> bool:
    return all(op.name in case.costs for op in case.graph.ops)


@given(case=legal_cases().filter(with_costs))
@example(  # a cost for one width of one device hides the measured width at which the others would be fastest
    Case(
        Graph((Op("a"),)),
        Plan((Lane("x", ("a",), width=3),)),
        Costs({"a": {"1": 100.0, "4": 10.0, "cpu0:4": 1000.0}}),
        Machine.of(cores=4),
    )
)
def test_no_legal_plan_is_below_the_lower_bound(case):
    found = bounds(case.graph, case.costs, case.machine)
    makespan_us = simulate(case.graph, case.plan, case.costs, case.machine).makespan_us
    assert found.lower_us <= makespan_us * ROUNDING
    assert found.lower_us <= found.upper_us
    assert found.critical_path_us <= makespan_us * ROUNDING


@settings(max_examples=40)
@given(data=st.data())
def test_the_optimum_lies_between_the_bounds(data):
    graph = data.draw(graphs(max_ops=4))
    costs = data.draw(costs_of(graph, widths=3))
    found = bounds(graph, costs, Machine.of(cores=3))
    best_us = min(
        optimum_us(graph, costs, [Lane(f"lane{i}", width=width) for i, width in enumerate(widths)])
        for widths in ([3], [1, 2], [1, 1, 1])
    )
    assert found.lower_us <= best_us * ROUNDING
    assert best_us <= found.upper_us * ROUNDING


@given(data=st.data())
def test_upper_bound_is_the_serial_plan(data):
    graph = data.draw(graphs())
    costs, machine = data.draw(costs_of(graph)), Machine.of(cores=4)
    serial = simulate(graph, plan(graph, costs, machine, planner="serial"), costs, machine)
    assert bounds(graph, costs, machine).upper_us == serial.makespan_us


@given(data=st.data())
def test_critical_path_by_hand(data):
    graph = data.draw(graphs())
    costs = Costs({op.name: {"1": 1.0 * data.draw(st.integers(0, 9))} for op in graph.ops})
    fastest = {op.name: costs.duration_us(op.name) for op in graph.ops}
    assert bounds(graph, costs, Machine.of(cores=2)).critical_path_us == longest_path_us(graph, fastest)


def test_work_decides_for_many_ops_and_the_chain_for_few():
    costs = Costs({f"op{i}": {"1": 30.0, "4": 10.0} for i in range(8)})
    wide = Graph(tuple(Op(f"op{i}") for i in range(8)))
    assert bounds(wide, costs, Machine.of(cores=4)) == Bounds(60.0, 80.0, 10.0, 240.0)
    chain = Graph(wide.ops, tuple(Edge(f"op{i}", f"op{i + 1}") for i in range(7)))
    assert bounds(chain, costs, Machine.of(cores=4)) == Bounds(80.0, 80.0, 80.0, 240.0)


def test_work_that_might_go_over_a_link_is_work_and_may_fit_beside():
    """An op of the role ``other`` may run on a core or take a channel, and its area counts either way."""
    graph = Graph((*(Op(f"op{n}") for n in range(6)), *(Op(f"f{n}", role="forward") for n in range(2))))
    costs = Costs({op.name: {"1": 30.0} for op in graph.ops})
    one = Machine.of(cores=2)
    assert bounds(graph, costs, one) == Bounds(120.0, 240.0, 30.0, 240.0)
    linked = Machine(one.devices, (Link("server", "cpu0", 1e6, channels=2),))
    found = bounds(graph, costs, linked)
    assert (found.work_us, found.lower_us) == (240.0, 60.0)  # two cores, two channels
    lanes = [Lane(f"core{n}", tuple(op.name for op in graph.ops[n::4])) for n in range(2, 4)]
    lanes += [Lane(f"wire{n}", tuple(op.name for op in graph.ops[n::4]), "channel", "server->cpu0") for n in range(2)]
    assert simulate(graph, Plan(tuple(lanes)), costs, linked).makespan_us == 60.0
    never_queues = Machine(one.devices, (Link("server", "cpu0", 1e6, channels=None),))
    found = bounds(graph, costs, never_queues)
    assert (found.work_us, found.lower_us) == (240.0, 30.0)


def test_better_than_linear_scaling_needs_the_least_area_at_its_width():
    graph, costs = Graph((Op("a"), Op("b"))), Costs({op: {"1": 100.0, "2": 40.0, "4": 30.0} for op in "ab"})
    assert bounds(graph, costs, Machine.of(cores=4)) == Bounds(40.0, 60.0, 30.0, 160.0)


def test_threads_of_a_core_count():
    graph, costs = Graph((Op("a"), Op("b"))), Costs({op: {"1": 100.0} for op in "ab"})
    found = bounds(graph, costs, Machine.of(cores=1, smt=2))
    assert found.lower_us == 100.0


def test_what_may_run_elsewhere_needs_no_cores():
    graph = Graph((Op("a", role="forward"), Op("t", role="recv", size_bytes=1000.0)))
    costs = Costs({"a": {"1": 50.0}, "t": {"cpu0": 400.0, "s->w": 70.0}})
    machine = Machine((Device("cpu0"),), (Link("s", "w", 1e6),))
    assert bounds(graph, costs, machine) == Bounds(70.0, 450.0, 70.0, 50.0)
    with_gpu = Machine((Device("cpu0"), Device("gpu0", "cuda")))
    costs = Costs({"a": {"cpu0": 50.0, "gpu0": 5.0}, "t": {"cpu0": 400.0}})
    assert bounds(graph, costs, with_gpu) == Bounds(400.0, 450.0, 400.0, 400.0)


def test_transfers_count_on_both_sides():
    ops = (Op("r1", role="recv", size_bytes=40.0), Op("r2", role="recv", size_bytes=30.0))
    ops += (Op("a", role="forward"), Op("b", role="forward"))
    graph = Graph(ops, (Edge("r1", "a"), Edge("r2", "b")))
    costs = Costs({"a": {"1": 20.0}, "b": {"1": 10.0}})
    machine = Machine((Device("cpu0"),), (Link("s", "cpu0", 1e6), Link("cpu0", "s", 1.0)))
    assert bounds(graph, costs, machine) == Bounds(70.0, 100.0, 60.0, 30.0)  # the wire alone takes 70
    two = Machine(machine.devices, (Link("s", "cpu0", 1e6, channels=2),))
    assert bounds(graph, costs, two) == Bounds(60.0, 100.0, 60.0, 30.0)
    unlimited = Machine(machine.devices, (Link("s", "cpu0", 1e6, channels=None),))
    assert bounds(graph, costs, unlimited).lower_us == 60.0


def test_potential():
    assert potential(Bounds(10.0, 30.0, 10.0, 10.0)) == 2.0
    assert potential(Bounds(10.0, 10.0, 10.0, 10.0)) == 0.0
    assert potential(Bounds(0.0, 0.0, 0.0, 0.0)) == 0.0


def test_an_op_without_a_cost_is_named():
    graph = Graph((Op("a"), Op("b")))
    refused("no duration for op 'b' on any device", bounds, graph, Costs({"a": {"1": 1.0}}), Machine.of(cores=1))
    with pytest.raises(InputError, match="no duration for op 'b' on any device"):
        bounds(graph, Costs({"a": {"1": 1.0}, "b": {"gpu0": 1.0}}), Machine.of(cores=1))


def test_efficiency():
    def takes(us: float) -> Timeline:
        return Timeline((Span("a", "x", 0.0, us),), ("x",))

    found = Bounds(10.0, 30.0, 10.0, 10.0)
    assert [efficiency(takes(us), found) for us in (10.0, 20.0, 30.0, 40.0)] == [1.0, 0.5, 0.0, -0.5]
    assert efficiency(takes(10.0), Bounds(10.0, 10.0, 10.0, 10.0)) == 1.0


def test_nothing_to_run():
    assert bounds(Graph(()), Costs({}), Machine.of(cores=2)) == Bounds(0.0, 0.0, 0.0, 0.0)


@given(case=gpu_cases())
def test_no_plan_of_streams_is_outside_the_bounds(case):
    limits = bounds(case.graph, case.costs, case.machine)
    makespan_us = simulate(case.graph, case.plan, case.costs, case.machine).makespan_us
    assert limits.lower_us <= makespan_us * (1 + 1e-9)
    one_gpu = Machine(case.machine.devices[:1])
    alone = bounds(case.graph, case.costs, one_gpu)
    total_us = sum(case.costs.duration_us(op.name, device="gpu0") for op in case.graph.ops)
    assert alone.upper_us == pytest.approx(total_us)


def test_a_gpu_by_hand():
    graph = Graph((Op("a"), Op("b"), Op("c")), (Edge("a", "b"),))
    costs = Costs({op: {"gpu0": 10.0} for op in "abc"}, shares={"a": {"gpu0": Share(1.0)}, "c": {"gpu0": Share(0.5)}})
    found = bounds(graph, costs, Machine((Device("gpu0", "cuda", 4),)))
    assert found == Bounds(lower_us=20.0, upper_us=30.0, critical_path_us=20.0, work_us=15.0)
