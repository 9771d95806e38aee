"""The parts of the page, each a function from what is known to HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hocket.ir import Graph
from hocket.reporting.comparison import Comparison
from hocket.reporting.content import Report, waterfall
from hocket.reporting.corunning import corunning_of, corunning_svg
from hocket.reporting.markup import Cell, breakable, header, meter, number, section, swatch, table, text
from hocket.reporting.parts import parts_svg
from hocket.reporting.summary import Changes, LaneUse, changes, lane_text, lane_uses, op_costs, timeline_of, totals
from hocket.reporting.words import MICRO, count_text, duration_text, percent_text, shorten

_MAX_ROWS = 200
_NONE = Cell("", "n", -1.0)


def hero_section(report: Report) -> str:
    """The verdict in one line, and the figures behind it."""
    plan, timelines, comparison = report.plan, report.timelines, report.comparison
    tiles: list[tuple[str, str, str]] = []
    headline, lines = report.title, []
    shown = timeline_of(plan, timelines)
    if comparison is not None:
        headline = _sentence(comparison.outcome) + (", same result bitwise" if comparison.bitwise else "")
        lines = [comparison.bound, comparison.why, comparison.disagreement]
        for name, sample in (("Eager", comparison.eager_ms), ("Planned", comparison.planned_ms)):
            tiles.append((name, _ms(sample.lower_quartile), f"lower quartile of {count_text(sample.runs, 'run')}"))
    elif shown is not None:
        headline = f"A planned step takes {duration_text(timelines[shown].makespan_us, MICRO)}"
        lines = [f"{timelines[shown].source}, not compared with eager in this report"]
    if report.bound_us is not None:
        why = "a measured step is faster" if report.is_bound_beaten else "no plan is faster"
        tiles.append((_sentence(report.bound_name), duration_text(report.bound_us, MICRO), why))
    if report.upper_us is not None:
        tiles.append(("Upper bound", duration_text(report.upper_us, MICRO), "without any overlap"))
    if comparison is not None:
        if comparison.over_bound is not None:
            tiles.append(("Over the bound", f"{comparison.over_bound:.2f}x", "planned step over lower bound"))
        result = "bitwise" if comparison.bitwise else comparison.result.removeprefix("max ")
        tiles.append(("Same result" if comparison.bitwise else "Result", result, "planned against eager"))
    ops = f"{count_text(len(plan), 'op')}{', ' + plan.planner if plan.planner else ''}"
    tiles.append(("Plan", count_text(len(plan.lanes), "lane"), ops))
    return header(report.title, headline, " ".join(f"{_sentence(line)}." for line in lines if line), tiles)


def comparison_section(report: Report) -> str:
    """Eager and planned as bars and as figures."""
    comparison = report.comparison
    if comparison is None:
        return ""
    samples = (("eager", comparison.eager_ms), ("planned", comparison.planned_ms))
    times_ms = {name: sample.lower_quartile for name, sample in samples}
    longest = max(times_ms.values()) or 1.0
    bound = None if report.bound_us is None else report.bound_us / 1e3
    mark = f'<u style="left:{min(1.0, bound / longest) * 100:.2f}%"></u>' if bound is not None else ""
    tracks = "".join(
        f'<div class="track{" kept" if name == comparison.verdict else ""}"><span>{name}</span>'
        f'<i><b style="width:{time_ms / longest * 100:.2f}%"></b>{mark}</i><em>{_ms(time_ms)}</em></div>'
        for name, time_ms in times_ms.items()
    )
    dashed = f" The dashed line is the {report.bound_name}." if bound is not None else ""
    race = f'<div class="race">{tracks}<p>Lower quartiles. The one in colour was kept.{dashed}</p></div>'
    body = f'<div class="pair">{race}{_times_table(comparison, bound, report.bound_name)}</div>'
    return section("comparison", "Eager and planned", body)


def _times_table(comparison: Comparison, bound: float | None, name: str) -> str:
    samples = (("eager", comparison.eager_ms), ("planned", comparison.planned_ms))
    head = [Cell("milliseconds"), *(Cell(word, "n") for word in ("lower quartile", "median", "min", "p90", "runs"))]
    rows = [
        [
            Cell(word),
            *(number(v, f"{v:,.3f}") for v in (s.lower_quartile, s.median, s.min, s.p90)),
            number(s.runs, f"{s.runs:,}"),
        ]
        for word, s in samples
    ]
    kinds = {position: "kept" for position, (word, _) in enumerate(samples) if word == comparison.verdict}
    if bound is not None:
        kinds[len(rows)] = "aside"
        rows.append([Cell(name), number(bound, f"{bound:,.3f}"), *([Cell("", "n")] * 4)])
    return table(head, rows, caption="Eager and planned in milliseconds", kinds=kinds)


def gains_section(report: Report) -> str:
    """Where the difference between eager and planned comes from."""
    comparison, gains = report.comparison, report.gains
    if comparison is None or not gains:
        return ""
    eager_ms, planned_ms = comparison.eager_ms.lower_quartile, comparison.planned_ms.lower_quartile
    bars = waterfall(gains, eager_ms)
    longest_ms = max(end for _, end in [(0.0, eager_ms), (0.0, planned_ms), *bars]) or 1.0

    def bar(begin_ms: float, end_ms: float, kind: str) -> Cell:
        place = f"left:{begin_ms / longest_ms:.2%};width:{(end_ms - begin_ms) / longest_ms:.2%}"
        return Cell(f'<span class="fall" aria-hidden="true"><b class="{kind}" style="{place}"></b></span>')

    def whole(name: str, time_ms: float) -> list[Cell]:
        return [Cell(name), number(time_ms, _ms(time_ms)), bar(0.0, time_ms, "whole"), Cell("measured")]

    rows = [whole("eager", eager_ms)]
    for gain, (begin_ms, end_ms) in zip(gains, bars, strict=True):
        sign, kind = ("−", "saved") if gain.saved_ms >= 0 else ("+", "lost")
        rows.append(
            [
                Cell(text(gain.name)),
                number(-gain.saved_ms, f"{sign}{_ms(abs(gain.saved_ms))}"),
                bar(begin_ms, end_ms, kind),
                Cell(text(f"{'estimated' if gain.is_estimate else 'measured'}: {gain.note}")),
            ]
        )
    rows.append(whole("planned", planned_ms))
    head = [Cell("part"), Cell("time", "n"), Cell('<span class="away">waterfall</span>'), Cell("how it is known")]
    body = table(head, rows, caption="From eager to planned", kinds={0: "kept", len(rows) - 1: "kept"})
    return section("gains", "Where the difference comes from", body)


def attempts_section(report: Report) -> str:
    """The forms and plans that were tried, and why the others were left out."""
    if not report.attempts:
        return ""
    eager_ms = None if report.comparison is None else report.comparison.eager_ms.lower_quartile
    head = [Cell("form"), Cell("planner"), Cell("time", "n"), Cell("of eager", "n"), Cell("outcome")]
    rows = []
    for attempt in report.attempts:
        time_ms = attempt.duration_ms
        share = _NONE if time_ms is None or not eager_ms else number(time_ms / eager_ms, f"{time_ms / eager_ms:.2f}x")
        rows.append(
            [
                Cell(breakable(attempt.form) or "bitwise", "name"),
                Cell(text(attempt.planner)),
                _NONE if time_ms is None else number(time_ms, _ms(time_ms)),
                share,
                Cell(text(attempt.outcome)),
            ]
        )
    lead = "Times are lower quartiles of the comparison that the verdict stands on."
    body = table(head, rows, caption="Forms and plans", tall=len(rows) > 12)
    return section("attempts", "Forms and plans that were tried", body, lead)


def schedule_html(name: str, state: str, comparison: Comparison | None) -> str:
    """Return a scheduled step for a notebook: its state, or, once it is compared, the outcome and the times."""
    if comparison is None:
        return f"<div><b>{text(name)}</b>: {text(state)}</div>"
    lines = (comparison.bound, comparison.why, comparison.disagreement)
    below = " ".join(f"{_sentence(line)}." for line in lines if line)
    bound_name = "estimated lower bound" if comparison.is_bound_beaten else "lower bound"
    return (
        f"<div><b>{text(name)}</b>: {text(comparison.outcome)}, {text(comparison.result)}"
        f"<p>{text(below)}</p>{_times_table(comparison, comparison.lower_bound_ms, bound_name)}</div>"
    )


def corunning_section(report: Report) -> str:
    """The number of ops that run at once, if any do."""
    if all(max(corunning_of(timeline), default=0) < 2 for timeline in report.on_lanes.values()):
        return ""
    lead = (
        "Counted whenever an op starts or ends, with that op. A line is the mean of nearby events, a band their range."
    )
    body = f'<div id="at-once">{corunning_svg(report.on_lanes, width=1120)}</div>'
    return section("corunning", "Ops that run at once", body, lead)


def parts_section(report: Report) -> str:
    """The ops of each device and the bytes between devices, if there are several."""
    if len({lane.device for lane in report.plan.lanes if lane.kind != "channel"}) < 2:
        return ""
    lead = "Each row is a device, with its ops in the order of the step, as wide as their duration; below, bytes sent."
    drawn = parts_svg(report.graph, report.plan, report.costs, width=1120)
    return section("parts", "Parts", f"<div>{drawn}</div>", lead)


def lanes_section(report: Report) -> str:
    """For each timeline and lane: busy, idle, utilisation."""
    known = [plan for plan in (report.plan, report.baseline_plan) if plan is not None]
    head = [
        *(Cell(word) for word in ("timeline", "lane", "runs on")),
        *(Cell(word, "n") for word in ("ops", "busy", "idle", "used")),
        Cell('<span class="away">utilisation</span>'),
    ]
    rows: list[list[Cell]] = []
    for name, timeline in report.timelines.items():
        rows_of = set(timeline.lanes)
        fitting = [plan for plan in known if {lane.name for lane in plan.lanes if lane.ops} <= rows_of]
        lanes = {lane.name: lane_text(lane) for plan in fitting for lane in plan.lanes}
        rows += [_lane_row(name, use, lanes.get(use.lane, "")) for use in lane_uses(timeline)]
    body = table(head, rows, caption="Use of the lanes", tall=len(rows) > 12, sortable=len(rows) > 12)
    return section("lanes", "How busy the lanes are", body)


def _lane_row(timeline: str, use: LaneUse, runs_on: str) -> list[Cell]:
    return [
        Cell(text(timeline), "name"),
        Cell(text(use.lane)),
        Cell(text(runs_on)),
        number(use.ops, f"{use.ops:,}"),
        number(use.busy_us, duration_text(use.busy_us, MICRO)),
        number(use.idle_us, duration_text(use.idle_us, MICRO)),
        number(use.utilisation, percent_text(use.utilisation)),
        Cell(meter(use.utilisation)),
    ]


def ops_section(report: Report) -> str:
    """The costliest ops, and all ops added up by layer and by role."""
    graph, timelines = report.graph, report.timelines
    found = op_costs(graph, report.costs, report.plan)
    whole_us = sum(row.duration_us for row in found) or 1.0
    ordered = sorted(found, key=lambda row: -row.duration_us)[:_MAX_ROWS]
    shown = [name for name, timeline in timelines.items() if timeline.source == "measured"][:3]
    head = [
        *(Cell(word) for word in ("op", "role")),
        *(Cell(text(word), "n") for word in ("cost", "share", *(f"in {shorten(name, 20)}" for name in shown))),
        *(Cell(word) for word in ("layer", "target")),
    ]
    rows = []
    for op, duration_us, source in ordered:
        spans = [timelines[name].by_op.get(op.name) for name in shown]
        rows.append(
            [
                Cell(f"<code>{breakable(op.name)}</code>", "name"),
                Cell(swatch(op.role)),
                number(duration_us, duration_text(duration_us, MICRO) if source else "?"),
                number(duration_us, percent_text(duration_us / whole_us)),
                *(number(s.duration_us, duration_text(s.duration_us, MICRO)) if s else _NONE for s in spans),
                Cell(text(op.layer)),
                Cell(f"<code>{text(op.target)}</code>"),
            ]
        )
    some = "" if len(rows) == len(graph) else f" Below are the {len(rows):,} costliest."
    lead = f"{count_text(len(graph), 'op')}, together {duration_text(whole_us, MICRO)} where the plan runs them.{some}"
    groups = []
    by_kind = {"layer": totals(found, lambda op: op.layer), "role": totals(found, lambda op: op.role)}
    for word, totalled in by_kind.items():
        lines = [
            [
                Cell((swatch(t.name) if word == "role" else breakable(t.name)) or "(no layer)", "name"),
                number(t.ops, f"{t.ops:,}"),
                number(t.duration_us, duration_text(t.duration_us, MICRO)),
                number(t.duration_us, percent_text(t.duration_us / whole_us)),
            ]
            for t in totalled[:_MAX_ROWS]
        ]
        columns = [Cell(word), *(Cell(name, "n") for name in ("ops", "cost", "share"))]
        body = table(columns, lines, caption=f"Costs by {word}", sortable=True, tall=len(lines) > 8)
        groups.append(f"<div><h3>By {word}</h3>{body}</div>")
    body = (
        '<p class="bar"><input id="filter" type="search" placeholder="filter by any column"'
        ' aria-label="Filter the ops" hidden></p>'
        f"{table(head, rows, caption='Costliest ops', identity='ops-table', sortable=True, tall=True)}"
        f'<div class="pair">{"".join(groups)}</div>'
    )
    return section("ops", "Costliest ops", body, text(lead))


def changes_section(report: Report) -> str:
    """The plan's differences from its baseline, its lanes, and its text."""
    graph, plan, baseline = report.graph, report.plan, report.baseline_plan
    changed = changes(graph, plan, report.timelines, baseline)
    against = f"the plan “{baseline.planner}”" if baseline is not None and baseline.planner else "the serial order"
    tiles = [("Moved to another lane", changed.moved)]
    if changed.earlier is not None and changed.later is not None:
        tiles += [("Start earlier", changed.earlier), ("Start later", changed.later)]
    items = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{len(ops):,}<small>of {count_text(changed.ops, "op")}</small></dd></div>'
        for name, ops in tiles
    )
    waits = sum(len(before) for before in plan.after.values())
    extra = f" It adds {count_text(waits, 'wait')} beyond the graph's edges." if waits else ""
    lead = (
        f"Compared with {against}. An op counts as earlier or later if it overtook others, or was overtaken, "
        f"in the order in which ops start.{extra}"
    )
    head = [Cell("lane"), Cell("runs on"), Cell("ops", "n"), Cell("roles")]
    rows = [
        [
            Cell(text(lane.name), "name"),
            Cell(text(lane_text(lane))),
            number(len(lane.ops), f"{len(lane.ops):,}"),
            Cell(text(_roles(graph, lane.ops))),
        ]
        for lane in plan.lanes
    ]
    body = (
        f'<dl class="tiles">{items}</dl>{_by_role(graph, changed)}'
        f"<h3>Lanes of the plan</h3>{table(head, rows, caption='Lanes of the plan', tall=len(rows) > 12)}"
        f"<details><summary>The plan as text, {count_text(str(plan).count(chr(10)), 'line')}</summary>"
        f'<pre tabindex="0">{_lines(str(plan))}</pre></details>'
    )
    return section("changes", "What the plan changed", body, text(lead))


def environment_section(report: Report) -> str:
    """Where this was measured."""
    comparison, notes = report.comparison, report.notes
    rows: list[Sequence[Cell]] = []
    if comparison is not None:
        pairs = {
            "target": comparison.target,
            "device": comparison.device,
            **({"planner": comparison.planner} if comparison.planner else {}),
            **comparison.versions,
        }
        rows = [[Cell(text(name)), Cell(text(value), "name")] for name, value in pairs.items()]
        notes = [*comparison.notes, *notes]
    if not rows and not notes:
        return ""
    body = table([Cell("what"), Cell("which")], rows, caption="Environment") if rows else ""
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    listed = f'<ul class="notes">{items}</ul>' if items else ""
    return section("environment", "Environment", body + listed)


def _by_role(graph: Graph, changed: Changes) -> str:
    columns = [("moved", changed.moved)]
    if changed.earlier is not None and changed.later is not None:
        columns += [("earlier", changed.earlier), ("later", changed.later)]
    counts = {name: Counter(graph[op].role for op in ops if op in graph.by_name) for name, ops in columns}
    used = Counter(op.role for op in graph.ops)
    head = [Cell("role"), Cell("ops", "n"), *(Cell(name, "n") for name, _ in columns)]
    rows = [
        [Cell(swatch(role)), number(n, f"{n:,}"), *(number(c[role], f"{c[role]:,}") for c in counts.values())]
        for role, n in used.most_common()
    ]
    return table(head, rows, caption="Changes by role", sortable=True)


def _roles(graph: Graph, ops: Sequence[str]) -> str:
    counts = Counter(graph[op].role if op in graph.by_name else "unknown" for op in ops)
    return ", ".join(f"{role.replace('_', ' ')} {count:,}" for role, count in counts.most_common())


def _lines(words: str) -> str:
    return "\n".join(text(line) for line in words.split("\n"))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _ms(value_ms: float) -> str:
    return duration_text(value_ms * 1e3, MICRO)


# Each by its place in the template of the page.
SECTIONS = {
    each.__name__.removesuffix("_section"): each
    for each in (
        *(hero_section, comparison_section, gains_section, corunning_section, parts_section, lanes_section),
        *(ops_section, changes_section, attempts_section, environment_section),
    )
}
