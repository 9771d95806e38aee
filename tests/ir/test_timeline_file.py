import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import FormatError
from hocket.ir import Span, Timeline
from support.refusals import fails


def test_unknown_source_and_duplicate_lane():
    fails(FormatError, "expected measured or simulated, got 'dreamt'", Timeline, (), ("main",), "dreamt")
    fails(FormatError, "duplicate lane name", Timeline, (), ("main", "main"))


def test_figures():
    timeline = Timeline((Span("b", "x", 2.0, 4.0), Span("a", "x", 0.0, 1.0)), ("x", "y"))
    assert timeline.makespan_us == 4.0
    assert timeline.busy_us == {"x": 3.0, "y": 0.0}
    assert timeline.utilisation == 3.0 / 8.0
    assert [span.op for span in timeline.by_lane["x"]] == ["a", "b"]
    assert timeline.by_op["b"].duration_us == 2.0
    empty = Timeline((), ())
    assert (empty.makespan_us, empty.utilisation) == (0.0, 0.0)


@given(data=st.data())
def test_columns_are_checked_as_spans_are(data):
    names = data.draw(st.lists(st.text(max_size=2), unique=True, max_size=3))
    lengths = [data.draw(st.integers(0, 3)) for _ in names]
    lanes = {name: [f"{name}{i}" for i in range(n)] for name, n in zip(names, lengths, strict=True)}
    times = st.one_of(st.integers(0, 8).map(float), st.sampled_from([math.nan, math.inf, -1.0, 1 - 1e-12]))
    columns = [data.draw(st.lists(times, min_size=sum(lengths), max_size=sum(lengths))) for _ in range(2)]
    if data.draw(st.booleans()):  # sorted by chance they would seldom be
        both = sorted(columns[0] + columns[1])
        columns = [both[::2], both[1::2]]
    source = data.draw(st.sampled_from(["simulated", "measured", "dreamt"]))
    spans = [
        Span(op, lane, start, end)
        for (lane, op), start, end in zip(
            [(lane, op) for lane, ops in lanes.items() for op in ops], *columns, strict=True
        )
    ]
    columns = [np.array(column) for column in columns]
    problem = expected = None
    try:
        expected = Timeline(tuple(spans), tuple(lanes), source)
    except FormatError as error:
        problem = str(error)
    if problem:
        with pytest.raises(FormatError) as caught:
            Timeline.of_columns(lanes, *columns, source)
        assert str(caught.value) == problem
    else:
        timeline = Timeline.of_columns(lanes, *columns, source)
        assert timeline.makespan_us == expected.makespan_us
        assert timeline == expected
        assert timeline.busy_us == expected.busy_us


def test_columns_of_a_lane_in_any_order_and_of_lanes_side_by_side():
    swapped = Timeline.of_columns({"main": ["b", "a"]}, np.array([1.0, 0.0]), np.array([2.0, 1.0]))
    assert [span.op for span in swapped.by_lane["main"]] == ["a", "b"]
    Timeline.of_columns({"x": ["a"], "idle": [], "y": ["b"]}, np.zeros(2), np.ones(2))


def test_columns_become_spans_of_plain_numbers():
    timeline = Timeline.of_columns({"x": ("a", "b"), "y": ()}, np.array([0.0, 2.0]), np.array([1.0, 3.0]))
    for other in (pickle.loads(pickle.dumps(timeline)), copy.copy(timeline), copy.deepcopy(timeline)):
        assert other == timeline
        assert hash(other) == hash(timeline)
    assert timeline.spans == (Span("a", "x", 0.0, 1.0), Span("b", "x", 2.0, 3.0))
    assert {type(value) for span in timeline.spans for value in span} == {str, float}
    assert repr(timeline).startswith("Timeline(spans=(Span(op='a'")
    with pytest.raises(AttributeError, match="span_s"):
        timeline.span_s  # noqa: B018


def test_columns_of_other_lengths():
    fails(FormatError, "1 ops, but 2 starts and 1 ends", Timeline.of_columns, {"x": ["a"]}, np.zeros(2), np.zeros(1))


def test_columns_are_not_changed_from_outside():
    ends = np.array([1.0])
    timeline = Timeline.of_columns({"x": ["a"]}, np.array([0.0]), ends)
    ends[0] = 5.0
    assert timeline.spans[0].end_us == timeline.makespan_us == 1.0
