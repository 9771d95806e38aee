"""Conditions on the tensors that a captured step reads, under which its graph is the step.

A graph is good for tensors of the types and layouts that it was recorded with: a view of contiguous memory is a copy of
other memory. And it orders ops by the memory that they share: tensors that had memory apart must have it apart, and
places that held one tensor must hold one still. ``native/binding.cpp`` checks the same before each planned step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.tracing.sources import Entry, Gradient


@dataclass(frozen=True)
class TensorKind:
    """The type and the layout of a tensor."""

    type: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    flags: tuple[bool, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorKind | None:
        """None of what is no dense tensor."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        return TensorKind(
            type(tensor),
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
            (tensor.is_conj(), tensor.is_neg()),
        )


@dataclass(frozen=True)
class Standing:
    """Checks the tensors in the slots of a captured step."""

    # slot -> the kind of its tensor, for all that is not of the batch (whose kinds are in the signature)
    kinds: Mapping[int, TensorKind | None]
    slots: tuple[int, ...]  # of the tensors whose memory counts, in order
    first: tuple[int, ...]  # for each of these, the position of the first one that shares its memory
    twins: Sequence[tuple[Entry | Gradient, Entry | Gradient]]  # pairs of places that hold one tensor

    def why_not(self, sources: Mapping[int, Any]) -> str:
        """The place that is not what it was, given the source of each slot."""
        for slot, kind in self.kinds.items():
            if TensorKind.of(value_now(sources[slot])) != kind:
                return f"{sources[slot].name} has not the type or the layout that it was captured with"
        for one, other in self.twins:
            if value_now(one) is not value_now(other):
                return f"{one.name} and {other.name} were one tensor when the step was captured"
        return "its tensors do not share memory as they did when the step was captured"

    def holds(self, values: Sequence[Any]) -> bool:
        """Return True if everything is as it was recorded."""
        if any(TensorKind.of(values[slot]) != kind for slot, kind in self.kinds.items()):
            return False
        first: dict[int, int] = {}
        for place, slot in enumerate(self.slots):
            tensor = values[slot]
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                return False
            if first.setdefault(tensor.untyped_storage()._cdata, place) != self.first[place]:
                return False
        return all(value_now(one) is value_now(other) for one, other in self.twins)


def value_now(source: Any) -> Any:
    """The value at a place. None where there is nothing, or no object that could have one."""
    try:
        return source.get()
    except (LookupError, AttributeError, TypeError):
        return None
