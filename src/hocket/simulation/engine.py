"""`simulate`: the timeline that a plan would have.

One rule: *each lane runs its ops in order, and an op starts when its lane has reached it and every op it depends on has
finished.* Without queues, an op's start is a maximum over the ends of earlier ops, so one pass in any order that
respects the waits gives the whole timeline, bitwise equal to that of an event queue. Where transfers compete for a
link's channels or a network card, lanes for a core through its sibling hardware threads, or streams for a GPU,
`hocket.simulation.events` simulates instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine, Plan, Timeline
from hocket.simulation.contention import CombinedContention, Contention, cards_of, multiprocessors_of
from hocket.simulation.durations import durations
from hocket.simulation.events import by_events
from hocket.simulation.launches import released_us
from hocket.simulation.plan_arrays import PlanArrays, plan_arrays, remember
from hocket.simulation.smt import sharing_of

_Floats = npt.NDArray[np.float64]


def simulate(
    graph: Graph,
    plan: Plan,
    costs: Costs,
    machine: Machine,
    wait_us: float = 0.0,
    launches: str = "free",
    outside: Collection[str] = (),
    earliest_us: Mapping[str, float] | None = None,
) -> Timeline:
    """The timeline that `plan` would have with the durations of `costs`.

    On a lane of cores an op has its duration at the lane's width on the lane's device, on a stream its duration on that
    device. On a channel it has its duration, if it has one, and otherwise the time of the machine's link for the op's
    `size_bytes`. A link of k channels carries k transfers side by side. Further ones queue in the order in which they
    became ready (among equals, in the order of the plan's lanes). A link of None channels never queues.

    Lanes on sibling hardware threads slow each other down (`hocket.simulation.smt`), and so do streams of a GPU if the
    costs have shares (`hocket.simulation.contention`). An op that depends on one of another lane starts at the
    earliest `wait_us` after its end: the time to wake a thread, 0 by default. With the `launches` ``eager`` or
    ``graph``, ops on streams have to be launched first (`hocket.simulation.launches`), and the events of other streams
    arrive after the machine's `event_us`. Ops `outside` of a graph are launched one by one. No op starts before its
    entry in `earliest_us`.

    Returns:
        A timeline in microseconds whose source is ``simulated``, with its spans lane after lane, in order.

    Raises:
        PlanError: the plan runs an op that the graph does not have or leaves one out, or its lanes wait for each
            other in a circle, which is then named op by op.
        InputError: no cost for an op on its lane, no link for a channel, a negative `wait_us`, unknown `launches`, or
            `earliest_us` of an unknown op or below 0.

    Example:
        >>> from hocket.ir import Costs, Edge, Graph, Lane, Machine, Op, Plan
        >>> graph = Graph((Op("a"), Op("b"), Op("c")), (Edge("a", "c"), Edge("b", "c")))
        >>> costs = Costs({"a": {"1": 30.0}, "b": {"1": 40.0}, "c": {"1": 5.0}})
        >>> plan = Plan((Lane("one", ("a",)), Lane("two", ("b", "c"))))
        >>> simulate(graph, plan, costs, Machine.of(cores=2)).makespan_us
        45.0
    """
    if not 0.0 <= wait_us < float("inf"):
        raise InputError(f"simulate: expected wait_us >= 0, got {wait_us!r}")
    arrays = plan_arrays(graph, plan)
    link_of, channels = _contended(plan, machine)
    sharing = _sharing(graph, plan, costs, machine)
    released = _released(graph, released_us(graph, plan, machine, launches, outside), earliest_us)
    waits_us = _waits(plan, machine, wait_us, launches)
    if channels or sharing is not None or released is not None or any(us != wait_us for us in waits_us):
        durations_us = durations(graph, plan, costs, machine).tolist()
        start_us, end_us = by_events(arrays, durations_us, link_of, channels, waits_us, sharing, released)
    elif wait_us:
        start_us, end_us = _with_waits(arrays, _work(graph, plan, costs, machine), wait_us)
    else:
        start_us, end_us = _in_one_pass(arrays, _work(graph, plan, costs, machine))
    position = arrays.position
    return Timeline.of_columns({lane.name: lane.ops for lane in plan.lanes}, start_us[position], end_us[position])


def _in_one_pass(arrays: PlanArrays, work_us: list[float]) -> tuple[_Floats, _Floats]:
    """The start and end of each op, in the order of the graph."""
    steps = arrays.steps
    ends = [0.0]
    append = ends.append
    for a, b, work in zip(steps.left, steps.right, work_us, strict=True):
        x = ends[a]
        y = ends[b]
        append((x if x > y else y) + work)
    end_us = np.array(ends)
    # An op starts at the very maximum to which its last step added the duration.
    start_us = np.maximum(end_us[steps.last_left], end_us[steps.last_right])
    return start_us, end_us[steps.last + 1]


def _with_waits(arrays: PlanArrays, work_us: list[float], wait_us: float) -> tuple[_Floats, _Floats]:
    """The same with a delay of `wait_us` after ops of other lanes, which are always in a step's right slot."""
    steps = arrays.steps
    ends = [0.0]
    for a, b, work in zip(steps.left, steps.right, work_us, strict=True):
        ends.append((max(ends[a], ends[b] + wait_us) if b else ends[a]) + work)
    end_us = np.array(ends)
    others_us = np.where(steps.last_right > 0, end_us[steps.last_right] + wait_us, 0.0)
    return np.maximum(end_us[steps.last_left], others_us), end_us[steps.last + 1]


def _sharing(graph: Graph, plan: Plan, costs: Costs, machine: Machine) -> Contention | None:
    found = [sharing_of(plan, machine), multiprocessors_of(graph, plan, costs, machine), cards_of(plan, machine)]
    parts: list[Contention] = [part for part in found if part is not None]
    return CombinedContention(*parts) if len(parts) > 1 else parts[0] if parts else None


def _released(
    graph: Graph, launched_us: list[float] | None, earliest_us: Mapping[str, float] | None
) -> list[float] | None:
    """The time from which each op may start."""
    if not earliest_us:
        return launched_us
    found = launched_us or [0.0] * len(graph)
    for op, us in earliest_us.items():
        if op not in graph.index:
            raise InputError(f"simulate: earliest_us names op {op!r}, which the graph does not have")
        if not 0.0 <= us < float("inf"):
            raise InputError(f"simulate: op {op!r}: expected earliest_us >= 0, got {us!r}")
        found[graph.index[op]] = max(found[graph.index[op]], us)
    return found


def _waits(plan: Plan, machine: Machine, wait_us: float, launches: str) -> list[float]:
    """For each lane the delay of its ops after an op of another lane that they wait for."""
    event_us = {device.name: device.event_us for device in machine.devices} if launches != "free" else {}
    return [max(wait_us, event_us.get(lane.device, 0.0)) if lane.kind == "stream" else wait_us for lane in plan.lanes]


@remember
def _work(graph: Graph, plan: Plan, costs: Costs, machine: Machine) -> list[float]:
    """The duration of each step of the plan: that of its op if it is the op's last step, else 0."""
    steps = plan_arrays(graph, plan).steps
    work = np.zeros(len(steps.left))
    work[steps.last] = durations(graph, plan, costs, machine)
    return work.tolist()


def _contended(plan: Plan, machine: Machine) -> tuple[Sequence[int], list[int]]:
    """For each lane the link that it must queue for (-1 for none), and the channels of each of these links."""
    users: dict[tuple[str, str], list[int]] = {}
    for number, lane in enumerate(plan.lanes):
        if lane.kind == "channel" and lane.ops:
            users.setdefault(lane.ends, []).append(number)
    link_of = [-1] * len(plan.lanes)
    channels: list[int] = []
    for ends, lanes in users.items():
        limit = machine.link(*ends).channels
        if limit is not None and limit < len(lanes):
            for lane_number in lanes:
                link_of[lane_number] = len(channels)
            channels.append(limit)
    return link_of, channels
