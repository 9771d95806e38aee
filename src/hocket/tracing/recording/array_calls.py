"""Calls that a recorded step makes with arrays of its own, where neither numpy nor torch asks the array itself.

Functions of numpy's that take any object, or make an array to write into, are exchanged while a step is recorded, and
so are those of scipy's that compute in C, and `from_dlpack`, which constructors of tensors call (``torch.Tensor(x)``).
`handed_to_torch` makes tensors of arrays in the arguments of torch's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hocket.pystate.places import is_a
from hocket.tracing.recording.array_tape import ArrayTape, are_equal
from hocket.tracing.recording.data_reads import MAKERS
from hocket.tracing.recording.step_arrays import StepValue, arrays_in, settled
from hocket.tracing.scalars.followed_math import exchanged, wherever_held
from hocket.tracing.scalars.live import plain_tree

_MAKING = ("zeros", "ones", "empty", "full", "eye", "identity", "zeros_like", "ones_like", "empty_like", "full_like")
# By module, functions of others that only compute.
_OF_OTHERS = {"scipy.optimize": ("linear_sum_assignment",), "scipy.signal": ("lfilter",)}
_LIBRARIES = ("numpy", "scipy", "sklearn", "pandas", "torch", "hocket")  # code of these gets plain arrays
# Functions that read an array without asking its class.
_READING = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray")
_OPTIONS = frozenset(("dtype", "device", "requires_grad"))
_INDEXING: Any = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def numpy_followed(tape: ArrayTape) -> AbstractContextManager[None]:
    """While this lasts, such functions take and make arrays of the step where the user's code of this thread calls."""
    here = threading.get_ident()

    def followed(function: Callable[..., Any], makes: bool = False) -> Callable[..., Any]:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            module = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            if tape.reasons or module in _LIBRARIES or threading.get_ident() != here:
                return function(*settled(args), **settled(kwargs))
            if not makes:
                args = tuple(each.numpy() if isinstance(each, torch.Tensor) else each for each in args)
            is_followed = makes or any(True for _ in arrays_in((args, kwargs)))
            return tape.apply(function, args, kwargs) if is_followed else function(*args, **kwargs)

        return called

    def shared(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def made(array: Any, *args: Any, **kwargs: Any) -> Any:
            found = tape.tensor_of(array) if is_a(array, StepValue) and not (args or kwargs) else None
            return function(settled(array), *args, **kwargs) if found is None else found.detach()

        return made

    others = {vars(np)[name]: followed(vars(np)[name], name in _MAKING) for name in (*_MAKING, *_READING)}
    others |= {function: shared(function) for function in (torch.from_numpy, torch.utils.dlpack.from_dlpack)}
    for module, names in _OF_OTHERS.items():
        if isinstance(found := sys.modules.get(module), ModuleType):
            others |= {vars(found)[name]: followed(vars(found)[name]) for name in names}
    return exchanged(wherever_held(others))


def handed_to_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A call of torch's with tensors in place of arrays of the step: the function and its arguments."""
    if not any(True for _ in arrays_in((args, kwargs))):
        return func, args, kwargs
    if kwargs.keys() <= _OPTIONS and (place := MAKERS.get(func)) is not None and len(args) > place:
        made = _made(func, args, place, **kwargs)
        if made is not None:
            return (lambda: made), (), {}
    if func in _INDEXING:
        args = (args[0], *map(_with_tensors, args[1:]))
    return func, settled(args), settled(kwargs)


def _made(func: Any, args: Any, place: int, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor | None:
    """The tensor that a function makes of arrays and numbers of the step, by ops. None if it cannot be followed."""
    data = args[place]
    tape = next(arrays_in(data)).tape
    with _disable_current_modes():
        plain = func(*plain_tree(args, lambda each: each.plain), **kwargs)
        elements = plain.cpu()
    array = data if is_a(data, StepValue) else tape.apply(np.array, (data,))
    tensor = tape.tensor_of(array) if is_a(array, StepValue) else None
    if tensor is None:
        return None
    shares = func in (torch.as_tensor, torch.asarray) and data is array and plain.dtype is tensor.dtype
    made = tensor.detach() if shares else tensor.to(plain.dtype, copy=True)
    if not are_equal(made, elements):
        tape.settle(array)
    return made.to(plain.device).requires_grad_(requires_grad)


def _with_tensors(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_with_tensors, value))
    tensor = value.tape.tensor_of(value) if is_a(value, StepValue) and value.is_array else None
    return value if tensor is None else tensor.detach()
