"""Number of ops that run at once, from event to event: Figure 4 of Liu et al. (IPDPS 2019, section IV-B).

An event is the start or the end of an op, and the number at an event includes that op. So a step on one lane shows as 1
throughout, and idle time does not show::

    lane 0   [  a  ][    b    ]
    lane 1      [  c  ][  d  ]
    events   a  c  a b c d   d b
    at once  1  2  2 2 2 2   2 1

A step has thousands of events and a picture a thousand columns, so each column shows the mean of its events as a line
and their range as a band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hocket.ir import Timeline
from hocket.reporting.svg import EDGE_PX, document, round_step, text_at, with_title
from hocket.reporting.words import count_text, shorten

# In the order of the timelines; after the last one the first comes again.
_SERIES = ("forward", "activation_grad", "weight_grad", "send", "update", "recv", "bias_grad", "other")

_COLUMN_PX = 2.0
_PLOT_PX = 220.0


def corunning_of(timeline: Timeline) -> tuple[int, ...]:
    """Count the running ops at each event in order of time, including the op that starts or ends.

    If one op ends at the time at which another starts, the end comes first.
    """
    events: list[tuple[float, int, int]] = []
    for span in timeline.spans:
        momentary = span.end_us == span.start_us
        events += [(span.start_us, 1, 1), (span.end_us, 2 if momentary else 0, -1)]
    counts, running = [], 0
    for _, _, change in sorted(events):
        running += change
        counts.append(running if change > 0 else running + 1)
    return tuple(counts)


def corunning_svg(timelines: Mapping[str, Timeline], *, title: str = "", width: int = 960) -> str:
    """Draw how many ops run at once in each of `timelines`, overlaid.

    The picture is for light and dark backgrounds.
    """
    counts = {name: corunning_of(timeline) for name, timeline in timelines.items()}
    events = max(map(len, counts.values()), default=0)
    top = max((max(found) for found in counts.values() if found), default=1)
    left = EDGE_PX + 24
    plot_px = max(50.0, width - left - EDGE_PX)
    parts, y = with_title(title, width)
    legend, y = _legend(counts, y)
    bottom = y + _PLOT_PX
    parts += [*legend, *_axes(events, top, left, plot_px, y, bottom)]
    step = plot_px / events if events else 0.0
    for number, found in enumerate(counts.values()):
        parts += _series(found, _SERIES[number % len(_SERIES)], left, bottom, step, _PLOT_PX / top)
    parts.append(text_at(left + plot_px / 2, bottom + 34, "events: an op starts or ends", "hk-tick"))
    words = [title] if title else []
    words += [f"{name}: {_summary(found)}" for name, found in counts.items()]
    return document(parts, width=width, height=bottom + 48, description="; ".join(words))


def _series(counts: Sequence[int], kind: str, left: float, bottom: float, step: float, unit: float) -> list[str]:
    """Draw a line of means, and a band from minimum to maximum if columns hold several events."""
    if not counts:
        return []
    columns = min(len(counts), max(1, math.ceil(len(counts) * step / _COLUMN_PX)))
    edges = [len(counts) * column // columns for column in range(columns + 1)]
    groups = [counts[edges[column] : edges[column + 1]] for column in range(columns)]
    ends = [(left + edges[column] * step, left + edges[column + 1] * step) for column in range(columns)]

    def staircase(values: Sequence[float], backwards: bool = False) -> str:
        points = [
            f"{x:.1f} {bottom - value * unit:.1f}"
            for (start, end), value in zip(ends, values, strict=True)
            for x in (start, end)
        ]
        return "L".join(reversed(points) if backwards else points)

    parts = []
    if len(groups) < len(counts):
        area = f"M{staircase([max(group) for group in groups])}L{staircase([min(group) for group in groups], True)}z"
        parts.append(f'<path class="hk-band hk-{kind}" d="{area}"/>')
    parts.append(f'<path class="hk-line hk-{kind}" d="M{staircase([sum(group) / len(group) for group in groups])}"/>')
    return parts


def _axes(events: int, top: int, left: float, plot_px: float, y: float, bottom: float) -> list[str]:
    lines = []
    for value in range(0, top + 1, math.ceil(round_step(top / 10))):
        height = bottom - value * _PLOT_PX / top
        lines.append(f'<path class="hk-grid" d="M{left:.1f} {height:.1f}h{plot_px:.1f}"/>')
        lines.append(text_at(left - 8, height + 4, str(value), "hk-lane"))
    for value in range(0, events + 1, math.ceil(round_step(max(events, 1) / 8))):
        x = left + (value * plot_px / events if events else 0.0)
        lines.append(f'<path class="hk-grid" d="M{x:.1f} {y:.1f}V{bottom:.1f}"/>')
        lines.append(text_at(x, bottom + 16, f"{value:,}", "hk-tick"))
    return lines


def _legend(counts: Mapping[str, Sequence[int]], y: float) -> tuple[list[str], float]:
    lines = [text_at(EDGE_PX, y + 10, "ops at once", "hk-head")]
    for number, (name, found) in enumerate(counts.items()):
        y += 18
        kind = _SERIES[number % len(_SERIES)]
        lines.append(f'<rect class="hk-{kind}" x="{EDGE_PX:.0f}" y="{y:.0f}" width="11" height="11" rx="2"/>')
        lines.append(text_at(EDGE_PX + 16, y + 9.5, f"{shorten(name, 60)}: {_summary(found)}", "hk-key"))
    return lines, y + 28


def _summary(counts: Sequence[int]) -> str:
    if not counts:
        return "no events"
    mean = sum(counts) / len(counts)
    return f"{count_text(len(counts), 'event')}, {mean:.2f} at once in the mean, {max(counts)} at most"
