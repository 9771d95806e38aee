"""Plans of a job: rank 0 makes the plan of the workers, all of them run it, and each server's plan follows from it.

The order of pulls and pushes is the order of the channel lanes in the workers' plan. A server sends its parameters in
the order of the pulls, and updates in the order in which the gradients come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch

from hocket.checking import check
from hocket.distributed.channels import PullChannel, PushChannel
from hocket.distributed.cycle import Cycle, cycle_of, in_order_of_arrival
from hocket.distributed.job import PROBE, PROBE_BYTES
from hocket.distributed.packets import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Packet, chunk_bytes_for, pack
from hocket.distributed.parts import WORKERS, Assignment, Exchanged, server_name
from hocket.distributed.setup import ShardedJob
from hocket.distributed.staging import devices_of
from hocket.errors import PeerError
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.execution.channels import Channel
from hocket.execution.streams import StreamLanes
from hocket.ir import Costs, Lane, Link, Machine, Plan
from hocket.planning import plan
from hocket.planning.transfers.planner import UNORDERED
from hocket.profiling import profile
from hocket.profiling.tracer import trace_streams
from hocket.tracing.captured import Captured

WORKER_DEVICE = "cpu0"
SERVER_DEVICE = "server"
LATENCY_US = 100.0
PROFILE_RUNS = 3


@dataclass(frozen=True)
class JobPlan:
    """The plan and the chunk sizes that all ranks use.

    Attributes:
        plan: plan of each worker.
        chunk_bytes: chunk size of the wires to each server.
    """

    plan: Plan
    chunk_bytes: tuple[int, ...]


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

    Args:
        job: the job.
        part: part of a worker.
        costs: costs of the ops, see `profiled`.
        rates: bytes per second from and to each server.
        order: order of the planner ``transfers``.
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
    """Wait for the plan that rank 0 announces.

    Raises:
        PeerError: rank 0 has failed, or announces something other than a plan and a chunk size for each server.
        PlanError: the plan does not parse.
    """
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
    """Make the executor of a worker's part, and its pull channels, while servers add their ends of the wires.

    Raises:
        PlanError: the plan does not fit this part.
        PeerError: another rank has failed.
    """
    check(part.graph, made.plan)
    pulls: list[PullChannel] = []
    channels: dict[str, Channel] = {}
    for number, wire in job.wires.items():
        down, up = step_packets(made, job.assignment, number)
        wire.add(up, down, ordered=True)
        pulls.append(PullChannel(wire, [each.name for each in job.assignment.pulls if each.server == number]))
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
        pack(
            ((each.name, each.size_bytes) for each in _on_link(made.plan, assignment, link)),
            made.chunk_bytes[server],
        )
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
