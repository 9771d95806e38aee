r"""Check that all pairs of ops that touch the same memory are ordered, whatever the ops take.

The graph and the plan decide that, without a run. Two things order ops: a lane runs its ops in order, step after step,
and an op waits for those of other lanes that an edge, a carried edge or the plan names. The pairs that have to be
ordered are these (RAW, WAR and WAW in the usual shorthand), inside a step and from one step to the next::

    a writes x -----> b reads x        read after write      b would find the old value
    a reads x  -----> b writes x       write after read      a would find the new value
    a writes x -----> b writes x       write after write     the wrong one would stay

    step 1   forward ---- activation gradients ----+
                     \                              \  the same lane: no wait
    lane 1            `--> weight gradient -> update  \
                                                |      v
    step 2                         wait:        `--> forward        (it reads the weight that the update writes)

Vector clocks tell if one op is always before another (Fidge 1988, Mattern 1989): for each op and each lane, the number
of ops of the lane that have finished when the op ends.

Capture lists the memory that an op touches in the graph (`hocket.ir.Buffer`). A graph without buffers has no hazards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hocket.errors import PlanError
from hocket.ir import Graph, Plan, Synchronisation, synchronisation

_WORDS = {"RAW": ("writes", "reads"), "WAR": ("reads", "writes"), "WAW": ("writes", "writes")}


class Hazard(NamedTuple):
    """Two ops that must keep their order, by what they do with a buffer: RAW, WAR or WAW.

    If `carried`, `first` is of one step and `second` of the next.
    """

    first: str
    second: str
    kind: str
    buffer: str
    carried: bool = False

    def __str__(self) -> str:
        step = " of the next step" if self.carried else ""
        one, other = _WORDS[self.kind]
        return f"{self.kind}: op {self.first!r} {one} {self.buffer!r}, and op {self.second!r}{step} {other} it"


def hazards(graph: Graph, plan: Plan) -> None:
    """Raise a `PlanError` for a pair of ops that lanes and waits do not keep in their order.

    It names both ops, the buffer, and the lanes they run on.
    """
    sync = synchronisation(graph, plan)
    step_before = _step_before(graph, plan, sync)
    for hazard in (*_inside(graph), *_across(graph)):
        clocks = step_before if hazard.carried else sync.clocks
        lane, position = sync.place[hazard.first]
        if clocks[hazard.second][lane] <= position:
            one, other = plan.lanes[lane].name, plan.lane_of[hazard.second].name
            lanes = f"nothing orders lanes {one!r} and {other!r} here"
            why = lanes if one != other else f"lane {one!r} turns them round"
            raise PlanError(f"{hazard}; {why}", op=hazard.second, lane=other)


def _step_before(graph: Graph, plan: Plan, sync: Synchronisation) -> dict[str, tuple[int, ...]]:
    """For each op the number of ops of each lane of the step before that have finished when it ends.

    Each lane starts the next step as soon as it has finished this one.
    """
    carried: dict[str, list[str]] = {}
    for src, dst in graph.carried:
        carried.setdefault(dst, []).append(src)
    current = [sync.clocks[lane.ops[-1]] if lane.ops else (0,) * len(plan.lanes) for lane in plan.lanes]
    found: dict[str, tuple[int, ...]] = {}
    for op in sync.clocks:  # in an order in which each comes after what it waits for
        lane, _ = sync.place[op]
        waited = [found[other] for other in sync.waits.get(op, ())]
        waited += [sync.clocks[other] for other in carried.get(op, ())]
        for clock in waited:
            current[lane] = tuple(map(max, current[lane], clock))
        found[op] = current[lane]
    return found


def _inside(graph: Graph) -> Iterator[Hazard]:
    writer: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for name in graph.order:
        op = graph[name]
        for buffer in op.reads:
            if buffer in writer:
                yield Hazard(writer[buffer], name, "RAW", buffer)
        for buffer in op.writes:
            if buffer in writer:
                yield Hazard(writer[buffer], name, "WAW", buffer)
            for reader in readers.pop(buffer, ()):
                yield Hazard(reader, name, "WAR", buffer)
            writer[buffer] = name
        for buffer in op.reads:
            if writer.get(buffer) != name:
                readers.setdefault(buffer, []).append(name)


def _across(graph: Graph) -> Iterator[Hazard]:
    """For memory that is the same in every step: this step's last accesses, before the next one's first."""
    lasting = [buffer.name for buffer in graph.buffers if buffer.life == "lasting"]
    reads: dict[str, list[str]] = {buffer: [] for buffer in lasting}
    writes: dict[str, list[str]] = {buffer: [] for buffer in lasting}
    place = {name: at for at, name in enumerate(graph.order)}
    for name in graph.order:
        for table, buffers in ((reads, graph[name].reads), (writes, graph[name].writes)):
            for buffer in buffers:
                if buffer in table:
                    table[buffer].append(name)
    for buffer in lasting:
        if not writes[buffer]:
            continue
        first, last = writes[buffer][0], writes[buffer][-1]
        yield Hazard(last, first, "WAW", buffer, carried=True)
        for reader in reads[buffer]:
            if place[reader] <= place[first]:
                yield Hazard(last, reader, "RAW", buffer, carried=True)
            if place[reader] > place[last]:
                yield Hazard(reader, first, "WAR", buffer, carried=True)
