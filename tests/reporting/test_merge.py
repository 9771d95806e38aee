from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Span
from hocket.reporting.drawing import merge

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
