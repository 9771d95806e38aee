"""Arithmetic on numbers that a step reads from its own tensors: ``total += loss.item() * len(batch)``.

Such a number is known only when the ops have run, so what is computed from it cannot reach an op of the same step. It
can be returned, appended to a list and put in a place. The arithmetic is written on a second tape, which is replayed
after the ops in the same Python numbers::

    tape (before)          graph               late tape (after)
    state["total"] ------------------------------.
    len(batch) ----------------------.            v
                       loss.item() ---> * ------> + ---> state["total"]

Only arithmetic that cannot raise is followed, so that a planned step ends as the eager one does: no `math.exp`. A
comparison is a branch on data, and so is a division by such a number (see `hocket.tracing.recording.outcomes`).
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from hocket.tracing.scalars.live import Late, Live, PlainNode, symbolic_methods

_TOTAL = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, max, min)


@dataclass(frozen=True)
class LateRef:
    """An entry of a late tape."""

    index: int


@dataclass
class LateTape:
    """A straight-line program over numbers, run after the ops.

    Attributes:
        has_whole: whole numbers are followed, too.
        inputs: numbers read from tensors, and live ones, while the step is recorded.
        entries: either an input ``(None, its position)`` or ``(function, operands)``, where an operand is a `LateRef`
            or a plain number.
        asked: outcome of a comparison or a predicate of such numbers, which every later step must find. None where it
            cannot be followed.
        operand: a tensor in float64 of no dimensions that computes such a number as Python does, or None.
    """

    has_whole: bool = False
    inputs: list[Any] = field(default_factory=list, repr=False)
    entries: list[tuple[Callable[..., Any] | None, Any]] = field(default_factory=list)
    asked: Callable[[Callable[..., Any], tuple[Any, ...]], bool | None] = field(
        default=lambda function, operands: None, repr=False, compare=False
    )
    operand: Callable[[Late], Any] = field(default=lambda number: None, repr=False, compare=False)
    _known: dict[int, LateRef] = field(default_factory=dict, repr=False)

    def apply(self, function: Callable[..., Any], operands: Sequence[Any], result: Any) -> LateRef | None:
        """Note how a result was computed. Return None if later steps could not compute it so, or might raise."""
        if (
            type(result) not in (int, float)
            or not all(map(_is_number, operands))
            or not self._is_total(function, operands)
        ):
            return None
        self.entries.append((function, tuple(self.ref(operand) for operand in operands)))
        return LateRef(len(self.entries) - 1)

    def ref(self, number: Any) -> Any:
        """Return the entry of a late or live number, or a plain number as it is."""
        if isinstance(number, Late) and number.entry is not None:
            return number.entry
        if not isinstance(number, (Late, Live)):
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
            if isinstance(divisor, Late):
                return self.asked(bool, (divisor,)) is True
            return type(divisor) in (int, float) and divisor != 0
        if function is round:
            return len(operands) == 2 and type(operands[1]) is int and operands[1] >= 0
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
    return type(operand) in (int, float, bool) or isinstance(operand, (Late, Live))


_REFLECTED = frozenset(f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod"))
_FOLLOWED: dict[str, Callable[..., Any]] = {
    f"__{prefix}{name}__": getattr(operator, name) for name in ("add", "sub", "mul", "truediv") for prefix in ("", "r")
}
_FOLLOWED |= {f"__{name}__": getattr(operator, name) for name in ("neg", "pos", "abs")} | {"__round__": round}
_ASKED: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
} | {"__bool__": bool}
_ASKED_BY_NUMPY: dict[Any, Callable[..., Any]] = {
    np.isfinite: math.isfinite,
    np.isnan: math.isnan,
    np.isinf: math.isinf,
}
_FREE = frozenset(
    ("__new__", "__init__", "__getattribute__", "__getnewargs__", "__doc__", "__getformat__", "fromhex", "__class__")
)


def _late(kind: type, name: str) -> Any:
    method = getattr(kind, name)
    function = getattr(operator, name.replace("__r", "__") if name in _REFLECTED else name, None)

    def use(self: Any, *args: Any) -> Any:
        if (
            name in _ASKED
            and self.tape is not None
            and (outcome := self.tape.asked(_ASKED[name], (self, *args))) is not None
        ):
            return outcome
        if name in _FOLLOWED and self.tape is not None and args and isinstance(args[0], torch.Tensor):
            return NotImplemented  # the tensor's own method asks the recorder
        if name in _FOLLOWED and (found := _followed(self, name, args)) is not None:
            return found
        self.reasons.add("uses a late number", line=self.origin)
        operands = [self.plain, *(arg.plain if isinstance(arg, Late) else arg for arg in args)]
        result = method(*operands)
        if result is not NotImplemented or function is None or len(operands) != 2:
            return result
        # The other one knows what to do with a number of Python's own.
        return function(*(operands[::-1] if name in _REFLECTED else operands))

    return use


def _followed(late: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Return the late number that arithmetic makes of another one, or None if it cannot be followed."""
    return _applied(late, _FOLLOWED[name], (*args, late) if name in _REFLECTED else (late, *args))


def _applied(late: Any, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    if late.tape is None:
        return None
    plain = [operand.plain if isinstance(operand, (Live, Late)) else operand for operand in operands]
    if any(type(operand) not in (int, float, bool) for operand in plain):
        return None
    result = function(*plain)
    entry = late.tape.apply(function, operands, result)
    return None if entry is None else _computed(late, result, entry)


def _computed(late: Any, value: Any, entry: LateRef) -> Any:
    number = late_number(value, None, late.origin, late.reasons)
    number.entry = entry
    return follow(number, late.tape, late.handed_out)


def _chosen(self: Any, function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """The largest or the smallest of these numbers. Where their types differ, so may that of the result."""
    is_one_type = len({each.__class__ for each in values}) == 1
    found = _applied(self, function, values) if is_one_type else None
    return function(*values) if found is None else found


def _late_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    if ufunc in _ASKED_BY_NUMPY and self.tape is not None and not kwargs:
        outcome = self.tape.asked(_ASKED_BY_NUMPY[ufunc], inputs)
        if outcome is not None:
            return np.bool_(outcome)
    self.reasons.add("uses a late number", line=self.origin)
    return getattr(ufunc, method)(*(x.plain if isinstance(x, Late) else x for x in inputs), **kwargs)


def _late_array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    self.reasons.add("uses a late number", line=self.origin)
    return np.asarray(self.plain, dtype)


def _late_reduce(self: Any, protocol: Any) -> Any:
    self.reasons.add("uses a late number", line=self.origin)
    return type(self.plain), (self.plain,)


def _methods(kind: type) -> dict[str, Any]:
    """The methods of a number that is known late."""
    names = [name for name in set(vars(kind)) - _FREE if callable(getattr(kind, name))]
    own = {"__copy__": lambda self: self, "__deepcopy__": lambda self, memo: self, "__array_ufunc__": _late_ufunc}
    return {name: _late(kind, name) for name in names} | own | {"__reduce_ex__": _late_reduce, "chosen": _chosen}


class LateFloat(Late, float):
    """The value of a tensor that the step itself computes, or what arithmetic makes of such values.

    It is a `float`, so that the step goes on as eager does in any use.
    """

    locals().update(_methods(float))
    __class__ = property(lambda self: float)

    def __new__(cls, *args: Any) -> Any:
        return float(*args)  # made by a function that asks for the type of its argument


class LateInt(Late, torch.SymInt):
    """A whole number of this kind: ``correct += (out.argmax(1) == y).sum().item()``.

    It is no `int`: C functions read those without calling a method, and a step that finds something by a number mostly
    ends as it did before. There is none in steps that reach a function which accepts only plain numbers (see
    `hocket.pystate.strict`).
    """

    locals().update(symbolic_methods(torch.SymInt, partial(_late, int)) | _methods(int))
    node = property(lambda self: PlainNode(self.__index__()))  # as torch's C++ asks for its value
    __array__ = _late_array
    __class__ = property(lambda self: int)
    real = numerator = property(lambda self: self)
    imag, denominator = 0, 1

    def __new__(cls, *args: Any) -> Any:
        return int(*args)


# Code may choose by the name of the type.
for _kind, _name in ((LateFloat, "float"), (LateInt, "int")):
    _kind.__name__ = _kind.__qualname__ = _name


def late_number(value: Any, source: tuple[Any, Any, list[Any]] | None, origin: str, reasons: Any) -> Any:
    """The late number of this value. For the source see `Late`."""
    number: Any = float.__new__(LateFloat, value) if type(value) is float else object.__new__(LateInt)
    number.plain, number.source, number.origin, number.reasons = value, source, origin, reasons
    number.num_writes = 0 if source is None else len(source[2])
    return number


def follow(number: Any, tape: Any, handed_out: list[weakref.ref[Any]]) -> Any:
    """The number, whose arithmetic is noted on a late tape from now on."""
    number.tape, number.handed_out = tape, handed_out
    handed_out.append(weakref.ref(number))
    return number
