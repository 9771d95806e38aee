"""Division of a step: the values that a part keeps, those that cross its border, and the parts that are refused.

A part is right if every value and all memory that its ops see is what they would see in the whole step. Ops left out
may change memory under its feet, bind a place anew, or count a number on, and none of that shows in the edges between
the ops that are kept. So each of these is looked for here, and refused by name unless the value arrives.

What arrives of memory that outlives the step (a parameter) is what the step before left there, if ops kept here use it
before those left out write it. If they use it after that, it is what this step leaves there. A program that pairs a
send with a receive pairs their steps so. Of a value that an op makes it is what all ops leave that write it. A part
that sends has to have that very value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from hocket.errors import InputError
from hocket.tracing.captured import Captured
from hocket.tracing.program import Call
from hocket.tracing.recording.batch_reads import BatchNumber
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.sources import LiveLeaf


@dataclass(frozen=True)
class Arrival:
    """A value that comes over a channel."""

    name: str  # of the ``recv`` op
    buffer: str  # a buffer of the graph: one that outlives the step, or one that an op makes which is not kept
    peer: str  # where it comes from


@dataclass(frozen=True)
class Departure:
    """A value that is sent over a channel once the last kept op that writes it is done. See `Arrival`."""

    name: str
    buffer: str
    peer: str
    # ops left out write it later, and the receiving part runs them, as for a gradient that is clipped in place
    # elsewhere
    unfinished: bool = False


class Division:
    """A captured step, the ops that a part of it keeps, and what arrives and departs."""

    def __init__(
        self, captured: Captured, keep: frozenset[str], arrivals: Sequence[Arrival], departures: Sequence[Departure]
    ) -> None:
        self.captured, self.whole, self.old = captured, captured.graph, captured.program
        self.keep, self.arrivals, self.departures = keep, arrivals, departures
        self.moved: list[Arrival | Departure] = [*arrivals, *departures]
        # slot -> the action that fills it, absent for inputs
        self.maker = {slot: action.name for action in self.old.actions for slot in action.fills}
        self.buffers = {buffer.name: buffer for buffer in self.whole.buffers}
        # buffer -> the slot that holds it: an input's own, or that of the value that made it
        self.slots = self._slots()
        self.actions = [action for action in self.old.actions if action.name in keep]
        self.arriving = {arrival.buffer for arrival in arrivals}
        self.touching: dict[str, list[str]] = {}  # buffer -> the kept ops that touch it, in program order
        # buffer -> the ops left out that write it, in program order, without the one that makes it
        self.left_writers: dict[str, list[str]] = {}
        for op in self.whole.ops:
            if op.name in keep:
                for buffer in dict.fromkeys((*op.reads, *op.writes)):
                    self.touching.setdefault(buffer, []).append(op.name)
            else:
                for buffer in op.writes:
                    if self.maker.get(self.slots.get(buffer, -1)) != op.name:
                        self.left_writers.setdefault(buffer, []).append(op.name)

    def stays(self, slot: int) -> bool:
        """Return True if this part of the step has the value of a slot."""
        maker = self.maker.get(slot)
        return maker is None or maker in self.keep or slot in self._arriving_slots

    def views(self, arrival: Arrival) -> tuple[Call, ...]:
        """The calls by which the op that makes the arriving value also makes views of it."""
        slot = self.slots[arrival.buffer]
        if slot not in self.maker:
            return ()
        known, found = {slot}, []
        for call in self.old.by_name[self.maker[slot]].calls[1:]:
            if call.reads and known.issuperset(call.reads) and not call.numbers:
                known.update(call.outs.values())
                found.append(call)
        return tuple(found)

    def with_views(self, slots: set[int]) -> set[int]:
        """These slots, and those of views that the prologue takes of them."""
        found = set(slots)
        for call in self.old.prologue.calls:
            found.update(call.outs.values() if found.intersection(call.reads) else ())
        return found

    @cached_property
    def examples(self) -> dict[int, Any]:
        """Fake tensors of the values in slots, from the trace."""
        found: dict[int, Any] = {}
        for node, slot in self.captured.lowered.slot_of.items():
            found.setdefault(slot, node.meta.get("val"))
        return found

    def has_dense_value(self, slot: int) -> bool:
        """Return True if the value of a slot is one tensor that fills its memory, in any order of its axes."""
        value = self.examples.get(slot)
        is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return is_strided and bool(torch.ops.aten.is_non_overlapping_and_dense(value))

    def check(self) -> None:
        """Refuse what could not compute as the whole step does, and name the op and the buffer."""
        if self.captured.trace.appended:
            raise InputError("cut: the step appends to lists, and a part of it cannot")
        self._check_names()
        self._check_values()
        self._check_memory()
        self._check_crossing()
        self._check_replaced()

    def _slots(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for slot, source in self.old.inputs.items():
            if source.name in self.buffers:
                found.setdefault(source.name, slot)
        for action in self.old.actions:
            for position, slot in enumerate(action.fills):
                if f"{action.name}:{position}" in self.buffers:
                    found.setdefault(f"{action.name}:{position}", slot)
        return found

    @cached_property
    def _arriving_slots(self) -> set[int]:
        views = {slot for a in self.arrivals for call in self.views(a) for slot in call.outs.values()}
        return views | {self.slots[buffer] for buffer in self.arriving}

    def _check_names(self) -> None:
        for name in self.keep:
            if name not in self.whole.by_name:
                raise InputError(f"cut: the step has no op {name!r}")
        names = set(self.keep)
        for one in self.moved:
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
            if self.buffers[arrival.buffer].life == "input":
                raise InputError(f"cut: {arrival.buffer!r} is of the batch and cannot arrive; give the part that batch")
        for departure in self.departures:
            maker = self.maker.get(self.slots[departure.buffer])
            if maker is not None and maker not in self.keep:
                raise InputError(f"cut: {departure.buffer!r} is to be sent, and {maker!r}, which makes it, is not kept")

    def _check_values(self) -> None:
        for action in self.actions:
            for slot in action.reads:
                if not self.stays(slot):
                    raise InputError(
                        f"cut: op {action.name!r} reads what {self.maker[slot]!r} makes; neither stays nor arrives"
                    )

    def _check_memory(self) -> None:
        """Ops left out change nothing that kept ops see, unless it arrives, and then not between their uses."""
        place = self.whole.index
        for buffer, writers in self.left_writers.items():
            uses = self.touching.get(buffer, [])
            lasts = self.buffers[buffer].life == "lasting"
            between = [name for name in uses if place[writers[0]] < place[name] < place[writers[-1]]]
            if buffer in self.arriving and between:
                raise InputError(
                    f"cut: {buffer!r} arrives once, and {between[0]!r} uses it between {writers[0]!r} and "
                    f"{writers[-1]!r}, which are not kept and write it"
                )
            for writer in writers if uses else ():
                before = [name for name in uses if place[name] < place[writer]]
                after = [name for name in uses if place[name] > place[writer]]
                if buffer not in self.arriving and (after or lasts):
                    raise InputError(
                        f"cut: {writer!r}, which is not kept, writes {buffer!r}, which {(after or before)[0]!r} uses; "
                        "let it arrive"
                    )
                if buffer in self.arriving and before and after:
                    raise InputError(
                        f"cut: {buffer!r} arrives once, and {before[0]!r} and {after[0]!r} use it before and after "
                        f"{writer!r}, which is not kept, writes it"
                    )
                if buffer in self.arriving and before and not lasts:
                    raise InputError(
                        f"cut: {buffer!r} arrives as {writer!r}, which is not kept, leaves it, and {before[0]!r} uses "
                        "it before that"
                    )

    def _check_crossing(self) -> None:
        """Check that each value that is sent is final, and that each arrival is all of its memory."""
        for departure in self.departures:
            writers = self.left_writers.get(departure.buffer)
            uses = self.touching.get(departure.buffer, ())
            wrote = [op for op in uses if departure.buffer in self.whole[op].writes]
            if writers and departure.unfinished:
                place = self.whole.index
                if place[writers[0]] > max((place[op] for op in uses), default=-1) and wrote:
                    continue
            if writers and (wrote or departure.buffer not in self.arriving):
                raise InputError(
                    f"cut: {departure.buffer!r} is to be sent, and {writers[-1]!r}, which writes it, is not kept"
                )
        trace, slot_of = self.captured.trace, self.captured.lowered.slot_of
        given = [node for node in trace.graph.nodes if node.op == "placeholder"]
        inputs = {slot_of[node]: node for node in given if slot_of.get(node) in self.old.inputs}
        for one in self.moved:
            mine = inputs.get(self.slots[one.buffer])
            if mine is None:
                continue
            for slot, other in inputs.items():
                if trace.roots[other] == trace.roots[mine] and _extent(other) != _extent(mine):
                    raise InputError(
                        f"cut: {one.buffer!r} shares its memory with {self.old.inputs[slot].name!r}; it cannot be moved"
                    )

    def _check_replaced(self) -> None:
        """A place that holds another tensor after each step is not what this part has there, nor is its old memory."""
        trace, slot_of = self.captured.trace, self.captured.lowered.slot_of
        slot_at = {source: slot for slot, source in self.old.inputs.items()}
        moved = {self.slots[one.buffer]: one.name for one in self.moved}
        replaced: dict[Any, fx.Node | None] = {**trace.rebound, **trace.gradients}
        for source, node in replaced.items():
            if node is None or source not in slot_at:
                continue
            slot, made = slot_at[source], slot_of[node]
            if made == slot:
                continue
            if slot in moved:
                raise InputError(f"cut: {moved[slot]!r} is to carry {source.name!r}, which each step binds anew")
            seen = self.with_views({slot})
            readers = [action.name for action in self.actions if seen.intersection(action.reads)]
            if readers and not self.stays(made):
                raise InputError(
                    f"cut: op {readers[0]!r} reads {source.name!r}, which {self.maker[made]!r}, which is not kept, "
                    "makes for the next step"
                )


def _extent(node: Any) -> tuple[Any, ...]:
    """Which part of its memory an input is."""
    value = node.meta["val"]
    return tuple(value.shape), value.stride(), value.storage_offset()


def restricted(tape: Tape, used: Iterable[int], guards: Sequence[tuple[int, Any]]) -> Tape:
    """The tape with what `used` entries and those `guards` need. Every entry keeps its number."""
    needed = tape.needed([*used, *(index for index, _ in guards)])
    read = sorted({tape.entries[index][1] for index in needed if tape.entries[index][0] is None})
    number = {leaf: at for at, leaf in enumerate(read)}
    entries: list[Any] = []
    for index, (function, operands) in enumerate(tape.entries):
        if index not in needed:
            entries.append((operator.add, (0.0, 0.0)))  # never read
        else:
            entries.append((None, number[operands]) if function is None else (function, operands))
    leaves = [tape.leaves[leaf] for leaf in read]
    found = [tape.found[leaf] for leaf in read]
    unproven = {number[leaf] for leaf in tape.unproven if leaf in number}
    return Tape(entries, leaves, list(guards), found, unproven, tape.trusting, set(tape.settled), closed=True)


def is_of_batch(tape: Tape, index: int) -> bool:
    """Return whether an entry is computed from numbers of the batch."""
    return any(isinstance(tape.leaves[leaf], (LiveLeaf, BatchNumber)) for leaf in tape.leaves_of(index))
