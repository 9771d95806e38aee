"""Values that a step reads of its batch: known before the step, so a step that branches on them can be captured.

``if attention_mask.all():`` looks into the batch, and into nothing else: no parameter, no state, no random number, and
nothing that the step has written. So it can be looked at before the step is run. While the step is traced, `BatchReads`
notes every op whose arguments come from the batch (and from constants) alone. When the step asks for such a value it
gets the real one, and what led to it becomes a small program, run on each new batch before anything else::

    batch[1] ---> eq ---> all ---> item == True ?      another outcome: the capture does not stand for this batch
    batch[3] ---> sum ---> item ---------------->      a number that is computed with: a leaf of the tape

Which tensors are of that kind is known by their *roots*, the memory they view: memory that is written with anything
else is lost for good, and so is memory from outside the step that the step writes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from hocket.tracing.program import Action, Call, Slot, compile_action, leaves_in, map_leaves
from hocket.tracing.recording.op_arguments import Note
from hocket.tracing.sources import BatchLeaf, Constant

# The ops that make a tensor of a literal number, and of a numpy array.
LIFTING = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


@dataclass(frozen=True)
class BatchNumber:
    """A leaf of the tape: a number that is read from the batch before each step, the `position`-th of them."""

    position: int


@dataclass(frozen=True, eq=False)
class _Read:
    """A value that is read of tensors, and the outcome that later batches must have."""

    func: Callable[..., Any]
    arguments: tuple[Any, Any]  # args and kwargs, with nodes in place of tensors
    roots: frozenset[int]
    outcome: Any
    is_number: bool  # it is handed to the tape, whatever it is

    def allows(self, outcome: Any) -> bool:
        if self.is_number:
            return True
        # Text tells 0.0 from -0.0, and NaN is the same text as itself.
        return bool(outcome == self.outcome and outcome != 0) or repr(outcome) == repr(self.outcome)


@dataclass(frozen=True)
class BatchGuards:
    """Reads of a batch that are made before a step, in a trace."""

    # for each read a function that runs the ops before it and makes it, and its slot
    parts: tuple[tuple[Callable[[list[Any], Any], None], int, _Read], ...] = ()
    template: tuple[Any, ...] = ()  # the initial slots, with constants in their places
    leaves: tuple[tuple[int, int], ...] = ()  # slot and place in the batch of each tensor that is read

    def evaluate(self, batch: Sequence[Any]) -> list[Any] | None:
        """Return the numbers that the tape needs from these leaves of a batch, or None if a guard fails."""
        numbers: list[Any] = []
        if not self.parts:
            return numbers
        values = list(self.template)
        for slot, place in self.leaves:
            values[slot] = batch[place]
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for run, slot, read in self.parts:
                try:
                    run(values, [])
                except (RuntimeError, IndexError, ValueError, TypeError):
                    return None  # eager will say what is wrong with this batch
                if not read.allows(values[slot]):
                    return None
                if read.is_number:
                    numbers.append(values[slot])
        return numbers


@dataclass
class BatchReads:
    """Watches, during a trace, what depends on the batch and on constants alone."""

    num_reads: int = 0  # how many reads were made so far
    _lost: set[int] = field(default_factory=set)
    _made: set[int] = field(default_factory=set)
    _events: list[fx.Node | _Read] = field(default_factory=list)  # ops on values of the batch, and reads of these
    _numbers: int = 0

    def lose(self, roots: Iterable[int | None]) -> None:
        """Tell of memory that depends on something else: on parameters, state or random numbers."""
        self._lost.update(root for root in roots if root is not None)

    def knows(self, roots: Iterable[int]) -> bool:
        """Return True if the content of this memory follows from the batch and from constants."""
        return self._lost.isdisjoint(roots)

    def ran(self, node: fx.Node, note: Note) -> None:
        """Note one op. What it writes to memory from outside is lost, too: a guard may not write there."""
        if note.random or not self.knows(note.reads | note.writes) or not note.writes <= self._made:
            self.lose((*note.writes, *note.returns))
            return
        self._made |= note.fresh
        self._events.append(node)

    def read(
        self, call: tuple[Any, Any, Any], arguments: Any, roots: frozenset[int], *, is_number: bool = False
    ) -> Any:
        """Return a value that a function reads from tensors of the batch. Later batches must have the same value.

        `arguments` are those of the call, with nodes in place of tensors.
        """
        func, args, kwargs = call
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            outcome = func(*args, **kwargs)
        self.num_reads += 1
        self._events.append(_Read(func, arguments, roots, outcome, is_number))
        return outcome

    def number(self, call: tuple[Any, Any, Any], arguments: Any, roots: frozenset[int]) -> tuple[BatchNumber, Any]:
        """A number that a function finds in tensors of the batch, and where later steps find theirs."""
        self._numbers += 1
        return BatchNumber(self._numbers - 1), self.read(call, arguments, roots, is_number=True)

    def guards(self, notes: Mapping[fx.Node, Note], sources: Mapping[fx.Node, Any]) -> BatchGuards:
        """The program that makes all reads again, without the ops that no read needs."""
        varying = self._varying(notes)
        read: set[fx.Node] = set()
        roots: set[int] = set()
        needed: list[fx.Node | _Read] = []
        for event in reversed(self._events):
            if isinstance(event, _Read):
                is_needed, reads = event.is_number or not varying.isdisjoint(event.roots), event.roots
                given = [leaf for leaf in leaves_in(event.arguments) if isinstance(leaf, fx.Node)]
            else:
                is_needed, reads = event in read or bool(notes[event].writes & roots), notes[event].reads
                given = event.all_input_nodes
            if is_needed:
                needed.append(event)
                roots |= reads
                # An item of several results is made along with them.
                read.update(given, (each.all_input_nodes[0] for each in given if each.target is operator.getitem))
        return _compiled(needed[::-1], read, sources)

    def _varying(self, notes: Mapping[fx.Node, Note]) -> set[int]:
        """Roots whose content may differ between steps: all but what follows from numbers that the step spells out."""
        ops = [(each, notes[each]) for each in self._events if isinstance(each, fx.Node)]
        spelled_out = {root for node, note in ops if node.target in LIFTING for root in note.reads}
        read = {root for each in self._events if isinstance(each, _Read) for root in each.roots}
        varying = read.union(*(note.reads for _, note in ops)) - self._made - spelled_out
        for _, note in ops:
            if not varying.isdisjoint(note.reads):
                varying |= note.writes | note.fresh
        return varying


def _compiled(
    events: Iterable[fx.Node | _Read], read: Collection[fx.Node], sources: Mapping[fx.Node, Any]
) -> BatchGuards:
    """The events as functions on slots, one for each read."""
    slots: defaultdict[Any, int] = defaultdict(count().__next__)

    def call(func: Any, args: Any, kwargs: Any, made: object) -> Call:
        args, kwargs = map_leaves((args, kwargs), lambda x: Slot(slots[x]) if isinstance(x, fx.Node) else x)
        return Call(func, args, kwargs, {None: slots[made]})

    parts: list[tuple[Callable[[list[Any], Any], None], int, _Read]] = []
    calls: list[Call] = []
    for event in events:
        if isinstance(event, _Read):
            calls.append(call(event.func, *event.arguments, event))
            parts.append((compile_action(Action("batch guard", tuple(calls))), slots[event], event))
            calls = []
            continue
        calls.append(call(event.target, event.args, event.kwargs, event))
        taken = (user for user in event.users if user in read and user.target is operator.getitem)
        calls += [call(operator.getitem, user.args, {}, user) for user in taken]
    given = [sources.get(each) for each in slots]
    template = tuple(source.value if isinstance(source, Constant) else None for source in given)
    leaves = tuple((slot, source.index) for slot, source in enumerate(given) if isinstance(source, BatchLeaf))
    return BatchGuards(tuple(parts), template, leaves)
