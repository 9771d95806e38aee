"""Plans of a job: rank 0 makes that of the workers, all run it, and each server's follows from it.

The order of pulls and pushes is the order of the channel lanes in the workers' plan. A server sends each worker its
parameters in the order of the pulls; it updates in the order in which the gradients come.
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
from hocket.distributed.parcels import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Parcel, chunk_bytes_for, packed
from hocket.distributed.parts import WORKERS, Assignment, Exchanged, server_name
from hocket.distributed.setup import PROBE, PROBE_BYTES, Setup
from hocket.errors import PeerError
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.execution.channels import Channel
from hocket.ir import Costs, Lane, Link, Machine, Plan
from hocket.planning import plan
from hocket.planning.transfers.planner import UNORDERED
from hocket.profiling import profile
from hocket.tracing.captured import Captured

__all__ = [
    "SERVER_DEVICE",
    "WORKER_DEVICE",
    "JobPlan",
    "link_rates",
    "machine_of",
    "parcels_of",
    "profiled",
    "server_plan",
    "tell_plan",
    "told_plan",
    "transfer_costs",
    "worker_lanes",
    "worker_plan",
]

WORKER_DEVICE = "cpu0"
SERVER_DEVICE = "server"
LATENCY_US = 100.0
PROFILE_RUNS = 3


@dataclass(frozen=True)
class JobPlan:
    """What all ranks have to know of how a job runs.

    Attributes:
        plan: of each worker.
        chunk_bytes: for each server the size of the chunks in which values go.
    """

    plan: Plan
    chunk_bytes: tuple[int, ...]


def profiled(made: Setup) -> Costs:
    """What the ops of a job's step take here, on one thread and on all of them."""
    threads = torch.get_num_threads()
    return profile(made.captured, widths=sorted({1, threads}), runs=PROFILE_RUNS, machine=machine_of(threads, ()))


def worker_plan(
    made: Setup, part: Captured, costs: Costs, rates: Sequence[float], order: str
) -> tuple[Plan, Cycle, float]:
    """Rank 0's plan of what workers run, the cycle that it stands on, and what a step takes by that, in microseconds.

    With the order ``auto``, the plans of the planner ``transfers``, made for one step alone, are compared as steps in a
    row with one whose pulls come as they are ready; but where no order can gain anything, nothing is ordered.

    Args:
        made: the job.
        part: what a worker runs.
        costs: of the ops, see `profiled`.
        rates: bytes per second from and to each server.
        order: of the planner ``transfers``.
    """
    machine = machine_of(torch.get_num_threads(), rates)
    costs = costs.merged(transfer_costs(made.assignment.pulls, made.assignment.pushes, machine))
    cycle = cycle_of(made.captured, part, made.assignment, costs, machine)
    plans = [plan(part.graph, costs, machine, planner="transfers", order=order)]
    if order == "auto" and plans[0].planner != UNORDERED:
        layer = plan(part.graph, costs, machine, planner="transfers", order="layer")
        plans += [layer, replace(cycle.by_readiness(layer), planner="transfers-readiness")]
    steps_us = [cycle.step_us(each) for each in plans]
    shortest = min(range(len(plans)), key=steps_us.__getitem__)
    return plans[shortest], cycle, steps_us[shortest]


def tell_plan(made: Setup, plan: Plan, rates: Sequence[float]) -> None:
    """Rank 0 says what workers run, and in chunks of which size values go; see `told_plan`."""
    made.membership.tell("plan", {"plan": str(plan), "chunk_bytes": [chunk_bytes_for(rate) for rate in rates]})


def told_plan(made: Setup) -> JobPlan:
    """What rank 0 says that workers run.

    Raises:
        PeerError: it says something else than a plan, and a size of chunks for each server; or it has failed.
        PlanError: what it says is no plan.
    """
    told = made.membership.told("plan", by=0)
    match told:
        case {"plan": str(plan), "chunk_bytes": [*sizes]} if len(sizes) == made.membership.num_servers and all(
            isinstance(size, int) and MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES for size in sizes
        ):
            return JobPlan(Plan.parse(plan), tuple(sizes))
    raise PeerError(
        f"{made.membership.name(0)} says no plan with sizes of chunks for {made.membership.num_servers} servers"
        f" ({MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}), but {told!r:.200}"
    )


def worker_lanes(made: Setup, part: Captured, job_plan: JobPlan, kind: str) -> tuple[Executor, list[PullChannel]]:
    """What runs a worker's part by a plan that all ranks have; servers lay their ends at the same time.

    Raises:
        PlanError: it is no plan for this part.
        PeerError: another rank has failed.
    """
    check(part.graph, job_plan.plan)
    pulls: list[PullChannel] = []
    channels: dict[str, Channel] = {}
    for number, wire in enumerate(made.wires):
        down, up = parcels_of(job_plan, made.assignment, number)
        wire.add(up, down, ordered=True)
        pulls.append(PullChannel(wire, [each.name for each in made.assignment.pulls if each.server == number]))
        channels[f"{server_name(number)}->{WORKER_DEVICE}"] = pulls[-1]
        channels[f"{WORKER_DEVICE}->{server_name(number)}"] = PushChannel(wire)
    made.membership.meet("planned")
    return executor(part, job_plan.plan, kind=kind, channels=channels), pulls


def machine_of(threads: int, rates: Sequence[float]) -> Machine:
    """A worker's cores, and a link each way to each server of so many bytes per second."""
    links = []
    for number, rate in enumerate(rates):
        links += [Link(server_name(number), WORKER_DEVICE, rate, LATENCY_US)]
        links += [Link(WORKER_DEVICE, server_name(number), rate, LATENCY_US)]
    return Machine(Machine.of(cores=threads).devices, tuple(links))


def transfer_costs(pulls: Sequence[Exchanged], pushes: Sequence[Exchanged], machine: Machine) -> Costs:
    """What pulls and pushes take, each on the link of its server."""
    by_ends = {(link.src, link.dst): link for link in machine.links}
    durations: dict[str, dict[str, float]] = {}
    for each in pulls:
        link = by_ends[server_name(each.server), WORKER_DEVICE]
        durations[each.name] = {link.channel: link.duration_us(each.size_bytes)}
    for each in pushes:
        link = by_ends[WORKER_DEVICE, server_name(each.server)]
        durations[each.name] = {link.channel: link.duration_us(each.size_bytes)}
    return Costs(durations)


def parcels_of(job_plan: JobPlan, assignment: Assignment, server: int) -> tuple[tuple[Parcel, ...], tuple[Parcel, ...]]:
    """What goes between a worker and a server in a step, in the order of the plan: pulls, and pushes."""
    down, up = (f"{server_name(server)}->{WORKER_DEVICE}", f"{WORKER_DEVICE}->{server_name(server)}")
    pulls, pushes = (
        packed(
            ((each.name, each.size_bytes) for each in _on_link(job_plan.plan, assignment, link)),
            job_plan.chunk_bytes[server],
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


def link_rates(made: Setup) -> list[float]:
    """Bytes per second from each server while all workers pull at once, as this worker sees it; a server only sends.

    Only the last of three transfers counts: before the first one a server may still be busy with the state that it was
    sent, and it begins each of the others when all workers have the one before.
    """
    receives = made.membership.is_worker
    moves = [wire.receive if receives else wire.send for wire in made.wires]
    for epoch in (1, 2, 3):
        began = time.perf_counter()
        took = _wait_for_all([(move, torch.zeros(PROBE_BYTES, dtype=torch.uint8)) for move in moves], epoch)
    return [PROBE_BYTES / (at - began) for at in took] if receives else []


def _wait_for_all(moves: Sequence[tuple[Any, torch.Tensor]], epoch: int) -> list[float]:
    """Begin all, and when each was done."""
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
