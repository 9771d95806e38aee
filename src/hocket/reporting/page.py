"""The report as one HTML file, without requests or frameworks, and readable without scripts.

The page is filled from a template whose places are replaced in one pass. All text from a user is escaped, and the
timelines are embedded as JSON that cannot close its script element.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.errors import InputError
from hocket.ir import ROLES
from hocket.ir._fields import write_text
from hocket.reporting.content import Report
from hocket.reporting.corunning import corunning_svg
from hocket.reporting.drawing import heading_of, timeline_svg
from hocket.reporting.markup import fill, framed, script_element, script_json, template, text
from hocket.reporting.sections import SECTIONS
from hocket.reporting.trace import write_trace
from hocket.reporting.words import MICRO, duration_text, plain

_MAX_EDGES = 60_000
_COMPARED = frozenset({"eager", "planned"})


def page_html(report: Report) -> str:
    """Return the text of the page."""
    lead = "Each row is a lane and each bar an op. Gaps are idle time."
    if report.captions:
        lead += " Eager's rows share one thread: its time is spent in ops, elsewhere in torch, or in Python."
    if len(report.timelines) > 1:
        lead += " All timelines have the same scale."
    label = ", ".join(f"{name} {duration_text(t.makespan_us, MICRO)}" for name, t in report.timelines.items())
    values = {name: section(report) for name, section in SECTIONS.items()}
    values |= {
        "timeline_lead": lead,
        "svg": _timeline_svg(report, width=1120),
        "chart_label": text(f"Timelines: {label}"),
    }
    scripts = [script_element(template(name)) for name in ("chart.js", "tables.js")]
    data = f'<script type="application/json" id="data">{script_json(_data(report))}</script>'
    return framed(report.title, fill(template("page.html"), values), "\n".join([data, *scripts]))


def write_report(directory: str | os.PathLike[str], report: Report) -> dict[str, Path]:
    """Write the page and everything it shows, each also as a separate file.

    Args:
        directory: created if it does not exist.
        report: the content.

    Returns:
        File name -> path: ``index.html``, ``trace.json``, ``timeline.svg``, ``corunning.svg``, ``plan.txt``,
        ``graph.json``, ``costs.json``, a ``timeline-NAME.json`` for each timeline, and ``comparison.json`` when there
        is one.

    Raises:
        InputError: `directory` is a file, or lies in one.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"report: {folder} is not a directory") from None
    paths: dict[str, Path] = {}

    def new(name: str) -> Path:
        paths[name] = folder / name
        return paths[name]

    report.graph.save(new("graph.json"))
    report.costs.save(new("costs.json"))
    write_text(new("plan.txt"), str(report.plan))
    for name, timeline in report.timelines.items():
        timeline.save(new(_timeline_file(name, paths)))
    if report.comparison is not None:
        report.comparison.save(new("comparison.json"))
    write_trace(new("trace.json"), report.timelines, report.drawn)
    write_text(new("timeline.svg"), _timeline_svg(report, title=report.title, is_short=True))
    write_text(new("corunning.svg"), corunning_svg(report.on_lanes, title=report.title))
    # The page comes last, so that it never refers to files that are older than it.
    write_text(new("index.html"), page_html(report))
    return paths


def _timeline_svg(report: Report, *, title: str = "", width: int = 960, is_short: bool = False) -> str:
    """Draw the timelines, or of a comparison eager's and the plan's alone."""
    shown = report.timelines
    if is_short and shown.keys() >= _COMPARED:
        shown = {name: shown[name] for name in shown if name in _COMPARED}
    return timeline_svg(
        shown,
        report.drawn,
        title=title,
        lower_us=report.bound_us,
        is_estimate=report.is_bound_beaten,
        captions=report.captions,
        width=width,
    )


def _timeline_file(name: str, taken: Mapping[str, Path]) -> str:
    stem = "timeline-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "step")
    found, number = f"{stem}.json", 2
    while found in taken:
        found, number = f"{stem}-{number}.json", number + 1
    return found


def _data(report: Report) -> dict[str, Any]:
    """Return ops, edges and spans for the chart's script. Times are in microseconds, rounded to nanoseconds."""
    graph, timelines = report.drawn, report.timelines
    index = dict(graph.index)
    ops: list[list[Any]] = []
    layers: dict[str, int] = {}
    targets: dict[str, int] = {}
    for op in graph.ops:
        layer = layers.setdefault(plain(op.layer), len(layers))
        target = targets.setdefault(plain(op.target), len(targets))
        ops.append([plain(op.name), ROLES.index(op.role), layer, target])
    for timeline in timelines.values():
        for span in timeline.spans:
            if span.op not in index:
                index[span.op] = len(ops)
                place = layers.setdefault("", len(layers)), targets.setdefault("", len(targets))
                ops.append([plain(span.op), ROLES.index("other"), *place])
    used = {ops[index[span.op]][1] for timeline in timelines.values() for span in timeline.spans}
    edges = [index[end] for src, found in graph.successors.items() for dst in found for end in (src, dst)]
    return {
        "roles": [
            {"name": role, "label": role.replace("_", " "), "used": number in used} for number, role in enumerate(ROLES)
        ],
        "layers": list(layers),
        "targets": list(targets),
        "ops": ops,
        "edges": edges if len(edges) <= 2 * _MAX_EDGES else [],
        "lower": report.bound_us,
        "lower_label": report.bound_name,
        "timelines": [
            {
                "name": plain(name),
                "makespan": round(timeline.makespan_us, 3),
                "summary": plain(report.captions.get(name) or heading_of(timeline)),
                "lanes": [
                    {
                        "name": plain(lane),
                        "op": [index[span.op] for span in spans],
                        "start": [round(span.start_us, 3) for span in spans],
                        "end": [round(span.end_us, 3) for span in spans],
                    }
                    for lane, spans in timeline.by_lane.items()
                ],
            }
            for name, timeline in timelines.items()
        ],
    }
