r"""Plans of a job: rank 0 makes the plan of the workers, all of them run it, and each server's plan follows from it.

The order of pulls and pushes is the order of the channel lanes in the workers' plan. A server sends its parameters in
the order of the pulls, and updates in the order in which the gradients come.

`Cycle` joins a worker and all servers into one graph, to predict the time of a step in a row of steps. A pull of the
next step begins when the last op of this one that reads the parameter is done *and* the server has updated it. These
are the carried edges of the joined graph::

    worker   [ pull w ] --> forward --> backward --> [ push w.grad ] --.
    server                                                             '--> update of w --.
    carried       ^------------- last reader -----------------'                           |
                  ^-----------------------------------------------------------------------'

Servers are assumed to compute as fast as the worker on separate cores, and all workers to be alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch

from hocket.checking import check
from hocket.distributed.channels import PullChannel, PushChannel
from hocket.distributed.job import PROBE, PROBE_BYTES
from hocket.distributed.packets import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Packet, chunk_bytes_for, pack
from hocket.distributed.parts import WORKERS, Assignment, Exchanged, server_name, server_part
from hocket.distributed.setup import ShardedJob
from hocket.distributed.staging import devices_of
from hocket.errors import PeerError
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.execution.channels import Channel
from hocket.execution.streams import StreamLanes
from hocket.ir import Carried, Costs, Edge, Graph, Lane, Link, Machine, Plan
from hocket.planning import plan
from hocket.planning.channels import first_use
from hocket.planning.transfers.planner import UNORDERED
from hocket.planning.transfers.repeating import in_order_of_readiness
from hocket.profiling import profile
from hocket.profiling.tracer import trace_streams
from hocket.simulation.steps import step_us
from hocket.tracing.captured import Captured


@dataclass(frozen=True)
class Cycle:
    """A worker's step, and the servers' work between two steps."""

    graph: Graph
    updates: tuple[frozenset[str], ...]  # for each server the names of its ops
    pulls: frozenset[str]  # names of the ops that bring parameters to the worker
    costs: Costs
    machine: Machine  # the worker's machine, with its links

    def step_us(self, workers_plan: Plan) -> float:
        """The predicted time of a step in a row of steps."""
        return step_us(self.graph, self._with_servers(workers_plan), self.costs, self.machine)

    def by_readiness(self, workers_plan: Plan) -> Plan:
        """The plan with pulls in the order of a server that always sends the most urgent value that is ready."""
        lanes = [lane.name for lane in workers_plan.lanes if not self.pulls.isdisjoint(lane.ops)]
        urgency = first_use(self.graph, [name for name in self.graph.order if name in self.pulls])
        row = self._with_servers(workers_plan)
        made = in_order_of_readiness(self.graph, row, self.costs, self.machine, lanes, urgency)
        return replace(workers_plan, lanes=made.lanes[: len(workers_plan.lanes)])

    def _with_servers(self, workers_plan: Plan) -> Plan:
        pushes = [op for lane in workers_plan.lanes if lane.kind == "channel" for op in lane.ops]
        device = self.machine.devices[0].name
        lanes = list(workers_plan.lanes)
        for number, mine in enumerate(self.updates):
            ops = in_order_of_arrival(self.graph, mine, pushes)
            # A stream: lanes of cores are threads of the worker, which wait for each other at the end of its step.
            lanes += [Lane(f"{server_name(number)}.updates", ops, "stream", device)] if ops else []
        return replace(workers_plan, lanes=tuple(lanes))


def cycle_of(captured: Captured, part: Captured, assignment: Assignment, costs: Costs, machine: Machine) -> Cycle:
    """Join the part of a worker with those of the servers. `costs` are those of all ops and transfers."""
    pulls = frozenset(each.name for each in assignment.pulls)
    ops, edges, carried = list(part.graph.ops), list(part.graph.edges), list(part.graph.carried)
    for number in range(len(assignment.server_ops)):
        served = server_part(captured, assignment, number).graph
        ops += [op for op in served.ops if op.name in assignment.server_ops[number]]
        for edge in served.edges:
            if edge.dst in pulls:
                carried.append(Carried(edge.src, edge.dst))
            else:
                edges.append(edge)
        for src, dst in served.carried:
            if src in pulls:
                edges.append(Edge(src, dst))
            elif dst not in part.graph.by_name:
                carried.append(Carried(src, dst))
    graph = Graph(
        tuple(replace(op, reads=(), writes=()) for op in ops),
        tuple({(edge.src, edge.dst): edge for edge in edges}.values()),
        tuple(dict.fromkeys(carried)),
    )
    return Cycle(graph, assignment.server_ops, pulls, costs, machine)


def in_order_of_arrival(graph: Graph, ops: Iterable[str], arrivals: Sequence[str]) -> tuple[str, ...]:
    """Sort ops by the last of `arrivals` that each waits for. Ops that wait for none come first."""
    place = {name: at for at, name in enumerate(arrivals)}
    wanted = frozenset(ops)
    last: dict[str, int] = {}
    for name in graph.order:
        if name in wanted:
            last[name] = max(
                [max(last.get(before, -1), place.get(before, -1)) for before in graph.predecessors[name]], default=-1
            )
    return tuple(sorted(last, key=last.__getitem__))


WORKER_DEVICE = "cpu0"
SERVER_DEVICE = "server"
LATENCY_US = 100.0
PROFILE_RUNS = 3


@dataclass(frozen=True)
class JobPlan:
    """The plan and the chunk sizes that all ranks use."""

    plan: Plan  # plan of each worker
    chunk_bytes: tuple[int, ...]  # chunk size of the wires to each server


def profiled(captured: Captured, widths: Sequence[int] = ()) -> Costs:
    """The costs of the ops of a step at this rank, at these widths, by default one thread and all, or on a GPU.

    The lanes of a rank launch the ops of a GPU one by one, at any width, and so does its profile.
    """
    threads = torch.get_num_threads()
    if devices := devices_of(captured.trace.places.models):
        costs = trace_streams(captured, devices[0], PROFILE_RUNS, lanes=StreamLanes)
        return Costs({op: {"1": min(keyed.values())} for op, keyed in costs.durations_us.items()})
    return profile(captured, widths=widths or sorted({1, threads}), runs=PROFILE_RUNS, machine=machine_of(threads, ()))


def worker_plan(
    job: ShardedJob, part: Captured, costs: Costs, rates: Sequence[float], order: str
) -> tuple[Plan, Cycle, float]:
    """Plan the workers' part, and return the plan, its cycle, and the predicted step time in microseconds.

    With the order ``auto``, the plans of the planner ``transfers``, made for one step alone, are compared in a row of
    steps with one whose pulls come as they are ready. If no order can gain anything, nothing is ordered.
    """
    machine = machine_of(torch.get_num_threads(), rates)
    costs = costs.merged(transfer_costs(job.assignment.pulls, job.assignment.pushes, machine))
    cycle = cycle_of(job.captured, part, job.assignment, costs, machine)
    plans = [plan(part.graph, costs, machine, planner="transfers", order=order)]
    if order == "auto" and plans[0].planner != UNORDERED:
        layer = plan(part.graph, costs, machine, planner="transfers", order="layer")
        plans += [layer, replace(cycle.by_readiness(layer), planner="transfers-readiness")]
    steps_us = [cycle.step_us(each) for each in plans]
    shortest = min(range(len(plans)), key=steps_us.__getitem__)
    return plans[shortest], cycle, steps_us[shortest]


def announce_plan(job: ShardedJob, plan: Plan, rates: Sequence[float]) -> None:
    """Announce, at rank 0, the workers' plan and the chunk sizes that suit the rates. See `announced_plan`."""
    job.membership.announce("plan", {"plan": str(plan), "chunk_bytes": [chunk_bytes_for(rate) for rate in rates]})


def announced_plan(job: ShardedJob) -> JobPlan:
    """Wait for the plan that rank 0 announces. Anything else is a `PeerError`, a text of no plan a `PlanError`."""
    found = job.membership.announced("plan", by=0)
    match found:
        case {"plan": str(plan), "chunk_bytes": [*sizes]} if len(sizes) == job.membership.num_servers and all(
            isinstance(size, int) and MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES for size in sizes
        ):
            return JobPlan(Plan.parse(plan), tuple(sizes))
    raise PeerError(
        f"{job.membership.name(0)} announced no plan with chunk sizes for {job.membership.num_servers} servers"
        f" ({MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}), but {found!r:.200}"
    )


def worker_executor(job: ShardedJob, part: Captured, made: JobPlan, kind: str) -> tuple[Executor, list[PullChannel]]:
    """Make a worker's executor and pull channels while servers add their ends, or raise a `PlanError`."""
    check(part.graph, made.plan)
    pulls: list[PullChannel] = []
    written = {buffer for op in part.graph.ops if op.role != "recv" for buffer in op.writes}
    channels: dict[str, Channel] = {}
    for number, wire in job.wires.items():
        down, up = step_packets(made, job.assignment, number)
        wire.add(up, down, ordered=True)
        mine = [each for each in job.assignment.pulls if each.server == number]
        unwritten = [each.name for each in mine if each.buffer not in written]
        pulls.append(PullChannel(wire, [each.name for each in mine], unwritten))
        channels[f"{server_name(number)}->{WORKER_DEVICE}"] = pulls[-1]
        channels[f"{WORKER_DEVICE}->{server_name(number)}"] = PushChannel(wire)
    job.membership.meet("planned")
    return executor(part, made.plan, kind=kind, channels=channels), pulls


def machine_of(threads: int, rates: Sequence[float]) -> Machine:
    """A worker's cores, and a link each way to each server, with its bytes per second."""
    links = []
    for number, rate in enumerate(rates):
        links += [Link(server_name(number), WORKER_DEVICE, rate, LATENCY_US)]
        links += [Link(WORKER_DEVICE, server_name(number), rate, LATENCY_US)]
    return Machine(Machine.of(cores=threads).devices, tuple(links))


def transfer_costs(pulls: Sequence[Exchanged], pushes: Sequence[Exchanged], machine: Machine) -> Costs:
    """The durations of pulls and pushes, each on the link of its server."""
    by_ends = {(link.src, link.dst): link for link in machine.links}
    on_link = [(each, by_ends[server_name(each.server), WORKER_DEVICE]) for each in pulls]
    on_link += [(each, by_ends[WORKER_DEVICE, server_name(each.server)]) for each in pushes]
    return Costs({each.name: {link.channel: link.duration_us(each.size_bytes)} for each, link in on_link})


def step_packets(made: JobPlan, assignment: Assignment, server: int) -> tuple[tuple[Packet, ...], tuple[Packet, ...]]:
    """The packets between a worker and a server in a step, in the order of the plan: pulls, and pushes."""
    down, up = (f"{server_name(server)}->{WORKER_DEVICE}", f"{WORKER_DEVICE}->{server_name(server)}")
    pulls, pushes = (
        pack(((each.name, each.size_bytes) for each in _on_link(made.plan, assignment, link)), made.chunk_bytes[server])
        for link in (down, up)
    )
    return pulls, pushes


def server_plan(part: Captured, workers_plan: Plan, assignment: Assignment, server: int) -> Plan:
    """A server's plan: updates on one lane, in the order in which the gradients arrive."""
    pulls = [each.name for each in _on_link(workers_plan, assignment, f"{server_name(server)}->{WORKER_DEVICE}")]
    pushes = [each.name for each in _on_link(workers_plan, assignment, f"{WORKER_DEVICE}->{server_name(server)}")]
    updates = in_order_of_arrival(part.graph, assignment.server_ops[server], pushes)
    lanes = [
        Lane("updates", updates, device=SERVER_DEVICE, width=torch.get_num_threads()),
        Lane("gradients", tuple(pushes), "channel", f"{WORKERS}->{SERVER_DEVICE}"),
        Lane("parameters", tuple(pulls), "channel", f"{SERVER_DEVICE}->{WORKERS}"),
    ]
    made = Plan(tuple(lane for lane in lanes if lane.ops), planner="server")
    check(part.graph, made)
    return made


def link_rates(job: ShardedJob) -> list[float]:
    """Bytes per second from each server to this worker while all workers pull. At a server the result is empty.

    Only the last of three transfers counts: before the first one a server may still be receiving its state, and it
    begins each of the others when all workers have the one before.
    """
    receives = job.membership.is_worker
    moves = [wire.receive if receives else wire.send for wire in job.wires.values()]
    for epoch in (1, 2, 3):
        began = time.perf_counter()
        took = _wait_for_all([(move, torch.zeros(PROBE_BYTES, dtype=torch.uint8)) for move in moves], epoch)
    return [PROBE_BYTES / (at - began) for at in took] if receives else []


def _wait_for_all(moves: Sequence[tuple[Any, torch.Tensor]], epoch: int) -> list[float]:
    """Begin all transfers, wait for them, and return the time at which each was over."""
    over: SimpleQueue[tuple[int, float, BaseException | None]] = SimpleQueue()
    for number, (move, tensor) in enumerate(moves):
        move(PROBE, tensor, epoch, lambda error, number=number: over.put((number, time.perf_counter(), error)))
    found = [0.0] * len(moves)
    for _ in moves:
        number, at, error = over.get()
        if error is not None:
            raise error
        found[number] = at
    return found


def _on_link(plan: Plan, assignment: Assignment, link: str) -> list[Exchanged]:
    return [assignment.by_name[op] for lane in plan.lanes if lane.device == link for op in lane.ops]
