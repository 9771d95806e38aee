"""The numbers that a part of a step needs (`hocket.tracing.cut`)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hocket.tracing.program import Call
from hocket.tracing.recording.batch_reads import BatchNumber
from hocket.tracing.scalars.tape import Tape, TapeRef
from hocket.tracing.state import LiveLeaf


def restricted(tape: Tape, used: Iterable[int], guards: Sequence[tuple[int, Any]]) -> Tape:
    """The tape with what `used` entries and those `guards` need. Every entry keeps its number."""
    needed: set[int] = set()
    waiting = [*used, *(index for index, _ in guards)]
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            function, operands = tape.entries[index]
            waiting += [o.index for o in operands if type(o) is TapeRef] if function is not None else []
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


def references(call: Call) -> Iterator[TapeRef]:
    """Every number of the tape that a call takes."""
    waiting: list[Any] = [call.args, call.kwargs]
    while waiting:
        value = waiting.pop()
        if isinstance(value, TapeRef):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (tuple, list)):
            waiting += value
