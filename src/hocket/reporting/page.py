"""The report as one HTML file, without requests or frameworks, and readable without scripts.

The page is filled from a template whose places are replaced in one pass. All text from a user is escaped, and the
timelines are embedded as JSON that cannot close its script element.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import InputError
from hocket.ir import ROLES, Costs, Graph, Plan, Timeline
from hocket.reporting import sections
from hocket.reporting._files import template, write_text
from hocket.reporting.comparison import Comparison
from hocket.reporting.corunning import corunning_svg
from hocket.reporting.drawing import timeline_svg
from hocket.reporting.markup import colours, fill, script_json, text
from hocket.reporting.trace import write_trace
from hocket.reporting.words import MICRO, duration_text, percent_text, plain

__all__ = ["page_html", "write_report"]

_MAX_EDGES = 60_000


def page_html(
    *,
    title: str,
    graph: Graph,
    plan: Plan,
    costs: Costs,
    timelines: Mapping[str, Timeline],
    comparison: Comparison | None = None,
    lower_us: float | None = None,
    upper_us: float | None = None,
    baseline_plan: Plan | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the text of the page. The arguments are those of `write_report`."""
    lower_us = _lower(lower_us, comparison)
    is_estimate = _is_beaten(lower_us, comparison, timelines)
    lead = "Each row is a lane and each bar an op. Gaps are idle time."
    if len(timelines) > 1:
        lead += " All timelines have the same scale."
    label = ", ".join(f"{name} {duration_text(t.makespan_us, MICRO)}" for name, t in timelines.items())
    values = {
        "title": text(title),
        "colours": colours(),
        "css": template("page.css"),
        "hero": sections.hero_section(title, plan, timelines, comparison, lower_us, upper_us, is_estimate),
        "comparison": sections.comparison_section(comparison, lower_us, is_estimate),
        "timeline_lead": lead,
        "svg": timeline_svg(timelines, graph, lower_us=lower_us, is_estimate=is_estimate, width=1120),
        "chart_label": text(f"Timelines: {label}"),
        "corunning": sections.corunning_section(timelines),
        "parts": sections.parts_section(graph, plan, costs),
        "lanes": sections.lanes_section(plan, timelines, baseline_plan),
        "ops": sections.ops_section(graph, plan, costs, timelines),
        "changes": sections.changes_section(graph, plan, timelines, baseline_plan),
        "environment": sections.environment_section(comparison, notes),
        "data": script_json(_data(graph, timelines, lower_us, is_estimate)),
        "chart_js": template("chart.js"),
        "tables_js": template("tables.js"),
    }
    return fill(template("page.html"), values)


def write_report(
    directory: str | os.PathLike[str],
    *,
    title: str,
    graph: Graph,
    plan: Plan,
    costs: Costs,
    timelines: Mapping[str, Timeline],
    comparison: Comparison | None = None,
    lower_us: float | None = None,
    upper_us: float | None = None,
    baseline_plan: Plan | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Path]:
    """Write the page and everything it shows, each also as a separate file.

    Args:
        directory: created if it does not exist.
        title: names the subject of the report.
        graph: the step's ops.
        plan: the plan that is reported on.
        costs: durations of the ops.
        timelines: name -> timeline, in the order in which they are drawn: eager first.
        comparison: eager against planned, when both were measured.
        lower_us: no plan is faster. The bound of `comparison` goes first. It is shown as an estimate if a measured
            step is faster.
        upper_us: the time at which efficiency is 0.
        baseline_plan: the plan to compare with. Defaults to all ops on one lane in the graph's order.
        notes: lines about the environment.

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
    lower_us = _lower(lower_us, comparison)
    paths: dict[str, Path] = {}

    def new(name: str) -> Path:
        paths[name] = folder / name
        return paths[name]

    graph.save(new("graph.json"))
    costs.save(new("costs.json"))
    write_text(new("plan.txt"), str(plan))
    for name, timeline in timelines.items():
        timeline.save(new(_timeline_file(name, paths)))
    if comparison is not None:
        comparison.save(new("comparison.json"))
    write_trace(new("trace.json"), timelines, graph)
    write_text(
        new("timeline.svg"),
        timeline_svg(
            timelines,
            graph,
            title=title,
            lower_us=lower_us,
            is_estimate=_is_beaten(lower_us, comparison, timelines),
        ),
    )
    write_text(new("corunning.svg"), corunning_svg(timelines, title=title))
    page = page_html(
        title=title,
        graph=graph,
        plan=plan,
        costs=costs,
        timelines=timelines,
        comparison=comparison,
        lower_us=lower_us,
        upper_us=upper_us,
        baseline_plan=baseline_plan,
        notes=notes,
    )
    write_text(new("index.html"), page)  # last, so that a page never refers to files that are older than it
    return paths


def _timeline_file(name: str, taken: Mapping[str, Path]) -> str:
    stem = "timeline-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "step")
    found, number = f"{stem}.json", 2
    while found in taken:
        found, number = f"{stem}-{number}.json", number + 1
    return found


def _lower(lower_us: float | None, comparison: Comparison | None) -> float | None:
    if comparison is not None and comparison.lower_bound_ms is not None:
        return comparison.lower_bound_ms * 1e3
    return lower_us if lower_us is not None and math.isfinite(lower_us) else None


def _is_beaten(lower_us: float | None, comparison: Comparison | None, timelines: Mapping[str, Timeline]) -> bool:
    """Return True if a measured step is faster than the bound."""
    measured_us = [each.makespan_us for each in timelines.values() if each.source == "measured" and each.spans]
    if comparison is not None:
        measured_us += [sample.min * 1e3 for sample in (comparison.eager_ms, comparison.planned_ms)]
    return lower_us is not None and min(measured_us, default=math.inf) < lower_us


def _data(graph: Graph, timelines: Mapping[str, Timeline], lower_us: float | None, is_estimate: bool) -> dict[str, Any]:
    """Return ops, edges and spans for the chart's script. Times are in microseconds, rounded to nanoseconds."""
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
        "lower": lower_us,
        "lower_label": "estimated lower bound" if is_estimate else "lower bound",
        "timelines": [
            {
                "name": plain(name),
                "makespan": round(timeline.makespan_us, 3),
                "summary": (
                    f"{duration_text(timeline.makespan_us, MICRO)} {timeline.source}, "
                    f"lanes busy {percent_text(timeline.utilisation)}"
                ),
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
