"""Assignment of lanes to threads: one thread for each lane, but a narrow lane shares that of a wide one on its core.

Lanes that share a core take turns, so one thread can run both. Then a step that begins wide and goes on narrow needs no
hand-over on that core::

    plan        wide    [ a ][ b ]            worker 0   [ a ][ b ][ c ][ d ]      two threads each, then one
                narrow0           [ c ][ d ]  worker 1  (asleep) zz[ e ][ f ]
                narrow1           [ e ][ f ]

Only lanes of width 1 join a wide one: an op of one thread starts no team, so it leaves the team of the wide lane as it
is, while libgomp ends and begins threads whenever a team of another size is asked for.

It also matters how a worker waits. While no other worker uses the cores of its lane it may spin. When an op of another
worker uses one of them, spinning would take the core from that op's team. So a worker whose core is in use by others
sleeps until the last of them has ended, before it waits for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.execution.base import arrivals_apart
from hocket.ir import Graph, Lane, Plan, Synchronisation, synchronisation


@dataclass(frozen=True)
class Worker:
    """One thread: the ops it runs, in order, and the lane of each."""

    ops: tuple[str, ...]
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Workers:
    """All threads of a plan. The first one is the caller's."""

    workers: tuple[Worker, ...]  # lanes and ops of each thread
    sync: Synchronisation  # the waits between them, with a worker in place of a lane, and each channel op by itself
    # op -> ops on other workers that use a core of its lane before it. The worker sleeps until they end.
    asleep: dict[str, tuple[str, ...]]


def workers_of(graph: Graph, plan: Plan, sync: Synchronisation, usual_width: int) -> Workers:
    """Divide the lanes of cores of a plan among threads. Channel lanes have no worker.

    A lane as wide as the caller's usual number of threads goes to the caller, whose team exists already. Otherwise one
    of width 1 does, if there is one.
    """
    lanes = [lane for lane in plan.lanes if lane.ops and lane.kind == "cores"]
    groups: list[list[Lane]] = [[lane] for lane in lanes if lane.width > 1 or not lane.cores]
    hosts = {group[0].cores[:1]: group for group in reversed(groups) if group[0].cores and group[0].width > 1}
    for lane in lanes:
        if lane.width == 1 and lane.cores:
            host = hosts.get(lane.cores[:1])
            if host is not None and host[0].device == lane.device:
                host.append(lane)
            else:
                groups.append([lane])
    place = {lane.name: number for number, lane in enumerate(plan.lanes)}
    groups.sort(key=lambda group: (group[0].width != usual_width, group[0].width, place[group[0].name]))
    if not groups or groups[0][0].width not in (1, usual_width):
        # Any other width would cost the caller its team: it only waits. It does so where there are no ops, too.
        groups.insert(0, [])
    made = tuple(_worker(group, sync) for group in groups)
    channels = (lane for lane in plan.lanes if lane.kind == "channel")
    merged = Plan((*(Lane(f"worker{n}", worker.ops) for n, worker in enumerate(made)), *channels), plan.after)
    together = synchronisation(graph, arrivals_apart(merged))
    return Workers(made, together, _asleep(made, together))


def _worker(group: Sequence[Lane], sync: Synchronisation) -> Worker:
    lane_of = {op: lane for lane in group for op in lane.ops}
    # Predecessors have the smaller sum of clocks: all workers use this order, so there is no circular wait.
    ops = sorted(lane_of, key=lambda op: (sum(sync.clocks[op]), sync.place[op]))
    return Worker(tuple(ops), tuple(lane_of[op] for op in ops))


def _asleep(workers: Sequence[Worker], sync: Synchronisation) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    last: dict[tuple[str, int], str] = {}
    lane_of = {op: lane for worker in workers for op, lane in zip(worker.ops, worker.lanes, strict=True)}
    for op in sorted(lane_of, key=lambda op: (sum(sync.clocks[op]), sync.place[op])):
        lane = lane_of[op]
        used = dict.fromkeys(last[lane.device, core] for core in lane.cores if (lane.device, core) in last)
        others = tuple(o for o in used if sync.place[o][0] != sync.place[op][0] and sync.before(o, op))
        if others:
            found[op] = others
        for core in lane.cores:
            last[lane.device, core] = op
    return found
