"""`list`: whenever a lane is idle, start the ready op from which the longest path leads to the end of the step.

A step ends with its longest chain of ops. A delay of that chain delays the step, and other ops can wait. The *upward
rank* of an op is the length of the longest path from its start to the end of the step (Topcuoglu,
Hariri, Wu: "Performance-effective and low-complexity task scheduling for heterogeneous computing", IEEE TPDS 2002)::

    rank:    90        50       10             lane 0   [ a ][   b   ][ d ]
            [ a ]---->[ b ]--->[ d ]           lane 1        [ c ]
               `----->[ c ]------^             ---------------------------> time
                       30

The op of the highest rank goes to the lane on which it ends first. On equal lanes no lane is ever idle while an op is
ready, and then, whatever the ranks, the plan is at most ``2 - 1/k`` times as long as the best one for these k lanes
(Graham: "Bounds for certain multiprocessing anomalies", Bell System Technical Journal 1966). No lane takes an op
before one that it was given earlier (no insertion), so the lanes' orders are the order of decisions.

The number of lanes is chosen by simulation: many narrow lanes run more ops side by side, one wide lane finishes a chain
sooner. Each division of the devices' cores into equal lanes is tried, and the serial plan. So the plan is never longer
than the serial one, as far as the costs are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Lane, Machine, Plan
from hocket.planning.base import Planner, cpu_devices, misplaced
from hocket.planning.ranks import graph_ranks
from hocket.planning.serial import Serial
from hocket.simulation import simulate


class ListScheduler(Planner):
    """Highest upward rank first, on the division of the CPU devices into equal lanes that simulates shortest.

    Args:
        lanes: this many lanes on each CPU device (the first ones a core wider, if its cores do not divide evenly),
            in place of trying every division and the serial plan.

    Example:
        >>> from hocket.ir import Costs, Graph, Machine, Op
        >>> costs = Costs({op: {"1": 30.0, "2": 25.0} for op in "ab"})
        >>> print(ListScheduler().plan(Graph((Op("a"), Op("b"))), costs, Machine.of(cores=2)), end="")
        hocket-plan/1 planner=list
        lane cpu0.0 kind=cores device=cpu0 width=1 cores=0
        run a
        lane cpu0.1 kind=cores device=cpu0 width=1 cores=1
        run b
    """

    name = "list"

    def __init__(self, lanes: int | None = None) -> None:
        self.require_whole(lanes=lanes)
        self.lanes = lanes

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        devices = cpu_devices(machine)
        if self.lanes is not None:
            return list_schedule(graph, costs, _divided(devices, self.lanes), earliest_us)
        best = Serial().compute_plan(graph, costs, machine, earliest_us)
        best_us = simulate(graph, best, costs, machine, earliest_us=earliest_us).makespan_us
        for lanes in _divisions(devices):
            candidate = list_schedule(graph, costs, lanes, earliest_us)
            if misplaced(candidate, costs):
                continue
            makespan_us = simulate(graph, candidate, costs, machine, earliest_us=earliest_us).makespan_us
            if makespan_us < best_us:
                best, best_us = candidate, makespan_us
        return replace(best, planner=self.name)


def _divided(devices: Sequence[Device], count: int) -> list[Lane]:
    for device in devices:
        if count > device.cores:
            raise InputError(f"planner list: {count} lanes do not fit {device.name!r}, which has {device.cores} cores")
    return [lane for device in devices for lane in _divide(device, count)]


def _divisions(devices: Sequence[Device]) -> Iterator[list[Lane]]:
    """Every division into equal lanes, with the next coarser one for a device that has no such division."""
    for count in sorted({count for device in devices for count in _divisors(device.cores)}):
        nearest = ((device, max(c for c in _divisors(device.cores) if c <= count)) for device in devices)
        yield [lane for device, number in nearest for lane in _divide(device, number)]


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _divide(device: Device, count: int) -> Iterator[Lane]:
    """`count` lanes over the cores of `device`, side by side, as equal as may be."""
    begin = 0
    for number in range(count):
        width = device.cores // count + (number < device.cores % count)
        name = device.name if count == 1 else f"{device.name}.{number}"
        yield Lane(name, device=device.name, width=width, cores=tuple(range(begin, begin + width)))
        begin += width


@dataclass
class _Kind:
    """Lanes on which every op has the same duration."""

    durations_us: list[float]
    idle: list[int]  # a heap of lane numbers
    # A heap: the time from which a lane is idle, and the lane.
    busy: list[tuple[float, int]] = field(default_factory=list)

    def end_us(self, op: int, now_us: float) -> float:
        """The end of `op` on the first of these lanes to be idle."""
        return (now_us if self.idle else self.busy[0][0]) + self.durations_us[op]


def list_schedule(graph: Graph, costs: Costs, lanes: Sequence[Lane], earliest_us: Mapping[str, float]) -> Plan:
    """The plan by the rule above, with no start before `earliest_us`. An op without a cost is an `InputError`."""
    numbers: dict[tuple[str, int], list[int]] = {}
    for number, lane in enumerate(lanes):
        numbers.setdefault((lane.device, lane.width), []).append(number)
    kinds = [
        _Kind([costs.duration_us(op.name, width=width, device=device) for op in graph.ops], idle)
        for (device, width), idle in numbers.items()
    ]
    weights = [len(kind.idle) / len(lanes) for kind in kinds]
    mean_us = [
        sum(weight * duration for weight, duration in zip(weights, durations, strict=True))
        for durations in zip(*(kind.durations_us for kind in kinds), strict=True)
    ]
    assigned = _assign(graph, graph_ranks(graph, mean_us), kinds, len(lanes), earliest_us)
    names = [tuple(graph.ops[op].name for op in ops) for ops in assigned]
    filled = tuple(replace(lane, ops=ops) for lane, ops in zip(lanes, names, strict=True))
    return Plan(filled, planner=ListScheduler.name)


def _assign(
    graph: Graph, ranks: Sequence[float], kinds: Sequence[_Kind], num_lanes: int, earliest_us: Mapping[str, float]
) -> list[list[int]]:
    """For each lane its ops, by position in the graph, in the order in which it was given them."""
    place = {op: position for position, op in enumerate(graph.order)}
    followers = [[graph.index[name] for name in graph.successors[op.name]] for op in graph.ops]
    waiting = [len(graph.predecessors[op.name]) for op in graph.ops]
    ready: list[tuple[float, int, int]] = []
    later = [(earliest_us.get(graph.ops[op].name, 0.0), op) for op, count in enumerate(waiting) if count == 0]
    heapify(later)  # ops that wait for an arrival only
    running: list[tuple[float, int]] = []  # the end of an op, and the op
    assigned: list[list[int]] = [[] for _ in range(num_lanes)]
    now_us = 0.0
    while ready or running or later:
        while later and later[0][0] <= now_us:
            op = heappop(later)[1]
            heappush(ready, (-ranks[op], place[graph.ops[op].name], op))
        while ready and any(kind.idle for kind in kinds):
            _, _, op = heappop(ready)
            kind = min(kinds, key=lambda kind: kind.end_us(op, now_us))
            end_us = kind.end_us(op, now_us)
            lane = heappop(kind.idle) if kind.idle else heappop(kind.busy)[1]
            heappush(kind.busy, (end_us, lane))
            heappush(running, (end_us, op))
            assigned[lane].append(op)
        now_us = min([ends_or_arrives[0][0] for ends_or_arrives in (running, later) if ends_or_arrives])
        while running and running[0][0] <= now_us:
            for follower in followers[heappop(running)[1]]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heappush(later, (earliest_us.get(graph.ops[follower].name, 0.0), follower))
        for kind in kinds:
            while kind.busy and kind.busy[0][0] <= now_us:
                heappush(kind.idle, heappop(kind.busy)[1])
    return assigned
