r"""`cut`: part of a captured step, with channels to the other parts.

A parameter server keeps the updates and leaves forward and backward to a worker. A partitioned model leaves other ops
to other ranks. Each of them runs a *cut* of the same captured step: the ops that it keeps, a ``recv`` op for each value
that comes from elsewhere, and a ``send`` op for each that goes there::

    whole    w --> f --> g --> u(w)           worker   [recv w] --> f --> g --> [send g]
                                              server   [recv g] --> u(w)

What arrives may be memory that outlives the step (a parameter: it is received into its own memory, and not before the
last op of the step before that touches it is done), or the value of an op that is not kept. Numbers, gradients, results
and inputs that only the other ops use are gone. A cut that would compute something else than the whole step is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import fx

from hocket.errors import InputError
from hocket.ir import Carried, Edge, Graph, Op
from hocket.tracing.captured import Captured
from hocket.tracing.division import Arrival, Departure, Division, is_of_batch, restricted
from hocket.tracing.program import Action, Program, Transfer
from hocket.tracing.recording.batch_reads import BatchGuards
from hocket.tracing.recording.trace import Trace
from hocket.tracing.scalars.tape import Tape, TapeRef
from hocket.tracing.sources import BatchLeaf, Entry, ItemOf


def cut(
    captured: Captured, keep: Collection[str], arrivals: Sequence[Arrival], departures: Sequence[Departure]
) -> Captured:
    """The part of a captured step that runs the ops `keep`.

    Numbers that the step writes back are kept if they belong to the optimizer and some update is kept, if they do not
    and some other op is kept, and if this part reads them. Gradients of other parts are None. A cut runs like any
    captured step, by an executor with the channels (`hocket.execution.channels`). `rehearse` and `relowered` are for
    whole steps.

    Raises:
        InputError: unknown or duplicate names, a value that a kept op needs and that neither stays nor arrives, memory
            that ops left out write between its uses here or after it is sent, a place that they bind anew, a number
            that they count on, memory that several inputs share in part, or a step that appends to lists.
    """
    made = _Cut(captured, frozenset(keep), arrivals, departures)
    made.check()
    program = made.program()
    lowered = replace(captured.lowered, program=program, graph=made.graph())
    trace = _restricted(made)
    return replace(captured, graph=lowered.graph, program=program, lowered=lowered, trace=trace)


class _Cut(Division):
    """The program and the graph of a part."""

    def program(self) -> Program:
        receives = [Action(a.name, self.views(a), transfer=self._transfer(a, sends=False)) for a in self.arrivals]
        sends = [Action(d.name, (), transfer=self._transfer(d, sends=True)) for d in self.departures]
        kept = frozenset(slot for slot in self.old.kept if self.keeps(slot))
        read = {*kept, *(slot for action in (*self.actions, *sends, *receives) for slot in action.reads)}
        calls = []
        for call in reversed(self.old.prologue.calls):
            if read.intersection(call.outs.values()):
                calls.append(call)
                read.update(call.reads)
        prologue = replace(self.old.prologue, calls=tuple(reversed(calls)))
        return Program((*receives, *self.actions, *sends), prologue, self.old.num_slots, self.old.inputs, kept)

    def keeps(self, slot: int) -> bool:
        """Return True if this part has the value of a slot. Parts that do not use the batch have none."""
        return self.stays(slot) and (self.reads_batch or slot not in self._batch_slots)

    @cached_property
    def reads_batch(self) -> bool:
        sent = {self.slots[departure.buffer] for departure in self.departures}
        return not self._batch_slots.isdisjoint(sent.union(*(action.reads for action in self.actions)))

    @cached_property
    def _batch_slots(self) -> set[int]:
        return self.with_views({slot for slot, source in self.old.inputs.items() if isinstance(source, BatchLeaf)})

    def _transfer(self, one: Arrival | Departure, sends: bool) -> Transfer:
        slot = self.slots[one.buffer]
        new = None
        if not sends and slot in self.maker:
            if not self.has_dense_value(slot):
                raise InputError(f"cut: the value of {self.maker[slot]!r} is not one dense tensor, and cannot arrive")
            value = self.examples[slot]
            new = (tuple(value.shape), value.stride(), value.dtype, value.device)
        return Transfer(slot, one.peer, sends, new)

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
        return node is None or made.keeps(slot_of[node])

    leaves: tuple[tuple[str, Any], ...] = tuple(
        leaf if leaf[0] in ("value", "number", "place", "again") or stays(leaf[1]) else ("value", None)
        for leaf in trace.result.leaves
    )
    used = {number for action in made.actions for call in action.calls for number in call.numbers}
    used |= {leaf.index for kind, leaf in leaves if kind == "number"}
    numbers, tape, with_batch = _numbers(made, used)
    return replace(
        trace,
        result=replace(trace.result, leaves=leaves),
        gradients={gradient: node if stays(node) else None for gradient, node in trace.gradients.items()},
        rebound={entry: node for entry, node in trace.rebound.items() if stays(node)},
        numbers=numbers,
        tape=tape,
        batch_guards=trace.batch_guards if with_batch else BatchGuards(),
    )


def _numbers(made: _Cut, used: set[int]) -> tuple[dict[Entry, TapeRef], Tape, bool]:
    """The numbers that this part counts on, its tape, and whether it needs the batch.

    A number that the part reads is counted on here, too, as on the other parts.
    """
    trace = made.captured.trace
    updates = any(made.whole[name].role == "update" for name in made.keep)
    others = any(made.whole[name].role != "update" for name in made.keep)
    counted = {entry for entry in trace.numbers if (updates if entry.kind in ("group", "state") else others)}
    while True:
        needed = used | {trace.numbers[entry].index for entry in counted}
        with_batch = made.reads_batch or any(is_of_batch(trace.tape, index) for index in needed)
        tape = restricted(trace.tape, needed, _guards(made, needed, with_batch))
        read = {id(leaf) for leaf in tape.leaves}
        more = {entry for entry in trace.numbers if id(entry) in read} - counted
        if not more:
            return {e: reference for e, reference in trace.numbers.items() if e in counted}, tape, with_batch
        counted |= more


def _guards(made: _Cut, needed: Collection[int], with_batch: bool) -> list[tuple[int, Any]]:
    """The guards of this part. On a number in a tensor that another part counts on, it has none: that one does.

    No op here, and no guard on other numbers, may read such a number.
    """
    tape = made.captured.trace.tape
    counted = {  # by which ops, kept or not
        number: [op.name for op in made.whole.ops if leaf.source.name in op.writes]
        for number, leaf in enumerate(tape.leaves)
        if isinstance(leaf, ItemOf)
    }
    away = {number: ops[-1] for number, ops in counted.items() if not made.keep.issuperset(ops)}
    here = {number for number, ops in counted.items() if ops} - away.keys()
    guards = [(index, outcome) for index, outcome in tape.guards if with_batch or not is_of_batch(tape, index)]
    found = []
    for index, outcome in guards:
        leaves = set(tape.leaves_of(index))
        if leaves.isdisjoint(away):
            found.append((index, outcome))
        elif not leaves.isdisjoint(here):
            needed = {*needed, index}
    for index in needed:
        for number in away.keys() & set(tape.leaves_of(index)):
            users = [a.name for a in made.actions for c in a.calls if index in c.numbers]
            raise InputError(
                f"cut: {users[0] if users else 'the step'!r} reads the number in {tape.leaves[number].source.name!r}, "
                f"which {away[number]!r}, which is not kept, writes"
            )
    return found
