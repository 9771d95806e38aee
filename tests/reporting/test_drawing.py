""" """

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Costs, Edge, Graph, Lane, Op, Plan, Span, Timeline
from hocket.reporting import bytes_between, corunning_svg, parts_svg, timeline_svg
from hocket.reporting.drawing import axis_ticks, merge

from .examples import HOSTILE, example, many_spans

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_it_shows_lanes_bound_title_and_legend() -> None:
    found = example()
    svg = timeline_svg(found.timelines, found.graph, title="one step", lower_us=34000.0)
    words = texts(svg)
    for text in ("one step", "main", "cpu0.0", "cpu0.1", "lower bound 34 ms", "weight grad", "idle"):
        assert text in words
    assert any(text.startswith("eager: ") for text in words)
    assert any(text.startswith("planned: ") for text in words)
    root = ElementTree.fromstring(svg)
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert any("weight_grad" in title and "stage1" in title for title in titles)
    assert "prefers-color-scheme:dark" in svg


def test_timelines_share_one_scale() -> None:
    found = example(4)
    svg = timeline_svg(found.timelines, found.graph)
    rests = [float(e.get("width", "0")) for e in ElementTree.fromstring(svg).iter(f"{SVG}rect")
             if e.get("class") == "hk-rest" and e.get("rx") is None]  # fmt: skip
    eager, planned = (found.timelines[name].makespan_us for name in ("eager", "planned"))
    assert rests[1] / rests[0] == pytest.approx(planned / eager, abs=1e-3)
    assert rests[1] == rests[2]


@pytest.mark.parametrize("lanes", [1, 2, 8, 68])
def test_it_stays_light(lanes: int) -> None:
    graph, timeline = many_spans(20_000, lanes)
    svg = timeline_svg({"eager": timeline, "planned": timeline}, graph, lower_us=1.0)
    ElementTree.fromstring(svg)
    assert len(svg.encode()) < 400_000


@pytest.mark.parametrize("draw", [timeline_svg, corunning_svg])
def test_hostile_names_are_only_text(draw) -> None:
    found = example(3, prefix=HOSTILE + "\x00\x1b\ud800")
    svg = draw({HOSTILE + name: timeline for name, timeline in found.timelines.items()}, title=HOSTILE)
    svg.encode("utf-8")
    tags = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(svg).iter()}
    assert tags <= {"svg", "style", "rect", "path", "text", "g", "title"}


@pytest.mark.parametrize("draw", [timeline_svg, corunning_svg])
@pytest.mark.parametrize("timelines", [{}, {"none": Timeline((), ())}, {"idle": Timeline((), ("l",))}])
def test_nothing_to_draw_is_drawn(draw, timelines: dict[str, Timeline]) -> None:
    ElementTree.fromstring(draw(timelines))


@pytest.mark.parametrize("longest_us", [0.0, 0.003, 0.9, 1.0, 37.0, 999.0, 1000.0, 12345.6, 9.9e5, 1e6, 7.7e8])
def test_ticks_are_round_and_few(longest_us: float) -> None:
    ticks = axis_ticks(longest_us)
    times = [time for time, _ in ticks]
    labels = [label for _, label in ticks]
    assert times[0] == 0.0
    assert times[-1] <= longest_us * (1 + 1e-9)
    assert len(set(labels)) == len(labels) <= 12
    assert longest_us == 0 or len(ticks) >= 4


@pytest.mark.parametrize("longest_us", [5e-324, 1e-300, 1e-13, 1e24])
def test_the_shortest_and_the_longest_timelines_are_drawn(longest_us: float) -> None:
    timeline = Timeline((Span("a", "main", 0.0, longest_us),), ("main",))
    assert "0" in texts(timeline_svg({"planned": timeline}))


runs = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.sampled_from(["forward", "update"])), max_size=60)


def spans_of(found: list[tuple[float, float, str]]) -> tuple[list[Span], dict[str, str]]:
    now, spans, roles = 0.0, [], {}
    for number, (gap, length, role) in enumerate(found):
        spans.append(Span(f"op{number}", "l", now + gap, now + gap + length))
        roles[f"op{number}"] = role
        now = spans[-1].end_us
    return spans, roles


@given(runs, st.sampled_from([0.01, 0.3, 1.0, 10.0]))
def test_shapes_keep_the_busy_time_and_do_not_overlap(found: list[tuple[float, float, str]], scale: float) -> None:
    spans, roles = spans_of(found)
    shapes = merge(spans, roles, scale)
    assert sum(shape.count for shape in shapes) == len(spans)
    assert sum(s.width for s in shapes) == pytest.approx(sum(s.duration_us for s in spans) * scale, abs=1e-6)
    for before, after in itertools.pairwise(shapes):
        assert before.x + before.width <= after.x + 1e-6


@given(runs)
def test_what_is_wide_enough_is_left_alone(found: list[tuple[float, float, str]]) -> None:
    spans, roles = spans_of(found)
    for shape in merge(spans, roles, 1.0):
        assert shape.count == 1 or shape.width <= 1.0 + 1e-9 or shape.role == roles[shape.first.op]
    wide = [span for span in spans if span.duration_us >= 1.0]
    kept = {shape.first.op for shape in merge(spans, roles, 1.0) if shape.count == 1}
    assert {span.op for span in wide} <= kept


def test_the_role_of_most_of_the_time_wins() -> None:
    spans = [Span("a", "l", 0.0, 0.2), Span("b", "l", 0.2, 0.5), Span("c", "l", 0.5, 0.7)]
    (shape,) = merge(spans, {"a": "forward", "b": "update", "c": "forward"}, 1.0)
    assert (shape.role, shape.count) == ("forward", 3)


def test_rests_are_not_painted_over() -> None:
    spans = [Span(f"op{n}", "l", n * 1.0, n * 1.0 + 0.1) for n in range(1000)]
    shapes = merge(spans, {}, 0.1)
    assert sum(shape.width for shape in shapes) == pytest.approx(10.0)


GRAPH = Graph(
    (Op("a", role="forward"), Op("b", role="forward"), Op("c", role="update")),
    (Edge("a", "b", 8.0), Edge("a", "c", 8.0), Edge("b", "c", 5.0), Edge("a", "c")),
)
COSTS = Costs({"a": {"1": 10.0}, "b": {"1": 20.0}})
PLAN = Plan((Lane("x", ("a",), device="x"), Lane("y", ("b", "c"), device="y<")))


def test_bytes_between_devices_count_a_tensor_once():
    assert bytes_between(GRAPH, PLAN) == {("x", "y<"): 8.0}
    assert bytes_between(GRAPH, Plan((Lane("x", ("a", "b", "c")),))) == {}


def test_a_bar_for_each_op_as_wide_as_it_takes_long():
    root = ElementTree.fromstring(parts_svg(GRAPH, PLAN, COSTS, title="<parts>"))
    bars = {
        bar[0].text: float(bar.get("width") or 0) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if len(bar)
    }
    assert bars.keys() == {"a", "b", "c"}
    assert abs(bars["b"] / bars["a"] - 2) < 0.01
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<parts>" in words
    assert "8 B" in words
    assert {"forward", "update"} <= set(words), "a legend"
    assert {"0", "10 \N{MICRO SIGN}s", "30 \N{MICRO SIGN}s"} <= set(words), "an axis"
    assert any("2 ops, 20" in str(word) for word in words)


def test_thousands_of_ops_are_a_few_bars():
    ops = tuple(Op(str(number), role="forward") for number in range(20_000))
    svg = parts_svg(
        Graph(ops), Plan((Lane("x", tuple(op.name for op in ops)),)), Costs({op.name: {"1": 1.0} for op in ops})
    )
    assert svg.count("<rect") < 50
