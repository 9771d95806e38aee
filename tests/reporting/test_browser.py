"""The page in a browser: no errors, no sideways scrolling on a telephone, keys, both backgrounds, and axe-core.

Chromium runs without a window and prints the page after its scripts. A probe at the end of the page writes what it
sees into an element. For axe-core, ``AXE_CORE`` names its ``axe.min.js``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hocket.ir import Costs, Plan
from hocket.reporting import Attempt, Report, gains_of, page_html

from .examples import example, many_spans
from .test_page import page_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
AXE = Path(os.environ.get("AXE_CORE", Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"))

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

# Without a window no frames are drawn.
FRAMES = "<script>window.requestAnimationFrame = (draw) => setTimeout(() => draw(performance.now()), 1);</script>"

LOOK = """(async () => {
  const chart = document.getElementById("chart"), frame = () => new Promise((done) => setTimeout(done, 50));
  const press = async (key) => {
    chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await frame();
    return chart.toDataURL();
  };
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

CHECK = """axe.run(document, { resultTypes: ["violations"] }).then((found) => found.violations.map(
  (each) => `${each.id}: ${each.help}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`))"""


def visit(html: str, folder: Path, probe: str, *, width: int, dark: bool = False, before: str = "") -> tuple[Any, str]:
    """Return what the probe found on the page, and the errors of the console."""
    script = (
        f"{before}<script>Promise.resolve().then(() => {probe}).catch((error) => [String(error)])"
        ".then((found) => parent.postMessage(JSON.stringify(found), '*'));</script>"
    )
    (folder / "page.html").write_text(
        html.replace("<head>", f"<head>{FRAMES}").replace("</body>", f"{script}</body>"), encoding="utf-8"
    )
    # A window is at least 500 pixels wide, a frame in it is not.
    outer = folder / "outer.html"
    outer.write_text(
        "<!doctype html><script>addEventListener('message', ({ data }) => {"
        " document.getElementById('found').textContent = data; });</script><pre id='found'></pre>"
        f"<iframe src='page.html' style='width: {width}px; height: 3000px; border: 0'></iframe>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"),
            *("--enable-logging=stderr", "--virtual-time-budget=8000", "--window-size=1400,3100", "--dump-dom"),
            *(f"--blink-settings=preferredColorScheme={0 if dark else 1}", outer.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(unescape(found[1])), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


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


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install axe-core, or AXE_CORE=.../axe.min.js")
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(dark: bool, tmp_path: Path) -> None:
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", whole_page())
    script = f'<script src="{AXE.as_uri()}"></script>'
    found, errors = visit(html, tmp_path, CHECK, width=1280, dark=dark, before=script)
    assert not errors
    assert found == []
