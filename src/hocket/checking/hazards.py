r"""Check that all pairs of ops that touch the same memory are ordered, whatever the ops take.

The graph and the plan decide that, without a run. Two things order ops: a lane runs its ops in order, step after step,
and an op may wait for an *event* of an op on another lane. The pairs that have to be ordered are these (RAW, WAR and
WAW in the usual shorthand), inside a step and from one step to the next::

    a writes x -----> b reads x        read after write      b would find the old value
    a reads x  -----> b writes x       write after read      a would find the new value
    a writes x -----> b writes x       write after write     the wrong one would stay

    step 1   forward ---- activation gradients ----+
                     \                              \  the same lane: no event
    lane 1            `--> weight gradient -> update  \
                                                |      v
    step 2                         event:       `--> forward        (it reads the weight that the update writes)

Vector clocks tell if one op is always before another (Fidge 1988, Mattern 1989): for each op and each lane, the number
of ops of the lane that have finished when the op ends.

Capture lists the memory that an op touches in the graph (`hocket.ir.Buffer`). Edges are checked in any case, since a
graph may have one for another reason. Without buffers only edges are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from hocket.errors import PlanError
from hocket.ir import Graph, Plan, carried_waits, clocks_of, execution_order, synchronisation

_WORDS = {"RAW": ("writes", "reads"), "WAR": ("reads", "writes"), "WAW": ("writes", "writes")}


@dataclass(frozen=True)
class Events:
    """Waits between lanes, in addition to the order of each lane.

    Attributes:
        waits: op -> ops on other lanes that it waits for.
        carried: op -> ops of the step before that it waits for.
    """

    waits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    carried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Hazard(NamedTuple):
    """Two ops that must keep their order, and the reason: RAW, WAR or WAW on a buffer, or an edge of the graph.

    If `carried`, `first` is of one step and `second` of the next.
    """

    first: str
    second: str
    kind: str
    buffer: str = ""
    carried: bool = False

    def __str__(self) -> str:
        step = " of the next step" if self.carried else ""
        if self.kind == "edge":
            return f"op {self.second!r}{step} depends on {self.first!r}"
        one, other = _WORDS[self.kind]
        return f"{self.kind}: op {self.first!r} {one} {self.buffer!r}, and op {self.second!r}{step} {other} it"


def events_of(graph: Graph, plan: Plan) -> Events:
    """The events that a plan needs: one where an edge crosses lanes and no other event already implies it.

    Raises:
        PlanError: the plan does not run every op once, or its lanes wait for each other in a circle.
    """
    sync = synchronisation(graph, plan)
    return Events(sync.waits, carried_waits(graph, plan, sync))


def hazards(graph: Graph, plan: Plan, events: Events | None = None) -> None:
    """Raise a `PlanError` for a pair of ops that lanes and events alone do not keep in their order.

    Args:
        graph: the ops, their edges, and the memory they touch.
        plan: their lanes.
        events: the waits between lanes, those of `events_of` by default. Edges and `Plan.after` count only if they are
            among them.

    Raises:
        PlanError: names both ops, the buffer, and the lanes they run on.

    Example:
        >>> from hocket.ir import Buffer, Edge, Graph, Lane, Op, Plan
        >>> ops = (Op("a", writes=("x",)), Op("b", reads=("x",)))
        >>> graph = Graph(ops, (Edge("a", "b", 4.0),), buffers=(Buffer("x", 4.0),))
        >>> plan = Plan((Lane("one", ("a",)), Lane("two", ("b",))))
        >>> hazards(graph, plan)
        >>> hazards(graph, plan, Events())
        Traceback (most recent call last):
        hocket.errors.PlanError: RAW: op 'a' writes 'x', and op 'b' reads it; nothing orders lanes 'one' and 'two' here
    """
    for hazard in _unordered(graph, plan, events if events is not None else events_of(graph, plan)):
        one, other = plan.lane_of[hazard.first].name, plan.lane_of[hazard.second].name
        why = f"nothing orders lanes {one!r} and {other!r} here" if one != other else f"lane {one!r} turns them round"
        raise PlanError(f"{hazard}; {why}", op=hazard.second, lane=other)


def _unordered(graph: Graph, plan: Plan, events: Events) -> Iterator[Hazard]:
    clocks = _Clocks(graph, plan, events)
    for hazard in _pairs(graph):
        if not clocks.before(hazard.first, hazard.second, hazard.carried):
            yield hazard


class _Clocks:
    """The number of ops of each lane that have finished when an op ends, of its own step and of the step before."""

    def __init__(self, graph: Graph, plan: Plan, events: Events) -> None:
        self._place = {op: (number, at) for number, lane in enumerate(plan.lanes) for at, op in enumerate(lane.ops)}
        order = _order(graph, plan, events.waits)
        self._own = clocks_of(plan, order, events.waits)
        self._last = self._step_before(plan, order, events)

    def before(self, first: str, second: str, carried: bool) -> bool:
        lane, position = self._place[first]
        if carried:
            return self._last[second][lane] > position
        # An op ends after itself; what has to be over when it *starts* lies on another lane or earlier on its own.
        return first != second and self._own[second][lane] > position

    def _step_before(self, plan: Plan, order: Sequence[str], events: Events) -> dict[str, tuple[int, ...]]:
        """For each op the number of ops of each lane of the step before that have finished when it ends."""
        nothing = (0,) * len(plan.lanes)
        current = [self._own[lane.ops[-1]] if lane.ops else nothing for lane in plan.lanes]
        clocks: dict[str, tuple[int, ...]] = {}
        for op in order:
            lane, _ = self._place[op]
            clock = current[lane]
            for others, known in ((events.waits, clocks), (events.carried, self._own)):
                for other in others.get(op, ()):
                    clock = tuple(map(max, clock, known[other]))
            current[lane] = clocks[op] = clock
        return clocks


def _order(graph: Graph, plan: Plan, events: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The ops so that each comes after the events that it waits for, and after the op before it on its lane.

    Raises:
        PlanError: lanes wait for each other in a circle, or for an op that no lane runs.
    """
    waits = {op: list(events.get(op, ())) for lane in plan.lanes for op in lane.ops}
    for lane in plan.lanes:
        for before, op in pairwise(lane.ops):
            waits[op].append(before)
    for op, others in waits.items():
        for other in others:
            if other not in waits:
                raise PlanError(f"op {op!r} waits for an event of {other!r}, which no lane runs", op=op)
    return execution_order(graph, plan, waits)


def _pairs(graph: Graph) -> Iterator[Hazard]:
    """All pairs that must keep their order, perhaps without those that others imply."""
    yield from _inside(graph)
    yield from _across(graph)
    for edge in graph.edges:
        yield Hazard(edge.src, edge.dst, "edge")
    for src, dst in graph.carried:
        yield Hazard(src, dst, "edge", carried=True)


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
