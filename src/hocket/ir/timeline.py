"""`Timeline`: the lane, start and end of each op of a step.

A measured and a simulated timeline are the same type. Time is counted in microseconds from the start of the step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.errors import FormatError
from hocket.ir._fields import load_document, read_from, save_document

FORMAT = "hocket-timeline/1"

SOURCES = ("measured", "simulated")

# Two spans on a lane may touch; sums of float durations may then miss each other by rounding.
_ROUNDING = 1e-9

_Floats = npt.NDArray[np.float64]


class Span(NamedTuple):
    """One op's run: from `start_us` to `end_us` on `lane`."""

    op: str
    lane: str
    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Timeline:
    """The spans of one step.

    Attributes:
        spans: in any order. `by_lane` sorts them.
        lanes: names of all lanes, idle ones included.
        source: ``measured`` or ``simulated``.

    Raises `FormatError` at construction for a span that ends before it starts, a negative or NaN time, a lane that
    is not listed, and two spans that overlap on a lane.

    Example:
        >>> Timeline((Span("a", "main", 0.0, 2.0), Span("b", "main", 2.0, 5.0)), ("main",)).makespan_us
        5.0
    """

    spans: tuple[Span, ...]
    lanes: tuple[str, ...]
    source: str = "simulated"

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        object.__setattr__(self, "lanes", tuple(self.lanes))
        _check(self)

    @staticmethod
    def of_columns(
        lanes: Mapping[str, Sequence[str]], start_us: _Floats, end_us: _Floats, source: str = "simulated"
    ) -> Timeline:
        """A timeline from whole columns, many times faster than from spans and checked in the same way.

        The spans are made on first access. A planner that only compares makespans never needs them.

        Args:
            lanes: for each lane its ops in order of time.
            start_us: the starts of all ops, lane after lane.
            end_us: their ends, in the same order.
            source: ``measured`` or ``simulated``.

        Example:
            >>> Timeline.of_columns({"main": ["a", "b"]}, np.array([0.0, 2.0]), np.array([2.0, 5.0])).makespan_us
            5.0
        """
        lengths = [len(ops) for ops in lanes.values()]
        if not sum(lengths) == len(start_us) == len(end_us):
            raise FormatError(
                "timeline", "spans", f"{sum(lengths)} ops, but {len(start_us)} starts and {len(end_us)} ends"
            )
        ops = {lane: tuple(of_lane) for lane, of_lane in lanes.items()}
        starts, ends = np.array(start_us, np.float64), np.array(end_us, np.float64)
        if source not in SOURCES or not _plainly_right(lengths, starts, ends):
            return Timeline(_spans(ops, starts, ends), tuple(lanes), source)  # which says what is wrong, if it is
        timeline = object.__new__(Timeline)
        for name, value in (("lanes", tuple(lanes)), ("source", source), ("_columns", (ops, starts, ends))):
            object.__setattr__(timeline, name, value)
        timeline.__dict__["makespan_us"] = float(ends.max(initial=0.0))
        return timeline

    if not TYPE_CHECKING:  # to a type checker this would mean that every attribute exists

        def __getattr__(self, name: str) -> Any:
            if name != "spans" or "_columns" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            spans = _spans(*self.__dict__["_columns"])
            object.__setattr__(self, "spans", spans)
            return spans

    @cached_property
    def makespan_us(self) -> float:
        """From the start of the step to the end of its last op."""
        return max((span.end_us for span in self.spans), default=0.0)

    @cached_property
    def busy_us(self) -> dict[str, float]:
        """For each lane the time it spent inside ops."""
        busy = dict.fromkeys(self.lanes, 0.0)
        for span in self.spans:
            busy[span.lane] += span.end_us - span.start_us
        return busy

    @property
    def utilisation(self) -> float:
        """Busy time of all lanes over their total time, between 0 and 1."""
        total_us = self.makespan_us * len(self.lanes)
        return sum(self.busy_us.values()) / total_us if total_us else 0.0

    @cached_property
    def by_lane(self) -> dict[str, tuple[Span, ...]]:
        """For each lane its spans in order of time."""
        found: dict[str, list[Span]] = {lane: [] for lane in self.lanes}
        for span in sorted(self.spans, key=lambda span: (span.start_us, span.end_us)):
            found[span.lane].append(span)
        return {lane: tuple(spans) for lane, spans in found.items()}

    @cached_property
    def by_op(self) -> dict[str, Span]:
        return {span.op: span for span in self.spans}

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Timeline:
        """Read a ``hocket-timeline/1`` file."""
        reader = load_document(path, FORMAT)
        reader.only("format", "source", "lanes", "spans")
        spans = []
        for element in reader["spans"].elements():
            element.only("op", "lane", "start_us", "end_us")
            spans.append(
                Span(
                    element["op"].text(),
                    element["lane"].text(),
                    element["start_us"].duration_us(),
                    element["end_us"].duration_us(),
                )
            )
        lanes = tuple(element.text() for element in reader["lanes"].elements())
        source = reader.get("source", "measured").text()
        with read_from(reader.source):
            return Timeline(tuple(spans), lanes, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``hocket-timeline/1`` file that reads back to an equal timeline."""
        spans = [span._asdict() for span in self.spans]
        save_document(path, {"format": FORMAT, "source": self.source, "lanes": list(self.lanes), "spans": spans})


def _spans(lanes: Mapping[str, Sequence[str]], start_us: _Floats, end_us: _Floats) -> tuple[Span, ...]:
    names = chain.from_iterable(lanes.values())
    of_lane = chain.from_iterable(repeat(lane, len(ops)) for lane, ops in lanes.items())
    return tuple(map(Span._make, zip(names, of_lane, start_us.tolist(), end_us.tolist(), strict=True)))


def _plainly_right(lengths: Sequence[int], start_us: _Floats, end_us: _Floats) -> bool:
    """Return True if the columns pass every test of `_check` and each lane is in order of time."""
    if not bool(((start_us >= 0.0) & (start_us <= end_us) & (end_us < math.inf)).all()):
        return False
    touches = start_us[1:] >= end_us[:-1]
    boundaries = np.cumsum(lengths, dtype=np.int64)[:-1]  # where one lane's column ends and the next one's begins
    touches[boundaries[(boundaries > 0) & (boundaries < len(start_us))] - 1] = True
    return bool(touches.all())


def _check(timeline: Timeline) -> None:
    if timeline.source not in SOURCES:
        raise FormatError("timeline", "source", f"expected measured or simulated, got {timeline.source!r}")
    if len(set(timeline.lanes)) != len(timeline.lanes):
        raise FormatError("timeline", "lanes", f"duplicate lane name in {list(timeline.lanes)}")
    lanes = set(timeline.lanes)
    for position, span in enumerate(timeline.spans):
        if span.lane not in lanes:
            raise FormatError(
                "timeline", f"spans[{position}]", f"op {span.op!r} ran on lane {span.lane!r}, which is not listed"
            )
        # One comparison chain rejects NaN, infinity, negative times and a span that ends before it starts.
        if not 0.0 <= span.start_us <= span.end_us < math.inf:
            raise FormatError(
                "timeline",
                f"spans[{position}]",
                f"op {span.op!r}: expected 0 <= start_us <= end_us, got {span.start_us!r} and {span.end_us!r}",
            )
    clash = _overlap(timeline.spans)
    if clash is not None:
        first, second = clash
        raise FormatError(
            "timeline",
            "spans",
            f"ops {first.op!r} and {second.op!r} overlap on lane {first.lane!r}: {first.op!r} ends at "
            f"{first.end_us!r} us, {second.op!r} starts at {second.start_us!r} us",
        )


def _overlap(spans: Iterable[Span]) -> tuple[Span, Span] | None:
    latest: dict[str, Span] = {}
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        before = latest.get(span.lane)
        if before is not None and span.start_us < before.end_us - _ROUNDING * max(1.0, before.end_us):
            return before, span
        latest[span.lane] = span
    return None
