"""Arrays of numpy in a batch: a recorded step that makes tensors of them reads them as the tensors they are made into.

`hocket.pystate.batches` unfolds an array into the tensor that shares its memory, so that a graph reads it like any
other leaf of the batch. While a step is recorded it is given a `WatchedArray` in place of each array::

    torch.from_numpy(x), torch.FloatTensor(x), tensor[x]   ->   the leaf
    x[2:], x[order], x.astype(np.float32)                  ->   one that stands for that part
    x / 255                                                ->   noted: numpy computes with it where no op is seen

All that makes tensors of arrays makes one in the memory of the array first, and hands it to an op, `lift_fresh`.
`np.asarray` and the like ask no class before they read, and are exchanged while a step is recorded.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hocket.arguments import is_size
from hocket.pystate.origins import user_line
from hocket.pystate.places import is_a
from hocket.tracing.recording.step_arrays import StepArray
from hocket.tracing.scalars.followed_math import exchanged, wherever_held
from hocket.tracing.scalars.plain import replace_by_plain

_FLOATS = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}
# Functions that read an array without asking its class.
READING = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "frombuffer")
# Attributes of an array that do not depend on its elements.
_FREE = frozenset(
    (
        "shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags", "__class__", "__dict__",
        "__module__", "__array_priority__", "__array_finalize__", "__array_ufunc__", "__array_function__", "__len__",
        "__array_wrap__", "_hocket_plain", "_hocket_tensor", "_hocket_note", "astype",
        "__torch_function__", "__cuda_array_interface__",
    )
)  # fmt: skip


class ArrayReads:
    """Elements of arrays that a recorded step reads where no op is seen.

    torch itself reads a few items of an array that is an index of a tensor, in the user's own frame, and only then asks
    the mode. So single items count when the recording ends, unless their instruction was such an index.
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        # some were read, or written. The recording is void, and the step goes on with the user's own arrays.
        self.are_any = False
        self._items: dict[tuple[FrameType, int], str] = {}
        self._watched: list[tuple[np.ndarray[Any, Any], torch.Tensor]] = []
        self._handed_out: list[weakref.ref[Any]] = []

    def watched(self, array: np.ndarray[Any, Any], tensor: torch.Tensor) -> Any:
        """A stand-in for `array`, which has the elements of `tensor`."""
        self._watched.append((array, tensor))
        made: Any = array.view(WatchedArray)
        made._hocket_tensor, made._hocket_note, made._hocket_plain = tensor, self, array
        self._handed_out.append(weakref.ref(made))
        return made

    def leaf(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that stands for a watched array with the memory of `tensor`. None if there is none."""
        for array, leaf in self._watched:
            if _are_same(array, tensor):
                return leaf
            first, last = np.lib.array_utils.byte_bounds(array)
            if first <= tensor.data_ptr() < last:
                self()
        return None

    def __call__(self) -> None:
        """The step reads elements, or writes them."""
        self.are_any = True
        self._note(user_line())

    def item(self) -> None:
        """The frame that called the caller reads one element."""
        frame = sys._getframe(2)
        self._items.setdefault((frame, frame.f_lasti), user_line())

    def was_index(self) -> None:
        """Forget the item that the running instructions have asked for: it indexes a tensor, which is followed."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._items.pop((frame, frame.f_lasti), None)
            frame = frame.f_back

    def end(self) -> None:
        for line in self._items.values():
            self._note(line)
        self._items.clear()

    def close(self, others: Sequence[weakref.ref[Any]]) -> list[tuple[Any, list[Any]]]:
        """Put plain arrays where the step has kept one that stands for them, or one of the `others`."""
        return replace_by_plain([*self._handed_out, *others], plain_arrays)


class WatchedArray(np.ndarray[Any, Any]):
    """An array of the batch. Whatever is done with its elements is noted, and done with the user's own array."""

    _hocket_plain: Any = None
    _hocket_tensor: Any = None
    _hocket_note: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name in _FREE or np.ndarray.__getattribute__(self, "_hocket_plain") is None:
            return np.ndarray.__getattribute__(self, name)
        self._hocket_note()
        return getattr(self._hocket_plain, name)

    def __getitem__(self, key: Any) -> Any:
        plain = np.ndarray.__getattribute__(self, "_hocket_plain")
        if plain is None:  # an array that numpy itself made of one of these
            return np.ndarray.__getitem__(self, key)
        found = plain[key]
        if type(key) is int and type(found) is not np.ndarray:
            self._hocket_note.item()
            return found
        keys = key if type(key) is tuple else (key,)
        if len(keys) == 1 and is_followed(keys[0]) and keys[0].dtype == np.int64:  # rows of a mini-batch
            key, keys = keys[0]._hocket_tensor, ()
        if type(found) is not np.ndarray or not all(map(is_basic, keys)):
            self._hocket_note()
            return found
        return self._hocket_note.watched(found, self._hocket_tensor[key])

    def __index__(self) -> int:
        plain = np.ndarray.__getattribute__(self, "_hocket_plain")
        if plain is None:
            return np.ndarray.__index__(self)
        if not plain.ndim and plain.dtype.kind in "iu":
            self._hocket_note()
        return operator.index(plain)  # any other array raises, whatever its elements

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        plain = np.ndarray.__getattribute__(self, "_hocket_plain")
        if plain is None:
            return np.ndarray.astype(self, dtype, *args, **kwargs)
        found = plain.astype(dtype, *args, **kwargs)
        kind = _FLOATS.get(found.dtype)
        if kind is None or args or kwargs or plain.dtype.kind not in "biuf":
            self._hocket_note()
            return found
        return self._hocket_note.watched(found, self._hocket_tensor.to(kind, copy=True))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*_noted(inputs), **_noted(kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*_noted(args), **_noted(kwargs))


def _passed_on(name: str) -> Any:
    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = np.ndarray.__getattribute__(self, "_hocket_plain")
        if plain is None:  # an array that numpy itself made of one of these
            return getattr(np.ndarray, name)(self, *args, **kwargs)
        self._hocket_note()
        return getattr(plain, name)(*args, **kwargs)

    return use


for _name in (
    *("__setitem__", "__iter__", "__float__", "__int__", "__bool__", "__complex__"),
    *("__contains__", "__repr__", "__str__", "__format__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"),
    *("__array__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__dlpack__"),
):
    setattr(WatchedArray, _name, _passed_on(_name))
# Code that chooses by the name of a type finds numpy's.
WatchedArray.__module__, WatchedArray.__name__, WatchedArray.__qualname__ = "numpy", "ndarray", "ndarray"


def is_basic(key: Any) -> bool:
    """True of indices that take the same part of an array as of a tensor, as a view."""
    if type(key) is slice:
        return all(each is None or type(each) is int for each in (key.start, key.stop, key.step)) and (
            key.step is None or key.step > 0
        )
    return type(key) is int or key is None or key is Ellipsis


def _are_same(array: np.ndarray[Any, Any], tensor: torch.Tensor) -> bool:
    return (
        array.ctypes.data == tensor.data_ptr()
        and array.shape == tensor.shape
        and array.strides == tuple(each * array.itemsize for each in tensor.stride())
    )


def is_followed(value: Any) -> bool:
    """Return True for a stand-in whose tensor has its elements."""
    return type(value) is WatchedArray and value._hocket_plain is not None and not value._hocket_note.are_any


def reading_noted() -> AbstractContextManager[None]:
    """While this lasts, functions of numpy's that read arrays unasked note it, by whatever module they are found."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(*args: Any, **kwargs: Any) -> Any:
            one = args[0] if len(args) == 1 and not kwargs and is_followed(args[0]) else None
            if one is not None and function(one._hocket_plain) is one._hocket_plain:
                return one
            return function(*_noted(args), **_noted(kwargs))

        return read

    return exchanged(wherever_held(np, {name: noted(vars(np)[name]) for name in READING}))


def _noted(value: Any) -> Any:
    def plain(array: Any) -> Any:
        if array._hocket_plain is None:
            return np.asarray(array)
        array._hocket_note()
        return array._hocket_plain

    return tree_map_only(WatchedArray, plain, value)


def plain_arrays(value: Any) -> Any:
    """`value` with the user's own arrays in place of those that stand for them."""
    if not any(is_a(leaf, (WatchedArray, StepArray)) for leaf in tree_leaves(value)):
        return value
    return tree_map(_own, value, is_leaf=is_size)


def _own(leaf: Any) -> Any:
    return leaf._hocket_plain if is_a(leaf, WatchedArray) else leaf.plain if is_a(leaf, StepArray) else leaf


def as_indices(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a tensor's `__getitem__` with leaves in place of watched arrays of integers."""

    def index(key: Any) -> Any:
        if is_followed(key) and key.dtype == np.int64:
            key._hocket_note.was_index()
            return key._hocket_tensor.detach()
        return key

    key = args[1]
    return (args[0], tuple(map(index, key)) if type(key) is tuple else index(key))
