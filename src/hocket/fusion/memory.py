"""Tensors of a model that lie in one memory under two names, which stacking would part without a word.

    self.decoder.weight.data = self.encoder.weight.data     two parameters, updated twice a step
    self.register_buffer("first", self.weight.data)         follows the parameter as it trains
    self.table = self.weight.detach().numpy()               the same

One tensor under two names is no such case: it is stacked once. Nor are constants that lie in one memory with each
other, which nothing writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.shared_objects import attributes_of, held, reached
from hocket.fusion.store import named_tensors

__all__ = ["check_memory"]

Span = tuple[str, int, int]  # the device, and the bytes from the first to behind the last


def check_memory(models: Sequence[nn.Module]) -> None:
    """Check that no parameter and no buffer shares memory with another tensor or array of these models.

    Raises:
        InputError: one does; names both.
    """
    found = sorted(
        (*span, is_named, f"model {index}: {name}")
        for index, model in enumerate(models)
        for name, value, is_named in _values(model)
        if (span := _span(value)) is not None
    )
    last: dict[tuple[str, bool], tuple[int, str]] = {}  # by device, of parameters and of others: the furthest so far
    for device, begin, end, is_named, name in found:
        for other_is_named in (True, False) if is_named else (True,):
            reached, other = last.get((device, other_is_named), (0, ""))
            if begin < reached:
                raise InputError(
                    f"{name} shares memory with {other}, and would not when models are stacked; make it the same "
                    "tensor, or clone it"
                )
        last[device, is_named] = max(last.get((device, is_named), (0, "")), (end, name))


def _values(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Every tensor and array once, and whether it is a parameter or buffer."""
    named = {id(tensor): (name, tensor) for name, tensor in reversed(named_tensors(model))}
    for name, tensor in named.values():
        yield name, tensor, True
    seen = set(named)
    for path, value in attributes_of(model):
        for inner in reached(value, set()):
            for each in (inner, *held(inner)):
                if id(each) not in seen:
                    seen.add(id(each))
                    yield path, each, False


def _span(value: Any) -> Span | None:
    """Where a tensor or an array of numpy lies; None for anything else, and for what has no memory."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.device.type not in ("cpu", "cuda") or not value.numel():
            return None
        shape, strides, begin = value.shape, value.stride(), value.data_ptr()
        size_bytes = value.element_size()
        length = size_bytes * (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
        return str(value.device), begin, begin + length
    array = getattr(value, "__array_interface__", None)
    if type(value).__module__ != "numpy" or array is None or not value.size:
        return None
    offsets = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
    begin = array["data"][0] + sum(min(0, offset) for offset in offsets)
    return "cpu", begin, begin + value.itemsize + sum(map(abs, offsets))
