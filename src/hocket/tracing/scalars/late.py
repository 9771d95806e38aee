"""Arithmetic on numbers that a step reads from its own tensors: ``total += loss.item() * len(batch)``.

Such a number is known only when the ops have run, so what is computed from it cannot reach an op of the same step. It
can be returned, appended to a list and put in a place. The arithmetic is written on a second tape, which is replayed
after the ops in the same Python floats::

    tape (before)          graph               late tape (after)
    state["total"] ------------------------------.
    len(batch) ----------------------.            v
                       loss.item() ---> * ------> + ---> state["total"]

Only arithmetic that cannot raise is followed, so that a planned step ends as the eager one does: no `math.exp`. A
comparison is a branch on data, and so is a division by such a number (see `hocket.tracing.recording.outcomes`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.tracing.scalars.live import LateFloat, Live

_TOTAL = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs)


@dataclass(frozen=True)
class LateRef:
    """An entry of a late tape."""

    index: int


@dataclass
class LateTape:
    """A straight-line program over numbers, run after the ops.

    Attributes:
        inputs: numbers read from tensors, and live ones, while the step is recorded.
        entries: either an input ``(None, its position)`` or ``(function, operands)``, where an operand is a `LateRef`
            or a plain number.
        asked: outcome of a comparison or a predicate of such numbers, which every later step must find. None where it
            cannot be followed.
        operand: a tensor in float64 of no dimensions that computes such a number as Python does, or None.
    """

    inputs: list[Any] = field(default_factory=list, repr=False)
    entries: list[tuple[Callable[..., Any] | None, Any]] = field(default_factory=list)
    asked: Callable[[Callable[..., Any], tuple[Any, ...]], bool | None] = field(
        default=lambda function, operands: None, repr=False, compare=False
    )
    operand: Callable[[LateFloat], Any] = field(default=lambda number: None, repr=False, compare=False)
    _known: dict[int, LateRef] = field(default_factory=dict, repr=False)

    def apply(self, function: Callable[..., Any], operands: Sequence[Any], result: Any) -> LateRef | None:
        """Note how a result was computed. Return None if later steps could not compute it so, or might raise."""
        if type(result) is not float or not all(map(_is_number, operands)) or not self._is_total(function, operands):
            return None
        self.entries.append((function, tuple(self.ref(operand) for operand in operands)))
        return LateRef(len(self.entries) - 1)

    def ref(self, number: Any) -> Any:
        """Return the entry of a late or live number, or a plain number as it is."""
        if isinstance(number, LateFloat) and number.entry is not None:
            return number.entry
        if not isinstance(number, (LateFloat, Live)):
            return number
        if id(number) not in self._known:
            self.inputs.append(number)  # and so it keeps its address
            self.entries.append((None, len(self.inputs) - 1))
            self._known[id(number)] = LateRef(len(self.entries) - 1)
        return self._known[id(number)]

    def _is_total(self, function: Callable[..., Any], operands: Sequence[Any]) -> bool:
        """True if the function cannot raise with these operands, for any values of the late ones."""
        if function is operator.truediv:
            divisor = operands[1]
            if isinstance(divisor, Live):
                return divisor.tape.guard(bool, divisor) is True
            if isinstance(divisor, LateFloat):
                return self.asked(bool, (divisor,)) is True
            return type(divisor) in (int, float) and divisor != 0
        if function is round:
            return type(operands[1]) is int and operands[1] >= 0
        return function in _TOTAL

    def evaluate(self, inputs: Sequence[Any]) -> list[Any]:
        """The value of every entry."""
        values: list[Any] = []
        for function, operands in self.entries:
            if function is None:
                values.append(inputs[operands])
            else:
                values.append(function(*[values[o.index] if type(o) is LateRef else o for o in operands]))
        return values


def _is_number(operand: Any) -> bool:
    return type(operand) in (int, float, bool) or isinstance(operand, (LateFloat, Live))
