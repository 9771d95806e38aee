"""Ops of chosen widths on the cores of one device: from placements to lanes.

An op that may run at several widths is *moldable*. A planner decides its width and its turn; `pack` then places it::

    cores 0  [   a (2 cores)   ][ b ][   d   ]      whenever cores are idle, the ready ops are taken in order of
          1  [                 ][    c    ][ e ]    priority, and each that fits starts at once
          ----------------------------------> time

`as_plan` makes lanes of that: one for each set of cores that ops ran on. Lanes that share a core take turns, which the
plan states by `after`: an op waits for whoever had its cores before, on other lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Lane, Plan

__all__ = ["Instance", "Placement", "as_plan", "instance_of", "makespan_us", "pack"]


class Placement(NamedTuple):
    """`op` (its position in the graph) on `cores`, from `start_us` to `end_us`."""

    op: int
    cores: tuple[int, ...]
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Instance:
    """A graph in numbers, for the inner loops of planners.

    Attributes:
        num_cores: of the device.
        durations_us: ``durations_us[op][width]``; index 0 is not used.
        predecessors, successors: positions of ops.
        best_width: for each op the width at which it is fastest, the narrowest of equals.
        ranks_us: for each op the longest path to the end of the step, every op at its best width.
    """

    num_cores: int
    durations_us: tuple[tuple[float, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    best_width: tuple[int, ...]
    ranks_us: tuple[float, ...]


def instance_of(graph: Graph, costs: Costs, device: Device) -> Instance:
    """The numbers of `graph` on `device`.

    Raises:
        InputError: an op without a cost.
    """
    widths = range(1, device.cores + 1)
    durations = tuple(
        (0.0, *(costs.duration_us(op.name, width=width, device=device.name) for width in widths)) for op in graph.ops
    )
    index = graph.index
    successors = tuple(tuple(index[name] for name in graph.successors[op.name]) for op in graph.ops)
    predecessors = tuple(tuple(index[name] for name in graph.predecessors[op.name]) for op in graph.ops)
    best = tuple(min(widths, key=of_op.__getitem__) for of_op in durations)
    order = tuple(index[name] for name in graph.order)
    ranks = [0.0] * len(graph)
    for op in reversed(order):
        ranks[op] = durations[op][best[op]] + max((ranks[after] for after in successors[op]), default=0.0)
    return Instance(device.cores, durations, predecessors, successors, order, best, tuple(ranks))


def pack(instance: Instance, widths: Sequence[int], priority: Sequence[float]) -> list[Placement]:
    """Start ready ops as soon as their width fits, the highest `priority` first.

    An op that does not fit lets narrower ones pass, but only those that end before it could have started, so that a
    wide op is not starved.
    """
    durations, successors = instance.durations_us, instance.successors
    waiting = [len(before) for before in instance.predecessors]
    ready = [(-priority[op], op) for op in instance.order if not waiting[op]]
    heapify(ready)
    idle = list(range(instance.num_cores))
    running: list[tuple[float, int, tuple[int, ...]]] = []
    placed: list[Placement] = []
    now_us = 0.0
    while ready or running:
        passed: list[tuple[float, int]] = []
        limit_us = float("inf")
        while ready and idle:
            entry = heappop(ready)
            op = entry[1]
            width = widths[op]
            end_us = now_us + durations[op][width]
            if width <= len(idle) and end_us <= limit_us:
                cores = tuple(idle[:width])
                del idle[:width]
                heappush(running, (end_us, op, cores))
                placed.append(Placement(op, cores, now_us, end_us))
            else:
                passed.append(entry)
                if limit_us == float("inf"):
                    limit_us = _when_idle(running, width - len(idle))
        for entry in passed:
            heappush(ready, entry)
        now_us = running[0][0]
        while running and running[0][0] <= now_us:
            _, op, cores = heappop(running)
            idle.extend(cores)
            for after in successors[op]:
                waiting[after] -= 1
                if not waiting[after]:
                    heappush(ready, (-priority[after], after))
        idle.sort()
    return placed


def _when_idle(running: Sequence[tuple[float, int, tuple[int, ...]]], more: int) -> float:
    """When `more` cores beyond the idle ones will be idle."""
    for end_us, _, cores in sorted(running):
        more -= len(cores)
        if more <= 0:
            return end_us
    return float("inf")


def makespan_us(placed: Sequence[Placement]) -> float:
    """When the last op ends."""
    return max((placement.end_us for placement in placed), default=0.0)


def as_plan(graph: Graph, placed: Sequence[Placement], device: Device, planner: str) -> Plan:
    """Lanes for these placements, and the turns of those that share cores.

    Raises:
        InputError: two placements overlap on a core.
    """
    lanes: dict[tuple[int, ...], list[str]] = {}
    after: dict[str, tuple[str, ...]] = {}
    last_on: dict[int, tuple[str, tuple[int, ...], float]] = {}
    for placement in sorted(placed, key=lambda p: (p.start_us, p.end_us, instance_order(p, graph))):
        name = graph.ops[placement.op].name
        turns: dict[str, None] = {}
        for core in placement.cores:
            before = last_on.get(core)
            if before is not None:
                if before[2] > placement.start_us * (1 + 1e-12) + 1e-9:
                    raise InputError(f"ops {before[0]!r} and {name!r} overlap on core {core}")
                if before[1] != placement.cores:
                    turns[before[0]] = None
            last_on[core] = (name, placement.cores, placement.end_us)
        data = set(graph.predecessors[name])
        needed = tuple(before for before in turns if before not in data)
        if needed:
            after[name] = needed
        lanes.setdefault(placement.cores, []).append(name)
    made: list[Lane] = []
    for cores in sorted(lanes, key=lambda cores: (-len(cores), cores)):
        label = f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0])
        if any(label == lane.name.partition(".")[2] for lane in made):
            label = "+".join(map(str, cores))
        made.append(Lane(f"{device.name}.{label}", tuple(lanes[cores]), "cores", device.name, len(cores), cores))
    return Plan(tuple(made), after, planner)


def instance_order(placement: Placement, graph: Graph) -> int:
    """Program order, for placements of no duration that start together."""
    return graph.index[graph.ops[placement.op].name]
