"""Live numbers: they stand for a number while a step is traced, and remember on a tape how they were computed.

Arithmetic gives further live numbers. A branch on one (``if weight_decay != 0``) is a guard on the outcome. Anything
else that looks at the value takes it out of our sight (an index, a dict's key, text, numpy, a C function): it gets the
plain number, and later steps must find the same one there.

A live float is no `float`, and a live int no `int`: C functions read those without asking anybody. It is a subclass of
`torch.SymFloat` (`torch.SymInt`), which torch takes wherever it takes a number, and Python asks for `__float__`,
`__index__`, `__format__` or `__array__`, all of which are ours. To `isinstance` it is a float or an int nevertheless.
What insists on the real type raises a TypeError, and such a step is not captured: `json`, `decimal`, `time.sleep`,
``type(x) is float``. What asks `torch.SymInt` for its symbol is refused by `Live.node`.

A number read from the data itself (``loss.item()``) is *late*: it may be returned, and nothing else.

The step may keep such a number in an object of its own (``losses.append(loss.item())``). `replace_by_plain` looks for
them when the trace is over.
"""

from __future__ import annotations

import gc
import math
import numbers
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hocket.tracing.refusals import refusal, user_line

if TYPE_CHECKING:
    from hocket.tracing.scalars.tape import Tape

__all__ = ["LateFloat", "Live", "LiveFloat", "LiveInt", "plain_tree", "replace_by_plain", "wrap"]


class Live:
    """What `LiveFloat` and `LiveInt` share: the tape, the entry that computes this number, and its plain value."""

    tape: Tape
    index: int
    plain: Any

    def __init__(self, tape: Tape, index: int, plain: Any) -> None:
        self.tape = tape
        self.index = index
        self.plain = plain

    @property
    def node(self) -> Any:
        """What torch asks a symbolic number for, where it would go on with the number unseen."""
        raise refusal(_unfollowed())


def _unfollowed() -> str:
    return f"the step at {user_line()} does with a number that changes between steps what cannot be followed"


def wrap(tape: Tape, index: int, value: Any) -> Any:
    """The live number that stands for entry `index` of the tape."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refusal(f"the step at {user_line()} computes with {value!r}, which is not a number that can be followed")
    number = (LiveFloat if isinstance(value, float) else LiveInt)(tape, index, value)
    tape.handed_out.append(weakref.ref(number))
    return number


def plain_tree(value: Any) -> Any:
    """`value` with every live number in its lists, tuples, dicts and slices settled: see `Tape.settle`."""
    if isinstance(value, Live):
        return value.tape.settle(value)
    if type(value) in (list, tuple):
        return type(value)(plain_tree(element) for element in value)
    if type(value) is dict:
        return {key: plain_tree(element) for key, element in value.items()}
    if type(value) is slice:
        return slice(plain_tree(value.start), plain_tree(value.stop), plain_tree(value.step))
    return value


def _computed(function: Callable[..., Any], one: Live, *operands: Any) -> Any:
    other = operands[0] if operands[1] is one else operands[1]
    if isinstance(other, (int, float)):
        return one.tape.apply(function, *operands)
    if isinstance(other, numbers.Number):  # complex, a fraction, numpy's single precision
        return function(*plain_tree(operands))
    return NotImplemented


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
        if isinstance(other, (int, float)):
            return self.tape.guard(function, self, other)
        if isinstance(other, numbers.Number):
            return function(self.tape.settle(self), other)
        return NotImplemented

    return compare


def _settled(function: Callable[..., Any]) -> Any:
    return lambda self, *args: function(self.tape.settle(self), *args)


def _method(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.tape.settle(self), name)(*args, **kwargs)


def _array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    return np.asarray(self.tape.settle(self), dtype)


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    if method == "__call__" and not kwargs and all(isinstance(value, (int, float)) for value in inputs):
        result = ufunc(*(value.plain if isinstance(value, Live) else value for value in inputs))
        if isinstance(result, float):
            return self.tape.apply(ufunc, *inputs)
    return getattr(ufunc, method)(*plain_tree(inputs), **plain_tree(kwargs))


_METHODS: dict[str, Any] = {}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _METHODS[f"__{_name}__"], _METHODS[f"__r{_name}__"] = _binary(getattr(operator, _name))
_METHODS["__pow__"] = _power
for _name in ("neg", "pos", "abs"):
    _METHODS[f"__{_name}__"] = _unary(getattr(operator, _name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _METHODS[f"__{_name}__"] = _compared(getattr(operator, _name))
for _name, _function in (("float", float), ("complex", complex), ("hash", hash), ("str", str), ("repr", repr)):
    _METHODS[f"__{_name}__"] = _settled(_function)
# A whole number may be the whole part of another one in the next step.
_METHODS["__int__"] = lambda self: self.tape.guard(int, self)
_METHODS["__bool__"] = lambda self: self.tape.guard(bool, self)
_METHODS["is_integer"] = lambda self: self.tape.guard(lambda number: float(number).is_integer(), self)
_METHODS["__format__"] = _settled(format)
_METHODS["__reduce_ex__"] = lambda self, protocol: (type(self.plain), (self.tape.settle(self),))
_METHODS["__array__"] = _array
_METHODS["__array_ufunc__"] = _array_ufunc
for _name in ("floor", "ceil", "trunc"):
    _METHODS[f"__{_name}__"] = _unary(getattr(math, _name))
_METHODS["__divmod__"] = lambda self, other: (self // other, self % other)
_METHODS["__rdivmod__"] = lambda self, other: (other // self, other % self)
_METHODS["__round__"] = lambda self, digits=None: self.tape.apply(round, self, digits)
_METHODS["as_integer_ratio"] = _method("as_integer_ratio")
_METHODS["conjugate"] = _METHODS["__copy__"] = lambda self: self
# An optimizer may deepcopy its defaults while it runs; the copy is the same number.
_METHODS["__deepcopy__"] = lambda self, memo: self
_METHODS["real"] = property(lambda self: self)


def _refused_methods(kind: type) -> dict[str, Any]:
    """What torch's symbolic numbers can do besides, which would lead to their symbol."""

    def refuse(self: Any, *_: Any) -> Any:
        raise refusal(_unfollowed())

    names = {name for name in vars(kind) if callable(getattr(kind, name)) and name not in vars(object)}
    return dict.fromkeys(names - set(_METHODS) - {"__init__"}, refuse)


class LiveFloat(Live, torch.SymFloat):
    """A float that remembers how it was computed."""

    locals().update(_refused_methods(torch.SymFloat) | _METHODS)
    __class__ = property(lambda self: float)
    hex = _method("hex")
    imag = 0.0


class LiveInt(Live, torch.SymInt):
    """A whole number that remembers how it was computed."""

    locals().update(_refused_methods(torch.SymInt) | _METHODS)
    for _name in ("and_", "or_", "xor", "lshift", "rshift"):
        _forward, _backward = _binary(getattr(operator, _name))
        locals()[f"__{_name.rstrip('_')}__"], locals()[f"__r{_name.rstrip('_')}__"] = _forward, _backward
    for _name in ("bit_length", "bit_count", "to_bytes"):
        locals()[_name] = _method(_name)
    __class__ = property(lambda self: int)
    __index__ = _settled(operator.index)
    __invert__ = _unary(operator.invert)
    numerator = property(lambda self: self)
    denominator = 1
    imag = 0


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    raise refusal(
        f"the step reads the value of a tensor and goes on in Python with it ({self.origin}); return the tensor "
        "and look at its value outside the step"
    )


class LateFloat(torch.SymFloat):
    """The value of a tensor that the step itself computes; it can be returned, and nothing else.

    Attributes:
        tensor: the tensor it was read from.
        origin: the user's line that read it.
        plain: the value, which nobody may see while the step is traced.
    """

    for _name in (*_METHODS, "hex"):
        if _name not in ("__deepcopy__", "__copy__", "real"):
            locals()[_name] = _refuse
    __class__ = property(lambda self: float)
    node = real = imag = property(_refuse)

    def __init__(self, tensor: Any, origin: str, plain: float) -> None:
        self.tensor = tensor
        self.origin = origin
        self.plain = plain


def replace_by_plain(handed_out: Sequence[weakref.ref[Any]]) -> None:
    """Put plain numbers where the user's lists, dicts and objects hold one of these."""
    left = {id(number): number for number in (reference() for reference in handed_out) if number is not None}
    if not left:
        return
    for holder in gc.get_referrers(*left.values()):
        if holder is left:
            continue
        if type(holder) is list:
            holder[:] = [left[id(value)].plain if id(value) in left else value for value in holder]
            continue
        table = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(table) is dict:
            table.update({key: left[id(value)].plain for key, value in table.items() if id(value) in left})
