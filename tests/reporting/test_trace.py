import itertools
import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Edge, Graph, Op, Span, Timeline
from hocket.reporting import trace, trace_events, write_trace
from hocket.reporting.svg import COLOURS

from .examples import HOSTILE, example

durations = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 2)), max_size=40)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    lanes = ("x", "y", "z")
    free = [0.0, 0.0, 0.0]
    spans = []
    for number, (gap, length, lane) in enumerate(draw(durations)):
        start = free[lane] + gap
        free[lane] = start + length
        spans.append(Span(f"op{number}", lanes[lane], start, free[lane]))
    return Timeline(tuple(spans), lanes)


def complete(document: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    start, length = event["ts"] * 1e3, event["dur"] * 1e3
    assert abs(start - round(start)) < 1e-3
    assert abs(length - round(length)) < 1e-3
    return round(start), round(start) + round(length)


@given(timelines())
def test_spans_on_a_track_never_overlap_and_add_up(timeline: Timeline) -> None:
    document = json.loads(json.dumps(trace_events({"one": timeline, "two": timeline}), allow_nan=False))
    tracks = complete(document)
    assert sum(map(len, tracks.values())) == 2 * len(timeline.spans)
    for (_, tid), events in tracks.items():
        times = [nanoseconds(event) for event in events]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
        lane = timeline.lanes[tid - 1]
        assert {event["name"] for event in events} == {span.op for span in timeline.by_lane[lane]}
        total_us = sum(event["dur"] for event in events)
        assert total_us == pytest.approx(timeline.busy_us[lane], abs=1e-3 * len(events) + 1e-6)


def test_spans_that_overlap_by_rounding_do_not_overlap_in_the_trace() -> None:
    timeline = Timeline((Span("a", "l", 0.0, 1e7), Span("b", "l", 1e7 - 0.005, 2e7)), ("l",))
    (events,) = complete(trace_events({"t": timeline})).values()
    assert nanoseconds(events[0])[1] <= nanoseconds(events[1])[0]


def test_names_and_arguments() -> None:
    found = example(3)
    document = trace_events(found.timelines, found.graph)
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]
        for event in document["traceEvents"]
        if event["ph"] == "M"
    }
    assert names["process_name", 1, 0] == {"name": "eager (measured)"}
    assert names["process_name", 2, 0] == {"name": "planned (measured)"}
    assert names["thread_name", 2, 2] == {"name": "cpu0.1"}
    assert names["thread_sort_index", 2, 2] == {"sort_index": 2}
    for events in complete(document).values():
        for event in events:
            op = found.graph[event["name"]]
            assert event["cat"] == op.role
            assert event["cname"] == COLOURS[op.role].cname
            assert event["args"] == {
                "role": op.role,
                "layer": op.layer,
                "target": op.target,
                "flops": op.flops,
                "bytes": op.size_bytes,
            }


def test_arrows_follow_the_edges_that_cross_lanes_and_only_those() -> None:
    graph = Graph((Op("a"), Op("b"), Op("c")), (Edge("a", "b"), Edge("a", "c"), Edge("a", "c", 5.0)))
    timeline = Timeline((Span("a", "l", 0.0, 2.0), Span("b", "l", 2.0, 3.0), Span("c", "r", 2.5, 4.0)), ("l", "r"))
    arrows = [event for event in trace_events({"t": timeline}, graph)["traceEvents"] if event["ph"] in "sf"]
    assert [(event["ph"], event["tid"], event["ts"]) for event in arrows] == [("s", 1, 1.999), ("f", 2, 2.5)]
    assert arrows[0]["id"] == arrows[1]["id"]


def test_arrows_are_bounded_and_lie_in_their_spans(monkeypatch) -> None:
    found = example(20)
    with monkeypatch.context() as changed:
        changed.setattr(trace, "MAX_FLOWS", 7)
        few = trace_events(found.timelines, found.graph)["traceEvents"]
    assert sum(event["ph"] == "s" for event in few) == 7
    document = trace_events(found.timelines, found.graph)
    tracks = complete(document)
    ids = set()
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            ids.add((event["ph"], event["id"]))
            spans = [nanoseconds(span) for span in tracks[event["pid"], event["tid"]]]
            assert any(start <= round(event["ts"] * 1e3) < max(end, start + 1) for start, end in spans)
    assert len(ids) == sum(event["ph"] in "sf" for event in document["traceEvents"])


def test_every_role_has_a_colour_of_its_own() -> None:
    assert len({colour.cname for colour in COLOURS.values()}) == len(COLOURS)
    assert len({colour.light for colour in COLOURS.values()}) == len(COLOURS)


def test_the_file_is_json(tmp_path) -> None:
    found = example(2, prefix=HOSTILE)
    write_trace(tmp_path / "trace.json", found.timelines, found.graph)
    document = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert document == trace_events(found.timelines, found.graph)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
