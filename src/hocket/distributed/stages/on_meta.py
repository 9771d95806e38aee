"""Ranks whose model has no memory yet: the step is captured on fake tensors, and memory is only made for a part of it.

A tensor of the meta device has a shape and no values. While such a rank watches and captures the step, its parameters
and buffers are fake tensors, which say that they are on the CPU and compute shapes and strides alone; the batch is
real. Then they are the same objects with memory of the CPU, of which no page is touched before something is written::

    meta  --standing_for_cpu-->  fake  --->  meta  --given_memory-->  CPU  --keep-->  CPU, or empty

Whether a fake tensor takes the same path through torch as a real one is not for torch to promise. So rank 0 captures on
real tensors, and every call of the two captures, with the layout of what it makes, is compared before anything runs
(`hocket.distributed.description`): a model for which they differ is refused by the name of the op. Only where all
values are in a file (`from_file.py`), rank 0 has none, either, and no rank captures on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils

from hocket.distributed.setup import captured_for
from hocket.errors import CaptureError, InputError
from hocket.tracing.captured import Captured
from hocket.tracing.standing import TensorKind
from hocket.tracing.state import inventory

__all__ = ["captured_at", "given_memory", "standing_for_cpu"]


def captured_at(
    rank: int, step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any, in_file: Collection[str] = ()
) -> Captured:
    """The step as a rank captures it: on what it has, or on fake tensors where that is on the meta device.

    `in_file` are the names of tensors whose values all ranks read from a file.

    Raises:
        InputError: rank 0 has no values; those that it has are everyone's.
        CaptureError: as `hocket.capture`.
    """
    nowhere = [name for name in _of_meta(model, optimizer) if name not in in_file] if rank == 0 else []
    if nowhere:
        raise InputError(
            f"distribute: {nowhere[0]!r} of rank 0 is on the meta device; all ranks take their values from "
            f"{'weights= or, of what is not in that file, from ' if in_file else ''}rank 0, so load it there"
        )
    with standing_for_cpu(model, optimizer):
        return captured_for(step, model, optimizer, batch)


@contextmanager
def standing_for_cpu(model: Any, optimizer: Any) -> Iterator[None]:
    """Have fake tensors in place of what is on the meta device, in the same objects.

    Raises:
        CaptureError: what runs inside reads a value that is not there.
    """
    found = _of_meta(model, optimizer)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {}
    for name, tensor in found.items():
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        fakes[name] = _like(tensor, fake)
        _exchange(tensor, fakes[name])
    # By their types, torch tells whether one call may be made for many tensors; these stand for ordinary ones.
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
    """The same, with memory of the CPU for all that is on the meta device or fake; what is in it is nobody's values.

    Of memory that is never written, the system has no page.
    """
    places = captured.trace.places
    for entry in (*places.parameters, *places.tensors):
        try:
            tensor = entry.get()
        except KeyError:
            continue  # state that is not made yet
        if tensor.is_meta:
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
    """Two objects become each other; whoever refers to the one finds what the other was."""
    kinds, attributes = (type(one), type(other)), (dict(one.__dict__), dict(other.__dict__))
    with torch._C.DisableTorchFunctionSubclass():
        torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = kinds[1], kinds[0]
    for tensor, values in ((one, attributes[1]), (other, attributes[0])):
        tensor.__dict__.clear()
        tensor.__dict__.update(values)
