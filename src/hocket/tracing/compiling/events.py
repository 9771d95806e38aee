"""The events of a wrapper as they are kept. Used in the compiling process only.

A kernel is given addresses. So what it reads or writes of a tensor is known by that tensor and an offset, and a view
that only kernels use is left out: a step of LSTM cells has 379 of them, at 0.3 us each. A buffer is allocated by what
touches it first, where that is a kernel, or a product that fills it: an op of its own costs 3 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.tracing.compiling.arguments import dtype_name
from hocket.tracing.compiling.wrapper import RecordedCalls

Event = dict[str, Any]

_ALLOCATION, _VIEW = "aten.empty_strided.default", "hocket.part.default"


def arranged(notes: RecordedCalls, prefix: str) -> Event:
    """One precision's part of a listing."""
    roots = [notes.root(value) for value in range(len(notes.values))]
    places = _places(notes)
    events = [_on_bases(event, places) if "kernel" in event else event for event in notes.events]
    used = {value for event in events if event.get("op") != _VIEW for value in event["given"]} | set(notes.outputs)
    for event in reversed(events):  # what a view is taken of, may be one itself
        if event.get("op") == _VIEW and event["outs"][0][1] in used:
            used.update(event["given"])
    events = [event for event in events if event.get("op") != _VIEW or event["outs"][0][1] in used]
    layouts = [[list(v.shape), list(v.stride()), dtype_name(v.dtype)] for v in notes.values]
    return {
        "values": layouts,
        "roots": roots,
        "events": [
            {**event, "kernel": prefix + event["kernel"]} if "kernel" in event else event
            for event in _allocating(events, notes, roots)
        ],
        "outputs": notes.outputs,
    }


def _places(notes: RecordedCalls) -> dict[int, tuple[int, int]]:
    """Map each view to its base tensor and its element offset."""
    places: dict[int, tuple[int, int]] = {}
    for event in notes.events:
        if event.get("op") == _VIEW:
            (base,), value, offset = event["given"], event["outs"][0][1], event["args"][3]
            if notes.values[base].dtype is notes.values[value].dtype:
                whole, before = places.get(base, (base, 0))
                places[value] = (whole, before + offset)
    return places


def _on_bases(event: Event, places: Mapping[int, tuple[int, int]]) -> Event:
    """A kernel that is given views, as one that is given what these are views of."""
    found = [places.get(value, (value, 0)) for value in event["given"]]
    written = list(dict.fromkeys(places.get(value, (value, 0))[0] for value in event["written"]))
    return {**event, "given": [base for base, _ in found], "written": written, "offsets": [n for _, n in found]}


def _allocating(events: list[Event], notes: RecordedCalls, roots: list[int]) -> list[Event]:
    """The same events, where those that touch a buffer first allocate it, if they can."""
    first: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.get("op") != _ALLOCATION:
            for value in event["given"]:
                first.setdefault(roots[value], at)
    allocated: set[int] = set()
    found: list[Event] = []
    for at, event in enumerate(events):
        if event.get("op") == _ALLOCATION:
            buffer = event["outs"][0][1]
            if buffer in first and _can_make(events[first[buffer]], buffer, notes, roots):
                allocated.add(buffer)
                continue
        fresh = [value for value in dict.fromkeys(event["given"]) if value in allocated and first[value] == at]
        found.append(_making(event, fresh))
    return found


def _can_make(event: Event, buffer: int, notes: RecordedCalls, roots: list[int]) -> bool:
    """Return whether this event, the first one to touch a buffer, can allocate it."""
    if {value for value in event["given"] if roots[value] == buffer} != {buffer} or buffer not in event["written"]:
        return False
    if "kernel" in event:
        return True
    is_only = event["given"].count(buffer) == 1 and event["written"] == [buffer]
    return is_only and event["op"].endswith(".out") and notes.values[buffer].is_contiguous()


def _making(event: Event, fresh: list[int]) -> Event:
    """The event, which makes these buffers itself."""
    if "kernel" in event:
        given = [value for value in dict.fromkeys(event["given"]) if value not in fresh]
        places = {value: n for n, value in enumerate(given)} | {value: -1 - n for n, value in enumerate(fresh)}
        return {
            "kernel": event["kernel"],
            "given": given,
            "order": [places[value] for value in event["given"]],
            "offsets": event["offsets"],
            "written": [value for value in event["written"] if value not in fresh],
            "outs": [[n, value] for n, value in enumerate(fresh)],
        }
    if not fresh:
        return event
    kwargs = {key: text for key, text in event["kwargs"].items() if key != "out"}
    given = [value for value in event["given"] if value not in fresh]
    op = event["op"].removesuffix("out") + "default"
    return {"op": op, "args": event["args"], "kwargs": kwargs, "outs": [[-1, fresh[0]]], "given": given, "written": []}
