"""Timelines as a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``.

The Trace Event Format counts in microseconds and its readers in whole nanoseconds, so times are rounded to those: ends
rather than durations are rounded, which keeps neighbours on a lane from overlapping.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hocket.ir import Graph, Timeline
from hocket.ir._fields import save_document
from hocket.reporting.svg import COLOURS

# Arrows are for reading; more of them than this hide the spans and slow the viewer down.
MAX_FLOWS = 2000


def trace_events(timelines: Mapping[str, Timeline], graph: Graph | None = None) -> dict[str, Any]:
    """One process per timeline, one thread per lane, one complete event per span.

    With a `graph`, events carry role, layer, target, flops and bytes, and arrows follow the edges that cross lanes: at
    most `MAX_FLOWS` for each timeline, those first whose receiver started soonest after its sender ended, because these
    are the ones that held it up.
    """
    events: list[dict[str, Any]] = []
    flows = 0
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        tids = {lane: tid for tid, lane in enumerate(timeline.lanes, start=1)}
        events.extend(_names(pid, f"{name} ({timeline.source})", tids))
        spans = _spans_ns(timeline)
        for lane, runs in spans.items():
            events.extend(_event(pid, tids[lane], op, start, end, graph) for op, start, end in runs)
        if graph is not None:
            arrows = _flows(pid, tids, spans, graph, flows + 1)
            flows += len(arrows) // 2
            events.extend(arrows)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], timelines: Mapping[str, Timeline], graph: Graph | None = None) -> None:
    """Write `trace_events` as JSON, whole or not at all."""
    save_document(path, trace_events(timelines, graph))


def _names(pid: int, process: str, tids: Mapping[str, int]) -> list[dict[str, Any]]:
    def metadata(kind: str, tid: int, **args: str | int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    events = [metadata("process_name", 0, name=process), metadata("process_sort_index", 0, sort_index=pid)]
    for lane, tid in tids.items():
        events.append(metadata("thread_name", tid, name=lane))
        events.append(metadata("thread_sort_index", tid, sort_index=tid))
    return events


def _spans_ns(timeline: Timeline) -> dict[str, list[tuple[str, int, int]]]:
    result: dict[str, list[tuple[str, int, int]]] = {}
    for lane, spans in timeline.by_lane.items():
        runs: list[tuple[str, int, int]] = []
        free = 0
        for span in spans:
            start = max(free, round(span.start_us * 1e3))
            free = max(start, round(span.end_us * 1e3))
            runs.append((span.op, start, free))
        result[lane] = runs
    return result


def _event(pid: int, tid: int, op: str, start_ns: int, end_ns: int, graph: Graph | None) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "name": op,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
    }
    known = graph.by_name.get(op) if graph is not None else None
    if known is not None:
        event["cat"] = known.role
        event["cname"] = COLOURS[known.role].cname
        event["args"] = {
            "role": known.role,
            "layer": known.layer,
            "target": known.target,
            "flops": known.flops,
            "bytes": known.size_bytes,
        }
    return event


def _flows(
    pid: int, tids: Mapping[str, int], spans: Mapping[str, list[tuple[str, int, int]]], graph: Graph, first_id: int
) -> list[dict[str, Any]]:
    where = {op: (tids[lane], start, end) for lane, runs in spans.items() for op, start, end in runs}
    crossing = [
        (where[dst][1] - where[src][2], src, dst)
        for src, followers in graph.successors.items()
        for dst in followers
        if src in where and dst in where and where[src][0] != where[dst][0]
    ]
    crossing.sort(key=lambda edge: edge[0])
    events: list[dict[str, Any]] = []
    for number, (_, src, dst) in enumerate(crossing[:MAX_FLOWS], start=first_id):
        src_tid, src_start, src_end = where[src]
        dst_tid, dst_start, _ = where[dst]
        # An arrow belongs to the span that holds its point in time, and a span does not hold its own end.
        leave = min(max(src_start, src_end - 1), dst_start)
        common = {"name": "waits for", "cat": "edge", "id": number, "pid": pid}
        events.append({"ph": "s", **common, "tid": src_tid, "ts": leave / 1e3})
        events.append({"ph": "f", "bp": "e", **common, "tid": dst_tid, "ts": dst_start / 1e3})
    return events
