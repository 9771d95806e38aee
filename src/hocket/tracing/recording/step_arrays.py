"""`StepArray` and `StepNumber`: an array of numpy, or a number of numpy's, that a recorded step computes.

While a step is recorded it gets a `StepArray` in place of each array of its batch, of each array that it makes of its
tensors (``values.detach().numpy()``), of what numpy computes with these, and of arrays that it makes to write into. Its
tape writes the calls down (`hocket.tracing.recording.array_tape`).

It is no array to C code, which has to ask it for its elements. So nothing is read or written unseen: what cannot be
followed is noted. Arrays that are made of nothing but what the step spells out may be read by all.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from hocket.arguments import is_size
from hocket.pystate.places import Followed, is_a

# Functions of numpy's that only compute.
_NAMES = """
    all allclose amax amin any append argmax argmin argpartition argsort argwhere around array_equal array_split
    atleast_1d atleast_2d atleast_3d average bincount block broadcast_arrays broadcast_to choose clip column_stack
    compress concatenate convolve copy corrcoef correlate count_nonzero cov cross cumprod cumsum delete diag diagflat
    diagonal diff digitize dot dsplit dstack ediff1d einsum empty_like expand_dims extract flatnonzero flip fliplr
    flipud full_like gradient hsplit hstack histogram inner insert interp intersect1d isclose isin kron lexsort max mean
    median meshgrid min moveaxis nanargmax nanargmin nancumsum nanmax nanmean nanmedian nanmin nanpercentile nanprod
    nanquantile nanstd nansum nanvar ndim nonzero ones_like outer pad partition percentile prod ptp quantile ravel
    ravel_multi_index repeat reshape roll rollaxis rot90 round searchsorted select setdiff1d setxor1d shape size sort
    split squeeze stack std sum swapaxes take take_along_axis tensordot tile trace transpose trapezoid tril triu union1d
    unique unravel_index var vdot vsplit vstack where zeros_like
    cholesky cond det eigh eigvalsh inv lstsq matrix_power matrix_rank norm pinv qr slogdet solve svd
"""
_PURE = frozenset(_NAMES.split())
# Those that write their first argument.
_FILLING = frozenset(("copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"))
# Likewise methods of arrays, and those that write the array.
_NAMES_OF_METHODS = """
    all any argmax argmin argpartition argsort astype choose clip compress conj conjugate copy cumprod cumsum diagonal
    dot flatten max mean min nonzero prod ravel repeat reshape round searchsorted squeeze std sum swapaxes take trace
    transpose var view
"""
_METHODS = frozenset(_NAMES_OF_METHODS.split())
_WRITING = frozenset(("fill", "partition", "put", "sort"))
# Attributes: those that are known before the values are, that follow from the shape, and that are arrays.
_FREE = frozenset(("dtype", "ndim", "itemsize"))
_ABOUT_SHAPES = frozenset(("shape", "size", "nbytes", "strides"))
_PARTS = frozenset(("T", "real", "imag"))
# Functions whose result is no array, and follows from the shape.
ASKING_SHAPES = (np.shape, np.ndim, np.size)


class StepValue(np.lib.mixins.NDArrayOperatorsMixin, Followed):
    """An array, or a number of numpy's, of a recorded step.

    Attributes:
        plain: the array, or the number.
        tape: an `ArrayTape`.
        index: of the call that has made it.
        memory: its `ArrayMemory`.
    """

    __slots__ = ("__weakref__", "index", "memory", "plain", "tape")
    __class__ = property(lambda self: type(self.plain))

    def __init__(self, plain: Any, tape: Any, index: int, memory: Any) -> None:
        self.plain, self.tape, self.index, self.memory = plain, tape, index, memory

    @property
    def is_array(self) -> bool:
        """False for a number."""
        return is_a(self, StepArray)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        if out and is_a(out[0], StepValue) and not out[0].is_array:  # ``number += 1``
            out = kwargs.pop("out")[1:]
        written = [*out, *(inputs[:1] if method == "at" else ())]
        if len(written) > 1 or not all(is_a(each, StepValue) for each in written):
            return getattr(ufunc, method)(*settled(inputs), **settled(kwargs))
        return self.tape.apply(getattr(ufunc, method), inputs, kwargs, *written)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        is_numpys = str(func.__module__).partition(".")[0] == "numpy" and kwargs.get("out") is None
        if is_numpys and func.__name__ in _FILLING and args and is_a(args[0], StepArray):
            return self.tape.apply(func, args, kwargs, args[0])
        if not (is_numpys and func.__name__ in _PURE):
            return func(*settled(args), **settled(kwargs))
        if func in ASKING_SHAPES:
            self.tape.ask_shape(self)
        return self.tape.apply(func, args, kwargs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.tape.settle(self), dtype)

    def __getattr__(self, name: str) -> Any:
        plain = self.plain
        if name in _FREE or not hasattr(plain, name):
            return getattr(plain, name)
        if name in _ABOUT_SHAPES:
            self.tape.ask_shape(self)
            return getattr(plain, name)
        if name in _PARTS:
            return self.tape.apply(getattr, (self, name))
        if name in _METHODS or (name in _WRITING and self.is_array):
            method, written = getattr(type(plain), name), (self,) if name in _WRITING else ()
            return lambda *args, **kwargs: self.tape.apply(method, (self, *args), kwargs, *written)
        if name in ("item", "tolist"):
            return partial(self._values, name)
        return getattr(self.tape.settle(self), name)

    def _values(self, name: str, *args: Any) -> Any:
        tensor = None if args or self.memory.is_constant else self.tape.tensor_of(self)
        return getattr(self.tape.settle(self) if tensor is None else tensor, name)(*args)

    def as_int(self) -> Any:
        """As `int`, likewise."""
        return int(self) if self.dtype.kind not in "iu" or self.memory.is_constant else self._values("item")

    def as_float(self) -> Any:
        """As `float`, which gives a number of Python's own."""
        return float(self) if self.dtype.kind != "f" or self.memory.is_constant else self._values("item")

    def item_of(self, table: Any) -> Any:
        """The items at these places of an array that is not the step's."""
        return self.tape.apply(operator.getitem, (table, self)) if is_a(table, np.ndarray) else table[self]

    def __bool__(self) -> bool:
        if not self.memory.is_constant and np.size(self.plain) == 1:
            tensor = self.tape.tensor_of(self)
            outcome: bool | None = None if tensor is None else self.tape.outcome_of(tensor)
            if outcome is not None:
                return outcome
        return bool(self.tape.settle(self))

    def __index__(self) -> int:
        found = operator.index(self.plain)  # most arrays raise, whatever their elements
        self.tape.settle(self)
        return found

    def __copy__(self) -> Any:
        return self.tape.apply(copy.copy, (self,))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.tape.apply(copy.copy, (self,))


class StepArray(StepValue):
    """An array of a recorded step. Constructors of tensors take its memory (``torch.FloatTensor(x)``)."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        part = self.tape.part_of(self, key)
        return self.tape.apply(operator.getitem, (self, key)) if part is None else part

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tape.apply(operator.setitem, (self, key, value), {}, self)

    def __len__(self) -> int:
        self.tape.ask_shape(self)
        return len(self.plain)

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def __dlpack__(self, **options: Any) -> Any:  # constructors of tensors ask for it, and call `from_dlpack`
        return settled(self).__dlpack__(**options)


class StepNumber(StepValue):
    """A number of numpy's of a recorded step. It is no sequence to C code, and an operand to torch."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*settled(args), **settled(kwargs or {}))


# Code that chooses by the name of a type finds numpy's.
for _kind in (StepArray, StepNumber):
    _kind.__module__, _kind.__name__, _kind.__qualname__ = "numpy", "ndarray", "ndarray"


def settled(value: Any) -> Any:
    """`value` with plain arrays, which leave our sight."""
    if is_a(value, StepValue):
        return value.tape.settle(value)
    if type(value) in (tuple, list):
        return type(value)([settled(each) for each in value])
    return {key: settled(each) for key, each in value.items()} if type(value) is dict else value


def plain_arrays(value: Any) -> Any:
    """`value` with the user's own arrays in place of those that stand for them."""
    if not any(is_a(leaf, StepValue) for leaf in tree_leaves(value)):
        return value
    return tree_map(lambda leaf: leaf.plain if is_a(leaf, StepValue) else leaf, value, is_leaf=is_size)


def values_in(arguments: Any) -> Iterator[Any]:
    """The values in the arguments of a call, through lists, tuples, dicts and slices."""
    if type(arguments) in (tuple, list, dict):
        for each in arguments.values() if type(arguments) is dict else arguments:
            yield from values_in(each)
    elif type(arguments) is slice:
        yield from values_in((arguments.start, arguments.stop, arguments.step))
    else:
        yield arguments


def arrays_in(arguments: Any) -> Iterator[StepValue]:
    """The arrays of the step in the arguments of a call."""
    return (each for each in values_in(arguments) if is_a(each, StepValue))


def _asking(function: Callable[..., Any]) -> Any:
    return lambda self, *args: function(settled(self), *settled(args))


def _beside_tensors(method: Callable[..., Any]) -> Any:
    """A method of an operator that leaves it to a tensor, as numpy's do."""

    @wraps(method)
    def computed(self: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, torch.Tensor) else method(self, other)

    return computed


for _function in (float, int, complex, hash, repr, str, format, round, operator.contains):
    setattr(StepValue, f"__{_function.__name__}__", _asking(_function))
StepValue.__reduce_ex__ = _asking(lambda value, protocol: value.__reduce_ex__(protocol))  # type: ignore[method-assign]
for _name, _method in list(vars(np.lib.mixins.NDArrayOperatorsMixin).items()):
    if callable(_method) and _name not in ("__neg__", "__pos__", "__abs__", "__invert__"):
        setattr(StepValue, _name, _beside_tensors(_method))
