"""The parts of the difference between eager and planned add up, and say what is estimated."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.reporting import Attempt, gains_of
from hocket.reporting.gains import waterfall

from .examples import HOSTILE, example
from .test_page import Page, page_of

times_ms = st.floats(0.01, 100.0)
shares = st.none() | st.floats(0.0, 0.5).map(lambda part: {"ops": 1 - 2 * part, "Python": part, "dispatch": part})


@given(times_ms, times_ms, times_ms, st.none() | times_ms, shares)
def test_gains_add_up_to_the_difference(
    eager_ms: float, planned_ms: float, serial_ms: float, in_form_ms: float | None, parts: dict[str, float] | None
) -> None:
    gains = gains_of(eager_ms=eager_ms, planned_ms=planned_ms, serial_ms=serial_ms, in_form_ms=in_form_ms, shares=parts)
    assert sum(gain.saved_ms for gain in gains) == pytest.approx(eager_ms - planned_ms, abs=1e-9)
    assert [gain.is_estimate for gain in gains[-1 - (in_form_ms is not None) :]] == [False] * (2 - (in_form_ms is None))
    assert all(gain.is_estimate for gain in gains[:3]) or parts is None
    bars = waterfall(gains, eager_ms)
    assert all(end - begin == pytest.approx(abs(gain.saved_ms)) for (begin, end), gain in zip(bars, gains, strict=True))


@settings(max_examples=10, deadline=None)
@given(times_ms)
def test_the_page_shows_each_part_with_its_sign_inside_the_plot(serial_ms: float) -> None:
    found = example(1)
    eager_ms, planned_ms = found.comparison.eager_ms.lower_quartile, found.comparison.planned_ms.lower_quartile
    gains = gains_of(eager_ms=eager_ms, planned_ms=planned_ms, serial_ms=serial_ms)
    html = page_of(found, gains=gains)
    assert "Where the difference comes from" in Page(html).text
    for place in re.findall(r'class="(?:saved|lost|whole)" style="left:([\d.]+)%;width:([\d.]+)%"', html):
        assert 0 <= float(place[0]) + float(place[1]) <= 100.02
    assert ('class="lost"' in html) == any(gain.saved_ms < 0 for gain in gains)


def test_the_page_says_why_forms_were_left_out() -> None:
    attempts = (
        Attempt("winograd", "list", 3.5, "kept"),
        Attempt("fused-norm" + HOSTILE, "", None, "left out: w.grad is off by 5e-06"),
    )
    text = Page(page_of(example(1), attempts=attempts)).text
    assert "winograd" in text
    assert "left out: w.grad is off by 5e-06" in text
    assert "Forms and plans" not in Page(page_of(example(1))).text
