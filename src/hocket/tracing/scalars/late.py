"""Arithmetic on numbers that a step reads from its own tensors: ``total += loss.item() * len(batch)``.

Such a number is known only when the ops have run, so what is computed from it cannot reach an op of the same step. It
can be returned, appended to a list and put in a place. The arithmetic is written on a second tape, which is replayed
after the ops in the same Python numbers::

    tape (before)          graph               late tape (after)
    state["total"] ------------------------------.
    len(batch) ----------------------.            v
                       loss.item() ---> * ------> + ---> state["total"]

Only arithmetic that cannot raise is followed, so that a planned step ends as the eager one does. Powers and roots
cannot where the numbers are small enough by their type, and not negative by how they were made: a number of float32 has
128 bits before its point at the most, its square 256, and a float of Python's has room for 1024. A comparison is a
branch on data, and so is a division by such a number, or a logarithm (see `hocket.tracing.recording.outcomes`).
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.tracing.scalars.live import METHODS_OF_FLOAT, METHODS_OF_WHOLE, Late, Live, PlainNode, computed, plain_tree
from hocket.tracing.scalars.tape import Tape, TapeRef

_TOTAL = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, float, max, min)
_ROOTS = (operator.pow, math.sqrt)
# Functions that raise for other numbers, with the comparison that theirs pass.
_RAISING: dict[Any, tuple[Callable[..., Any], int]] = {
    math.exp: (operator.le, 709),
    math.sqrt: (operator.ge, 0),
    **dict.fromkeys((math.log, math.log2, math.log10), (operator.gt, 0)),
}
_MAX_BITS = 1023  # before the point of a float
# By the type of a tensor, those of its finite numbers.
_BITS = {torch.float32: 128, torch.bfloat16: 128, torch.float16: 16, torch.int64: 64, torch.int32: 32}


@dataclass
class LateTape:
    """A straight-line program over numbers, run after the ops. While a step is recorded, it hands these out."""

    # either an input ``(None, its position)`` or ``(function, operands)``, where an operand is a `TapeRef` or a plain
    # number
    entries: list[tuple[Callable[..., Any] | None, Any]] = field(default_factory=list)
    # of the numbers before the ops, in the same recording
    tape: Tape = field(default_factory=Tape, repr=False, compare=False)
    follows: bool = False  # numbers may be computed with. Otherwise each use is a reason not to capture the step.
    has_whole: bool = False  # whole numbers are followed, too
    inputs: list[Any] = field(default_factory=list, repr=False)  # numbers read from tensors, and live ones
    # outcome of a comparison or a predicate of such numbers, which every later step must find. None where it cannot be
    # followed.
    asked: Callable[..., bool | None] = field(default=lambda *_, **__: None, repr=False, compare=False)
    # a tensor in float64 of no dimensions that computes such a number as Python does, or None
    operand: Callable[[Late], Any] = field(default=lambda number: None, repr=False, compare=False)
    _known: dict[int, TapeRef] = field(default_factory=dict, repr=False)

    def read(self, value: Any, source: tuple[Any, Any, list[Any]] | None, origin: str) -> Any:
        """A number with this value that is read from a tensor. For source and origin see `Late`."""
        number: Any = float.__new__(LateFloat, value) if type(value) is float else object.__new__(LateInt)
        number.plain, number.source, number.origin, number.tape = value, source, origin, self
        number.num_writes = 0 if source is None else len(source[2])
        number.bits = math.inf if source is None else _BITS.get(source[0].dtype, math.inf)
        self.tape.handed_out.append(weakref.ref(number))
        return number

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now, and note it for every later step.

        A result is plain that later steps could not compute so, or might raise in computing.
        """
        result = computed(function, operands)
        is_followed = self.follows and type(result) in (int, float) and all(map(_is_number, operands))
        if not (is_followed and self._is_total(function, operands)):
            plain_tree(operands)
            return result
        self.entries.append((function, tuple(self.ref(operand) for operand in operands)))
        number = self.read(result, None, next(each.origin for each in operands if isinstance(each, Late)))
        number.entry = TapeRef(len(self.entries) - 1)
        number.bits, number.is_signed = _range(function, operands)
        return number

    def converted(self, kind: Callable[[Any], Any], number: Late) -> TapeRef:
        """The entry of a number of another type that has the value of a late one."""
        self.entries.append((kind, (self.ref(number),)))
        return TapeRef(len(self.entries) - 1)

    def guard(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now. Later steps must find the same outcome."""
        outcome = self.asked(function, operands)
        return function(*plain_tree(operands)) if outcome is None else outcome

    def settle(self, number: Late) -> Any:
        """The plain value of a number that leaves our sight: no graph has it."""
        self.tape.reasons.add("uses a late number", line=number.origin)
        return number.plain

    def ref(self, number: Any) -> Any:
        """Return the entry of a late or live number, or a plain number as it is."""
        if isinstance(number, Late) and number.entry is not None:
            return number.entry
        if not isinstance(number, (Late, Live)):
            return number
        if id(number) not in self._known:
            self.inputs.append(number)  # and so it keeps its address
            self.entries.append((None, len(self.inputs) - 1))
            self._known[id(number)] = TapeRef(len(self.entries) - 1)
        return self._known[id(number)]

    def _is_total(self, function: Callable[..., Any], operands: Sequence[Any]) -> bool:
        """True if the function cannot raise with these operands, for any values of the late ones."""
        if function is operator.truediv:
            divisor = operands[1]
            if isinstance(divisor, Live):
                return divisor.tape.guard(bool, divisor) is True
            if isinstance(divisor, Late):
                return self.asked(bool, (divisor,)) is True
            return type(divisor) in (int, float) and divisor != 0
        if function is round:
            return len(operands) == 2 and type(operands[1]) is int and operands[1] >= 0
        if function in _TOTAL or (function in _ROOTS and _range(function, operands)[0] <= _MAX_BITS):
            return True
        if function not in _RAISING or len(operands) > 1:
            return False
        passes, bound = _RAISING[function]
        return self.asked(passes, (*operands, bound), early=True) is True

    def evaluate(self, inputs: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        for function, operands in self.entries:
            if function is None:
                values.append(inputs[operands])
            else:
                values.append(function(*[values[o.index] if type(o) is TapeRef else o for o in operands]))
        return values


def _is_number(operand: Any) -> bool:
    return type(operand) in (int, float, bool) or isinstance(operand, (Late, Live))


def _range(function: Callable[..., Any], operands: Sequence[Any]) -> tuple[float, bool]:
    """The bits before the point that a finite result has at the most, and whether it may be negative."""
    bits, are_signed = zip(*map(_range_of, operands), strict=True)
    if function in (operator.add, operator.sub):
        return max(bits) + 1, function is operator.sub or any(are_signed)
    if function is operator.mul:
        return sum(bits), any(are_signed)
    if function is operator.truediv and not isinstance(operands[1], (Live, Late)):
        return bits[0] - bits[1] + 1, any(are_signed)
    if function in (float, operator.pos, operator.neg, operator.abs, max, min):
        return max(bits), function is operator.neg or (function is not operator.abs and any(are_signed))
    exponent = operands[-1] if function is operator.pow else 0.5
    is_root = function in _ROOTS and type(exponent) in (int, float) and 0 <= exponent <= _MAX_BITS
    is_even = is_root and exponent % 2 == 0
    if not is_root or (are_signed[0] and exponent % 1):
        return math.inf, True
    return max(0, bits[0]) * exponent, are_signed[0] and not is_even


def _range_of(operand: Any) -> tuple[float, bool]:
    if isinstance(operand, Late):
        return operand.bits, operand.is_signed
    if isinstance(operand, Live) or (type(operand) is float and not math.isfinite(operand)):
        return math.inf, True
    return math.frexp(operand)[1] if type(operand) is float else operand.bit_length(), operand < 0


class LateFloat(Late, float):
    """The value of a tensor that the step itself computes, or what arithmetic makes of such values.

    It is a `float`, so that the step goes on as eager does in any use.
    """

    locals().update(METHODS_OF_FLOAT)
    __class__ = property(lambda self: float)

    def __new__(cls, *args: Any) -> Any:
        return float(*args)  # made by a function that asks for the type of its argument


class LateInt(Late, torch.SymInt):
    """A whole number of this kind: ``correct += (out.argmax(1) == y).sum().item()``.

    It is no `int`: C functions read those without calling a method, and a step that finds something by a number mostly
    ends as it did before. There is none in steps that reach a function which accepts only plain numbers (see
    `hocket.pystate.strict`).
    """

    locals().update(METHODS_OF_WHOLE)
    node = property(lambda self: PlainNode(self.__index__()))  # as torch's C++ asks for its value
    __class__ = property(lambda self: int)

    def __new__(cls, *args: Any) -> Any:
        return int(*args)


# Code may choose by the name of the type.
for _kind, _name in ((LateFloat, "float"), (LateInt, "int")):
    _kind.__name__ = _kind.__qualname__ = _name
