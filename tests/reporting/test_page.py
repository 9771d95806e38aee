"""

The parts of the difference between eager and planned add up, and say what is estimated.


"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import InputError
from hocket.ir import ROLES, Costs, Graph, Plan, Timeline
from hocket.reporting import Attempt, Report, gains_of, page_html, write_report
from hocket.reporting.content import waterfall
from hocket.reporting.markup import breakable, fill

from .examples import HOSTILE, Example, example

VOID = {"meta", "link", "input", "br", "wbr", "hr", "img"}


class Page(HTMLParser):
    """Checks that elements nest, and keeps tags and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data: dict[str, Any] = {}
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.tags[-1][1].get("type") == "application/json":
                self.data = json.loads(data)
        elif self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def page_of(found: Example, **changed: Any) -> str:
    arguments: dict[str, Any] = {
        "title": "resnet20",
        "graph": found.graph,
        "plan": found.plan,
        "costs": found.costs,
        "timelines": found.timelines,
        "comparison": found.comparison,
        "baseline_plan": found.baseline,
        "notes": ("a note",),
    }
    return page_html(Report(**{**arguments, **changed}))


def test_it_is_one_file_without_requests() -> None:
    html = page_of(example(4))
    outside = [url for url in re.findall(r"https?://[^\s\"'<)]+", html) if url != "http://www.w3.org/2000/svg"]
    assert outside == []
    page = Page(html)
    for tag, attributes in page.tags:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "link" or attributes["href"] == "data:,"
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_it_embeds_every_span() -> None:
    found = example(5)
    data = Page(page_of(found)).data
    assert [entry["name"] for entry in data["timelines"]] == ["eager", "planned"]
    for entry, timeline in zip(data["timelines"], found.timelines.values(), strict=True):
        seen = {
            (data["ops"][op][0], lane["name"], start, end)
            for lane in entry["lanes"]
            for op, start, end in zip(lane["op"], lane["start"], lane["end"], strict=True)
        }
        assert seen == {(s.op, s.lane, round(s.start_us, 3), round(s.end_us, 3)) for s in timeline.spans}
    for name, role, layer, target in data["ops"]:
        op = found.graph[name]
        assert (ROLES[role], data["layers"][layer], data["targets"][target]) == (op.role, op.layer, op.target)
    assert len(data["edges"]) == 2 * sum(map(len, found.graph.successors.values()))
    assert data["lower"] == pytest.approx(found.comparison.lower_bound_ms * 1e3)


def test_it_says_what_was_found() -> None:
    found = example(5)
    text = Page(page_of(found, upper_us=20000.0)).text
    for words in (
        *("faster than eager, same result bitwise", "Lower bound", "Over the bound", "1.42x", "Upper bound", "20 ms"),
        *("How busy the lanes are", "cpu0, 1 thread, core 1", "Costliest ops", "By layer", "By role"),
        *("What the plan changed", "Moved to another lane", "Start later", "hocket-plan/1 planner=list"),
        *("Environment", "2.13.0", "a note", "batch 8, float32"),
    ):
        assert words in text


def test_it_says_when_eager_was_kept() -> None:
    found = example(3)
    kept = replace(
        found.comparison, verdict="eager", speedup=0.5, why="the plan lost", bitwise=False, max_abs_diff=1e-6
    )
    text = Page(page_of(found, comparison=kept)).text
    assert "Eager kept: the plan is 2.00x slower than eager" in text
    assert "The plan lost." in text
    assert "difference 1e-06" in text


def test_it_stands_without_a_comparison() -> None:
    found = example(3)
    text = Page(page_of(found, comparison=None, baseline_plan=None, lower_us=float("nan"), notes=())).text
    assert "A planned step takes" in text
    assert "Lower bound" not in text
    assert "Environment" not in text


def test_it_stands_with_next_to_nothing() -> None:
    empty = Graph(())
    Page(page_html(Report(title="", graph=empty, plan=Plan(()), costs=Costs({}), timelines={})))
    lonely = {"idle": Timeline((), ("l",))}
    Page(page_html(Report(title="x", graph=empty, plan=Plan(()), costs=Costs({}), timelines=lonely)))


def test_hostile_names_are_only_text() -> None:
    plain, hostile = example(3), example(3, prefix=HOSTILE + "\x00\x1b\ud800")
    timelines = {HOSTILE + name: timeline for name, timeline in hostile.timelines.items()}
    html = page_of(hostile, title=HOSTILE, timelines=timelines, notes=(HOSTILE,))
    html.encode("utf-8")
    page = Page(html)
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in Page(page_of(plain)).tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 3
    shown = HOSTILE.replace("\u2028", "\ufffd")
    assert shown in page.text
    assert any(timeline["name"].startswith(shown) for timeline in page.data["timelines"])


def test_ops_beyond_the_first_are_counted() -> None:
    found = example(40)
    page = Page(page_of(found))
    assert "Below are the 200 costliest." in page.text
    assert len(page.data["ops"]) == len(found.graph)


def test_a_value_is_never_read_as_a_template() -> None:
    assert fill("{{a}}-{{b}}", {"a": "{{b}}", "b": "2"}) == "{{b}}-2"
    with pytest.raises(KeyError):
        fill("{{missing}}", {})


def test_names_break_between_their_parts() -> None:
    assert breakable("a.b/c_d&<") == "a.<wbr>b/<wbr>c_<wbr>d&amp;&lt;"


def test_write_report_gives_files_that_read_back(tmp_path: Path) -> None:
    found = example(3)
    timelines = {**found.timelines, "eager ../x": found.timelines["eager"], "eager//x": found.timelines["eager"]}
    paths = write_report(
        tmp_path / "new" / "report",
        Report(
            title="t",
            graph=found.graph,
            plan=found.plan,
            costs=found.costs,
            timelines=timelines,
            comparison=found.comparison,
        ),
    )
    assert set(paths) == {path.name for path in (tmp_path / "new" / "report").iterdir()}
    assert {"index.html", "trace.json", "timeline.svg", "timeline-eager.json", "timeline-planned.json"} <= set(paths)
    assert sum(name.startswith("timeline-") for name in paths) == 4
    assert all(path.parent == tmp_path / "new" / "report" and path.name == name for name, path in paths.items())
    assert Graph.load(paths["graph.json"]) == found.graph
    assert Costs.load(paths["costs.json"]) == found.costs
    assert Plan.parse(paths["plan.txt"].read_text()) == found.plan
    assert Timeline.load(paths["timeline-planned.json"]) == found.timelines["planned"]
    assert json.loads(paths["comparison.json"].read_text()) == found.comparison.to_json()


def test_write_report_names_the_file_in_its_way(tmp_path: Path) -> None:
    found = example(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is not a directory"):
        write_report(
            tmp_path / "file", Report(title="t", graph=found.graph, plan=found.plan, costs=found.costs, timelines={})
        )


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


def test_importing_the_package_loads_neither_rich_nor_torch() -> None:
    code = "import sys, hocket.reporting; print([m for m in ('rich', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
