"""Lanes that share cores: their ops must be ordered, by edges, `after` or the lanes themselves."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from hocket.checking import check
from hocket.errors import PlanError
from hocket.ir import Device, Edge, Graph, Lane, Machine, Op, Plan

MACHINE = Machine((Device("cpu0", cores=4), Device("cpu1", cores=4)))
ABC = Graph((Op("a"), Op("b"), Op("c")))


def narrow(name: str, ops: tuple[str, ...], core: int, device: str = "cpu0") -> Lane:
    return Lane(name, ops, device=device, width=1, cores=(core,))


def test_two_lanes_on_one_core():
    lanes = (narrow("x", ("a", "b"), 0), narrow("y", ("c",), 0))
    with pytest.raises(PlanError, match=r"ops '[ab]' \(lane 'x', cores 0\) and 'c' \(lane 'y', cores 0\) share|'c'"):
        check(ABC, Plan(lanes))
    with pytest.raises(PlanError, match="share a core of 'cpu0', and nothing orders them"):
        check(ABC, Plan(lanes, {"c": ("a",)}))
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
    with pytest.raises(PlanError, match="'b'"):
        check(ABC, Plan(lanes, {"b": ("a",)}))


def test_the_same_core_of_another_device_is_another_core():
    check(ABC, Plan((narrow("x", ("a", "b"), 0), narrow("y", ("c",), 0, "cpu1"))), MACHINE)


def test_lanes_that_are_not_pinned_share_only_when_there_are_too_few_cores():
    loose = [Lane(f"lane{op}", (op,), width=2) for op in "abc"]
    check(ABC, Plan(tuple(loose)))
    with pytest.raises(PlanError, match="width 2, not pinned"):
        check(ABC, Plan(tuple(loose)), MACHINE)
    check(ABC, Plan(tuple(loose), {"b": ("a",), "c": ("b",)}), MACHINE)
    check(ABC, Plan((loose[0], loose[1], narrow("z", ("c",), 0, "cpu1"))), MACHINE)
    with pytest.raises(PlanError, match="not pinned"):
        check(ABC, Plan((loose[0], loose[1], narrow("z", ("c",), 0))), MACHINE)


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
