"""Memory of a model at a rank that runs a part of its step: none before the division, and then only for that part.

A tensor of the meta device has a shape and no values. While a rank with such a model watches and captures the step, its
parameters and buffers are fake tensors, which report the CPU as their device and compute only shapes and strides. The
batch is real. Then the same objects get memory of the CPU, of which no page is used before something is written::

    meta  --standing_for_cpu-->  fake  --->  meta  --given_memory-->  CPU  --PartMemory-->  CPU, or empty

Torch does not promise that a fake tensor takes the same path as a real one. So rank 0 captures on real tensors, and
every call of the two captures, with the layout of its result, is compared before anything runs
(`hocket.distributed.description`). A model for which they differ is refused by the name of the op. Only if all values
are in a file (`from_file.py`), rank 0 has none either, and no rank captures on real tensors.

A tensor whose memory was released has shape (0,), so that stale use fails on shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils

from hocket.distributed.job import captured_for
from hocket.errors import CaptureError, InputError
from hocket.tracing.captured import Captured
from hocket.tracing.sources import Entry
from hocket.tracing.standing import TensorKind, value_now
from hocket.tracing.state import inventory


class PartMemory:
    """Tracks which places of a model and an optimizer have memory. State that does not exist yet has none."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        # shapes and strides of the places whose memory was released
        self.released: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def keep(self, names: Collection[str]) -> None:
        """Release the memory of all other places."""
        for name, entry in self._entries.items():
            if name in names or name in self.released:
                continue
            tensor = value_now(entry)
            if tensor is not None and tensor.numel():
                self.released[name] = (tuple(tensor.shape), tensor.stride())
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def restore(self, names: Collection[str] | None = None) -> None:
        """Allocate the memory of these places again, or of all. Its contents are undefined."""
        for name in list(self.released) if names is None else self.released.keys() & set(names):
            shape, strides = self.released.pop(name)
            tensor = self._entries[name].get()
            tensor.data = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    def size_bytes(self, name: str) -> int:
        """The size of a place when it has memory."""
        tensor = self._entries[name].get()
        shape = self.released[name][0] if name in self.released else tensor.shape
        return math.prod(shape) * int(tensor.element_size())


def captured_at(
    rank: int, step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any, in_file: Collection[str] = ()
) -> Captured:
    """Capture a step at a rank, on fake tensors in place of meta ones. All ranks read the values of those `in_file`."""
    missing = [name for name in _of_meta(model, optimizer) if name not in in_file] if rank == 0 else []
    if missing:
        raise InputError(
            f"distribute: {missing[0]!r} of rank 0 is on the meta device; all ranks take their values from "
            f"{'weights= or, of what is not in that file, from ' if in_file else ''}rank 0, so load it there"
        )
    with standing_for_cpu(model, optimizer):
        return captured_for(step, model, optimizer, batch)


@contextmanager
def standing_for_cpu(model: Any, optimizer: Any) -> Iterator[None]:
    """Put fake tensors in the place of meta tensors, in the same objects. Reading their values is a `CaptureError`."""
    found = _of_meta(model, optimizer)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {}
    for name, tensor in found.items():
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        fakes[name] = _like(tensor, fake)
        _exchange(tensor, fakes[name])
    # Torch decides by these types whether one call may be made for many tensors. Fake ones count as ordinary here.
    ordinary: list[Any] = _foreach_utils._foreach_supported_types
    if found:
        ordinary.append(FakeTensor)
    try:
        yield
    except DataDependentOutputException as error:
        raise CaptureError(
            f"distribute: the step reads the value of a tensor ({error.func}), and this rank's model is on the meta "
            "device; load it here, too"
        ) from error
    finally:
        if found:
            ordinary.remove(FakeTensor)
        for name, tensor in found.items():
            _exchange(tensor, fakes[name])


def given_memory(captured: Captured) -> Captured:
    """Return the step with memory of the CPU for all meta and fake tensors. Its contents are undefined.

    The system allocates pages only for memory that is written.
    """
    places = captured.trace.places
    for entry in (*places.parameters, *places.tensors):
        tensor = value_now(entry)  # None for state that does not exist yet
        if tensor is not None and tensor.is_meta:
            _exchange(tensor, _like(tensor, _empty(tensor)))
    stand_ins = {
        slot: _empty(value) if isinstance(value, FakeTensor) else value for slot, value in captured.stand_ins.items()
    }
    kinds = {source: _with_memory(source, kind) for source, kind in captured.trace.kinds.items()}
    return replace(captured, stand_ins=stand_ins, trace=replace(captured.trace, kinds=kinds))


def _with_memory(source: Any, kind: TensorKind | None) -> TensorKind | None:
    """The kind of a tensor with memory, in place of that of a fake one."""
    if kind is None or not issubclass(kind.type, FakeTensor):
        return kind
    return replace(kind, type=nn.Parameter if source.kind == "parameter" else torch.Tensor)


def _of_meta(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The tensors of model and optimizer on the meta device, by name."""
    places = inventory(model, optimizer)
    return {e.name: e.get() for e in (*places.parameters, *places.tensors) if e.get().is_meta}


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _like(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensor objects in place."""
    kinds, attributes = (type(one), type(other)), (dict(one.__dict__), dict(other.__dict__))
    with torch._C.DisableTorchFunctionSubclass():
        torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = kinds[1], kinds[0]
    for tensor, values in ((one, attributes[1]), (other, attributes[0])):
        tensor.__dict__.clear()
        tensor.__dict__.update(values)
