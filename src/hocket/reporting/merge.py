"""Spans of one lane as shapes of at least about a pixel, as wide as their spans were busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hocket.ir import Span

# Neighbours of one role grow together past a pixel only while less than this share of the shape is rest.
_INVISIBLE_REST = 0.05


@dataclass(frozen=True)
class Shape:
    """The shape drawn for one span, or for several that are too narrow to distinguish.

    Attributes:
        x: start, in pixels.
        width: the busy time of its spans, in pixels.
        role: the role with most of that time.
        count: number of spans.
        first: the first span.
    """

    x: float
    width: float
    role: str
    count: int
    first: Span


def merge(spans: Sequence[Span], roles: Mapping[str, str], scale: float, pixel: float = 1.0) -> list[Shape]:
    """Return the shapes of `spans` (one lane, in order of time) at `scale` pixels per microsecond.

    Spans narrower than `pixel` join their neighbour while both together stay within one `pixel`, or while they have its
    role and hardly any idle time is between them.

    Example:
        >>> spans = [Span(f"op{i}", "main", i * 0.1, i * 0.1 + 0.1) for i in range(10)]
        >>> [(shape.count, round(shape.width, 3)) for shape in merge(spans, {}, 1.0)]
        [(10, 1.0)]
    """
    shapes: list[Shape] = []
    group: list[Span] = []
    times: dict[str, float] = {}
    busy_us = 0.0
    for span in spans:
        role = roles.get(span.op, "other")
        if group:
            whole_us = span.end_us - group[0].start_us
            small = span.duration_us * scale < pixel and (len(group) > 1 or busy_us * scale < pixel)
            alike = len(times) == 1 and role in times
            dense = busy_us + span.duration_us >= (1 - _INVISIBLE_REST) * whole_us
            if not (small and (whole_us * scale <= pixel or (alike and dense))):
                shapes.append(_shape(group, times, busy_us, scale))
                group, times, busy_us = [], {}, 0.0
        group.append(span)
        times[role] = times.get(role, 0.0) + span.duration_us
        busy_us += span.duration_us
    if group:
        shapes.append(_shape(group, times, busy_us, scale))
    return shapes


def _shape(group: list[Span], times: Mapping[str, float], busy_us: float, scale: float) -> Shape:
    role = max(times, key=lambda role: times[role])
    return Shape(group[0].start_us * scale, busy_us * scale, role, len(group), group[0])
