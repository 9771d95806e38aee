"""The page in a browser: no errors, no sideways scrolling on a telephone, keys, both backgrounds, and axe-core."""

from pathlib import Path

import pytest

from hocket.ir import Costs, Plan
from hocket.reporting import Attempt, Report, gains_of, page_html
from support.browser import axe_finds, needs_axe, needs_chromium, visit

from .examples import example, many_spans
from .test_page import page_of

pytestmark = needs_chromium

LOOK = """(async () => {
  const chart = document.getElementById("chart"), frame = () => new Promise((done) => setTimeout(done, 50));
  const press = async (key) => {
    chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await frame();
    return chart.toDataURL();
  };
  for (let times = 0; times < 10; times++) await frame();  // until the page has its size
  const whole = await press("Home"), near = await press("+"), right = await press("ArrowRight");
  const back = await press("0");
  const page = document.documentElement, past = (each) => each.getBoundingClientRect().right > innerWidth + 1;
  const inside = (each) => each.closest(".scroll, #scroll, pre, .away");
  return {
    width: innerWidth, needed: page.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
    drawn: !document.getElementById("stage").hidden,
    zooms: near !== whole, pans: right !== near, returns: back === whole,
    wide: [...document.querySelectorAll("main *")].filter((each) => past(each) && !inside(each))
      .map((each) => each.outerHTML.slice(0, 80)),
  };
})()"""


def whole_page() -> str:
    found = example(8)
    eager_ms, planned_ms = found.comparison.eager_ms.lower_quartile, found.comparison.planned_ms.lower_quartile
    shares = {"ops": 0.5, "dispatch": 0.3, "Python": 0.2}
    return page_of(
        found,
        gains=gains_of(eager_ms=eager_ms, planned_ms=planned_ms, serial_ms=0.8 * eager_ms, shares=shares),
        attempts=(Attempt("", "list", planned_ms, "kept"), Attempt("fused-norm", "", None, "left out: too far")),
        captions={"eager": "30 ms measured: ops 50%, dispatch 30%, Python 20%; other cores busy 12% at most"},
    )


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_fits_and_answers_to_keys(width: int, dark: bool, tmp_path: Path) -> None:
    found, errors = visit(whole_page(), tmp_path, LOOK, width=width, dark=dark)
    assert not errors
    assert found["drawn"]
    assert found["zooms"]
    assert found["pans"]
    assert found["returns"]
    assert found["paper"] == ("rgb(16, 19, 23)" if dark else "rgb(247, 246, 242)")
    assert found["width"] == width
    assert found["needed"] <= found["width"], found["wide"]
    assert not found["wide"]


def test_five_thousand_ops_are_drawn(tmp_path: Path) -> None:
    graph, timeline = many_spans(5000)
    timelines = {"eager": timeline, "planned": timeline}
    html = page_html(Report(title="many", graph=graph, plan=Plan(()), costs=Costs({}), timelines=timelines))
    found, errors = visit(html, tmp_path, LOOK, width=390)
    assert not errors
    assert found["zooms"]
    assert found["returns"]
    assert found["needed"] <= found["width"], found["wide"]


@needs_axe
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(dark: bool, tmp_path: Path) -> None:
    found, errors = axe_finds(whole_page(), tmp_path, width=1280, dark=dark)
    assert not errors
    assert found == []
