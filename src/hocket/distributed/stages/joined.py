"""The plan of all ranks that run parts of one step: checked as one plan before anything runs.

It has a lane of cores for each rank, and for each pair of ranks that exchange values a lane of sends at one end and a
lane of receives at the other. All lanes follow one order of the whole step: a send comes after the last op that writes
its value, and a receive after its send, or before all ops if the value was sent in the step before. So lanes cannot
wait for each other in a circle. `joined_graph` lets `hocket.check` and the hazard checker verify that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hocket.checking import check, hazards
from hocket.distributed.stages.crossings import Borders, Crossing, rank_name
from hocket.ir import Buffer, Carried, Edge, Graph, Lane, Op, Plan
from hocket.tracing.captured import Captured

SENDS, RECEIVES = "out", "in"


def link_name(home: int, to: int) -> str:
    """The name of the link from one rank to another."""
    return f"{rank_name(home)}->{rank_name(to)}"


def joined_plan(
    graph: Graph, order: Sequence[str], rank_of: Mapping[str, int], crossings: Sequence[Crossing], width: int
) -> Plan:
    """The plan of all ranks."""
    written = _written(graph, order)
    lanes = []
    for rank in sorted(set(rank_of.values())):
        ops = tuple(name for name in order if rank_of[name] == rank)
        lanes.append(Lane(rank_name(rank), ops, device=rank_name(rank), width=width))
    links: dict[tuple[int, int], list[Crossing]] = {}
    for each in sorted(crossings, key=lambda each: written[each.buffer]):
        links.setdefault((each.home, each.to), []).append(each)
    for (home, to), carried in links.items():
        name = f"{rank_name(home)}.{rank_name(to)}"
        lanes.append(Lane(f"{name}.{SENDS}", tuple(each.send for each in carried), "channel", link_name(home, to)))
        received = sorted(carried, key=lambda each: not each.lasts)
        lanes.append(Lane(f"{name}.{RECEIVES}", tuple(each.recv for each in received), "channel", link_name(home, to)))
    return Plan(tuple(lanes), planner="stages")


def joined_order(graph: Graph, order: Sequence[str], crossings: Sequence[Crossing]) -> tuple[str, ...]:
    """All ops in one order: a send follows the last op that writes its value, and its receive follows the send.

    Values that were sent in the step before are received first. Ops may wait for any op before them in this order
    without a circle of waits, though a send is over only when its receive has begun.

    Args:
        graph: the whole step.
        order: its ops, in a topological order.
        crossings: values that ranks exchange.
    """
    written = _written(graph, order)
    of_place: dict[int, list[str]] = {}
    for each in crossings:
        for name, place in ((each.send, written[each.buffer]), (each.recv, -1 if each.lasts else written[each.buffer])):
            of_place.setdefault(place, []).append(name)
    found = list(of_place.get(-1, ()))
    for at, name in enumerate(order):
        found += [name, *of_place.get(at, ())]
    return tuple(found)


def plan_of_rank(plan: Plan, rank: int) -> Plan:
    """The lanes of one rank in the joined plan."""
    name = rank_name(rank)

    def is_here(lane: Lane) -> bool:
        if lane.kind != "channel":
            return lane.device == name
        return lane.ends[0 if lane.name.endswith(f".{SENDS}") else 1] == name

    lanes = tuple(lane for lane in plan.lanes if is_here(lane))
    here = {op for lane in lanes for op in lane.ops}
    return Plan(lanes, {op: waits for op, waits in plan.after.items() if op in here}, planner=plan.planner)


def joined_graph(parts: Sequence[Captured], crossings: Sequence[Crossing]) -> Graph:
    """The ops of all parts and their transfers. Each part has its own copies of all memory.

    A receive waits for its send in the same step, or in the step before if the value outlives the step.
    """
    ops: list[Op] = []
    edges: list[Edge] = []
    carried: list[Carried] = []
    buffers: list[Buffer] = []
    for rank, part in enumerate(parts):
        at = f"@{rank}"
        for op in part.graph.ops:
            reads, writes = (tuple(f"{name}{at}" for name in names) for names in (op.reads, op.writes))
            ops.append(replace(op, reads=reads, writes=writes))
        edges += part.graph.edges
        carried += part.graph.carried
        buffers += [Buffer(f"{buffer.name}{at}", *buffer[1:]) for buffer in part.graph.buffers]
    for each in crossings:
        if each.lasts:
            carried.append(Carried(each.send, each.recv))
        else:
            edges.append(Edge(each.send, each.recv, each.size_bytes))
    return Graph(tuple(ops), tuple(edges), tuple(carried), tuple(buffers))


def checked_parts(
    borders: Borders, rank_of: Mapping[str, int], crossings: Sequence[Crossing], plan: Plan, num_ranks: int
) -> list[Captured]:
    """The parts of all ranks, checked together.

    Raises:
        InputError: a division that could not compute as the whole step does.
        PlanError: the joined plan is not legal, or two ops that use the same memory have no order.
    """
    parts = [borders.part(rank_of, crossings, rank) for rank in range(num_ranks)]
    joined = joined_graph(parts, crossings)
    check(joined, plan)
    hazards(joined, plan)
    return parts


def _written(graph: Graph, order: Sequence[str]) -> dict[str, int]:
    """Map each written buffer to the position of the last op that writes it."""
    place = {name: at for at, name in enumerate(order)}
    written: dict[str, int] = {}
    for op in graph.ops:
        for buffer in op.writes:
            written[buffer] = max(written.get(buffer, -1), place[op.name])
    return written


def ranks_of(plan: Plan) -> dict[str, int]:
    """The rank of each op by a plan with a lane for each rank.

    Example:
        >>> ranks_of(Plan((Lane("cpu0", ("a", "c")), Lane("cpu1", ("b",)))))
        {'a': 0, 'c': 0, 'b': 1}
    """
    return {op: rank for rank, lane in enumerate(plan.lanes) for op in lane.ops}


def check_runs(captured: Captured, plan: Plan) -> None:
    """Return if `hocket.distribute.stages` can run a plan with one rank for each lane.

    Raises:
        InputError, PlanError: it cannot. Ops and memory are named.
    """
    borders, rank_of, num_ranks = Borders(captured), ranks_of(plan), len(plan.lanes)
    borders.check(rank_of, num_ranks)
    crossings = borders.crossings(rank_of, num_ranks)
    joined = joined_plan(captured.graph, captured.graph.order, rank_of, crossings, 1)
    checked_parts(borders, rank_of, crossings, joined, num_ranks)
