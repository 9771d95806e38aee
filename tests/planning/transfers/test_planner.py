import logging
import statistics
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.ir import Costs, Device, Edge, Graph, Link, Machine, Op
from hocket.planning import bounds, efficiency, plan, potential
from hocket.planning.transfers import ORDERS
from hocket.simulation import simulate
from planning.transfers.examples import FIGURE_1, FIGURE_4B, ONE_CORE, Step, random_step, step
from support.refusals import refused


def wire(of: Step, **options) -> tuple[str, ...]:
    made = plan(of.graph, of.costs, of.machine, "transfers", **options)
    check(of.graph, made, of.machine)
    (lane,) = [lane for lane in made.lanes if lane.kind == "channel"]
    return lane.ops


@cache
def makespan_us(seed: int, order: str) -> float:
    found = random_step(seed)
    made = plan(found.graph, found.costs, found.machine, "transfers", order=order)
    return simulate(found.graph, made, found.costs, found.machine).makespan_us


def over_exact(order: str, count: int) -> list[float]:
    return [makespan_us(seed, order) / makespan_us(seed, "exact") for seed in range(count)]


COUNTS = [100, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_the_default_is_next_to_the_best_and_never_behind_first_use(count):
    found = over_exact("auto", count)
    assert min(found) >= 1 - 1e-9
    assert statistics.mean(found) <= 1.002
    assert sorted(found)[int(0.95 * count)] <= 1.02
    assert all(one <= other * (1 + 1e-9) for one, other in zip(found, over_exact("layer", count), strict=True))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("order", "most"), [("tac", 1.02), ("tic", 1.08)])
def test_the_papers_heuristics_are_near_the_best(count, order, most):
    assert 1 <= statistics.mean(over_exact(order, count)) <= most


def test_reverse_and_random_are_worse():
    default = statistics.mean(over_exact("auto", 100))
    assert statistics.mean(over_exact("random", 100)) > 1.05 * default
    assert statistics.mean(over_exact("reverse", 100)) > 1.1 * default


def test_orders_by_name():
    assert wire(FIGURE_4B) == ("A", "B", "C", "D")
    assert wire(FIGURE_4B, order="reverse") == ("D", "C", "B", "A")
    assert wire(FIGURE_4B, order="fifo") == ("D", "C", "B", "A")
    assert wire(FIGURE_4B, order="layer") == ("B", "A", "C", "D")  # both first used by op1: as the graph has them
    assert wire(FIGURE_4B, order="random", seed=1) != wire(FIGURE_4B, order="random", seed=2)
    for order in ORDERS[1:]:
        made = plan(FIGURE_1.graph, FIGURE_1.costs, FIGURE_1.machine, "transfers", order=order)
        assert made.planner == f"transfers-{order}"


def test_unknown_options():
    refused(r"expected order to be one of auto, tic, tac, .*, got 'best'", wire, FIGURE_1, order="best")
    refused(r"expected seed to be a whole number, got 1\.5", wire, FIGURE_1, order="random", seed=1.5)


def test_where_nothing_can_be_gained_nothing_is_ordered_and_it_says_so(caplog):
    slow_wire = step({"B": 4000.0, "A": 4000.0}, {"a": (3.0, "A"), "b": (4.0, "B a")})
    with caplog.at_level(logging.INFO, logger="hocket.planning.transfers.planner"):
        made = plan(slow_wire.graph, slow_wire.costs, slow_wire.machine, "transfers")
    assert made.planner == "transfers-unordered"
    assert [lane.ops for lane in made.lanes if lane.kind == "channel"] == [("B", "A")]
    assert "transfers are not ordered: no order can gain more than 0.1% over another" in caplog.text
    assert wire(slow_wire, order="tac") == ("A", "B")  # who asks for an order gets it


def test_efficiency_and_potential_of_figure_1():
    limits = bounds(FIGURE_1.graph, FIGURE_1.costs, FIGURE_1.machine)
    assert (limits.upper_us, limits.lower_us) == (19.0, 15.0)  # recv1, op1, op2 is the longest chain
    assert potential(limits) == pytest.approx(4 / 15)
    for order, expected in (("tac", 1.0), ("fifo", 0.0)):
        made = plan(FIGURE_1.graph, FIGURE_1.costs, FIGURE_1.machine, "transfers", order=order)
        timeline = simulate(FIGURE_1.graph, made, FIGURE_1.costs, FIGURE_1.machine)
        assert efficiency(timeline, limits) == expected


def test_gradients_are_sent_as_soon_as_they_are_there():
    parameters = ["w1", "w2"]
    ops = [Op(name, role="recv", size_bytes=20.0) for name in parameters]
    ops += [Op("f1"), Op("f2"), Op("g2"), Op("g1"), *(Op(f"send{n}", role="send", size_bytes=9.0) for n in (1, 2))]
    edges = [("w1", "f1"), ("w2", "f2"), ("f1", "f2"), ("f2", "g2"), ("g2", "g1"), ("g2", "send2"), ("g1", "send1")]
    graph = Graph(tuple(ops), tuple(Edge(*edge) for edge in edges))
    machine = Machine(ONE_CORE.devices, (Link("server", "cpu0", 1e6), Link("cpu0", "server", 1e6)))
    costs = Costs({name: {"1": 10.0} for name in ("f1", "f2", "g1", "g2")})
    made = plan(graph, costs, machine, "transfers")
    check(graph, made, machine)
    lanes = {lane.device: lane.ops for lane in made.lanes}
    assert lanes["server->cpu0"] == ("w1", "w2")
    assert lanes["cpu0->server"] == ("send2", "send1")
    assert simulate(graph, made, costs, machine).by_op["send2"].start_us == 60.0


def test_gradients_that_are_sent_are_computed_before_longer_chains_go_on():
    """Two narrow lanes end what is computed earlier, but the link waits for gradients while they run both chains."""
    layers, chain = (3, 2, 1), ("b3", "b2", "b1")
    ops = [Op("w", role="recv", size_bytes=1.0), Op("f")]
    ops += [op for n in layers for op in (Op(f"a{n}"), Op(f"g{n}"), Op(f"send{n}", role="send", size_bytes=20.0))]
    ops += map(Op, chain)
    edges = [("w", "f"), *pairwise(("f", "a3", "a2", "a1")), *pairwise(("f", *chain))]
    edges += [pair for n in layers for pair in ((f"a{n}", f"g{n}"), (f"g{n}", f"send{n}"))]
    graph = Graph(tuple(ops), tuple(Edge(*edge) for edge in edges))
    machine = Machine(Machine.of(cores=2).devices, (Link("server", "cpu0", 1e6), Link("cpu0", "server", 1e6)))
    costs = Costs({op.name: {"1": 10.0, "2": 6.1} for op in ops if op.role == "other"})
    made = plan(graph, costs, machine, "transfers")
    assert made.lanes[0].ops == ("f", "a3", "g3", "a2", "g2", "a1", "g1", *chain)
    assert simulate(graph, made, costs, machine).makespan_us == pytest.approx(1.0 + 3 * 6.1 + 3 * 20.0)


def test_on_a_gpu():
    graph = Graph(FIGURE_1.graph.ops, FIGURE_1.graph.edges)
    costs = Costs({"op1": {"gpu0": 6.0}, "op2": {"gpu0": 5.0}})
    machine = Machine((Device("gpu0", "cuda", 4),), (Link("server", "gpu0", 1e6),))
    made = plan(graph, costs, machine, "transfers")
    check(graph, made, machine)
    assert {lane.kind: lane.ops for lane in made.lanes} == {"stream": ("op1", "op2"), "channel": ("recv1", "recv2")}


@given(data=st.data())
def test_two_servers_and_two_cores(data):
    found = random_step(data.draw(st.integers(0, 10_000)))
    links = (Link("a", "cpu0", 1e6), Link("b", "cpu0", data.draw(st.floats(1e5, 1e7))))
    machine = Machine(Machine.of(cores=2).devices, links)
    order = data.draw(st.sampled_from(["auto", "tac", "tic", "layer", "random"]))
    made = plan(found.graph, found.costs, machine, "transfers", order=order)
    check(found.graph, made, machine)
    limits = bounds(found.graph, found.costs, machine)
    assert simulate(found.graph, made, found.costs, machine).makespan_us >= limits.lower_us * (1 - 1e-9)
