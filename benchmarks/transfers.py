"""Orders of transfers, by simulation: ``python -m benchmarks transfers``.

A worker's step is that of a zoo model: a recv for each parameter before the op that reads it first, and a send for each
parameter's gradient before its update, which runs at the server and so is left out. Links to the servers are scaled so
that receiving takes as long as computing; each model also runs with half and twice its batch, over the same links.

Workers that run the same plan at the same time all have the same part of each server's card, so one worker is simulated
for many. With random orders each is simulated alone, and the step ends with the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.bench import Save, columns_of, table_of, unsaved
from hocket.ir import Costs, Edge, Graph, Link, Machine, NetworkCard, Op
from hocket.planning import bounds, efficiency, plan, potential
from hocket.planning.transfers.orders import random_order, tac_order
from hocket.planning.transfers.receives import Receives, receives_of
from hocket.profiling.analytic import estimate
from hocket.simulation import simulate
from hocket.tracing import capture
from hocket.zoo import load

# The paper's Table 1, and ResNet-152. GoogLeNet is Inception v1.
NAMES = (
    *("alexnet", "googlenet", "inception-v2", "inception-v3", "resnet50", "resnet101", "resnet50-v2", "resnet101-v2"),
    *("vgg16", "vgg19", "resnet152"),
)
# The paper's factors of the batch size (section 6.1, "Scaling the computational load").
BATCH_FACTORS = (0.5, 1.0, 2.0)
BATCH_SIZE = 4
SERVERS, LATENCY_US = 4, 50.0
ORDERS = ("auto", "tac", "tic", "layer", "random", "reverse")
# Estimates are for one CPU core of this rate; only their proportions matter, since links are scaled to them.
FLOPS_PER_S = 5e10
BYTES_PER_S = 1e10


def with_transfers(graph: Graph) -> Graph:
    """A captured step as a worker has it: parameters are received, gradients are sent, and updates run elsewhere."""
    kept = [op for op in graph.ops if op.role != "update"]
    names = {op.name for op in kept}
    size = {buffer.name: buffer.size_bytes for buffer in graph.buffers if buffer.life == "lasting"}
    changed = {buffer for op in graph.ops if op.role == "update" for buffer in op.writes}
    recvs: dict[str, Op] = {}
    edges = [edge for edge in graph.edges if edge.src in names and edge.dst in names]
    for op in kept:
        for buffer in op.reads:
            if buffer in size and buffer in changed:
                recv = recvs.setdefault(buffer, Op(f"recv:{buffer}", role="recv", size_bytes=size[buffer]))
                edges.append(Edge(recv.name, op.name, size[buffer]))
    sends = []
    for edge in graph.edges:
        if graph[edge.src].role in ("weight_grad", "bias_grad") and graph[edge.dst].role == "update":
            sends.append(Op(f"send:{edge.src}>{edge.dst}", role="send", size_bytes=edge.size_bytes))
            edges.append(Edge(edge.src, sends[-1].name, edge.size_bytes))
    bare = (replace(op, reads=(), writes=()) for op in kept)
    return Graph((*recvs.values(), *bare, *sends), tuple(dict.fromkeys(edges)))


def worker_machine(card_bytes_per_s: float, workers: int = 1, servers: int = 1) -> Machine:
    """One of the workers of a cluster in which all do the same: its links have its part of each server's card."""
    links = []
    for server in range(servers):
        ends = (f"server{server}", "cpu0")
        for pair, card in ((ends, "in"), (ends[::-1], "out")):
            links.append(Link(*pair, card_bytes_per_s / workers, LATENCY_US, cards=(card,)))
    cards = tuple(NetworkCard(name, card_bytes_per_s) for name in ("in", "out"))
    return Machine(Machine.of(cores=1).devices, tuple(links), cards=cards)


def straggler_share(receives: Receives, workers: int, order: Callable[[int], Sequence[int]]) -> dict[str, float]:
    """Duration of the slowest worker by the n-th's order, and the share of it that the fastest one waits."""
    takes_us = [receives.makespan_us(order(number)) for number in range(workers)]
    last_us = max(takes_us)
    return {"step_us": last_us, "straggler_share": (last_us - min(takes_us)) / last_us}


def run(
    targets: Sequence[str] = NAMES, workers: int = 1024, image_size: int = 64, save: Save = unsaved
) -> dict[str, Any]:
    """Simulate every order on every model, and many workers on each."""
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"workers": workers, "image_size": image_size, "models": rows}
    for name in targets:
        side = max(image_size, {"alexnet": 67, "inception-v3": 75}.get(name, 32))
        whole_us = _compute_us(*_step(name, BATCH_SIZE, side))
        for factor in BATCH_FACTORS:
            graph, costs = _step(name, int(BATCH_SIZE * factor), side)
            ratio = whole_us / _compute_us(graph, costs)
            row = {"model": name, "batch_factor": factor, "communication_to_computation": ratio}
            rows.append(row | _simulated(graph, costs, whole_us, workers))
        save(result)
    return result


def _step(name: str, batch_size: int, image_size: int) -> tuple[Graph, Costs]:
    """A worker's step, and estimates for the ops that compute."""
    job = load(name, batch_size=batch_size, image_size=image_size, num_batches=1)
    rates = Machine.of(cores=1).with_rates("cpu0", flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S)
    graph = with_transfers(capture(job.step, job.model, job.optimizer, job.batch(0)).graph)
    return graph, estimate(graph, rates).restricted([op.name for op in graph.ops if op.role not in ("recv", "send")])


def _compute_us(graph: Graph, costs: Costs) -> float:
    return sum(costs.duration_us(op.name) for op in graph.ops if op.name in costs)


def _simulated(graph: Graph, costs: Costs, receiving_us: float, workers: int) -> dict[str, Any]:
    """Every order, over a link that carries the parameters in `receiving_us`, and many workers."""
    received_bytes = sum(op.size_bytes for op in graph.ops if op.role == "recv")
    card_bytes_per_s = received_bytes / receiving_us * 1e6
    machine = worker_machine(card_bytes_per_s)
    begin_s = time.perf_counter()
    receives = receives_of(graph, costs, machine)
    tac_order(receives)
    tac_ms = (time.perf_counter() - begin_s) * 1e3
    limits = bounds(graph, costs, machine)
    orders = {}
    for order in ORDERS:
        timeline = simulate(graph, plan(graph, costs, machine, "transfers", order=order), costs, machine)
        orders[order] = {"step_us": timeline.makespan_us, "efficiency": efficiency(timeline, limits)}
    # The servers' cards together give each of many workers what one worker had alone.
    shared = receives_of(graph, costs, worker_machine(card_bytes_per_s * workers / SERVERS, workers, SERVERS))
    best = tac_order(shared)
    return {
        "ops": len(graph),
        "recvs": len(receives),
        "received_mib": received_bytes / 2**20,
        "tac_ms": tac_ms,
        "potential": potential(limits),
        "orders": orders,
        "cluster": {
            "tac": straggler_share(shared, workers, lambda _: best),
            "random": straggler_share(shared, workers, lambda number: random_order(shared, number)),
        },
    }


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = []
    for row in result["models"]:
        best_us = row["orders"]["auto"]["step_us"]
        rows.append({**row, "to_auto": {order: row["orders"][order]["step_us"] / best_us for order in ORDERS}})
    columns = {
        **{"model": "{model}", "batch": "{batch_factor:g}", "recvs": "{recvs}", "TAC ms": "{tac_ms:.0f}"},
        **{"potential": "{potential:.2f}", **columns_of("to_auto", ORDERS, ".3f")},
        "stragglers": "{cluster[tac][straggler_share]:.0%}",
        "random's": "{cluster[random][straggler_share]:.0%}",
    }
    yield table_of(f"step time over auto's, simulated; {result['workers']} workers", columns, rows)
