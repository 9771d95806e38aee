"""Figures of a report: costs by op, layer and role, use of lanes, and the changes of a plan."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Lane, Op, Plan, Timeline


class OpCost(NamedTuple):
    """An op with its duration. `source` is empty if there is none."""

    op: Op
    duration_us: float
    source: str


class Total(NamedTuple):
    """Ops that belong together (one layer, one role), and their time."""

    name: str
    ops: int
    duration_us: float


class LaneUse(NamedTuple):
    """Time that a lane spent inside ops, and the rest of the step."""

    lane: str
    ops: int
    busy_us: float
    idle_us: float
    utilisation: float


@dataclass(frozen=True)
class Changes:
    """Differences between a plan and its baseline."""

    moved: tuple[str, ...]  # ops that left the lane on which most of their baseline lane's ops stayed
    # ops that overtook others in start order, or None if no timeline gives the start order
    earlier: tuple[str, ...] | None
    later: tuple[str, ...] | None  # ops that were overtaken in start order, or None likewise
    ops: int  # how many ops both plans run


def op_costs(graph: Graph, costs: Costs, plan: Plan | None = None) -> list[OpCost]:
    """Return every op of `graph` with its duration where `plan` runs it, else at one thread.

    An op that is known only for other devices has the shortest of its durations, so that it still shows.
    """
    lanes = plan.lane_of if plan is not None else {}
    return [_op_cost(op, costs, lanes.get(op.name)) for op in graph.ops]


def _op_cost(op: Op, costs: Costs, lane: Lane | None) -> OpCost:
    if op.name not in costs:
        return OpCost(op, 0.0, "")
    try:
        if lane is not None:
            return OpCost(op, *costs.lookup(op.name, width=lane.width, device=lane.device))
        return OpCost(op, *costs.lookup(op.name, width=1))
    except InputError:
        return OpCost(op, min(costs.durations_us[op.name].values()), costs.sources.get(op.name, "measured"))


def totals(rows: Iterable[OpCost], key: Callable[[Op], str]) -> list[Total]:
    """Sum `rows` by `key`, the costliest first."""
    counts: Counter[str] = Counter()
    times: dict[str, float] = {}
    for row in rows:
        name = key(row.op)
        counts[name] += 1
        times[name] = times.get(name, 0.0) + row.duration_us
    return sorted((Total(name, counts[name], time) for name, time in times.items()), key=lambda t: -t.duration_us)


def lane_uses(timeline: Timeline) -> list[LaneUse]:
    """Return the use of each lane of `timeline`, in its order."""
    whole_us = timeline.makespan_us
    return [
        LaneUse(
            lane,
            len(timeline.by_lane[lane]),
            busy_us,
            max(0.0, whole_us - busy_us),
            min(1.0, busy_us / whole_us) if whole_us else 0.0,
        )
        for lane, busy_us in timeline.busy_us.items()
    ]


def lane_text(lane: Lane) -> str:
    """The device of a lane, and its threads and cores, its priority or its ends."""
    if lane.kind == "channel":
        src, dst = lane.ends
        return f"channel {src} to {dst}"
    if lane.kind == "stream":
        return f"{lane.device}, stream, priority {lane.priority}"
    threads = f"{lane.width} thread{'s' if lane.width > 1 else ''}"
    where = f", core{'s' if len(lane.cores) > 1 else ''} {','.join(map(str, lane.cores))}" if lane.cores else ""
    return f"{lane.device}, {threads}{where}"


def timeline_of(plan: Plan, timelines: Mapping[str, Timeline]) -> str | None:
    """Return the name of a timeline in which every op of `plan` ran on its lane, preferably a measured one."""
    for source in ("measured", "simulated"):
        for name, timeline in timelines.items():
            if timeline.source == source and _ran(plan, timeline):
                return name
    return None


def _ran(plan: Plan, timeline: Timeline) -> bool:
    found = timeline.by_op
    return len(plan) > 0 and all(op in found and found[op].lane == lane.name for op, lane in plan.lane_of.items())


def changes(
    graph: Graph, plan: Plan, timelines: Mapping[str, Timeline] | None = None, baseline: Plan | None = None
) -> Changes:
    """Compare `plan` with `baseline`, or with all ops on one lane in the graph's order.

    Lanes have other names in another plan, so the heir of a baseline lane is the lane that runs most of its ops, and an
    op has moved if it is not on the heir. An op changed its place in the start order if it does not belong to a longest
    run of ops that kept their order among themselves: one op that is delayed counts once, not all that it lets pass.
    """
    timelines = timelines or {}
    base = baseline if baseline is not None else Plan((Lane("program", graph.order),))
    common = [op for op in base.lane_of if op in plan.lane_of]
    heirs: dict[str, str] = {}
    for lane in base.lanes:
        votes = Counter(plan.lane_of[op].name for op in lane.ops if op in plan.lane_of)
        if votes:
            heirs[lane.name] = votes.most_common(1)[0][0]
    moved = tuple(op for op in common if plan.lane_of[op].name != heirs[base.lane_of[op].name])
    before, after = _start_order(base, timelines), _start_order(plan, timelines)
    if before is None or after is None:
        return Changes(moved, None, None, len(common))
    old = {op: rank for rank, op in enumerate(op for op in before if op in plan.lane_of)}
    order = [op for op in after if op in old]
    kept = _longest_increasing([old[op] for op in order])
    shifted = [(op, rank - old[op]) for rank, op in enumerate(order) if rank not in kept]
    return Changes(
        moved,
        tuple(op for op, shift in shifted if shift < 0),
        tuple(op for op, shift in shifted if shift >= 0),
        len(common),
    )


def _start_order(plan: Plan, timelines: Mapping[str, Timeline]) -> Sequence[str] | None:
    if len(plan.lanes) == 1:
        return plan.lanes[0].ops
    name = timeline_of(plan, timelines)
    if name is None:
        return None
    found = timelines[name].by_op
    return sorted(plan.lane_of, key=lambda op: (found[op].start_us, found[op].end_us))


def _longest_increasing(ranks: Sequence[int]) -> set[int]:
    """Positions of a longest increasing subsequence (patience sorting)."""
    tails: list[int] = []
    ends: list[int] = []
    previous: list[int] = []
    for position, rank in enumerate(ranks):
        at = bisect_left(tails, rank)
        previous.append(ends[at - 1] if at else -1)
        tails[at : at + 1] = [rank]
        ends[at : at + 1] = [position]
    found: set[int] = set()
    position = ends[-1] if ends else -1
    while position >= 0:
        found.add(position)
        position = previous[position]
    return found
