"""Numbers that change between steps: learning rates, step counts, bias corrections.

The classic bug of a captured step is a learning rate or a step count that was baked in. Here every Python number that
an optimizer keeps (in its parameter groups, or in its state) is replaced, while the step is traced, by a number that
remembers how it was computed (see `live`). The arithmetic that leads from the optimizer's numbers to the scalars of its
update ops is thereby written on a `Tape`, and replayed before each planned step in the same Python floats as eager
uses::

    group["lr"] ----.                         tape                        graph
    group["betas"] --+--> lr / (1 - b1 ** t) ------> addcdiv_(p, m, d, value=<tape 7>)
    state["step"] --'

A comparison (``if weight_decay != 0``) becomes a *guard*: should it turn out differently later, the step is captured
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.tracing.scalars.live import Live, replace_by_plain, wrap

__all__ = ["Tape", "TapeRef"]


@dataclass(frozen=True)
class TapeRef:
    """A place in an op's arguments that is filled from the tape before each step."""

    index: int


@dataclass
class Tape:
    """A straight-line program over numbers: leaves first read, then arithmetic, then guards checked.

    Attributes:
        entries: ``entries[i]`` is either a leaf ``(None, number of the leaf)`` or ``(function, operands)``, where an
            operand is a `TapeRef` or a plain number.
        leaves: where each leaf is read from.
        guards: entries with the outcome that every step must find.
        stand_ins: what stood for each leaf in the trace.
        found: what each leaf really was when the step was traced.
        settled: entries whose value is guarded itself; to the trace they are constants.
        handed_out: every number that the step was given.
        closed: the trace is over, and live numbers that outlive it compute like plain ones.
    """

    entries: list[tuple[Callable[..., Any] | None, Any]] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    guards: list[tuple[int, Any]] = field(default_factory=list)
    stand_ins: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)
    handed_out: list[weakref.ref[Any]] = field(default_factory=list, repr=False)
    closed: bool = False
    _plain: list[Any] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _guarded: set[Any] = field(default_factory=set)

    def leaf(self, source: Any, value: Any, found: Any = None) -> Any:
        """A live number that is read from `source` at the start of every step.

        `value` stands for it in the trace; `found` is what it is now, where that is something else.
        """
        self.leaves.append(source)
        self.stand_ins.append(value)
        self.found.append(value if found is None else found)
        self.entries.append((None, len(self.leaves) - 1))
        self._plain.append(value)
        return wrap(self, len(self.entries) - 1, value)

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now, and note it for every later step.

        Raises:
            CaptureError: the result is no number.
        """
        result = function(*[self._value(operand) for operand in operands])
        if result is NotImplemented or self.closed:
            return result
        return wrap(self, self._note(function, operands, result), result)

    def guard(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now; later steps must find the same outcome."""
        outcome = function(*[self._value(operand) for operand in operands])
        if outcome is not NotImplemented and not self.closed:
            self._guard(self._note(function, operands, outcome), outcome)
        return outcome

    def settle(self, number: Live) -> Any:
        """The plain value of a number that leaves our sight: later steps must find the same value."""
        value = number.plain
        if not self.closed:
            if value == 0 or value != value:
                self.guard(repr, number)  # 0.0 equals -0.0, and NaN does not equal itself
            else:
                self._guard(number.index, value)
            self.settled.add(number.index)
        return value

    def evaluate(self, leaves: Sequence[float]) -> list[Any] | None:
        """The value of every entry for these leaves, or None where a guard turned out differently."""
        values = self._computed(leaves)
        if len(values) < len(self.entries):
            # What cannot be computed may be what a guard keeps from being computed: 1 / x, if x != 0.
            return None
        for index, outcome in self.guards:
            if values[index] != outcome:
                return None
        return values

    def upset(self) -> list[Any]:
        """Leaves for which the trace is wrong: guards fail because they had another value in it than they have."""
        values = self._computed(self.found)
        failing = [i for i, outcome in self.guards if i >= len(values) or values[i] != outcome]
        leaves = {leaf for index in failing for leaf in self.leaves_of(index)}
        return [self.leaves[leaf] for leaf in sorted(leaves) if self.stand_ins[leaf] != self.found[leaf]]

    def leaves_of(self, index: int) -> set[int]:
        """Numbers of the leaves that an entry is computed from."""
        found: set[int] = set()
        waiting, seen = [index], {index}
        while waiting:
            function, operands = self.entries[waiting.pop()]
            if function is None:
                found.add(operands)
                continue
            behind = {operand.index for operand in operands if type(operand) is TapeRef} - seen
            waiting += behind
            seen |= behind
        return found

    def close(self) -> None:
        """End the trace: the numbers that the step kept become plain ones."""
        self.closed = True
        replace_by_plain(self.handed_out)
        self.handed_out.clear()

    def _computed(self, leaves: Sequence[float]) -> list[Any]:
        """The values of the entries, up to the first one that cannot be computed."""
        values: list[Any] = []
        append = values.append
        try:
            for function, operands in self.entries:
                if function is None:
                    append(leaves[operands])
                else:
                    append(function(*[values[o.index] if type(o) is TapeRef else o for o in operands]))
        except (ArithmeticError, ValueError):
            pass
        return values

    def _guard(self, index: int, outcome: Any) -> None:
        key = (index, type(outcome), outcome)
        if key not in self._guarded:
            self._guarded.add(key)
            self.guards.append((index, outcome))

    def _value(self, operand: Any) -> Any:
        if isinstance(operand, TapeRef):
            return self._plain[operand.index]
        return operand.plain if isinstance(operand, Live) else operand

    def _note(self, function: Callable[..., Any], operands: Sequence[Any], result: Any) -> int:
        noted = tuple(TapeRef(o.index) if isinstance(o, Live) else o for o in operands)
        # The type belongs to the key: 1, 1.0 and True are equal but do not compute the same, and so it is with -0.0.
        key = (function, *((type(o), repr(o)) for o in noted))
        index = self._known.get(key)
        if index is None:
            self.entries.append((function, noted))
            self._plain.append(result)
            index = self._known[key] = len(self.entries) - 1
        return index
