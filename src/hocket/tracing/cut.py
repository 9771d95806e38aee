r"""`cut`: part of a captured step, with channels to where the rest of it is.

A parameter server keeps the updates and leaves forward and backward to a worker; a partitioned model leaves other ops
to other ranks. Each of them runs a *cut* of the same captured step: the ops that it keeps, a ``recv`` op for each value
that comes from elsewhere, and a ``send`` op for each that goes there::

    whole    w --> f --> g --> u(w)           worker   [recv w] --> f --> g --> [send g]
                                              server   [recv g] --> u(w)

What arrives may be memory that outlives the step (a parameter: it is received into its own memory, and not before the
last op of the step before that touches it is done), or the value of an op that is not kept. Numbers, gradients, results
and inputs that only the other ops know are gone. What the cut could not compute as the whole step does is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from hocket.errors import InputError
from hocket.ir import Carried, Edge, Graph, Op
from hocket.tracing.captured import Captured
from hocket.tracing.program import Action, Call, Program, Transfer
from hocket.tracing.recording.batch_reads import BatchGuards
from hocket.tracing.restricted_tape import is_of_batch, references, restricted
from hocket.tracing.state import BatchLeaf
from hocket.tracing.trace import Trace

__all__ = ["Arrival", "Departure", "cut"]


@dataclass(frozen=True)
class Arrival:
    """A value that comes over a channel.

    Attributes:
        name: of the ``recv`` op.
        buffer: a buffer of the graph: one that outlives the step, or one that an op makes which is not kept.
        peer: where it comes from.
    """

    name: str
    buffer: str
    peer: str


@dataclass(frozen=True)
class Departure:
    """A value that goes out over a channel, when the last kept op that writes it is done; as `Arrival`."""

    name: str
    buffer: str
    peer: str


def cut(
    captured: Captured, keep: Collection[str], arrivals: Sequence[Arrival], departures: Sequence[Departure]
) -> Captured:
    """The part of a captured step that runs the ops `keep`.

    Numbers that the step writes back stay where they belong to the optimizer and some update is kept, or to anything
    else and some other op is. It is run like any captured step, by an executor that has the channels
    (`hocket.execution.channels`); `rehearse` and `relowered` are for whole steps.

    Args:
        captured: the whole step.
        keep: names of ops.
        arrivals: what comes from elsewhere.
        departures: what goes there.

    Raises:
        InputError: unknown or duplicate names, a value that a kept op needs and that neither stays nor arrives, memory
            that ops left out write between its uses here, or a step that appends to lists.
    """
    made = _Cut(captured, frozenset(keep), arrivals, departures)
    made.check()
    program = made.program()
    lowered = replace(captured.lowered, program=program, graph=made.graph())
    trace = _restricted(made)
    return replace(captured, graph=lowered.graph, program=program, lowered=lowered, trace=trace)


class _Cut:
    def __init__(
        self,
        captured: Captured,
        keep: frozenset[str],
        arrivals: Sequence[Arrival],
        departures: Sequence[Departure],
    ) -> None:
        self.whole, self.old = captured.graph, captured.program
        self.keep = keep
        self.arrivals, self.departures = arrivals, departures
        self.captured = captured
        self.maker = {slot: action.name for action in self.old.actions for slot in action.fills}
        self.buffers = {buffer.name: buffer for buffer in self.whole.buffers}
        self.slots = self._slots()
        self.actions = [action for action in self.old.actions if action.name in keep]
        self.arriving = {arrival.buffer for arrival in arrivals}
        self.touching: dict[str, list[str]] = {}  # for each buffer the kept ops that touch it, in program order
        for op in self.whole.ops:
            for buffer in dict.fromkeys((*op.reads, *op.writes)) if op.name in keep else ():
                self.touching.setdefault(buffer, []).append(op.name)

    def _slots(self) -> dict[str, int]:
        """The slot that holds each buffer: an input's own, or that of the value that made it."""
        found: dict[str, int] = {}
        for slot, source in self.old.inputs.items():
            if source.name in self.buffers:
                found.setdefault(source.name, slot)
        for action in self.old.actions:
            for position, slot in enumerate(action.fills):
                if f"{action.name}:{position}" in self.buffers:
                    found.setdefault(f"{action.name}:{position}", slot)
        return found

    def check(self) -> None:
        if self.captured.trace.appended:
            raise InputError("cut: the step appends to lists, and a part of it cannot")
        for name in self.keep:
            if name not in self.whole.by_name:
                raise InputError(f"cut: the step has no op {name!r}")
        names = set(self.keep)
        moved: list[Arrival | Departure] = [*self.arrivals, *self.departures]
        for one in moved:
            if one.name in names or one.name in self.whole.by_name or one.name.split() != [one.name]:
                raise InputError(f"cut: expected a name of its own without white space, got {one.name!r}")
            names.add(one.name)
            if one.buffer not in self.slots:
                raise InputError(f"cut: {one.name!r} is to carry {one.buffer!r}, which is no buffer of the step")
        if len(self.arriving) < len(self.arrivals):
            raise InputError("cut: a buffer arrives twice")
        for arrival in self.arrivals:
            if self.maker.get(self.slots[arrival.buffer]) in self.keep:
                raise InputError(f"cut: {arrival.buffer!r} arrives, and the op that makes it is kept, too")
        for departure in self.departures:
            maker = self.maker.get(self.slots[departure.buffer])
            if maker is not None and maker not in self.keep:
                raise InputError(f"cut: {departure.buffer!r} is to be sent, and {maker!r}, which makes it, is not kept")
        self._check_values()
        self._check_memory()

    def _check_values(self) -> None:
        here = self._arriving_slots
        for action in self.actions:
            for slot in action.reads:
                maker = self.maker.get(slot)
                if maker is not None and maker not in self.keep and slot not in here:
                    raise InputError(f"cut: op {action.name!r} reads what {maker!r} makes; neither stays nor arrives")

    def _check_memory(self) -> None:
        """Ops left out change nothing that kept ops see, unless it arrives."""
        place = self.whole.index
        for op in self.whole.ops:
            if op.name in self.keep:
                continue
            for buffer in op.writes:
                uses = self.touching.get(buffer, [])
                if not uses or self.maker.get(self.slots.get(buffer, -1)) == op.name:
                    continue
                before = [name for name in uses if place[name] < place[op.name]]
                after = [name for name in uses if place[name] > place[op.name]]
                lasting = self.buffers[buffer].life == "lasting"
                if buffer not in self.arriving and (after or lasting):
                    user = (after or before)[0]
                    raise InputError(
                        f"cut: {op.name!r}, which is not kept, writes {buffer!r}, which {user!r} uses; let it arrive"
                    )
                if buffer in self.arriving and before and after:
                    raise InputError(
                        f"cut: {buffer!r} arrives once, and {before[0]!r} and {after[0]!r} use it before and after "
                        f"{op.name!r}, which is not kept, writes it"
                    )

    def program(self) -> Program:
        receives = [Action(a.name, self.views(a), transfer=self._transfer(a, sends=False)) for a in self.arrivals]
        sends = [Action(d.name, (), transfer=self._transfer(d, sends=True)) for d in self.departures]
        read = {slot for action in (*self.actions, *sends, *receives) for slot in action.reads}
        calls = []
        for call in reversed(self.old.prologue.calls):
            if read.intersection(call.outs.values()):
                calls.append(call)
                read.update(call.reads)
        prologue = replace(self.old.prologue, calls=tuple(reversed(calls)))
        kept = frozenset(slot for slot in self.old.kept if self.stays(slot))
        return Program((*receives, *self.actions, *sends), prologue, self.old.num_slots, self.old.inputs, kept)

    def stays(self, slot: int) -> bool:
        """Whether the value of a slot is one that this part of the step has."""
        maker = self.maker.get(slot)
        return maker is None or maker in self.keep or slot in self._arriving_slots

    @cached_property
    def _arriving_slots(self) -> set[int]:
        views = {slot for a in self.arrivals for call in self.views(a) for slot in call.outs.values()}
        return views | {self.slots[buffer] for buffer in self.arriving}

    def views(self, arrival: Arrival) -> tuple[Call, ...]:
        """The calls by which the op that makes the arriving value also makes views of it."""
        slot = self.slots[arrival.buffer]
        if slot not in self.maker:
            return ()
        known, found = {slot}, []
        for call in self.old.by_name[self.maker[slot]].calls[1:]:
            if call.reads and known.issuperset(call.reads) and next(references(call), None) is None:
                known.update(call.outs.values())
                found.append(call)
        return tuple(found)

    def _transfer(self, one: Arrival | Departure, sends: bool) -> Transfer:
        slot = self.slots[one.buffer]
        new = None
        if not sends and slot in self.maker:
            value = self._example(slot)
            new = (tuple(value.shape), value.dtype, value.device)
        return Transfer(slot, one.peer, sends, new)

    def _example(self, slot: int) -> Any:
        """What the trace knows of the value of a slot: a fake tensor."""
        node = next((n for n, at in self.captured.lowered.slot_of.items() if at == slot), None)
        value = node.meta.get("val") if node is not None else None
        if value is None or not value.is_contiguous():
            raise InputError(f"cut: the value of {self.maker[slot]!r} is not one dense tensor, and cannot arrive")
        return value

    def graph(self) -> Graph:
        size = {name: buffer.size_bytes for name, buffer in self.buffers.items()}
        receives = [
            Op(a.name, "hocket.recv", "recv", size_bytes=size[a.buffer], stateless=False, writes=(a.buffer,))
            for a in self.arrivals
        ]
        sends = [
            Op(d.name, "hocket.send", "send", size_bytes=size[d.buffer], stateless=False, reads=(d.buffer,))
            for d in self.departures
        ]
        edges = [edge for edge in self.whole.edges if edge.src in self.keep and edge.dst in self.keep]
        carried = [pair for pair in self.whole.carried if pair.src in self.keep and pair.dst in self.keep]
        lasting = {buffer.name for buffer in self.whole.buffers if buffer.life == "lasting"}
        for arrival in self.arrivals:
            uses = self._uses(arrival.buffer)
            edges += [Edge(arrival.name, name, size[arrival.buffer]) for name in uses]
            if arrival.buffer in lasting:
                carried += [Carried(name, arrival.name) for name in uses]
        for departure in self.departures:
            writers = [n for n in self._uses(departure.buffer) if departure.buffer in self.whole[n].writes]
            edges += [Edge(name, departure.name, size[departure.buffer]) for name in writers]
            if departure.buffer in lasting:
                carried += [Carried(departure.name, name) for name in writers]
            for arrival in self.arrivals:
                if arrival.buffer == departure.buffer:
                    edges.append(Edge(arrival.name, departure.name, size[departure.buffer]))
                    carried += [Carried(departure.name, arrival.name)] if departure.buffer in lasting else []
        ops = (*receives, *(op for op in self.whole.ops if op.name in self.keep), *sends)
        touched = {buffer for op in ops for buffer in (*op.reads, *op.writes)}
        buffers = tuple(buffer for buffer in self.whole.buffers if buffer.name in touched)
        return Graph(ops, tuple(dict.fromkeys(edges)), tuple(dict.fromkeys(carried)), buffers)

    def _uses(self, buffer: str) -> list[str]:
        """The kept ops that touch a buffer, or read its slot or a view that comes with it."""
        slots = {self.slots[buffer]}
        for arrival in self.arrivals:
            if arrival.buffer == buffer:
                slots |= {slot for call in self.views(arrival) for slot in call.outs.values()}
        readers = [action.name for action in self.actions if not slots.isdisjoint(action.reads)]
        return list(dict.fromkeys((*self.touching.get(buffer, ()), *readers)))


def _restricted(made: _Cut) -> Trace:
    """The trace with only those gradients, results, rebound places and numbers that this part of the step has."""
    trace, slot_of = made.captured.trace, made.captured.lowered.slot_of

    def stays(node: fx.Node | None) -> bool:
        return node is None or made.stays(slot_of[node])

    leaves: tuple[tuple[str, Any], ...] = tuple(
        leaf if leaf[0] in ("value", "number") or stays(leaf[1]) else ("value", None) for leaf in trace.result.leaves
    )
    updates = any(made.whole[name].role == "update" for name in made.keep)
    others = any(made.whole[name].role != "update" for name in made.keep)
    numbers = {
        entry: reference
        for entry, reference in trace.numbers.items()
        if (updates if entry.kind in ("group", "state") else others)
    }
    used = {ref.index for action in made.actions for call in action.calls for ref in references(call)}
    used |= {ref.index for ref in numbers.values()} | {leaf.index for kind, leaf in leaves if kind == "number"}
    slots = {slot for action in (*made.actions, made.program().prologue) for slot in action.reads}
    sources = [made.old.inputs.get(slot) for slot in slots]
    with_batch = any(isinstance(source, BatchLeaf) for source in sources) or any(
        is_of_batch(trace.tape, index) for index in used
    )
    return replace(
        trace,
        result=replace(trace.result, leaves=leaves),
        gradients={gradient: node for gradient, node in trace.gradients.items() if stays(node)},
        rebound={entry: node for entry, node in trace.rebound.items() if stays(node)},
        numbers=numbers,
        tape=restricted(trace.tape, used, with_batch),
        batch_guards=trace.batch_guards if with_batch else BatchGuards(),
    )
