"""Links with fewer channels than lanes: who queues, and who goes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Costs, Device, Edge, Graph, Lane, Link, Machine, Op, Plan
from hocket.simulation import simulate
from invariants import naive_simulation
from strategies import legal_cases


def machine(channels: int | None) -> Machine:
    return Machine((Device("cpu0", cores=4),), (Link("s", "w", 1e6, channels=channels),))


def transfers(count: int, channels: int | None) -> dict[str, tuple[float, float]]:
    """Transfers of 10 us each, one a lane."""
    names = [f"t{i}" for i in range(count)]
    graph = Graph(tuple(Op(name, role="recv", size_bytes=10.0) for name in names))
    plan = Plan(tuple(Lane(f"lane {i}".replace(" ", ""), (f"t{i}",), "channel", "s->w") for i in range(count)))
    timeline = simulate(graph, plan, Costs({}), machine(channels))
    return {span.op: (span.start_us, span.end_us) for span in timeline.spans}


@pytest.mark.parametrize(
    ("channels", "starts"),
    [(1, [0, 10, 20, 30]), (2, [0, 0, 10, 10]), (3, [0, 0, 0, 10]), (4, [0] * 4), (None, [0] * 4)],
)
def test_channels_run_side_by_side_and_the_next_queue(channels, starts):
    assert [start for start, _ in transfers(4, channels).values()] == starts


def test_who_was_ready_first_goes_first():
    graph = Graph(
        (Op("slow"), Op("quick"), *(Op(f"t{i}", role="recv", size_bytes=10.0) for i in range(3))),
        (Edge("slow", "t1"), Edge("quick", "t2")),
    )
    plan = Plan(
        (Lane("x", ("slow",)), Lane("y", ("quick",)), *(Lane(f"c{i}", (f"t{i}",), "channel", "s->w") for i in range(3)))
    )
    costs = Costs({"slow": {"1": 5.0}, "quick": {"1": 3.0}})
    timeline = simulate(graph, plan, costs, machine(1))
    assert [timeline.by_op[f"t{i}"].start_us for i in range(3)] == [0.0, 20.0, 10.0]


def test_two_links_do_not_queue_for_each_other():
    graph = Graph(tuple(Op(name, role="recv", size_bytes=10.0) for name in "abcd"))
    both = Machine((Device("cpu0"),), (Link("s", "w", 1e6), Link("r", "w", 1e6)))
    ends = {"a": "s->w", "b": "s->w", "c": "r->w", "d": "r->w"}
    plan = Plan(tuple(Lane(f"lane.{op}", (op,), "channel", device) for op, device in ends.items()))
    timeline = simulate(graph, plan, Costs({}), both)
    assert [timeline.by_op[op].start_us for op in "abcd"] == [0.0, 10.0, 0.0, 10.0]


# One device and one link whose lanes outnumber its channels, whole durations so that many instants coincide.
BUSY = st.builds(
    lambda channels: Machine((Device("cpu0", cores=4),), (Link("s", "w", 1e6, 1.0, channels),)), st.integers(1, 2)
)


@given(case=legal_cases(machines=BUSY), data=st.data())
def test_agrees_with_the_naive_simulator_where_instants_coincide(case, data):
    whole = st.integers(0, 3).map(float)
    costs = Costs({op.name: {"1": data.draw(whole)} for op in case.graph.ops})
    lanes = [Lane(f"net{i}", kind="channel", device="s->w") for i in range(3)]
    ops: list[list[str]] = [[] for _ in lanes]
    kept = []
    for lane in case.plan.lanes:  # move whatever may travel onto three lanes of one link
        travels = [op for op in lane.ops if case.graph[op].role in ("recv", "send", "other")]
        kept.append(Lane(lane.name, tuple(op for op in lane.ops if op not in travels), lane.kind, lane.device))
        for op in travels:
            ops[data.draw(st.integers(0, 2))].append(op)
    place = {op: at for at, op in enumerate(case.graph.order)}
    plan = Plan(
        tuple(
            Lane(lane.name, tuple(sorted(lane_ops, key=place.__getitem__)), lane.kind, lane.device)
            for lane, lane_ops in [(lane, lane.ops) for lane in kept] + list(zip(lanes, ops, strict=True))
        )
    )
    timeline = simulate(case.graph, plan, costs, case.machine)
    naive = naive_simulation(case.graph, plan, costs, case.machine)
    assert {span.op: (span.start_us, span.end_us) for span in timeline.spans} == naive
