"""Timelines as an SVG picture: a row per lane, a rectangle per span, and gaps where the lane is idle.

Several timelines share one time scale, so that the time that a plan saves is the gap at its right end. Spans below a
pixel are merged: neighbours become one shape of the role that took most of its time, as wide as they were busy, so a
row keeps its share of idle time. The page and the trace show each span.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hocket.ir import ROLES, Graph, Span, Timeline
from hocket.reporting.svg import EDGE_PX, document, escaped, round_step, text_at, with_title
from hocket.reporting.words import MICRO, duration_text, percent_text, shorten

_MAX_SHAPES = 6000
_MAX_TITLES = 800
_TITLE_PX = 2.0
_TICKS = 8
MIN_AXIS_US = 1e-12
# Neighbours of one role grow together past a pixel only while less than this share of the shape is rest.
_INVISIBLE_REST = 0.05


@dataclass(frozen=True)
class _Row:
    timeline: str
    lane: str
    y: float
    height: float
    rest_px: float
    shapes: list[Shape]


def timeline_svg(
    timelines: Mapping[str, Timeline],
    graph: Graph | None = None,
    *,
    title: str = "",
    lower_us: float | None = None,
    is_estimate: bool = False,
    captions: Mapping[str, str] | None = None,
    width: int = 960,
) -> str:
    """Draw `timelines`, one under the other.

    The graph gives each op's role, hence its colour. No plan is faster than `lower_us`, a dashed line, whose label
    says so if it `is_estimate`, since a measured step is faster. A caption stands in place of a timeline's duration
    and use. The picture is for light and dark backgrounds.
    """
    labels = [lane for timeline in timelines.values() for lane in timeline.lanes]
    left = EDGE_PX + min(150.0, 14 + 6.4 * max((len(label) for label in labels), default=0))
    plot_px = max(50.0, width - left - EDGE_PX)
    longest_us = max([timeline.makespan_us for timeline in timelines.values()] + [lower_us or 0.0])
    scale = plot_px / longest_us if longest_us >= MIN_AXIS_US else 0.0
    roles = {op.name: op.role for op in graph.ops} if graph is not None else {}

    parts, y = with_title(title, width)
    keys, y = legend({roles.get(s.op, "other") for t in timelines.values() for s in t.spans}, y, width)
    parts += keys
    top = y
    if lower_us is not None:
        y += 18
    rows: list[_Row] = []
    panels: list[tuple[float, float]] = []
    shapes = _shapes(timelines, roles, scale)
    for name, timeline in timelines.items():
        heading = (captions or {}).get(name) or heading_of(timeline)
        parts.append(text_at(EDGE_PX, y + 14, shorten(f"{shorten(name, 40)}: {heading}", width // 7), "hk-head"))
        y += 22
        height, gap = _row_size(len(timeline.lanes))
        panel = y
        for lane in timeline.lanes:
            rows.append(_Row(name, lane, y, height, timeline.makespan_us * scale, shapes[name, lane]))
            y += height + gap
        panels.append((panel - 4, y - gap + 4))
        y += 10
    bottom = y - 4
    titled = _titled(rows)
    layers = {op.name: op.layer for op in graph.ops} if graph is not None else {}
    body = [line for row in rows for line in _draw_row(row, left, plot_px, titled, timelines[row.timeline], layers)]
    ticks = axis(longest_us, scale, left, panels, bottom)
    bound_name = "estimated lower bound" if is_estimate else "lower bound"
    bound = [] if lower_us is None else _bound(lower_us, bound_name, scale, left, top, bottom, width)
    return document(
        [*ticks, *parts, *body, *bound],
        width=width,
        height=bottom + 34,
        description=_description(timelines, title, lower_us, bound_name),
    )


def heading_of(timeline: Timeline) -> str:
    """Return the duration of a timeline, and how busy its lanes are."""
    duration = duration_text(timeline.makespan_us, MICRO)
    return f"{duration} {timeline.source}, lanes busy {percent_text(timeline.utilisation)}"


def axis_ticks(longest_us: float) -> list[tuple[float, str]]:
    """Return round times from 0 to `longest_us` with their labels, all in one unit."""
    if longest_us < MIN_AXIS_US:
        return [(0.0, "0")]
    step = round_step(longest_us / _TICKS)
    scale, unit = (1e6, "s") if longest_us >= 1e6 else (1e3, "ms") if longest_us >= 1e3 else (1.0, MICRO)
    digits = max(0, -math.floor(math.log10(step / scale) + 1e-9))
    times = [number * step for number in range(math.floor(longest_us / step * (1 + 1e-12)) + 1)]
    return [(time, f"{time / scale:,.{digits}f} {unit}" if time else "0") for time in times]


def _shapes(
    timelines: Mapping[str, Timeline], roles: Mapping[str, str], scale: float
) -> dict[tuple[str, str], list[Shape]]:
    pixel = 1.0
    while True:
        found = {
            (name, lane): merge(spans, roles, scale, pixel)
            for name, timeline in timelines.items()
            for lane, spans in timeline.by_lane.items()
        }
        if sum(map(len, found.values())) <= _MAX_SHAPES or pixel > 1000:
            return found
        pixel *= 1.5


def _titled(rows: list[_Row]) -> set[int]:
    wide = [shape for row in rows for shape in row.shapes if shape.count == 1 and shape.width >= _TITLE_PX]
    wide.sort(key=lambda shape: -shape.width)
    return {id(shape) for shape in wide[:_MAX_TITLES]}


def _draw_row(
    row: _Row, left: float, plot_px: float, titled: set[int], timeline: Timeline, layers: Mapping[str, str]
) -> list[str]:
    use = timeline.busy_us[row.lane] / timeline.makespan_us if timeline.makespan_us else 0.0
    words = f"{row.lane}: busy {percent_text(use)}"
    lines = [f'<g transform="translate({left:.1f} {row.y:.1f})">']
    if row.height >= 9:
        size = " hk-small" if row.height < 14 else ""
        y = row.height / 2 + 4 - (1 if size else 0)
        lines.append(text_at(-10, y, shorten(row.lane, 22), f"hk-lane{size}"))
    rest_px = max(0.5, min(plot_px, row.rest_px))
    lines.append(
        f'<rect class="hk-rest" width="{rest_px:.1f}" height="{row.height:g}"><title>{escaped(words)}</title></rect>'
    )
    paths: dict[str, list[str]] = {}
    for shape in row.shapes:
        width = max(0.3, shape.width - (0.6 if shape.width > 3 else 0.0))
        if id(shape) in titled:
            span = shape.first
            layer = f"{shorten(layers[span.op], 60)}, " if layers.get(span.op) else ""
            title = f"{shorten(span.op, 80)}, {layer}{shape.role}, {duration_text(span.duration_us, MICRO)}"
            lines.append(
                f'<rect class="hk-{shape.role}" x="{shape.x:.1f}" width="{width:.1f}" height="{row.height:g}">'
                f"<title>{escaped(title)} at {duration_text(span.start_us, MICRO)}</title></rect>"
            )
        else:
            digits = 1 if width >= 1 else 2
            path = f"M{shape.x:.1f} 0h{width:.{digits}f}v{row.height:g}h-{width:.{digits}f}z"
            paths.setdefault(shape.role, []).append(path)
    lines += [f'<path class="hk-{role}" d="{"".join(found)}"/>' for role, found in paths.items()]
    lines.append("</g>")
    return lines


def axis(longest_us: float, scale: float, left: float, panels: list[tuple[float, float]], bottom: float) -> list[str]:
    """Return a grid of round times through each panel (its top and bottom), with labels below."""
    lines = []
    for time, label in axis_ticks(longest_us):
        x = left + time * scale
        strokes = "".join(f"M{x:.1f} {top:.1f}V{end:.1f}" for top, end in panels)
        lines.append(f'<path class="hk-grid" d="{strokes}"/>')
        lines.append(text_at(x, bottom + 16, label, "hk-tick"))
    return lines


def _bound(lower_us: float, name: str, scale: float, left: float, top: float, bottom: float, width: float) -> list[str]:
    x = left + lower_us * scale
    label = f"{name} {duration_text(lower_us, MICRO)}"
    anchor = "hk-before" if x + 6.2 * len(label) > width - EDGE_PX else "hk-after"
    shift = -5 if anchor == "hk-before" else 5
    return [
        f'<path class="hk-bound" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>',
        text_at(x + shift, top + 10, label, f"hk-mark {anchor}"),
    ]


def legend(used: Collection[str], y: float, width: float) -> tuple[list[str], float]:
    """Return a legend of the roles in `used` at a height, and the height below it."""
    lines: list[str] = []
    x = EDGE_PX
    for role in [*(role for role in ROLES if role in used), "rest"]:
        label = "idle" if role == "rest" else role.replace("_", " ")
        wide = 22 + 6.6 * len(label)
        if x + wide > width - EDGE_PX:
            x, y = EDGE_PX, y + 18
        lines.append(f'<rect class="hk-{role}" x="{x:.0f}" y="{y:.0f}" width="11" height="11" rx="2"/>')
        lines.append(text_at(x + 16, y + 9.5, label, "hk-key"))
        x += wide + 10
    return lines, y + 24


def _row_size(lanes: int) -> tuple[float, float]:
    if lanes <= 8:
        return 24.0, 6.0
    return (14.0, 4.0) if lanes <= 32 else (6.0, 2.0)


def _description(timelines: Mapping[str, Timeline], title: str, lower_us: float | None, bound_name: str) -> str:
    words = [title] if title else []
    words += [f"{name} {duration_text(timeline.makespan_us)}" for name, timeline in timelines.items()]
    if lower_us is not None:
        words.append(f"{bound_name} {duration_text(lower_us)}")
    return ", ".join(words)


@dataclass(frozen=True)
class Shape:
    """The shape drawn for one span, or for several that are too narrow to distinguish."""

    x: float  # start, in pixels
    width: float  # the busy time of its spans, in pixels
    role: str  # the role with most of that time
    count: int
    first: Span


def merge(spans: Sequence[Span], roles: Mapping[str, str], scale: float, pixel: float = 1.0) -> list[Shape]:
    """Return the shapes of `spans` (one lane, in order of time) at `scale` pixels per microsecond.

    Spans narrower than `pixel` join their neighbour while both together stay within one `pixel`, or while they have its
    role and hardly any idle time is between them.
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
