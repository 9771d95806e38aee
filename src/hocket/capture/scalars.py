"""Numbers that change between steps: learning rates, step counts, bias corrections.

The classic bug of a captured step is a learning rate or a step count that was baked in. Here every Python number that
an optimizer keeps (in its parameter groups, or in its state) is replaced, while the step is traced, by a number that
remembers how it was computed. The arithmetic that leads from the optimizer's numbers to the scalars of its update ops
is thereby written on a `Tape`, and replayed before each planned step in the same Python floats as eager uses::

    group["lr"] ----.                         tape                        graph
    group["betas"] --+--> lr / (1 - b1 ** t) ------> addcdiv_(p, m, d, value=<tape 7>)
    state["step"] --'

The functions of `math` would take the number out of such a float unseen; `followed_math` sees to them. A comparison
(``if weight_decay != 0``) becomes a *guard*: should it turn out differently later, the step is captured again. A number
read from the data itself (``loss.item()``) is *late*: it may be returned, but not computed with.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import CaptureError

__all__ = ["LateFloat", "Live", "LiveFloat", "LiveInt", "Tape", "TapeRef", "followed_math"]


@dataclass(frozen=True)
class TapeRef:
    """A place in an op's arguments that is filled from the tape before each step."""

    index: int


@dataclass
class Tape:
    """A straight-line program over numbers: leaves first read, then arithmetic, then guards checked.

    `entries[i]` is either a leaf ``(None, number of the leaf)`` or ``(function, operands)``, where an operand is a
    `TapeRef` or a plain number.
    """

    entries: list[tuple[Callable[..., Any] | None, Any]] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    guards: list[tuple[int, Any]] = field(default_factory=list)
    stand_ins: list[float] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)

    def leaf(self, source: Any, value: float) -> Any:
        """A live number that is read from `source` at the start of every step; `value` stands for it in the trace."""
        self.leaves.append(source)
        self.stand_ins.append(value)
        self.entries.append((None, len(self.leaves) - 1))
        return _wrap(self, len(self.entries) - 1, value)

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now, and note it for every later step."""
        plain = [self._value(operand) for operand in operands]
        result = function(*plain)
        if result is NotImplemented:
            return NotImplemented
        return _wrap(self, self._note(function, operands), result)

    def _value(self, operand: Any) -> Any:
        if not isinstance(operand, TapeRef):
            return _plain(operand)
        # Only leaves have a value of their own here; anything else is computed from them again.
        known: list[Any] = []
        for function, operands in self.entries[: operand.index + 1]:
            known.append(
                self.stand_ins[operands]
                if function is None
                else function(*[known[o.index] if type(o) is TapeRef else o for o in operands])
            )
        return known[operand.index]

    def guard(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Apply `function` now; later steps must find the same outcome."""
        outcome = function(*(_plain(operand) for operand in operands))
        if outcome is not NotImplemented:
            self.guards.append((self._note(function, operands), outcome))
        return outcome

    def evaluate(self, leaves: Sequence[float]) -> list[Any] | None:
        """The value of every entry for these leaves, or None where a guard turned out differently."""
        values: list[Any] = []
        append = values.append
        try:
            for function, operands in self.entries:
                if function is None:
                    append(leaves[operands])
                else:
                    append(function(*[values[o.index] if type(o) is TapeRef else o for o in operands]))
        except (ArithmeticError, ValueError):
            # What cannot be computed may be what a guard keeps from being computed: 1 / x, if x != 0.
            return None
        for index, outcome in self.guards:
            if values[index] != outcome:
                return None
        return values

    def _note(self, function: Callable[..., Any], operands: Sequence[Any]) -> int:
        noted = tuple(TapeRef(o.index) if isinstance(o, Live) else o for o in operands)
        # The type belongs to the key: 1, 1.0 and True are equal but do not compute the same, and so it is with -0.0.
        key = (function, *((type(o), repr(o)) for o in noted))
        index = self._known.get(key)
        if index is None:
            self.entries.append((function, noted))
            index = self._known[key] = len(self.entries) - 1
        return index


class Live:
    """What `LiveFloat` and `LiveInt` share: the tape, the entry that computes this number, and its plain value."""

    tape: Tape
    index: int
    plain: Any


def _binary(function: Callable[..., Any]) -> tuple[Any, Any]:
    def forward(self: Any, other: Any) -> Any:
        return self.tape.apply(function, self, other) if isinstance(other, (int, float)) else NotImplemented

    def backward(self: Any, other: Any) -> Any:
        return self.tape.apply(function, other, self) if isinstance(other, (int, float)) else NotImplemented

    return forward, backward


def _unary(function: Callable[..., Any]) -> Any:
    return lambda self: self.tape.apply(function, self)


def _compared(function: Callable[..., Any]) -> Any:
    def compare(self: Any, other: Any) -> Any:
        return self.tape.guard(function, self, other) if isinstance(other, (int, float)) else NotImplemented

    return compare


def _settled(function: Callable[..., Any]) -> Any:
    # float(x), int(x), x as an index: the plain number leaves our sight, so later steps must find the same one.
    return lambda self: self.tape.guard(function, self)


_METHODS: dict[str, Any] = {}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _METHODS[f"__{_name}__"], _METHODS[f"__r{_name}__"] = _binary(getattr(operator, _name))
for _name in ("neg", "pos", "abs"):
    _METHODS[f"__{_name}__"] = _unary(getattr(operator, _name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _METHODS[f"__{_name}__"] = _compared(getattr(operator, _name))
_METHODS["__bool__"] = _settled(bool)
_METHODS["__int__"] = _METHODS["__trunc__"] = _settled(int)
_METHODS["__float__"] = _settled(float)
_METHODS["is_integer"] = _settled(lambda number: float(number).is_integer())
_METHODS["__floor__"] = _unary(math.floor)
_METHODS["__ceil__"] = _unary(math.ceil)
_METHODS["__divmod__"] = lambda self, other: (self // other, self % other)
_METHODS["__rdivmod__"] = lambda self, other: (other // self, other % self)
_METHODS["__round__"] = lambda self, digits=None: self.tape.apply(round, self, digits)
# An optimizer may deepcopy its defaults while it runs; the copy is the same number.
_METHODS["__deepcopy__"] = lambda self, memo: self
_METHODS["__copy__"] = lambda self: self


class LiveFloat(float, Live):
    """A float that remembers how it was computed."""

    locals().update(_METHODS)
    __hash__ = float.__hash__


class LiveInt(float, Live):
    """A whole number that remembers how it was computed.

    Underneath it is a float, because a float asks its own subclasses first: ``0.9 ** count`` would take the value of
    an int unseen.
    """

    locals().update(_METHODS)
    __index__ = _settled(operator.index)
    __hash__ = float.__hash__
    __class__ = property(lambda self: int)


@contextmanager
def followed_math() -> Iterator[None]:
    """While this lasts, the functions of `math` follow live numbers."""
    functions = {name: value for name, value in vars(math).items() if callable(value) and not name.startswith("_")}
    try:
        for name, function in functions.items():
            setattr(math, name, _followed(function, asks=name.startswith("is") and name != "isqrt"))
        yield
    finally:
        for name, function in functions.items():
            setattr(math, name, function)


def _followed(function: Callable[..., Any], asks: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def followed(*operands: Any, **options: Any) -> Any:
        live = next((operand for operand in operands if isinstance(operand, Live)), None)
        if live is None or options:
            return function(*operands, **options)
        return (live.tape.guard if asks else live.tape.apply)(function, *operands)

    return followed


def _refuse(self: Any, *_: Any) -> Any:
    raise CaptureError(
        f"the step reads the value of a tensor and goes on in Python with it ({self.origin}); return the tensor "
        "and look at its value outside the step"
    )


class LateFloat(float):
    """The value of a tensor that the step itself computes; it can be returned, and nothing else.

    Attributes:
        tensor: the tensor it was read from.
        origin: the user's line that read it.
    """

    tensor: Any
    origin: str

    for _name in (*_METHODS, "__str__", "__repr__", "__format__"):
        if _name not in ("__deepcopy__", "__copy__"):
            locals()[_name] = _refuse
    __hash__ = float.__hash__


def _wrap(tape: Tape, index: int, value: Any) -> Any:
    live: Any
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CaptureError(f"the optimizer computes with {value!r}, which is not a number that Hocket can follow")
    live = LiveFloat(value) if type(value) is float else LiveInt(value)
    live.tape = tape
    live.index = index
    live.plain = value
    return live


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, Live) else value
