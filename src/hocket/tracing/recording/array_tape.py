"""The calls of numpy's that a recorded step makes with arrays of its own, between its ops.

Each call is made at once, and written down. Where a result goes back to torch, or Python asks for its value, the calls
so far become an op of the graph (`hocket.tracing.recording.numpy_calls`), and all arrays that are still there are among
its results::

    out ──> numpy() ·· mean ·· subtract ·· true_divide ··> torch.from_numpy ──> loss
            `── written down ──────────────────────────'   one op, `call_numpy`

The tensors that the step gets have the memory of its own arrays, so that the recorded step is eager's in all ways. What
writes memory that torch and numpy share, or that an earlier op has read, is a reason not to capture the step.
"""

from __future__ import annotations

import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hocket.pystate.origins import user_line
from hocket.pystate.places import is_a, is_number
from hocket.tracing.reasons import Reasons
from hocket.tracing.recording.numpy_calls import (
    CALL_NUMPY,
    NUMBER,
    NumpyCall,
    NumpyCalls,
    ValueRef,
    as_tensor,
    copied,
    key_of,
    layout_of,
)
from hocket.tracing.recording.step_arrays import ASKING_SHAPES, StepArray, StepNumber, StepValue, arrays_in, values_in
from hocket.tracing.scalars.late import LateTape
from hocket.tracing.scalars.live import Late, Live

_KINDS = "biuf"
_USUAL_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_HERE = __file__.rpartition("/")[0]


class ArrayMemory:
    """Memory that arrays share, as views of each other.

    Attributes:
        is_constant: it holds what every step computes alike.
        is_seen: others may read and write it.
        is_given: it is that of an array of the batch.
    """

    def __init__(self, *, is_constant: bool = False, is_seen: bool = False, is_given: bool = False) -> None:
        self.is_constant, self.is_seen, self.is_given = is_constant, is_seen, is_given


class ArrayTape:
    """The calls of one recorded step.

    Args:
        reasons: of the recording.
        follows: arrays are followed. Otherwise each that is made of a tensor is a reason not to capture the step.
        on_device: the step has tensors on a GPU. Only arrays of the batch are followed.
    """

    def __init__(self, reasons: Reasons, follows: bool, on_device: bool = False) -> None:
        self.reasons, self.follows, self.on_device = reasons, follows, on_device
        # True if the step can be undone where a call turns out otherwise
        self.may_branch: Callable[[], bool] = lambda: False
        self.outcome_of: Callable[[torch.Tensor], bool | None] = lambda tensor: None
        self.writers: Callable[[torch.Tensor], list[Any]] = lambda tensor: []  # ops that write its memory
        # lets a tensor be what an op has returned
        self.stand_for: Callable[[torch.Tensor, torch.Tensor], None] = lambda tensor, result: None
        self.handed_out: list[weakref.ref[Any]] = []
        self._calls: list[NumpyCall] = []
        # by the index of a value: its tensor, how that is turned, and how many ops had written it
        self._inputs: dict[int, tuple[torch.Tensor, Any, int]] = {}
        self._layouts: dict[int, tuple[list[Any], int]] = {}  # where an op asks for the layout of a value
        self._aliases: list[tuple[torch.Tensor, int]] = []  # memory that must not be written any more
        self._pending: list[weakref.ref[StepValue]] = []
        self._constants: list[Any] = []  # arrays of others that calls were given
        self._num = 0

    # -------------------------------------------------------------------------------------------- to and from tensors

    def can_read(self, tensor: Any) -> bool:
        """True if ``tensor.numpy()`` can be followed."""
        is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_cpu
        is_usual = is_dense and not (tensor.requires_grad or tensor.is_complex() or tensor.is_neg() or self.on_device)
        return self.follows and is_usual and tensor.dtype is not torch.bfloat16 and not _is_for_c()

    def of_tensor(self, array: Any, tensor: torch.Tensor) -> StepValue:
        """Return the stand-in for an array in the memory of a tensor, which has the same elements."""
        with torch.no_grad():
            read = tensor.detach()
        made = self._new(array, ArrayMemory(is_seen=True), self._next())
        self._inputs[made.index] = (read, None, len(self.writers(read)))
        return made

    def of_batch(self, array: Any, tensor: torch.Tensor) -> StepValue:
        """Return the stand-in for an array of the batch."""
        made = self.of_tensor(array, tensor)
        made.memory.is_given = True
        return made

    def left_tensor(self, array: StepValue) -> torch.Tensor | None:
        """The tensor of an array that the step leaves behind. None for the user's own, of which there is one object."""
        return None if array.memory.is_given else self.tensor_of(array)

    def part_of(self, array: StepValue, key: Any) -> StepValue | None:
        """A part of an array in a tensor's memory by indices that both take, or None where it has to be a call."""
        tensor, how, _ = self._inputs.get(array.index, (None, (), 0))
        keys = key if type(key) is tuple else (key,)
        if tensor is None or how is not None or self.reasons or not all(map(is_basic, keys)):
            return None
        if type(part := array.plain[key]) is not np.ndarray:
            return None
        self._check(array.index)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            made = self.of_tensor(part, tensor[key])
        array.memory.is_seen, made.memory = True, array.memory
        return made

    def tensor_of(self, array: StepValue) -> torch.Tensor | None:
        """The tensor in the memory of an array. None where it cannot be followed."""
        if array.memory.is_constant and array.index not in self._inputs:
            return torch.from_numpy(np.asarray(self.settle(array)))
        if array.index not in self._inputs:
            self._emit()
        array.memory.is_seen = True
        found = None if self.reasons else self._inputs.get(array.index)
        if found is None or (found[1] is not None and array.is_array):  # reversed
            self._note()
            return None
        self.ask_shape(array)
        self._check(array.index)
        return found[0]

    def operand(self, number: StepValue) -> torch.Tensor | None:
        """A tensor of no dimensions that computes as a number of the step does in an op, or None."""
        is_number = not (number.is_array or number.memory.is_constant) and number.dtype.kind in "iuf"
        return self.tensor_of(number) if is_number else None

    def late_ref(self, number: Any, late: LateTape) -> Any:
        """The entry of the late tape for a late number, or for one of numpy's, which keeps its type."""
        if is_a(number, Late):
            return late.ref(number)
        if (tensor := self.tensor_of(number)) is None:
            return None
        found = late.read(number.plain.item(), (tensor, tensor, self.writers(tensor)), user_line())
        return late.converted(type(number.plain), found)

    def end(self) -> None:
        """Emit what the step has left behind, when it is over."""
        if any(ref() is not None for ref in self._pending) and not self.reasons:
            self._emit()
        if any(len(self.writers(tensor)) != num for tensor, num in self._aliases):
            self._note()

    def _check(self, index: int) -> None:
        """Note a reason if the memory of a value was written by an op since it was read."""
        tensor, _, num = self._inputs[index]
        if len(self.writers(tensor)) != num:
            self._note()

    def _emit(self) -> None:
        """Let an op make the calls so far, with all arrays as its results that are still there."""
        alive = list({each.index: each for ref in self._pending if (each := ref()) is not None}.values())
        calls, self._calls, self._pending = self._calls, [], []
        made = {call.index for call in calls}
        read = sorted({ref.index for call in calls for ref in _refs(call)} - made)
        for index in self._inputs.keys() & set(read):
            self._check(index)
        if self.reasons or not self._inputs.keys() >= set(read) or not self.may_branch():
            return self._note()
        tensors = [self._inputs[index][0] for index in read]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            copies = list(_shared(alive, [*self._constants, *(each.numpy() for each in tensors)]))
            layouts: list[Any] = [None] * len(alive)
            program = NumpyCalls(
                tuple(calls),
                tuple((ValueRef(index), self._inputs[index][1]) for index in read),
                tuple((ValueRef(each.index), is_copy) for each, is_copy in zip(alive, copies, strict=True)),
                layouts,
                user_line(),
            )
            try:
                found = CALL_NUMPY([each.detach() for each in tensors], key_of(program))
            except RuntimeError:
                return self._note()
            for place, (each, result) in enumerate(zip(alive, found, strict=True)):
                self._take(each, result)
                self._layouts[each.index] = (layouts, place)
            if any(copies):  # in the graph these do not share memory
                self._aliases += [(tensor, len(self.writers(tensor))) for tensor in (*tensors, *found)]

    def _take(self, array: StepValue, result: torch.Tensor) -> None:
        """Let the tensor in the memory of an array be a result of the op."""
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of memory that must not be written
            tensor, how = as_tensor(array.plain, False)
            is_same = tensor.stride() == result.stride() and are_equal(tensor, result)
        if not is_same:
            self._note()
        self.stand_for(tensor, result)
        self._inputs[array.index] = (tensor, how, len(self.writers(tensor)))

    # --------------------------------------------------------------------------------------------------------- calls

    def apply(
        self, function: Callable[..., Any], args: Any, kwargs: Any = None, written: StepValue | None = None
    ) -> Any:
        """Make a call with the plain values of arrays, and write it down.

        Args:
            function: of numpy's.
            args: of the call, with arrays of the step in them.
            kwargs: likewise.
            written: the array that the call writes.
        """
        kwargs = kwargs or {}
        given = list(arrays_in((args, kwargs)))
        plain_args, plain_kwargs = self._mapped((args, kwargs), lambda each: each.plain)
        if self.reasons or not self.follows:
            return function(*plain_args, **plain_kwargs)
        if written is not None:
            self._write(written, given)
        ref_args, ref_kwargs = self._mapped((args, kwargs), self._ref, noting=True)
        with self.reasons.of_error(getattr(function, "__name__", function)):
            result = function(*plain_args, **plain_kwargs)
        if self.reasons:
            return result
        errors = None if np.geterr() == _USUAL_ERRORS else np.geterr()
        call = NumpyCall(function, ref_args, ref_kwargs, self._next(), errors)
        self._calls.append(call)
        is_constant = all(each.memory.is_constant for each in given)
        return None if result is None else self._wrapped(result, call, given, is_constant)

    def settle(self, array: StepValue) -> Any:
        """The plain value of an array that leaves our sight."""
        if not array.memory.is_constant:
            self._note()
        array.memory.is_seen = True
        return array.plain

    def ask_shape(self, array: StepValue) -> None:
        """Let every later step find the shape of this array, on which it depends."""
        if array.index in self._layouts:
            layouts, place = self._layouts[array.index]
            layouts[place] = layout_of(array.plain)
        for call in reversed(self._calls):
            if call.index == array.index:
                call.shape = np.shape(array.plain)
                return

    def _note(self) -> None:
        self.reasons.add("computes with an array", line=user_line())

    def _next(self) -> int:
        self._num += 1
        return self._num

    def _new(self, value: Any, memory: ArrayMemory, index: int) -> StepValue:
        kind = StepArray if is_a(value, np.ndarray) else StepNumber
        made = kind(value, self, index, memory)
        self.handed_out.append(weakref.ref(made))
        return made

    def _ref(self, array: StepValue) -> ValueRef:
        if array.index in self._inputs:
            self._check(array.index)
        return ValueRef(array.index)

    def _of_number(self, number: Any) -> Any:
        """A number that changes between steps, or is known late, which an op hands over."""
        kind = torch.int64 if type(number.plain) is int else torch.float64
        found = number.tape.operand(number) if is_a(number, Late) else torch.full((), number, dtype=kind)
        if found is None:
            return number.tape.settle(number)
        tensor, index = found.to(kind), self._next()
        self._inputs[index] = (tensor, () if type(number.plain) is np.float64 else NUMBER, len(self.writers(tensor)))
        return ValueRef(index)

    def _write(self, target: StepValue, given: Sequence[StepValue]) -> None:
        if target.memory.is_seen:
            self._note()
        elif target.index in self._inputs:  # an op has handed it back: the calls from here on write a copy
            others = (each for ref in self.handed_out if (each := ref()) is not None and each is not target)
            if any(each.memory is target.memory for each in others):
                self._note()
            call = NumpyCall(copied, (self._ref(target),), {}, self._next())
            self._calls.append(call)
            target.index = call.index
            self._pending.append(weakref.ref(target))
        if not all(each.memory.is_constant for each in given):
            target.memory.is_constant = False

    def _wrapped(self, result: Any, call: NumpyCall, given: Sequence[StepValue], is_constant: bool) -> Any:
        for each in given:
            if each.plain is result:
                return each
        if type(result) is np.ndarray or is_a(result, np.generic):
            if result.dtype.kind not in _KINDS:
                self._note()
                return result
            shared = {id(each.memory): each.memory for each in given if _may_share(each.plain, result)}
            if len(shared) > 1:
                self._note()
            made = self._new(result, next(iter(shared.values()), ArrayMemory(is_constant=is_constant)), call.index)
            self._pending.append(weakref.ref(made))
            return made
        is_known = is_constant or call.function in ASKING_SHAPES
        if isinstance(result, (tuple, list)) and not is_known:
            call.length = len(result)
            found = [self._element(result, n, call, given) for n in range(len(result))]
            return result._make(found) if hasattr(result, "_make") else type(result)(found)
        if not is_known:
            self._note()
        return result

    def _element(self, result: Any, n: int, call: NumpyCall, given: Sequence[StepValue]) -> Any:
        taken = NumpyCall(operator.getitem, (ValueRef(call.index), n), {}, self._next())
        self._calls.append(taken)
        return self._wrapped(result[n], taken, given, False)

    def _mapped(self, value: Any, change: Callable[[StepValue], Any], noting: bool = False) -> Any:
        """Arguments with other values in place of arrays of the step, and with plain or followed numbers."""
        if is_a(value, StepValue):
            return change(value)
        if is_a(value, (Live, Late)) and is_number(value.plain):
            return self._of_number(value) if noting else value.plain
        if is_a(value, (Live, Late)):
            return value.tape.settle(value)
        if type(value) in (tuple, list):
            return type(value)([self._mapped(each, change, noting) for each in value])
        if type(value) is dict:
            return {key: self._mapped(each, change, noting) for key, each in value.items()}
        if type(value) is slice:
            return slice(*(self._mapped(each, change, noting) for each in (value.start, value.stop, value.step)))
        if noting and type(value) is np.ndarray:
            self._constants.append(value)
            return value.copy(order="K")
        return value


def is_basic(key: Any) -> bool:
    """True of indices that take the same part of an array as of a tensor, as a view."""
    if type(key) is slice:
        return all(each is None or type(each) is int for each in (key.start, key.stop, key.step)) and (
            key.step is None or key.step > 0
        )
    return type(key) is int or key is None or key is Ellipsis


def _refs(call: NumpyCall) -> Iterator[ValueRef]:
    return (each for each in values_in((call.args, call.kwargs)) if type(each) is ValueRef)


def _shared(arrays: Sequence[StepValue], others: list[Any]) -> Iterator[bool]:
    """For each array whether it may share memory with one before it or with others, or must not be written."""
    for each in arrays:
        is_read_only = each.is_array and not each.plain.flags.writeable
        yield is_read_only or any(_may_share(each.plain, other) for other in others)
        others.append(each.plain)


def _may_share(one: Any, other: Any) -> bool:
    return is_a(one, np.ndarray) and is_a(other, np.ndarray) and bool(np.may_share_memory(one, other))


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    with torch._C.DisableTorchFunction():
        one, other = one.detach(), other.detach()
        is_like = one.shape == other.shape and one.dtype is other.dtype
        return is_like and one.numpy().tobytes() == other.numpy().tobytes()


def _is_for_c() -> bool:
    """True if C code asks a tensor for its array, and takes no other object."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code is torch.Tensor.__array__.__code__
