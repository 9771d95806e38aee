"""A captured step in float64, the reference for every other way of computing the step.

The ops are those of the step as it was captured, in its order. Tensors of floating point, and every dtype that an op is
given, become float64 (complex ones complex128). Random numbers are drawn in the step's own dtype and then converted, so
that a dropout leaves out the same elements.

In float64 torch has no kernels of oneDNN: it writes the images of a whole batch out as the columns of one matrix, nine
times their size for a kernel of 3 x 3, and that is what the step would need most of its memory for. So convolutions are
computed some images at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from hocket.errors import CaptureError
from hocket.heap import HeapTrimmer, trim_heap
from hocket.tracing.captured import Captured
from hocket.tracing.program import Call, Slot, map_leaves
from hocket.tracing.recording.op_arguments import written_arguments
from hocket.tracing.saved_state import OVERLAPS, RandomStates
from hocket.tracing.scalars.tape import TapeRef
from hocket.tracing.sources import BatchLeaf, Memory
from hocket.tracing.spill import ValueMemory

_aten = torch.ops.aten
WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

SHARED = "two tensors of the step share memory, and one of them is written"

# Freed memory is given back each time this much was allocated, and as often where less may be held.
MAX_UNTRIMMED_BYTES = 32 * 2**20
# The limit for the columns of some images together.
MAX_COLUMNS_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Left:
    """Results and state after a step. Values may lie in a file until the ``with`` block ends: read them by `each`."""

    # the value of each place that it reads or writes (parameters, buffers, state, gradients)
    places: tuple[tuple[Any, Any], ...]
    result: tuple[Any, ...]  # the leaves of its result, and of values that it appends to lists
    memory: ValueMemory = field(default_factory=lambda: ValueMemory(math.inf, {}))  # holds the values

    def __enter__(self) -> Left:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()

    def each(self) -> Iterator[tuple[Any, Any]]:
        """Each place and its value."""
        for source, value in self.places:
            yield source, self.memory.present(value)


def float64_step(captured: Captured, batch: Any, *, is_wide: bool = False, limit_bytes: float = math.inf) -> Left:
    """Make one step in float64 from the current state of model and optimizer, which stays as it is.

    With `is_wide` the captured ops are those of a step in float64 already. Values beyond `limit_bytes` between two ops
    lie in a temporary file (see `spill`). Returns results and state after the step, to be used in a ``with`` block.

    Raises:
        CaptureError: the capture is not valid for this step, the step writes memory that two of its tensors share, or
            an op draws random numbers in a way that float64 cannot repeat.
        Exception: an op has no kernel for float64.
    """
    leaves, _ = tree_flatten(batch)
    numbers = captured.numbers(batch)
    if numbers is None:
        raise CaptureError("the numbers of the step changed since it was captured")
    if captured.trace.writes_shared_inputs:
        raise CaptureError(SHARED)
    slot_of = captured.lowered.slot_of
    dtypes = {slot: v.dtype for n, slot in slot_of.items() if isinstance(v := n.meta.get("val"), torch.Tensor)}
    random = RandomStates(captured.trace.places.generators)
    calls, uses, kept = _uses(captured)
    memory, heap = ValueMemory(limit_bytes, uses), HeapTrimmer(int(min(MAX_UNTRIMMED_BYTES, limit_bytes)))
    values: dict[int, Any] = {}
    source_of = dict(captured.inputs)

    def take(slots: Iterable[int]) -> None:
        """Copy inputs when they are first read: state of the optimizer would lie in the file until its update."""
        for slot in slots:
            if slot not in values:
                source = source_of[slot]
                values[slot] = _copied(leaves[source.index] if type(source) is BatchLeaf else source.get())
                memory.add(slot, values[slot])

    try:
        with torch.no_grad():
            for at, call in enumerate(calls):
                take(call.reads)
                memory.load(call.reads)
                _run(call, values, numbers, None if is_wide else dtypes)
                made_bytes = 0
                for slot in call.outs.values():
                    memory.add(slot, values[slot])
                    made_bytes += values[slot].nbytes if isinstance(values[slot], torch.Tensor) else 0
                for slot in {*call.reads, *call.outs.values()} - kept:
                    if uses[slot][-1] == at:
                        memory.drop(slot)
                        del values[slot]
                memory.spill(at)
                heap.made(made_bytes)
            for slot in source_of:
                take([slot])
                memory.spill(len(calls), limit_bytes=0)  # it is asked for one value at a time
            memory.load(at for kind, at, _ in captured.results if kind != "number")
    except BaseException:
        memory.close()
        raise
    finally:
        random.restore()
        trim_heap()
    places = {source: values[slot] for slot, source in captured.inputs if type(source) is not BatchLeaf}
    places |= {entry: values[slot] for entry, slot in captured.rebound}
    places |= {entry.place: values[slot] for entry, slot in captured.rebound if isinstance(entry, Memory)}
    places |= {gradient: None if slot is None else values[slot] for gradient, slot in captured.gradients}
    places |= {entry: numbers[reference.index] for entry, reference in captured.trace.numbers.items()}
    results = [numbers[at] if kind == "number" else values[at] for kind, at, _ in captured.results]
    late = captured.late_values([x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in results])
    places |= {entry: late[reference.index] for entry, reference in captured.trace.late_numbers.items()}
    result = captured.trace.result.filled(results, late, places.get)
    return Left(tuple(places.items()), tuple(result), memory)


def _uses(captured: Captured) -> tuple[list[Call], dict[int, list[int]], set[int]]:
    """Return the calls of the step, the calls that use each slot, in order, and the slots needed afterwards."""
    program = captured.program
    calls = [call for action in (program.prologue, *program.actions) for call in action.calls]
    uses: dict[int, list[int]] = {}
    for at, call in enumerate(calls):
        for slot in {*call.reads, *call.outs.values()}:
            uses.setdefault(slot, []).append(at)
    kept = {*program.kept, *(slot for slot, source in captured.inputs if type(source) is not BatchLeaf)}
    return calls, uses, kept


def _run(call: Call, values: dict[int, Any], numbers: Sequence[Any], dtypes: dict[int, torch.dtype] | None) -> None:
    """Make one call, with the step's own `dtypes` by slot, or unchanged for None."""
    is_random = dtypes is not None and torch.Tag.nondeterministic_seeded in getattr(call.func, "tags", ())

    def given(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            value = values[leaf.index]
            return value.to(dtypes[leaf.index]) if dtypes and is_random and isinstance(value, torch.Tensor) else value
        if isinstance(leaf, TapeRef):
            return numbers[leaf.index]
        return WIDE.get(leaf, leaf) if dtypes is not None and not is_random and isinstance(leaf, torch.dtype) else leaf

    args, kwargs = map_leaves((call.args, call.kwargs), given)
    run = None if kwargs else IN_PARTS.get(call.func)
    result = (run or call.func)(*args, **kwargs)
    if is_random:
        result = tree_map(_wide, result)
        slots = written_arguments(call.func, call.args, call.kwargs)
        for slot, drawn in zip(slots, written_arguments(call.func, args, kwargs), strict=True):
            if not isinstance(slot, Slot):
                raise CaptureError(f"{call.func} draws random numbers into several tensors")
            values[slot.index].copy_(drawn)
    for position, slot in call.outs.items():
        values[slot] = result if position is None else result[position]


def _wide(value: Any) -> Any:
    return value.detach().to(WIDE.get(value.dtype, value.dtype)) if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    """A copy in float64 with the same strides: kernels are compiled for these. `Tensor.to` closes gaps between rows."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().to(WIDE.get(value.dtype, value.dtype), copy=True)
    if copy.stride() == value.stride() or torch._debug_has_internal_overlap(value) == OVERLAPS:
        return copy
    return torch.empty_strided(value.shape, value.stride(), dtype=copy.dtype, device=copy.device).copy_(copy)


def _forward(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    result: Any = None
    for begin, size in _parts(x, weight):
        made = _aten.convolution.default(x.narrow(0, begin, size), weight, bias, *options)
        if size == len(x):
            return made
        result = _put(result, made, begin, len(x))
    return result


def _backward(gradient: Any, x: Any, weight: Any, *options: Any) -> Any:
    mask = options[-1]
    images: Any = None
    sums: list[Any] = [None, None]
    for begin, size in _parts(x, weight):
        parts = (each.narrow(0, begin, size) for each in (gradient, x))
        made, *further = _aten.convolution_backward.default(*parts, weight, *options)
        if size == len(x):
            return made, *further
        images = _put(images, made, begin, len(x)) if mask[0] else made
        sums = [new if old is None or new is None else old.add_(new) for old, new in zip(sums, further, strict=True)]
    return images, *sums


# Functions that compute an op for some images at a time, with the op's arguments, result and layout. Sums over images
# have another order.
IN_PARTS: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _forward,
    _aten.convolution_backward.default: _backward,
}


def _parts(x: torch.Tensor, weight: torch.Tensor) -> list[tuple[int, int]]:
    """Return the first image of each part of a batch, and the number of its images."""
    num_images = len(x) if x.dim() == weight.dim() else 1
    if x.dtype is not torch.float64 or num_images < 2:
        return [(0, len(x))]
    # A strided convolution has fewer columns, a transposed one as many as its input has places.
    columns_bytes = x.element_size() * math.prod(weight.shape[2:]) * x[0].numel()
    size = max(1, MAX_COLUMNS_BYTES // max(1, columns_bytes))
    return [(begin, min(size, num_images - begin)) for begin in range(0, num_images, size)]


def _put(whole: Any, part: torch.Tensor, begin: int, num_images: int) -> torch.Tensor:
    """A part of a batch put into the whole one, which is made for the first part, with its strides."""
    if whole is None:
        shape = (num_images, *part.shape[1:])
        strides = (math.prod(part.shape[1:]), *part.stride()[1:])
        whole = torch.empty_strided(shape, strides, dtype=part.dtype, device=part.device)
    whole.narrow(0, begin, len(part)).copy_(part)
    return whole
