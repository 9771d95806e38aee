import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given

from hocket.ir import Span, Timeline
from hocket.reporting import Report, corunning_of, corunning_svg, page_html
from strategies import any_timelines

from .examples import example, many_spans

SVG = "{http://www.w3.org/2000/svg}"


def test_the_number_at_an_event_counts_the_op_it_is_about() -> None:
    spans = (Span("a", "x", 0, 3), Span("c", "y", 2, 6), Span("b", "x", 4, 10), Span("d", "y", 7, 9))
    assert corunning_of(Timeline(spans, ("x", "y"))) == (1, 2, 2, 2, 2, 2, 2, 1)
    assert corunning_of(Timeline((), ("x",))) == ()


def test_ops_that_only_touch_do_not_run_at_once() -> None:
    spans = [Span("a", "x", 0, 5), Span("b", "x", 5, 5), Span("c", "x", 5, 9), Span("d", "y", 9, 12)]
    assert corunning_of(Timeline(tuple(spans), ("x", "y")))[:2] == (1, 1)
    assert corunning_of(Timeline((spans[0], spans[2], spans[3]), ("x", "y"))) == (1,) * 6


@given(any_timelines())
def test_it_is_what_asking_every_span_at_every_event_says(timeline: Timeline) -> None:
    counts = corunning_of(timeline)
    assert len(counts) == 2 * len(timeline.spans)
    times = sorted(time for span in timeline.spans for time in (span.start_us, span.end_us))
    for time, count in zip(times, counts, strict=True):
        inside = sum(span.start_us < time < span.end_us for span in timeline.spans)
        touching = sum(span.start_us <= time <= span.end_us for span in timeline.spans)
        assert max(1, inside) <= count <= touching
        if times.count(time) == 1:
            assert count == touching


def lines(svg: str) -> list[list[tuple[float, float]]]:
    paths = [e.get("d", "") for e in ElementTree.fromstring(svg).iter(f"{SVG}path") if "hk-line" in e.get("class", "")]
    return [[(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)] for path in paths]


def test_few_events_are_drawn_one_by_one() -> None:
    spans = (Span("a", "x", 0, 3), Span("c", "y", 2, 6))
    svg = corunning_svg({"two": Timeline(spans, ("x", "y")), "none": Timeline((), ())}, title="one step")
    assert "hk-band" not in re.sub(r"<style>.*</style>", "", svg)
    (points,) = lines(svg)
    assert len(points) == 8, "two points for each of four events"
    low, high = max(y for _, y in points), min(y for _, y in points)
    assert [y for _, y in points] == [low, low, high, high, high, high, low, low]
    assert points[0][0] < points[-1][0]
    words = [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "one step" in words
    assert "two: 4 events, 1.50 at once in the mean, 2 at most" in words
    assert "none: no events" in words


@pytest.mark.parametrize("lanes", [1, 2, 8, 68])
def test_many_events_are_drawn_as_mean_and_range_and_stay_light(lanes: int) -> None:
    _, timeline = many_spans(20_000, lanes)
    svg = corunning_svg({"planned": timeline, "serial": many_spans(500, 1)[1]})
    assert len(svg.encode()) < 120_000
    counts = corunning_of(timeline)
    first, second = lines(svg)
    ground, top = max(y for _, y in second), max(counts)
    unit = (ground - min(y for _, y in first)) / 1.0  # a positive length: the means are not all on the ground line
    assert (unit > 0) == (lanes > 1)
    assert {y for _, y in second} == {ground}, "on one lane there is always one op at an event"
    assert f"40,000 events, {sum(counts) / len(counts):.2f} at once in the mean, {top} at most" in svg
    assert max(x for x, _ in second) - min(x for x, _ in second) == pytest.approx(
        (max(x for x, _ in first) - min(x for x, _ in first)) * 1000 / 40_000, abs=0.2
    )


def test_the_page_shows_it_where_ops_run_at_once_and_only_there() -> None:
    found = example(4)
    page = {"title": "t", "graph": found.graph, "plan": found.plan, "costs": found.costs}
    assert "Ops that run at once" in page_html(Report(**page, timelines=found.timelines))
    assert "Ops that run at once" not in page_html(Report(**page, timelines={"eager": found.timelines["eager"]}))
