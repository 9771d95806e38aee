r"""Values that cross between ranks that run parts of one captured step, and ops that must share a rank.

Memory that is written has one home, the rank of all ops that write it. Ranks that read it elsewhere get a copy::

    value of an op          home   f --> f:0 ----> [send f:0]
                            other          [recv f:0] --> g

    lasting, step t         home   forward ---> update w ---> [send w]            for step t + 1
                            other  [recv w] ---> forward ---> backward            sent in step t - 1

A copy is made once a step. So ops that read memory between two writes share the rank of the writes, and so do ops that
read lasting memory after it was written. Ops that read it before may be at any rank. Ops that draw random numbers share
a rank, too: the generator is memory that they all write.

The plan of all ranks is checked as one plan before anything runs. It has a lane of cores for each rank, and for each
pair of ranks that exchange values a lane of sends at one end and a lane of receives at the other. All lanes follow one
order of the whole step: a send comes after the last op that writes its value, and a receive after its send, or before
all ops if the value was sent in the step before. So lanes cannot wait for each other in a circle. `joined_graph` lets
`hocket.check` and the hazard checker verify that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hocket.checking import check, hazards
from hocket.distributed.parts import items_of
from hocket.errors import InputError
from hocket.ir import Buffer, Carried, Edge, Graph, Lane, Op, Plan
from hocket.planning.partition.graph_problem import one_home
from hocket.tracing.captured import Captured
from hocket.tracing.cut import cut
from hocket.tracing.division import Arrival, Departure, Division


def rank_name(rank: int) -> str:
    """The name of a rank in plans and machines."""
    return f"rank{rank}"


@dataclass(frozen=True)
class Crossing:
    """A value that goes from its home to another rank in each step."""

    buffer: str  # buffer of the graph of the whole step
    home: int  # rank that writes it
    to: int  # rank that gets a copy
    size_bytes: int
    lasts: bool  # True if it outlives the step, and is sent for the next one
    since: int = 0  # number of migrations before. It makes the name unique on the wire.

    @property
    def send(self) -> str:
        """The name of the op that sends it."""
        return f"send:{self._name}"

    @property
    def recv(self) -> str:
        """The name of the op that receives it, and of the value on the wire."""
        return f"recv:{self._name}"

    @property
    def _name(self) -> str:
        return f"{'_'.join(self.buffer.split())}:{self.to}" + (f"~{self.since}" if self.since else "")


class Borders:
    """Constraints and crossings of divisions of a captured step between ranks."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._graph = captured.graph
        self._whole = Division(captured, frozenset(), (), ())
        self._lives = {buffer.name: buffer for buffer in self._graph.buffers}
        self._writers: dict[str, list[str]] = {}
        self._touching: dict[str, list[str]] = {}
        for op in self._graph.ops:
            for buffer in dict.fromkeys((*op.reads, *op.writes)):
                self._touching.setdefault(buffer, []).append(op.name)
            for buffer in op.writes:
                self._writers.setdefault(buffer, []).append(op.name)

    @cached_property
    def together(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Sets of two or more ops that must share a rank, each with the reason."""
        of_memory = ((ops, f"{buffer!r} is written, and has one home") for buffer, ops in one_home(self._graph))
        return tuple((ops, why) for ops, why in (*of_memory, *self._unseen()) if len(set(ops)) > 1)

    @cached_property
    def graph(self) -> Graph:
        """The graph, with constraints in `together` that its buffers do not show, so that its partitions can run."""
        found = dict.fromkeys(tuple(dict.fromkeys(ops)) for ops, _ in self._unseen())
        return replace(self._graph, together=tuple(ops for ops in found if len(ops) > 1))

    def check(self, rank_of: Mapping[str, int], num_ranks: int) -> None:
        """Refuse a division of unknown ops or ranks, or one that parts what has to share a rank."""
        self._check_shared_memory()
        for name in self._graph.by_name:
            if name not in rank_of:
                raise InputError(f"distribute: op {name!r} of the step is given to no rank")
        for name, rank in rank_of.items():
            if name not in self._graph.by_name:
                raise InputError(f"distribute: the step has no op {name!r}")
            if not 0 <= rank < num_ranks:
                raise InputError(f"distribute: op {name!r} is given to rank {rank}, and there are {num_ranks}")
        for ops, why in self.together:
            other = next((op for op in ops if rank_of[op] != rank_of[ops[0]]), None)
            if other is not None:
                raise InputError(
                    f"distribute: ops {ops[0]!r} (rank {rank_of[ops[0]]}) and {other!r} (rank {rank_of[other]}) have "
                    f"to share a rank: {why}"
                )

    def home_of(self, rank_of: Mapping[str, int]) -> dict[str, int]:
        """Map each buffer to the rank that writes it, or to the first rank that reads it if no op writes it."""
        found = {buffer: min(rank_of[op] for op in ops) for buffer, ops in self._touching.items()}
        return found | {buffer: rank_of[ops[0]] for buffer, ops in self._writers.items()}

    def crossings(self, rank_of: Mapping[str, int], num_ranks: int, since: int = 0) -> tuple[Crossing, ...]:
        """All crossings: for each rank the values that its ops read, and the results of the step.

        `since` is the number of migrations before (see `Crossing`).
        """
        home = self.home_of(rank_of)
        wanted: dict[tuple[str, int], None] = {}
        for op in self._graph.ops:
            rank = rank_of[op.name]
            for buffer in self._read_by(op.name):
                if buffer in self._writers and home[buffer] != rank and self._lives[buffer].life != "input":
                    wanted[buffer, rank] = None
        for buffer in self._returned:
            for rank in range(num_ranks):
                if home[buffer] != rank:
                    wanted[buffer, rank] = None
        lives = self._lives
        return tuple(
            Crossing(buffer, home[buffer], to, int(lives[buffer].size_bytes), lives[buffer].life == "lasting", since)
            for buffer, to in wanted
        )

    def part(self, rank_of: Mapping[str, int], crossings: Sequence[Crossing], rank: int) -> Captured:
        """The part of a rank, or an `InputError` if it could not compute as in the whole step."""
        return cut(
            self.captured,
            [name for name in self._graph.order if rank_of[name] == rank],
            [Arrival(each.recv, each.buffer, rank_name(each.home)) for each in crossings if each.to == rank],
            [Departure(each.send, each.buffer, rank_name(each.to)) for each in crossings if each.home == rank],
        )

    def _check_shared_memory(self) -> None:
        """Refuse places that share memory: a copy of one would not be a copy of the other."""
        roots, slot_of = self.captured.trace.roots, self.captured.lowered.slot_of
        inputs = self.captured.program.inputs
        seen: dict[int, str] = {}
        for node in self.captured.trace.graph.nodes:
            source = inputs.get(slot_of[node]) if node in roots and node in slot_of else None
            if source is not None and seen.setdefault(roots[node], source.name) != source.name:
                raise InputError(
                    f"distribute: {source.name!r} and {seen[roots[node]]!r} share memory, and neither can be copied"
                )

    @cached_property
    def _buffer_of(self) -> dict[int, str]:
        """Map each slot that can be received with the value of a buffer to that buffer."""
        found: dict[int, str] = {}
        for buffer, slot in self._whole.slots.items():
            # It can be if no op makes the value, or it fills its memory without gaps, in any order.
            if slot in self._whole.maker and not self._whole.has_dense_value(slot):
                continue
            found.setdefault(slot, buffer)
            for call in self._whole.views(Arrival("", buffer, "")):
                for out in call.outs.values():
                    found.setdefault(out, buffer)
        return found

    def _read_by(self, name: str) -> Iterator[str]:
        """The buffers that an op reads, or whose values it reads."""
        program = self.captured.program
        yield from self._graph[name].reads
        for slot in program.by_name[name].reads:
            if self._whole.maker.get(slot, name) != name:
                yield self._buffer_of[slot]

    @cached_property
    def _returned(self) -> tuple[str, ...]:
        """The buffers that hold the results of the step."""
        found = []
        for kind, slot, _ in self.captured.results:
            if kind == "number":
                continue
            source = self.captured.program.inputs.get(slot)
            if source is not None or slot in self.captured.program.prologue.fills:
                if source is None or source.name in self._writers:
                    raise InputError("distribute: the step returns memory of its model, its optimizer or its batch")
                continue
            if slot not in self._buffer_of:
                raise InputError(f"distribute: what {self._whole.maker[slot]!r} makes is returned, and cannot be sent")
            found.append(self._buffer_of[slot])
        return tuple(found)

    def _unseen(self) -> Iterator[tuple[tuple[str, ...], str]]:
        yield from self._of_values()
        yield from self._of_replaced()
        yield from self._of_numbers()

    def _of_values(self) -> Iterator[tuple[tuple[str, ...], str]]:
        for action in self.captured.program.actions:
            for slot in action.reads:
                maker = self._whole.maker.get(slot)
                if maker is not None and slot not in self._buffer_of:
                    yield (maker, action.name), "the one takes a value of the other that cannot be sent"

    def _of_replaced(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Ops that make a tensor that the step binds again, with the ops that read it in the next step."""
        program, slot_of = self.captured.program, self.captured.lowered.slot_of
        slot_at = {source: slot for slot, source in program.inputs.items()}
        replaced: dict[Any, Any] = {**self.captured.trace.rebound, **self.captured.trace.gradients}
        for source, node in replaced.items():
            if node is None or source not in slot_at or slot_of[node] not in self._whole.maker:
                continue
            seen = {slot_at[source]}
            for call in program.prologue.calls:
                seen.update(call.outs.values() if seen.intersection(call.reads) else ())
            readers = [action.name for action in program.actions if seen.intersection(action.reads)]
            yield (self._whole.maker[slot_of[node]], *readers), f"{source.name!r} is bound anew in each step"

    def _of_numbers(self) -> Iterator[tuple[tuple[str, ...], str]]:
        for op, tensors in items_of(self.captured).items():
            for tensor in tensors:
                if tensor in self._writers:
                    yield (*self._writers[tensor], op), f"the number in {tensor!r} is counted on"


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
    """The parts of all ranks, checked together: an illegal division is an `InputError` or a `PlanError`."""
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
    """The rank of each op by a plan with a lane for each rank."""
    return {op: rank for rank, lane in enumerate(plan.lanes) for op in lane.ops}


def check_runs(captured: Captured, plan: Plan) -> None:
    """Raise an `InputError` or a `PlanError` if `hocket.distribute.stages` cannot run a plan with one rank a lane."""
    borders, rank_of, num_ranks = Borders(captured), ranks_of(plan), len(plan.lanes)
    borders.check(rank_of, num_ranks)
    crossings = borders.crossings(rank_of, num_ranks)
    joined = joined_plan(captured.graph, captured.graph.order, rank_of, crossings, 1)
    checked_parts(borders, rank_of, crossings, joined, num_ranks)
