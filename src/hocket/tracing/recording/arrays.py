"""Arrays of numpy in a batch: a recorded step that makes tensors of them reads them as the tensors they are made into.

`hocket.pystate.batches` unfolds an array into the tensor that shares its memory, so that a graph reads it like any
other leaf of the batch. While a step is recorded it is given a `WatchedArray` in place of each array::

    torch.from_numpy(x)   ->   the leaf           x / 255   ->   noted: numpy computes with it where no op is seen
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

MAKERS: frozenset[Any] = frozenset((torch.tensor, torch.as_tensor, torch.asarray))

# What may be asked of an array without looking at its elements.
_FREE = frozenset(
    (
        "shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags", "__class__", "__dict__",
        "__module__", "__array_priority__", "__array_finalize__", "__array_ufunc__", "__array_function__", "__len__",
        "__array_wrap__", "_hocket_plain", "_hocket_tensor", "_hocket_note",
    )
)  # fmt: skip


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
    *("__getitem__", "__setitem__", "__iter__", "__float__", "__int__", "__bool__", "__index__", "__complex__"),
    *("__contains__", "__repr__", "__str__", "__format__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"),
    *("__array__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__dlpack__"),
):
    setattr(WatchedArray, _name, _passed_on(_name))
# Code that chooses by the name of a type finds numpy's.
WatchedArray.__module__, WatchedArray.__name__, WatchedArray.__qualname__ = "numpy", "ndarray", "ndarray"


def watched_array(array: np.ndarray[Any, Any], tensor: torch.Tensor, note: Callable[[], None]) -> Any:
    """A stand-in for `array`, which `tensor` shares its memory with."""
    made: Any = array.view(WatchedArray)
    made._hocket_tensor, made._hocket_note, made._hocket_plain = tensor, note, array
    return made


def _noted(value: Any) -> Any:
    def plain(array: Any) -> Any:
        if array._hocket_plain is None:
            return np.asarray(array)
        array._hocket_note()
        return array._hocket_plain

    return tree_map_only(WatchedArray, plain, value)


def plain_arrays(value: Any) -> Any:
    """`value` with the user's own arrays in place of those that stand for them."""
    if not any(isinstance(leaf, WatchedArray) for leaf in tree_leaves(value)):
        return value
    return tree_map_only(WatchedArray, lambda array: array._hocket_plain, value)


def made_of_array(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The tensor that one of `MAKERS` makes of a watched array. None where it is not known how."""
    if kwargs.keys() - {"dtype", "device"} or len(args) != 1:
        args[0]._hocket_note()
        return None
    leaf: torch.Tensor = args[0]._hocket_tensor.detach()
    return leaf.to(**kwargs, copy=True) if func is torch.tensor else leaf.to(**kwargs) if kwargs else leaf


@contextmanager
def arrays_followed() -> Iterator[None]:
    """While this lasts, `torch.from_numpy` follows watched arrays. No mode of torch sees it."""
    usual = torch.from_numpy

    def from_numpy(ndarray: Any) -> torch.Tensor:
        followed = type(ndarray) is WatchedArray and ndarray._hocket_plain is not None
        return ndarray._hocket_tensor.detach() if followed else usual(ndarray)

    torch.from_numpy = from_numpy
    try:
        yield
    finally:
        torch.from_numpy = usual
