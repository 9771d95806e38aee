"""Streams that share a GPU: against a naive simulation, and worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import InputError
from hocket.ir import Costs, Device, Edge, Graph, Lane, Link, Machine, NetworkCard, Op, Plan, Share
from hocket.simulation import LAUNCHES, simulate
from hocket.simulation.contention import max_min_rates
from invariants import naive_gpu_simulation
from strategies import gpu_cases

GPU = Machine((Device("gpu0", "cuda", 4, priorities=2),))


@given(case=gpu_cases(), launches=st.sampled_from(LAUNCHES))
def test_agrees_with_the_naive_simulator(case, launches):
    timeline = simulate(case.graph, case.plan, case.costs, case.machine, launches=launches)
    naive = naive_gpu_simulation(case.graph, case.plan, case.costs, case.machine, launches)
    for span in timeline.spans:
        assert (span.start_us, span.end_us) == pytest.approx(naive[span.op], rel=1e-6, abs=1e-6)


@given(case=gpu_cases())
def test_no_gpu_does_more_than_it_can(case):
    timeline = simulate(case.graph, case.plan, case.costs, case.machine)
    for device in case.machine.devices:
        for part in (0, 1):
            area_us = sum(
                case.costs.duration_us(op, device=device.name) * case.costs.shares[op][device.name][part]
                for lane in case.plan.lanes
                if lane.device == device.name
                for op in lane.ops
                if op in case.costs.shares
            )
            assert timeline.makespan_us >= area_us * (1 - 1e-9)


def streams(*priorities: int, ops: str = "ab") -> Plan:
    return Plan(tuple(Lane(op, (op,), "stream", "gpu0", priority=p) for op, p in zip(ops, priorities, strict=True)))


def times(
    plan: Plan, shares: dict[str, Share], durations: dict[str, float], edges=()
) -> dict[str, tuple[float, float]]:
    graph = Graph(tuple(Op(op) for op in durations), tuple(Edge(*edge) for edge in edges))
    costs = Costs(
        {op: {"gpu0": us} for op, us in durations.items()}, shares={op: {"gpu0": s} for op, s in shares.items()}
    )
    timeline = simulate(graph, plan, costs, GPU)
    return {span.op: (span.start_us, span.end_us) for span in timeline.spans}


def test_kernels_that_fit_run_side_by_side_and_others_divide():
    assert times(streams(0, 0), {"a": Share(0.5), "b": Share(0.5)}, {"a": 10, "b": 10})["b"] == (0, 10)
    # b asks for 0.8 and gets 0.4 while a runs: 5 of its 10 us are done by then.
    assert times(streams(0, 0), {"a": Share(0.6), "b": Share(0.8)}, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (0, 15)}


def test_bandwidth_runs_out_as_well():
    shares = {"a": Share(0.1, 0.75), "b": Share(0.1, 0.5)}
    assert times(streams(0, 0), shares, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (0, 15)}


def test_priority_decides_and_among_equals_whoever_was_first():
    full = {"a": Share(1.0), "b": Share(1.0)}
    assert times(streams(0, 0), full, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (10, 20)}
    assert times(streams(0, 1), full, {"a": 10, "b": 10}) == {"a": (10, 20), "b": (0, 10)}


def test_a_late_kernel_of_higher_priority_takes_its_part_at_once():
    shares = {"a": Share(1.0), "b": Share(1.0), "c": Share(0.2)}
    found = times(
        Plan((Lane("low", ("a",), "stream", "gpu0"), Lane("high", ("c", "b"), "stream", "gpu0", priority=1))),
        shares,
        {"a": 10.0, "b": 10.0, "c": 5.0},
    )
    assert found["c"] == (0, 5)
    assert found["b"] == (5, 15)
    assert found["a"] == (0, 21)  # 4 of its 10 us beside c, nothing beside b


def test_an_op_without_a_share_is_in_nobodys_way():
    assert times(streams(0, 0), {"a": Share(1.0)}, {"a": 10, "b": 10}) == {"a": (0, 10), "b": (0, 10)}


def test_launches_hold_an_op_back_and_events_delay_it():
    machine = Machine((Device("gpu0", "cuda", 4, launch_us=5.0, graph_launch_us=1.0, event_us=2.0),))
    graph = Graph((Op("a"), Op("b"), Op("c")), (Edge("a", "c"),))
    plan = Plan((Lane("x", ("a", "b"), "stream", "gpu0"), Lane("y", ("c",), "stream", "gpu0")))
    costs = Costs({op: {"gpu0": 3.0} for op in "abc"})

    def starts(launches: str, *outside: str) -> list[float]:
        spans = simulate(graph, plan, costs, machine, launches=launches, outside=outside).by_op
        return [spans[op].start_us for op in "abc"]

    assert starts("free") == [0.0, 3.0, 3.0]
    assert starts("eager") == [5.0, 10.0, 15.0]
    assert starts("graph") == [1.0, 4.0, 6.0]
    assert starts("graph", "b") == [1.0, 6.0, 7.0], "b is launched by itself, and c after it"
    with pytest.raises(InputError, match="expected launches to be one of free, eager, graph, got 'lazy'"):
        simulate(graph, plan, costs, machine, launches="lazy")


def test_lanes_of_cores_are_not_launched():
    machine = Machine((Device("cpu0"), Device("gpu0", "cuda", 4, launch_us=5.0, event_us=2.0)))
    graph = Graph((Op("a"), Op("b")), (Edge("a", "b"),))
    plan = Plan((Lane("x", ("a",)), Lane("y", ("b",), "stream", "gpu0")))
    timeline = simulate(graph, plan, Costs({op: {"1": 9.0} for op in "ab"}), machine, launches="eager")
    assert timeline.by_op["a"].start_us == 0.0
    assert timeline.by_op["b"].start_us == 11.0


def fed(links: dict[str, list[float]], rates: dict[str, float], card: float, latency_us: float = 0.0):
    """Spans of transfers of some bytes from one server, whose card is shared, to workers over a link each."""
    ops, lanes = [], []
    for worker, sizes in links.items():
        names = [f"{worker}{n}" for n in range(len(sizes))]
        ops += [Op(name, role="recv", size_bytes=size) for name, size in zip(names, sizes, strict=True)]
        lanes.append(Lane(worker, tuple(names), "channel", f"server->{worker}"))
    machine = Machine(
        Machine.of(cores=1).devices,
        tuple(Link("server", worker, rates[worker], latency_us, cards=("card",)) for worker in links),
        cards=(NetworkCard("card", card),),
    )
    found = simulate(Graph(tuple(ops)), Plan(tuple(lanes)), Costs({}), machine)
    return {span.op: (span.start_us, span.end_us) for span in found.spans}


@pytest.mark.parametrize(
    ("sizes", "rates", "latency_us", "ends_us"),
    [
        ([100.0, 300.0], [1e6, 1e6], 0.0, [200.0, 400.0]),  # half the card each, and the last one all of it
        ([90.0, 90.0, 10.0], [1e6, 1e6, 1e5], 0.0, [190.0, 190.0, 100.0]),  # others have 0.45 for 100, then 0.5
        ([100.0, 100.0], [1e6, 1e6], 30.0, [230.0, 230.0]),  # latency uses no card
    ],
)
def test_workers_share_a_card_as_far_as_their_links_go(sizes, rates, latency_us, ends_us):
    links = {name: [size] for name, size in zip("abc", sizes, strict=False)}
    spans = fed(links, dict(zip("abc", rates, strict=False)), card=1e6, latency_us=latency_us)
    assert list(spans.values()) == [(0.0, end_us) for end_us in ends_us]


def test_a_link_queues_on_its_channels_and_its_card():
    ops = tuple(Op(name, role="recv", size_bytes=100.0) for name in "abc")
    lanes = tuple(Lane(name, (name,), "channel", "s->w") for name in "abc")
    machine = Machine(
        Machine.of(cores=1).devices,
        (Link("s", "w", 1e6, channels=2, cards=("card",)),),
        cards=(NetworkCard("card", 1e6),),
    )
    found = simulate(Graph(ops), Plan(lanes), Costs({}), machine)
    assert {span.op: (span.start_us, span.end_us) for span in found.spans} == {
        "a": (0.0, 200.0),
        "b": (0.0, 200.0),
        "c": (200.0, 300.0),
    }


def test_streams_share_a_gpu_while_transfers_share_a_card():
    links = tuple(Link("s", worker, 1e6, cards=("card",)) for worker in "xy")
    machine = Machine(GPU.devices, links, cards=(NetworkCard("card", 1e6),))
    ops = (Op("a"), Op("b"), Op("r", role="recv", size_bytes=100.0), Op("q", role="recv", size_bytes=300.0))
    lanes = (Lane("x", ("r",), "channel", "s->x"), Lane("y", ("q",), "channel", "s->y"))
    shares = {"a": {"gpu0": Share(0.6)}, "b": {"gpu0": Share(0.8)}}
    costs = Costs({op: {"gpu0": 10.0} for op in "ab"}, shares=shares)
    found = simulate(Graph(ops), Plan((*streams(0, 0).lanes, *lanes)), costs, machine)
    assert {span.op: span.end_us for span in found.spans} == {"a": 10.0, "b": 15.0, "r": 200.0, "q": 400.0}


def test_a_card_as_fast_as_all_its_links_changes_nothing():
    ops = (Op("r", role="recv", size_bytes=100.0), Op("q", role="recv", size_bytes=50.0), Op("f"))
    graph = Graph(ops, (Edge("r", "f"), Edge("q", "f")))
    plan = Plan((Lane("w", ("r", "q"), "channel", "s->w"), Lane("c", ("f",))))
    costs = Costs({"f": {"1": 7.0}})
    plain = Machine(Machine.of(cores=1).devices, (Link("s", "w", 3e6, 1.0),))
    carded = Machine(plain.devices, (Link("s", "w", 3e6, 1.0, cards=("n",)),), cards=(NetworkCard("n", 3e6),))
    one, other = [simulate(graph, plan, costs, machine) for machine in (plain, carded)]
    assert other.makespan_us == pytest.approx(one.makespan_us, rel=1e-12)


@given(data=st.data())
def test_max_min_rates_are_fair_and_leave_nothing(data):
    cards = {name: data.draw(st.floats(1, 100)) for name in "xyz"}
    flows = data.draw(st.lists(st.tuples(st.floats(0.5, 100), st.sets(st.sampled_from("xyz"))), max_size=6))
    limits, passed = [limit for limit, _ in flows], [sorted(names) for _, names in flows]
    rates = max_min_rates(limits, passed, cards)
    used = {card: sum(rate for rate, names in zip(rates, passed, strict=True) if card in names) for card in cards}
    full = {card for card, us in used.items() if us >= cards[card] * (1 - 1e-9)}
    assert all(us <= cards[card] * (1 + 1e-9) for card, us in used.items())
    for rate, limit, names in zip(rates, limits, passed, strict=True):
        assert rate <= limit * (1 + 1e-9)
        # A transfer below the rate of its link has a full card, on which no transfer is faster.
        if rate < limit * (1 - 1e-9):
            assert any(
                all(rate >= other * (1 - 1e-9) for other, its in zip(rates, passed, strict=True) if card in its)
                for card in full.intersection(names)
            )
