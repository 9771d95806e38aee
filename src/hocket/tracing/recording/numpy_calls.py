"""`call_numpy`: an op that makes calls of numpy's which a step makes between two other ops.

The calls of a recorded step with arrays of its own (`hocket.tracing.recording.step_arrays`) are written down. They
become one Python function, and one op of the graph runs it::

    values = out.detach().numpy()              read:     out
    gain = (values - values.mean()) / 2.0      calls:    v1 = mean(v0); v2 = subtract(v0, v1); v3 = true_divide(v2, 2.0)
    loss = (torch.from_numpy(gain) * out)...   results:  v3

The same calls get the same memory layouts in the same order, and so give the same bits. Where a call raises, or a shape
is another one that the step has asked for, the step takes another branch (`hocket.tracing.raising.OTHER_BRANCH`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hocket.tracing.raising import OTHER_BRANCH

# A tensor stands for a number of Python's own.
NUMBER = "number"


@dataclass(frozen=True)
class ValueRef:
    """The value that a call has given, or that was read, in the arguments of another call."""

    index: int


@dataclass(eq=False)
class NumpyCall:
    """One call: its function and its arguments, with a `ValueRef` in place of each value of the step."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int  # of its value
    errors: Any = None  # how numpy treats errors in it (see `numpy.errstate`), unless as usual
    length: int | None = None  # of a tuple or list of results
    shape: tuple[int, ...] | None = None  # of the result, where the step depends on it


@dataclass(frozen=True, eq=False)
class NumpyCalls:
    """Calls in their order, and what is handed back.

    Attributes:
        calls: in their order.
        inputs: for each tensor that is read the value that it stands for, and how it is turned (see `as_tensor`).
        outputs: values that are handed back, and whether as a copy.
        layouts: dtype, shape and strides of each of them, where the step depends on these. None where not.
        origin: the user's line.
    """

    calls: tuple[NumpyCall, ...]
    inputs: tuple[tuple[ValueRef, Any], ...]
    outputs: tuple[tuple[ValueRef, bool], ...]
    layouts: list[Any]
    origin: str
    run: Callable[..., tuple[Any, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names: dict[str, Any] = {}
        lines = []
        for call in self.calls:
            arguments = [_text(each, names) for each in call.args]
            arguments += [f"{key}={_text(each, names)}" for key, each in call.kwargs.items()]
            line = f"v{call.index} = {_constant(call.function, names)}({', '.join(arguments)})"
            if call.errors is not None:
                line = f"with {_constant(np.errstate, names)}(**{_constant(call.errors, names)}): {line}"
            lines.append(line)
            if call.shape is not None:
                lines.append(f"if v{call.index}.shape != {call.shape!r}: raise ValueError('another shape')")
            if call.length is not None:
                lines.append(f"if len(v{call.index}) != {call.length}: raise ValueError('another length')")
        given = ", ".join(f"v{ref.index}" for ref, _ in self.inputs)
        body = [*lines, f"return ({''.join(f'v{ref.index}, ' for ref, _ in self.outputs)})"]
        text = f"def run({given}):\n" + "".join(f"    {line}\n" for line in body)
        exec(compile(text, "<hocket calls of numpy>", "exec"), names)
        object.__setattr__(self, "run", names["run"])

    def __call__(self, read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = [as_value(each.detach(), how) for each, (_, how) in zip(read, self.inputs, strict=True)]
        try:
            found = self.run(*given)
            if any(each and layout_of(value) != each for each, value in zip(self.layouts, found, strict=True)):
                raise ValueError("another layout")
            return [as_tensor(value, is_copy)[0] for value, (_, is_copy) in zip(found, self.outputs, strict=True)]
        except Exception as error:
            raise RuntimeError(f"{OTHER_BRANCH} at {self.origin}") from error


def as_tensor(value: Any, is_copy: bool) -> tuple[torch.Tensor, Any]:
    """The tensor with the elements of an array or a number of numpy's, and how the tensor is turned to give it back.

    A copy has the strides of the array. Reversed axes are turned, as no tensor has them.
    """
    if not isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value)), ()
    how = tuple(slice(None, None, -1 if stride < 0 else None) for stride in value.strides)
    turned = value[how] if any(each.step for each in how) else value
    if is_copy:
        turned = copied(turned)
    return torch.from_numpy(turned), how if any(each.step for each in how) else None


def layout_of(value: Any) -> Any:
    """Dtype, shape and strides of an array, or the class of a number."""
    return (value.dtype, value.shape, value.strides) if isinstance(value, np.ndarray) else type(value)


def copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy with the same strides."""
    first, last = np.lib.array_utils.byte_bounds(array)
    memory = np.empty(max(1, last - first), np.uint8)
    copy = np.ndarray(array.shape, array.dtype, memory, array.__array_interface__["data"][0] - first, array.strides)
    copy[...] = array
    return copy


def as_value(tensor: torch.Tensor, how: Any) -> Any:
    """The array or the number that a tensor stands for."""
    array = tensor.numpy()
    return array if how is None else array.item() if how == NUMBER else array[how]


def _text(value: Any, names: dict[str, Any]) -> str:
    if type(value) is ValueRef:
        return f"v{value.index}"
    if type(value) in (tuple, list):
        inner = "".join(f"{_text(each, names)}, " for each in value)
        return f"({inner})" if type(value) is tuple else f"[{inner}]"
    if type(value) is slice:
        return f"slice({', '.join(_text(each, names) for each in (value.start, value.stop, value.step))})"
    if value is None or value is Ellipsis or type(value) in (bool, int):
        return repr(value)
    return _constant(value, names)


def _constant(value: Any, names: dict[str, Any]) -> str:
    name = f"k{len(names)}"
    names[name] = value
    return name


class CallsKey(str):
    """The name by which the op finds its calls, which live as long as the key: ops take no objects of Python's."""

    __slots__ = ("calls",)
    calls: NumpyCalls

    def __deepcopy__(self, memo: Any) -> CallsKey:
        return self


_CALLS: weakref.WeakValueDictionary[str, NumpyCalls] = weakref.WeakValueDictionary()


def key_of(calls: NumpyCalls | str) -> CallsKey:
    """The key of calls, or of those with this name."""
    found = _CALLS[calls] if isinstance(calls, str) else calls
    key = CallsKey(f"{id(found):x}: {OTHER_BRANCH} at {found.origin}")
    key.calls = found
    _CALLS[str(key)] = found
    return key


def _call_numpy(read: list[torch.Tensor], calls: str) -> list[torch.Tensor]:
    return _CALLS[calls](read)


_LIBRARY = torch.library.Library("hocket", "FRAGMENT")
_LIBRARY.define("call_numpy(Tensor[] read, str calls) -> Tensor[]")
_LIBRARY.impl("call_numpy", _call_numpy, "CompositeExplicitAutograd")
CALL_NUMPY = torch.ops.hocket.call_numpy.default
