"""Headline, verdict, bound, table and page of random decisions tell one story."""

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.reporting import Comparison, Sample, comparison_table, schedule_html

from .examples import example
from .test_page import Page, page_of
from .test_table import rendered

FOUND = example(1)

times_ms = st.lists(st.floats(0.01, 50.0), min_size=1, max_size=5)


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    eager, planned = Sample.of(draw(times_ms)), Sample.of(draw(times_ms))
    interval = draw(st.none() | st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 5.0)).map(lambda two: tuple(sorted(two))))
    return replace(
        FOUND.comparison,
        eager_ms=eager,
        planned_ms=planned,
        speedup=eager.lower_quartile / planned.lower_quartile,
        lower_bound_ms=draw(st.none() | st.floats(0.01, 50.0)),
        verdict=draw(st.sampled_from(("planned", "eager"))),
        speedup_interval=interval,
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(comparisons())
def test_no_part_of_a_report_contradicts_another(comparison: Comparison) -> None:
    table = rendered(comparison_table(comparison), 200)
    # The page gets another bound, which must not show beside the comparison's.
    another_us = None if comparison.lower_bound_ms is None else 1.0  # must not show beside the comparison's own
    page = Page(page_of(FOUND, comparison=comparison, timelines={}, lower_us=another_us)).text
    notebook = Page(schedule_html("step", "", comparison)).text
    faster = comparison.eager_ms.lower_quartile > comparison.planned_ms.lower_quartile
    for text in (comparison.headline, page, notebook):
        assert ("eager kept" in text.lower()) == (comparison.verdict == "eager")
        assert f"x {'slower' if faster else 'faster'} than eager" not in text
    assert f"verdict: {comparison.verdict}" in table
    bound_ms = comparison.lower_bound_ms
    fastest_ms = min(comparison.eager_ms.min, comparison.planned_ms.min)
    is_beaten = bound_ms is not None and fastest_ms < bound_ms
    assert ("no plan is faster" in page) == (bound_ms is not None and not is_beaten)
    assert (
        ("Estimated lower bound" in page)
        == ("est. lower bound" in table)
        == ("estimated lower bound" in notebook)
        == is_beaten
    )
    assert ("estimated bound" in comparison.headline) == is_beaten
    shown = [float(x) for x in re.findall(r"speedup ([\d.]+)x", table)]
    assert set(shown) == {round(comparison.speedup, 2)}
    interval = comparison.speedup_interval
    is_outside = interval is not None and not round(interval[0], 2) <= shown[0] <= round(interval[1], 2)
    for text in (table, page, notebook):
        assert ("expected by the verdict" in text) == is_outside


def test_a_measured_timeline_that_beats_the_bound_makes_it_an_estimate() -> None:
    makespan_us = FOUND.timelines["planned"].makespan_us
    for lower_us, is_beaten in ((makespan_us * 0.5, False), (makespan_us * 1.1, True)):
        page = Page(page_of(FOUND, comparison=None, lower_us=lower_us))
        assert ("no plan is faster" in page.text) != is_beaten
        assert page.data["lower_label"] == ("estimated lower bound" if is_beaten else "lower bound")
