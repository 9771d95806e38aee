"""Live numbers: they have the value of a number while a step is recorded, and remember on a tape how it was computed.

Arithmetic gives further live numbers. A branch on one (``if weight_decay != 0``) is a guard on the outcome. Anything
else that looks at the value takes it out of our sight (an index, a dict's key, text, numpy, a C function): it gets the
plain number, and later steps must find the same one there. ``step in milestones`` is a guard on the answer.

A live float is not a `float`, and a live int not an `int`: C functions read those without calling a method. It is a
subclass of `torch.SymFloat` (`torch.SymInt`), which torch takes wherever it takes a number. Python calls `__float__`,
`__index__`, `__format__` or `__array__` on it, all of which are ours. For `isinstance` it is a float or an int all the
same.

A text of the batch is a `LiveText`. It is a `str`, and notes what looks at it by a method. What reads a text without
one is seen by the watch (`hocket.pystate.strict.reads_text`).

A number read from the data itself (``loss.item()``) is *late*: it may be computed with (see `late`), returned and kept.

The step may keep such a number in an object of its own (``losses.append(loss.item())``). `replace_by_plain` looks for
them when the recording is over.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hocket.pystate.places import Followed, is_a
from hocket.tracing.scalars.membership import keys_asked


class NumberTape(Protocol):
    """A tape as its numbers use it (see `hocket.tracing.scalars.tape.Tape`)."""

    handed_out: list[weakref.ref[Any]]
    looked_up: list[tuple[Any, Any]]

    def apply(self, function: Callable[..., Any], *operands: Any) -> Any: ...

    def guard(self, function: Callable[..., Any], *operands: Any) -> Any: ...

    def settle(self, number: Any) -> Any: ...


class Late(Followed):
    """Base of numbers that are known when the ops have run (see `late`): the value as recorded, and its uses."""

    # where it was read: the tensor, a copy of it, and the writes of its memory so far, which grow. None if it was
    # computed.
    source: tuple[Any, Any, list[Any]] | None
    num_writes: int  # how many there were when it was read
    origin: str  # the user's line that read it
    plain: Any
    tape: Any  # the late tape, which notes what becomes of it
    entry: Any = None  # the entry of the late tape that computes it, or None if it was read
    bits: float = math.inf  # before the point, at the most, where it is finite
    is_signed: bool = True  # it may be negative

    @property
    def tensor(self) -> Any:
        """The tensor that holds it now, or None if it was computed."""
        if self.source is None:
            return None
        read, copy, writes = self.source
        return read if len(writes) == self.num_writes else copy

    def chosen(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """The largest or the smallest of these numbers. Where their types differ, so may that of the result."""
        is_one_type = len({each.__class__ for each in values}) == 1
        return self.tape.apply(function, *values) if is_one_type else function(*values)


class Live(Followed):
    """Base of `LiveFloat`, `LiveInt` and `LiveText`: the tape, the entry that computes it, and its plain value."""

    tape: NumberTape
    entry: int
    plain: Any

    def __new__(cls, *args: Any) -> Any:
        if len(args) == 3:
            return super().__new__(cls)
        # Made by a function that asks for the type of its argument.
        return (float if issubclass(cls, torch.SymFloat) else int)(*plain_tree(args))

    def __init__(self, tape: NumberTape, entry: int, plain: Any) -> None:
        self.tape = tape
        self.entry = entry
        self.plain = plain

    def __getattr__(self, name: str) -> Any:
        """An attribute that only numpy's floats have. Torch's C++ asks for others, which begin with an underscore."""
        if name.startswith("_") or not isinstance(self.plain, np.generic):
            raise AttributeError(f"{type(self.plain).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.tape.settle(self), name)

    @property
    def node(self) -> Any:
        """The plain value, for torch code that takes the value of a symbolic number."""
        return PlainNode(self.tape.settle(self))


class PlainNode:
    """A plain number, as torch's C++ asks symbolic ones for their value."""

    def __init__(self, value: Any) -> None:
        self.hint = self.constant = value

    def is_int(self) -> bool:
        return isinstance(self.hint, int)

    def is_float(self) -> bool:
        return isinstance(self.hint, float)

    def has_hint(self) -> bool:
        return True

    def is_bool(self) -> bool:
        return False

    is_symbolic = is_nested_int = is_bool

    def guard_int(self, *_: Any) -> int:
        return int(self.hint)

    def guard_float(self, *_: Any) -> float:
        return float(self.hint)

    int_ = guard_int
    maybe_as_int = constant_int = is_constant = lambda self: self.hint


def wrap(tape: NumberTape, entry: int, value: Any) -> Any:
    """The live number or text that stands for this entry of the tape."""
    kind = LiveText if isinstance(value, str) else LiveFloat if isinstance(value, float) else LiveInt
    number = kind(tape, entry, value)
    tape.handed_out.append(weakref.ref(number))
    return number


def plain_of(value: Any) -> Any:
    """The plain number of a live or late one. Any other value as it is."""
    return value.plain if is_a(value, Followed) else value


def computed(
    function: Callable[..., Any], operands: Sequence[Any], value_of: Callable[[Any], Any] | None = None
) -> Any:
    """The result of a function for the plain values of numbers. Where it raises, they are settled: others may not."""
    try:
        return function(*map(value_of or plain_of, operands))
    except Exception:
        plain_tree(tuple(operands))
        raise


def plain_tree(value: Any, plain: Callable[[Any], Any] | None = None) -> Any:
    """`value` with every live or late number in its lists, tuples, dicts and slices settled: see `Tape.settle`.

    With `plain`, that takes the place of those outside of slices. Those in an index must be the same in later steps.
    """
    if is_a(value, Followed):
        return value.tape.settle(value) if plain is None else plain(value)
    if type(value) in (list, tuple):
        return type(value)(plain_tree(element, plain) for element in value)
    if type(value) is dict:
        return {key: plain_tree(element, plain) for key, element in value.items()}
    if type(value) is slice:
        return slice(plain_tree(value.start), plain_tree(value.stop), plain_tree(value.step))
    return value


# Types that raise beside a number, or that a number repeats.
_NO_NUMBERS = (type(None), str, bytes, bytearray, list, tuple, dict, set, frozenset)
_ORDERS = (operator.lt, operator.le, operator.gt, operator.ge)
_PREDICATES = {np.isfinite: math.isfinite, np.isnan: math.isnan, np.isinf: math.isinf}


def _is_number(value: Any) -> bool:
    """False of arrays of the step, whose class may be that of a number of numpy's."""
    return isinstance(value, (int, float)) and (is_a(value, (Live, Late)) or not is_a(value, Followed))


def _computed(function: Callable[..., Any], one: Live | Late, *operands: Any) -> Any:
    other = operands[0] if operands[1] is one else operands[1]
    if isinstance(other, Late) and not isinstance(one, Late):
        return NotImplemented  # a late number knows what to do with a live one
    if _is_number(other):
        return one.tape.apply(function, *operands)
    if operands[0] is one and _has_python_method(other, function):
        return NotImplemented
    # Its C code would look at the type. Beside what is no number it mostly raises, the user's own error.
    return function(*plain_tree(operands))


def _has_python_method(other: Any, function: Callable[..., Any]) -> bool:
    """Return True if an operand on the right computes by a Python method, which may treat a live number as plain."""
    method = getattr(type(other), f"__r{function.__name__.rstrip('_')}__", None)
    return isinstance(other, torch.Tensor) or inspect.isfunction(method)


def _binary(function: Callable[..., Any]) -> tuple[Any, Any]:
    def forward(self: Any, other: Any) -> Any:
        return _computed(function, self, self, other)

    def backward(self: Any, other: Any) -> Any:
        return _computed(function, self, other, self)

    return forward, backward


def _power(self: Any, other: Any, modulo: Any = None) -> Any:
    if modulo is None:
        return _computed(operator.pow, self, self, other)
    return pow(*plain_tree((self, other, modulo)))


def _unary(function: Callable[..., Any]) -> Any:
    return lambda self: self.tape.apply(function, self)


def _compared(function: Callable[..., Any]) -> Any:
    def compare(self: Any, other: Any) -> Any:
        if isinstance(self, Live) and isinstance(other, Late):
            return NotImplemented  # as above
        if _is_number(other):
            return self.tape.guard(function, self, other)
        if isinstance(other, numbers.Number) or (function in _ORDERS and isinstance(other, _NO_NUMBERS)):
            return function(self.tape.settle(self), other)
        return NotImplemented

    return compare


def _settled(function: Callable[..., Any]) -> Any:
    return lambda self, *args: function(self.tape.settle(self), *args)


def _method(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.tape.settle(self), name)(*args, **kwargs)


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    if method == "__call__" and not kwargs and all(map(_is_number, inputs)):
        if ufunc in _PREDICATES:
            return np.bool_(self.tape.guard(_PREDICATES[ufunc], *inputs))
        if isinstance(ufunc(*map(plain_of, inputs)), float):
            return self.tape.apply(ufunc, *inputs)
    if any(is_a(each, Followed) and not is_a(each, (Live, Late)) for each in inputs):
        return NotImplemented  # an array of the step knows what to do with it
    return getattr(ufunc, method)(*plain_tree(inputs), **plain_tree(kwargs))


def _clipped(self: Any, low: Any = None, high: Any = None, out: Any = None) -> Any:
    """As `numpy.clip`, which asks a number for such a method."""
    if out is None:
        return self.tape.apply(np.clip, self, low, high)
    return np.clip(self.tape.settle(self), low, high, out)


# The arithmetic of numbers. All other questions go to their tape.
METHODS: dict[str, Any] = {}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    METHODS[f"__{_name}__"], METHODS[f"__r{_name}__"] = _binary(getattr(operator, _name))
METHODS["__pow__"] = _power
for _name in ("neg", "pos", "abs"):
    METHODS[f"__{_name}__"] = _unary(getattr(operator, _name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    METHODS[f"__{_name}__"] = _compared(getattr(operator, _name))
for _name, _function in (("float", float), ("complex", complex), ("hash", hash), ("str", str), ("repr", repr)):
    METHODS[f"__{_name}__"] = _settled(_function)
# A whole number may be the whole part of another one in the next step.
METHODS["__int__"] = lambda self: self.tape.guard(int, self)
METHODS["__bool__"] = lambda self: self.tape.guard(bool, self)
METHODS["is_integer"] = lambda self: self.tape.guard(lambda number: float(number).is_integer(), self)
METHODS["__format__"] = _settled(format)
METHODS["__reduce_ex__"] = lambda self, protocol: (type(self.plain), (self.tape.settle(self),))
METHODS["__array__"] = lambda self, dtype=None, copy=None: np.asarray(self.tape.settle(self), dtype)
METHODS["__array_ufunc__"] = _array_ufunc
for _name in ("floor", "ceil", "trunc"):
    METHODS[f"__{_name}__"] = _unary(getattr(math, _name))
METHODS["__divmod__"] = lambda self, other: (self // other, self % other)
METHODS["__rdivmod__"] = lambda self, other: (other // self, other % self)
METHODS["__round__"] = lambda self, digits=None: self.tape.apply(round, self, digits)
METHODS["as_float"] = lambda self: self.tape.apply(float, self)
METHODS["clip"] = _clipped
METHODS["as_integer_ratio"] = _method("as_integer_ratio")
METHODS["conjugate"] = METHODS["__copy__"] = lambda self: self
# An optimizer may deepcopy its defaults while it runs; the copy is the same number.
METHODS["__deepcopy__"] = lambda self, memo: self
METHODS["real"] = property(lambda self: self)
METHODS_OF_FLOAT = METHODS | {"hex": _method("hex")}


def _symbolic_methods(kind: type) -> dict[str, Any]:
    plain = float if issubclass(kind, torch.SymFloat) else int
    names = {name for name in vars(kind) if callable(getattr(kind, name)) and name not in vars(object)}
    names -= {"__init__"}
    return {name: _method(name) if hasattr(plain, name) else (lambda *_: NotImplemented) for name in names}


METHODS_OF_WHOLE = _symbolic_methods(torch.SymInt) | METHODS
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    _forward, _backward = _binary(getattr(operator, _name))
    METHODS_OF_WHOLE |= {f"__{_name.rstrip('_')}__": _forward, f"__r{_name.rstrip('_')}__": _backward}
METHODS_OF_WHOLE |= {name: _method(name) for name in ("bit_length", "bit_count", "to_bytes")}
METHODS_OF_WHOLE |= {"__index__": _settled(operator.index), "__invert__": _unary(operator.invert)}
METHODS_OF_WHOLE["as_int"] = METHODS["real"].fget
METHODS_OF_WHOLE |= {"numerator": METHODS["real"], "denominator": 1, "imag": 0}


class LiveFloat(Live, torch.SymFloat):
    """A float that remembers how it was computed."""

    locals().update(_symbolic_methods(torch.SymFloat) | METHODS_OF_FLOAT)
    __class__ = property(lambda self: type(self.plain))
    imag = 0.0


class LiveInt(Live, torch.SymInt):
    """A whole number that remembers how it was computed."""

    locals().update(METHODS_OF_WHOLE)
    __class__ = property(lambda self: int)

    def __hash__(self) -> int:
        keys = keys_asked(sys._getframe(1), self)
        if keys is None:
            self.tape.settle(self)
        else:
            self.tape.guard(keys.__contains__, self)
        return hash(self.plain)

    def item_of(self, table: Any) -> Any:
        """The item of a list or an array at this position, which another step looks up at its own."""
        found = table[self.plain]
        if type(found) not in (int, float, np.float64) or getattr(table, "ndim", 1) > 1:
            self.tape.settle(self)
            return found
        self.tape.looked_up.append((table, self))
        return self.tape.apply(partial(operator.getitem, table), self)


_NOT_LOOKING = frozenset(("__new__", "__init__", "__getattribute__", "__doc__", "maketrans"))


def _of_text(name: str) -> Any:
    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(str, name)(self.tape.settle(self), *plain_tree(args), **plain_tree(kwargs))

    return look


class LiveText(Live, str):
    """A text of the batch, of which another batch has another one."""

    locals().update({name: _of_text(name) for name in set(vars(str)) - _NOT_LOOKING})
    __int__, __float__ = _settled(int), _settled(float)
    __radd__ = _settled(lambda text, other: other + text)
    __copy__, __deepcopy__ = METHODS["__copy__"], METHODS["__deepcopy__"]
    __reduce_ex__ = METHODS["__reduce_ex__"]
    __class__ = property(lambda self: str)

    def __new__(cls, *args: Any) -> Any:
        is_own = len(args) == 3 and isinstance(args[1], int)
        return str.__new__(cls, args[2]) if is_own else str(*plain_tree(args))


# Errors of C code name the type, and code may choose by its name.
for _kind, _plain in ((LiveFloat, float), (LiveInt, int), (LiveText, str)):
    _kind.__name__ = _kind.__qualname__ = _plain.__name__
