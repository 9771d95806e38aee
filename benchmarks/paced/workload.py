"""The work of paced workers: a recorded step of a zoo model that sleeps to compute, and receives its parameters.

Each op is timed once on this machine; a worker of many then sleeps these times, for two cores cannot compute for eight
workers. Parameters of one layer travel as one value, as a wire would pack the small ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.transfers import Cluster, with_transfers, worker_machine
from hocket.ir import Edge, Graph, Op
from hocket.planning.transfers.insertion import searched_order
from hocket.planning.transfers.receives import Receives, receives_of
from hocket.profiling import profile
from hocket.tracing import capture
from hocket.zoo import load

PROFILE_RUNS = 3


@dataclass(frozen=True)
class Workload:
    """A step of one worker, scaled so that its parameters take a given time on its link.

    Attributes:
        receives: names, links and times of what is received, and the work that waits for it.
        sizes: bytes of each, in this order.
        planned: the order that the planner finds.
        scale: sizes over those of the model.
    """

    receives: Receives
    sizes: tuple[int, ...]
    planned: tuple[int, ...]
    scale: float

    @property
    def upper_us(self) -> float:
        """Everything one after another."""
        return sum(self.receives.times_us) + sum(self.receives.works_us)

    @property
    def lower_us(self) -> float:
        """The duration of the busier one of wire and computing."""
        links = [0.0] * len(self.receives.channels)
        for link, us in zip(self.receives.links, self.receives.times_us, strict=True):
            links[link] += us
        return max(*links, sum(self.receives.works_us))

    def efficiency(self, makespan_us: float) -> float:
        """TicTac's E of a step that takes so long."""
        return (self.upper_us - makespan_us) / (self.upper_us - self.lower_us)


def recorded(name: str, servers: int, bytes_per_s: float, receiving_s: float, **settings: Any) -> Workload:
    """Record a zoo model's step on this machine, and scale it.

    Args:
        name: of the model.
        servers: each sends its parameters at its part of the worker's rate.
        bytes_per_s: of a worker's link.
        receiving_s: how long all parameters take on it. Computing takes as long.
        settings: of the zoo entry.
    """
    job = load(name, **settings)
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    costs = profile(captured, widths=[1], runs=PROFILE_RUNS)
    graph = _by_layer(with_transfers(captured.graph))
    received = [op for op in graph.ops if op.role == "recv"]
    scale = bytes_per_s * receiving_s / sum(op.size_bytes for op in received)
    sizes = tuple(max(1, int(op.size_bytes * scale)) for op in received)
    scaled = dict(zip((op.name for op in received), sizes, strict=True))
    graph = Graph(
        tuple(replace(op, size_bytes=scaled[op.name]) if op.name in scaled else op for op in graph.ops), graph.edges
    )
    machine = worker_machine(Cluster(servers=servers, card_bytes_per_s=bytes_per_s / servers))
    found = receives_of(graph, costs, machine)
    slower = receiving_s * 1e6 / sum(found.works_us)
    found = replace(found, works_us=tuple(us * slower for us in found.works_us))
    return Workload(found, tuple(scaled[each] for each in found.names), tuple(searched_order(found)), scale)


def _by_layer(graph: Graph) -> Graph:
    """One recv for all parameters of a layer, and no sends."""
    layer = {op.name: op.name.rpartition(".")[0] for op in graph.ops if op.role == "recv"}
    sizes: dict[str, float] = {}
    for op in graph.ops:
        if op.name in layer:
            sizes[layer[op.name]] = sizes.get(layer[op.name], 0.0) + op.size_bytes
    recvs = [Op(name, role="recv", size_bytes=size) for name, size in sizes.items()]
    computing = [op for op in graph.ops if op.role not in ("recv", "send")]
    names = {op.name for op in (*recvs, *computing)}
    edges = [Edge(layer.get(edge.src, edge.src), edge.dst, edge.size_bytes) for edge in graph.edges]
    known = {(edge.src, edge.dst): edge for edge in edges if edge.src in names and edge.dst in names}
    return Graph((*recvs, *computing), tuple(known.values()))
