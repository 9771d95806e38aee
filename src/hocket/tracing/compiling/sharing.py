"""Calls whose results share memory with what they are given, and whose schema does not say so.

``unsafe_split`` takes an LSTM cell's gates apart. What is then written in place into a part goes into the whole, too.
The compiler believes the schema. In a captured step views come right behind what makes their base, so a write of the
base that came before such a call now comes behind it, and would be missed.

A split whose whole is not touched any more once a part of it was (that is what "unsafe" asks of its caller) is made
where its parts are first used. They are then values of their own, and a write of one part is no write of the whole.
Any other one is written as the view that it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.errors import CaptureError
from hocket.tracing.program import Call

_aten = torch.ops.aten
# Such ops, and the same as views whose schema says so.
_SPLITS = {
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
}
_VIEWS = {**_SPLITS, _aten._unsafe_view.default: _aten.view.default}


def with_told_views(calls: Sequence[Call], memory: Mapping[int, int], kept: Collection[int]) -> list[Call]:
    """The same calls, so that each one does what its schema says.

    Args:
        calls: in their order.
        memory: of slots. Two of the same number share it.
        kept: slots that are needed afterwards.

    Raises:
        CaptureError: a call shares memory in silence, and is not known to.
    """
    told: list[Call] = []
    late: dict[int, list[Call]] = {}
    for at, call in enumerate(calls):
        told += late.pop(at, [])
        if call.func in _SPLITS and (place := _first_use(calls, at, memory, kept)) is not None:
            late.setdefault(place, []).append(call)
        elif call.func in _VIEWS:
            told.append(replace(call, func=_VIEWS[call.func]))
        elif _shares_in_silence(call, memory):
            raise CaptureError(f"{call.func} returns memory that it is given, and does not say so")
        else:
            told.append(call)
    return told


def _first_use(calls: Sequence[Call], at: int, memory: Mapping[int, int], kept: Collection[int]) -> int | None:
    """Return the first call that uses a part of this split. None if the whole is used afterwards, or no part is."""
    parts = set(calls[at].outs.values())
    whole = {memory.get(slot) for slot in parts}
    place: int | None = None
    for later in range(at + 1, len(calls)):
        used = [slot for slot in calls[later].reads if memory.get(slot) in whole]
        if place is None and not parts.isdisjoint(used):
            place = later
        if place is None:
            continue
        if not parts.issuperset(used):
            return None
        parts |= {slot for slot in calls[later].outs.values() if memory.get(slot) in whole}
    return None if any(memory.get(slot) in whole and slot not in parts for slot in kept) else place


def _shares_in_silence(call: Call, memory: Mapping[int, int]) -> bool:
    returns: Any = call.func._schema.returns  # type: ignore[attr-defined]
    if any(each.alias_info is not None for each in returns):
        return False
    given = {memory[slot] for slot in call.reads if slot in memory}
    return any(memory.get(slot) in given for slot in call.outs.values())
