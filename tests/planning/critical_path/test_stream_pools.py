"""Memory of streams whose pools serve no other stream, and plans that keep a limit on it."""

from __future__ import annotations

import random

import pytest

from hocket.ir import Buffer, Costs, Edge, Graph, Lane, Machine, Op, Plan
from hocket.planning import plan
from hocket.planning.critical_path import serial_peak_bytes
from hocket.planning.critical_path.stream_pools import pool_bytes

A100 = Machine.preset("a100")


def layered(num_layers: int, size_bytes: float = 1e6) -> Graph:
    """Forward and backward of a chain, in which each layer's activation is read once more in its backward."""
    layers = range(num_layers)
    forward = [
        Op(f"f{n}", role="forward", layer=str(n), reads=(f"x{n}",), writes=(f"x{n + 1}",), flops=1e9) for n in layers
    ]
    backward = []
    edges = [Edge(f"f{n}", f"f{n + 1}", size_bytes) for n in layers[:-1]]
    edges.append(Edge(f"f{num_layers - 1}", f"a{num_layers - 1}", size_bytes))
    for n in reversed(layers):
        given = f"d{n + 1}" if n < num_layers - 1 else f"x{num_layers}"
        backward.append(Op(f"a{n}", role="activation_grad", layer=str(n), reads=(given,), writes=(f"d{n}",), flops=1e9))
        backward.append(
            Op(f"w{n}", role="weight_grad", layer=str(n), reads=(given, f"x{n}"), writes=(f"g{n}",), flops=1e9)
        )
        edges.append(Edge(f"a{n + 1}" if n < num_layers - 1 else f"f{n}", f"w{n}", size_bytes))
        if n:
            edges.append(Edge(f"f{n - 1}", f"w{n}", size_bytes))
        if n < num_layers - 1:
            edges.append(Edge(f"a{n + 1}", f"a{n}", size_bytes))
    buffers = [Buffer("x0", size_bytes, "input")]
    buffers += [Buffer(f"x{n + 1}", size_bytes) for n in layers]
    buffers += [Buffer(f"d{n}", size_bytes) for n in layers]
    buffers += [Buffer(f"g{n}", size_bytes / 10, "kept") for n in layers]
    return Graph((*forward, *backward), tuple(dict.fromkeys(edges)), buffers=tuple(buffers))


def test_on_one_stream_it_is_eagers_peak() -> None:
    graph = layered(6)
    assert pool_bytes(graph, Plan((Lane("s", graph.order),))) == pytest.approx(serial_peak_bytes(graph))


@pytest.mark.parametrize("seed", range(20))
def test_more_streams_never_need_less_than_what_is_alive_at_once(seed: int) -> None:
    graph, chance = layered(5), random.Random(seed)
    lanes: list[list[str]] = [[], [], []]
    for name in graph.order:
        chance.choice(lanes).append(name)
    made = Plan(tuple(Lane(f"s{n}", tuple(ops)) for n, ops in enumerate(lanes)))
    allocated = sum(buffer.size_bytes for buffer in graph.buffers)
    assert serial_peak_bytes(graph) * 0.9 <= pool_bytes(graph, made) <= allocated


@pytest.mark.parametrize("limit", [1.0, 1.05, 1.1, 1.3])
def test_a_plan_on_a_gpu_keeps_its_limit_in_pools(limit: float) -> None:
    graph = layered(12)
    costs = Costs({op.name: {"gpu0": 10.0} for op in graph.ops})
    eager_bytes = serial_peak_bytes(graph)
    made = plan(graph, costs, A100, planner="critical-path", peak_limit_bytes=limit * eager_bytes)
    assert pool_bytes(graph, made) <= limit * eager_bytes * (1 + 1e-6)
    assert made.peak_bytes == pytest.approx(pool_bytes(graph, made), abs=1.0)
