"""Paced workers and their servers: processes that sleep what they would compute, and move bytes over real wires.

In turns all workers receive in the planned order, which the sender keeps, and each one in an order of its own, drawn
anew for each step, as frameworks without an order do. A worker's step is that of a zoo model, whose ops are timed once
on this machine. Parameters of one layer travel as one value, as a wire would pack the small ones.

Their step is predicted by simulation of all transfers over shared network cards. A worker's card carries what all
servers send it, and a server's what it sends all workers, each transfer a max-min fair part
(`hocket.simulation.contention`). Workers in the same order want the same value of the same server at the same
moment; by links of a fixed rate for each pair that would cost nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.namespaces import Namespace
from benchmarks.ranks import join_job
from benchmarks.transfers import with_transfers, worker_machine
from hocket.distributed.membership import connected
from hocket.distributed.packets import Packet
from hocket.distributed.store import meet_at, opened
from hocket.distributed.wire import Wire
from hocket.ir import Costs, Edge, Graph, Lane, Link, Machine, NetworkCard, Op, Plan
from hocket.planning.transfers.orders import searched_order
from hocket.planning.transfers.receives import Receives, receives_of
from hocket.profiling import profile
from hocket.simulation import simulate
from hocket.tracing import capture
from hocket.zoo import load

PROFILE_RUNS = 3


@dataclass(frozen=True)
class Workload:
    """A step of one worker, scaled so that its parameters take a given time on its link.

    What is received has these sizes in bytes, and an order that the planner finds.
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
    """Record a zoo model's step on this machine, and scale it: parameters and computing take `receiving_s`."""
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
    machine = worker_machine(bytes_per_s / servers, servers=servers)
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


def predicted_us(
    work: Workload, orders: Sequence[Sequence[int]], worker_bytes_per_s: float, server_bytes_per_s: float
) -> float:
    """When the last of several workers has ended its step, all having begun together.

    Example:
        >>> from hocket.planning.transfers.receives import Receives
        >>> one = Receives(("a", "b"), (1e6, 1e6), (0, 0), (1,), (1, 2), (1e6, 5e5), (0, 1))
        >>> work = Workload(one, (100, 100), (0, 1), 1.0)
        >>> predicted_us(work, [(0, 1)], 100.0, 100.0), predicted_us(work, [(0, 1)] * 2, 100.0, 100.0)
        (2500000.0, 4500000.0)
    """
    links, ops, lanes = {}, [], []
    for worker, order in enumerate(orders):
        for recv in order:
            server = work.receives.links[recv]
            ops.append(Op(_transfer(worker, recv), role="recv", size_bytes=work.sizes[recv]))
            ends = (f"server{server}", f"worker{worker}")
            links[ends] = Link(*ends, worker_bytes_per_s, cards=ends)
        for ends in [ends for ends in links if ends[1] == f"worker{worker}"]:
            mine = [recv for recv in order if f"server{work.receives.links[recv]}" == ends[0]]
            lanes.append(
                Lane("-".join(ends), tuple(_transfer(worker, r) for r in mine), "channel", links[ends].channel)
            )
    rates = {name: server_bytes_per_s if name.startswith("server") else worker_bytes_per_s for name in sum(links, ())}
    machine = Machine(
        Machine.of(cores=1).devices, tuple(links.values()), cards=tuple(NetworkCard(*card) for card in rates.items())
    )
    timeline = simulate(Graph(tuple(ops)), Plan(tuple(lanes)), Costs({}), machine)
    ended = {span.op: span.end_us for span in timeline.spans}
    return max(
        work.receives.ends_us([ended[_transfer(worker, recv)] for recv in range(len(work.sizes))])
        for worker in range(len(orders))
    )


def _transfer(worker: int, recv: int) -> str:
    return f"{worker}:{recv}"


TIMEOUT_S = 60.0
GO, FINISHED = "go", "finished"


@dataclass(frozen=True)
class Place:
    """The position of one rank in a cluster: workers come first."""

    rank: int
    workers: int
    servers: int
    chunk_bytes: int
    store: tuple[str, int]
    end: Namespace


@dataclass(frozen=True)
class StepRecord:
    """One step of one worker, by the clock that all processes of the machine share."""

    order: tuple[int, ...]
    is_planned: bool
    begin_ns: int
    end_ns: int


def run_rank(place: Place, work: Workload, steps: int) -> list[StepRecord]:
    """Take part. A worker returns what it has recorded."""
    join_job(place.rank, place.workers + place.servers, *place.store, place.end)
    wires = _wires(place, work)
    found = _work(place, work, wires, steps) if place.rank < place.workers else _serve(place, work, wires, steps)
    for wire in wires:
        wire.close()
    return found


def _wires(place: Place, work: Workload) -> list[Wire]:
    store = opened(*place.store, TIMEOUT_S)
    is_worker = place.rank < place.workers
    others = range(place.workers, place.workers + place.servers) if is_worker else range(place.workers)
    found = []
    for other in others:
        worker, server = (place.rank, other) if is_worker else (other, place.rank)
        key, end = f"paced/{worker}/{server}", 0 if is_worker else 1
        wire = connected(store, key, end, f"rank {place.rank}", f"rank {other}", TIMEOUT_S)
        mine = [index for index in work.planned if work.receives.links[index] == server - place.workers]
        planned = [Packet((_name(index, True),), (work.sizes[index],), place.chunk_bytes) for index in mine]
        free = [Packet((_name(index, False),), (work.sizes[index],), place.chunk_bytes) for index in mine]
        down, up = [Packet((GO,), (8,)), *free], [Packet((FINISHED,), (8,))]
        wire.add(*((up, down) if is_worker else (down, up)))
        wire.add(*(((), planned) if is_worker else (planned, ())), ordered=True)
        meet_at(store, key, end, f"rank {other}", TIMEOUT_S)
        found.append(wire)
    return found


def _serve(place: Place, work: Workload, wires: list[Wire], steps: int) -> list[StepRecord]:
    number = place.rank - place.workers
    values = {
        i: torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(work.sizes) if work.receives.links[i] == number
    }
    told = torch.zeros(1, dtype=torch.int64)
    for step in range(1, steps + 1):
        for wire in wires:
            for index, tensor in values.items():
                wire.send(_name(index, _is_planned(step)), tensor, step, lambda error: None)
        if number == 0:
            for wire in wires:
                wire.post(GO, told)
            for wire in wires:
                wire.get(FINISHED, torch.empty(1, dtype=torch.int64))
    if number:
        wires[0].get(FINISHED, told)  # of worker 0, at the end
    return []


def _work(place: Place, work: Workload, wires: list[Wire], steps: int) -> list[StepRecord]:
    memory = [torch.empty(size, dtype=torch.uint8) for size in work.sizes]
    found = []
    for step in range(1, steps + 1):
        order = work.planned
        if not _is_planned(step):
            order = tuple(random.Random(f"{place.rank}/{step}").sample(order, len(order)))
        wires[0].get(GO, torch.empty(1, dtype=torch.int64))
        begin_ns = time.perf_counter_ns()
        pace = _Pace(work.receives)
        for index in order:
            name = _name(index, _is_planned(step))
            wires[work.receives.links[index]].receive(name, memory[index], step, pace.arrival(index))
        pace.run()
        found.append(StepRecord(order, _is_planned(step), begin_ns, time.perf_counter_ns()))
        wires[0].put(FINISHED, torch.zeros(1, dtype=torch.int64))
    for wire in wires[1:] if place.rank == 0 else ():
        wire.put(FINISHED, torch.zeros(1, dtype=torch.int64))
    return found


class _Pace:
    """Sleeps the work of one step, each group when all that it needs has arrived."""

    def __init__(self, receives: Receives) -> None:
        self._left = list(zip(receives.groups, receives.works_us, strict=True))
        self._missing = (1 << len(receives)) - 1
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def arrival(self, index: int) -> Any:
        """Return the function that a wire calls when a value has arrived."""

        def arrived(error: BaseException | None) -> None:
            with self._changed:
                self._missing &= ~(1 << index)
                self._failure = self._failure or error
                self._changed.notify()

        return arrived

    def run(self) -> None:
        """All of it, and the last arrival."""
        free_s = time.perf_counter()
        while self._left:
            ready = self._wait(lambda: next((each for each in self._left if not each[0] & self._missing), None))
            self._left.remove(ready)
            # Sleeps that were too short or too long are balanced by the following ones.
            free_s = max(free_s, time.perf_counter() - 1e-3) + ready[1] / 1e6
            if (left_s := free_s - time.perf_counter()) > 0:
                time.sleep(left_s)
        self._wait(lambda: not self._missing)

    def _wait(self, condition: Any) -> Any:
        with self._changed:
            found = self._changed.wait_for(lambda: self._failure or condition(), TIMEOUT_S)
        if self._failure is not None:
            raise self._failure
        return found


def _name(index: int, is_planned: bool) -> str:
    return f"{'planned' if is_planned else 'free'}:{index}"


def _is_planned(step: int) -> bool:
    return step % 2 == 0
