import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.errors import PlanError
from hocket.ir import Device, Edge, Graph, Lane, Link, Machine, Op, Plan
from invariants import illegality
from strategies import legal_cases, mutated_plans
from support.refusals import fails

MACHINE = Machine(
    (Device("cpu0", cores=4), Device("smt", cores=2, smt=2), Device("gpu0", "cuda", cores=80)), (Link("s", "w", 1e6),)
)
AB = Graph((Op("a"), Op("b")), (Edge("a", "b"),))


@given(case=legal_cases())
def test_legal_plans_pass(case):
    assert illegality(case.graph, case.plan, case.machine) is None
    assert check(case.graph, case.plan, case.machine) is None
    assert check(case.graph, case.plan) is None


@given(data=st.data())
def test_refuses_what_brute_force_refuses_and_nothing_else(data):
    case = data.draw(legal_cases(max_ops=7))
    plan = data.draw(mutated_plans(case))
    for machine in (case.machine, None):
        if illegality(case.graph, plan, machine) is None:
            check(case.graph, plan, machine)
        else:
            with pytest.raises(PlanError) as caught:
                check(case.graph, plan, machine)
            assert caught.value.op is not None
            assert repr(caught.value.op) in str(caught.value)


def test_every_op_once_and_nothing_else():
    fails(PlanError, "op 'b' of the graph is run by no lane", check, AB, Plan((Lane("x", ("a",)),)))
    with pytest.raises(PlanError, match="lane 'x' runs op 'c', which the graph does not have") as caught:
        check(AB, Plan((Lane("x", ("a", "b", "c")),)))
    assert (caught.value.op, caught.value.lane) == ("c", "x")


def test_deadlocks_between_lanes_are_named():
    graph = Graph(tuple(Op(name) for name in "abcd"), (Edge("a", "b"), Edge("c", "d")))
    with pytest.raises(PlanError, match="deadlock: ") as caught:
        check(graph, Plan((Lane("x", ("d", "a")), Lane("y", ("b", "c")))))
    for part in ("b' depends on 'a'", "c' comes after 'b' on lane 'y'", "d' depends on 'c'", "a' comes after 'd' on"):
        assert f"op '{part}" in str(caught.value)
    with pytest.raises(PlanError, match="op 'a' waits for 'b' by the plan"):
        check(AB, Plan((Lane("x", ("a",)), Lane("y", ("b",))), {"a": ("b",)}))
    fails(PlanError, "op 'a' waits for 'a' by the plan", check, AB, Plan((Lane("x", ("a", "b")),), {"a": ("a",)}))


BAD_LANES = {
    "the machine has no device 'cpu7', only cpu0, smt, gpu0": Lane("x", device="cpu7"),
    "a lane of cores needs a cpu device, and 'gpu0' is a cuda": Lane("x", device="gpu0"),
    "a stream needs a cuda device, and 'cpu0' is a cpu": Lane("x", kind="stream", device="cpu0"),
    "no link from 'w' to 's'": Lane("x", kind="channel", device="w->s"),
    "width 5, but 'cpu0' has 4 cores": Lane("x", width=5),
    "width 5, but 'smt' has 2 cores of 2 threads": Lane("x", device="smt", width=5),
    "pinned to core 4, but 'cpu0' has 4 cores, counted from 0": Lane("x", width=2, cores=(0, 4)),
    "width 2 does not fit the 1 cores it is pinned to": Lane("x", width=2, cores=(0,)),
    "width 1 does not fit the 2 cores it is pinned to": Lane("x", width=1, cores=(0, 1)),
    "width 3 does not fit the 1 cores it is pinned to": Lane("x", device="smt", width=3, cores=(1,)),
}


@pytest.mark.parametrize("problem", BAD_LANES)
def test_lanes_that_the_machine_does_not_have(problem):
    lane = BAD_LANES[problem]
    plan = Plan((Lane("x", ("a", "b"), lane.kind, lane.device, lane.width, lane.cores),))
    with pytest.raises(PlanError) as caught:
        check(AB, plan, MACHINE)
    assert problem in str(caught.value)
    assert "lane 'x' (it runs 'a')" in str(caught.value)
    check(AB, plan)


@pytest.mark.parametrize(
    "lane",
    [
        Lane("x", width=4),
        Lane("x", width=2, cores=(1, 3)),
        Lane("x", device="smt", width=4),
        Lane("x", device="smt", width=2, cores=(1,)),
        Lane("x", kind="stream", device="gpu0", priority=1),
        Lane("x", kind="channel", device="s->w"),
    ],
)
def test_lanes_that_the_machine_has(lane):
    check(AB, Plan((Lane("x", ("a", "b"), lane.kind, lane.device, lane.width, lane.cores, lane.priority),)), MACHINE)


def test_an_empty_lane_is_looked_at_too():
    with pytest.raises(PlanError, match="lane 'spare': the machine has no device 'cpu7'"):
        check(AB, Plan((Lane("x", ("a", "b")), Lane("spare", device="cpu7"))), MACHINE)


@pytest.mark.parametrize(("role", "link"), [("recv", "cpu0->server"), ("send", "server->cpu0")])
def test_a_link_that_leads_the_other_way(role, link):
    machine = Machine(MACHINE.devices, (Link("cpu0", "server", 1.0), Link("server", "cpu0", 1.0)))
    graph = Graph((Op("a", role=role),))
    with pytest.raises(PlanError, match=f"op 'a' is a {role}, and lane 'net' leads the other way: {link}"):
        check(graph, Plan((Lane("net", ("a",), "channel", link),)), machine)
    back = "->".join(reversed(link.split("->")))
    check(graph, Plan((Lane("net", ("a",), "channel", back),)), machine)


def test_a_channel_carries_no_computation():
    graph = Graph((Op("a", role="forward"),))
    with pytest.raises(PlanError, match="op 'a' has the role 'forward', but lane 'net' is a channel"):
        check(graph, Plan((Lane("net", ("a",), "channel", "s->w"),)))


FOUR_CORES = Machine((Device("cpu0", cores=4), Device("cpu1", cores=4)))
ABC = Graph((Op("a"), Op("b"), Op("c")))


def narrow(name: str, ops: tuple[str, ...], core: int, device: str = "cpu0") -> Lane:
    return Lane(name, ops, device=device, width=1, cores=(core,))


def test_two_lanes_on_one_core():
    lanes = (narrow("x", ("a", "b"), 0), narrow("y", ("c",), 0))
    with pytest.raises(PlanError, match=r"ops '[ab]' \(lane 'x', cores 0\) and 'c' \(lane 'y', cores 0\) share|'c'"):
        check(ABC, Plan(lanes))
    fails(PlanError, "share a core of 'cpu0', and nothing orders them", check, ABC, Plan(lanes, {"c": ("a",)}))
    check(ABC, Plan(lanes, {"c": ("b",)}))
    check(ABC, Plan(lanes, {"c": ("a",), "b": ("c",)}))


def test_an_edge_orders_as_well_as_after():
    graph = Graph(ABC.ops, (Edge("b", "c"),))
    check(graph, Plan((narrow("x", ("a", "b"), 0), narrow("y", ("c",), 0))))


def test_an_order_by_way_of_a_third_lane():
    graph = Graph((Op("a"), Op("b"), Op("c"), Op("d")), (Edge("a", "b"), Edge("c", "d")))
    lanes = (narrow("x", ("a",), 0), narrow("far", ("b", "c"), 1), narrow("y", ("d",), 0))
    check(graph, Plan(lanes))
    with pytest.raises(PlanError, match=r"'a'.*'d'|'d'.*'a'"):
        check(graph, Plan((lanes[0], narrow("far", ("b",), 1), narrow("away", ("c",), 2), lanes[2])))


def test_sharing_is_not_transitive():
    lanes = (
        Lane("left", ("a",), width=2, cores=(0, 1)),
        Lane("middle", ("b",), width=2, cores=(1, 2)),
        Lane("right", ("c",), width=2, cores=(2, 3)),
    )
    check(ABC, Plan(lanes, {"b": ("a", "c")}))
    fails(PlanError, "'b'", check, ABC, Plan(lanes, {"b": ("a",)}))


def test_the_same_core_of_another_device_is_another_core():
    check(ABC, Plan((narrow("x", ("a", "b"), 0), narrow("y", ("c",), 0, "cpu1"))), FOUR_CORES)


def test_lanes_that_are_not_pinned_share_only_when_there_are_too_few_cores():
    loose = [Lane(f"lane{op}", (op,), width=2) for op in "abc"]
    check(ABC, Plan(tuple(loose)))
    fails(PlanError, "width 2, not pinned", check, ABC, Plan(tuple(loose)), FOUR_CORES)
    check(ABC, Plan(tuple(loose), {"b": ("a",), "c": ("b",)}), FOUR_CORES)
    check(ABC, Plan((loose[0], loose[1], narrow("z", ("c",), 0, "cpu1"))), FOUR_CORES)
    with pytest.raises(PlanError, match="not pinned"):
        check(ABC, Plan((loose[0], loose[1], narrow("z", ("c",), 0))), FOUR_CORES)


def test_threads_of_a_core_count_for_lanes_that_are_not_pinned():
    machine = Machine.of(cores=3, smt=2)
    loose = tuple(Lane(f"lane{op}", (op,), width=2) for op in "abc")
    check(ABC, Plan(loose), machine)
    check(ABC, Plan((loose[0], loose[1], narrow("z", ("c",), 0))), machine)
    with pytest.raises(PlanError, match="share a core"):  # a pinned lane has both threads of its core
        check(ABC, Plan((loose[0], Lane("y", ("b",), width=3), narrow("z", ("c",), 0))), machine)


def test_many_lanes_are_checked_quickly():
    count, width = 20_000, 16
    ops = [f"op{i}" for i in range(count)]
    graph = Graph(tuple(map(Op, ops)), tuple(Edge(a, b) for a, b in pairwise(ops)))
    lanes = [narrow(f"n{i}", tuple(ops[i :: width + 1]), i) for i in range(width)]
    wide = Lane("wide", tuple(ops[width :: width + 1]), width=width, cores=tuple(range(width)))
    begin = time.perf_counter()
    check(graph, Plan((*lanes, wide)), Machine.of(cores=width))
    assert time.perf_counter() - begin < 10.0
