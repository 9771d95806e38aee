"""Tables for a terminal, good at 80 columns and without one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.ir import Costs, Graph, Plan, Timeline
from hocket.reporting.comparison import Comparison, Sample
from hocket.reporting.summary import lane_text, lane_uses, op_costs
from hocket.reporting.words import count_text, duration_text, percent_text, plain, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text


# Titles and captions are set as wide as their table, and wrap badly above a narrow one.
_MIN_WIDTH = 76


def comparison_table(comparison: Comparison) -> Table:
    """Eager and planned (or regions) side by side, the bound below, and the verdict underneath."""
    from rich.text import Text

    kept = comparison.verdict
    table = styled_table(f"{comparison.target} on {comparison.device}, {count_text(comparison.ops, 'op')}")
    table.min_width = _MIN_WIDTH
    table.add_column("milliseconds", no_wrap=True)
    for name in ("lower quartile", "median", "min", "p90", "runs"):
        table.add_column(name, justify="right", no_wrap=True)

    def row(name: str, sample: Sample) -> None:
        times = (f"{value:,.3f}" for value in (sample.lower_quartile, sample.median, sample.min, sample.p90))
        table.add_row(name, *times, f"{sample.runs:,}", style="bold" if name == kept else None)

    row("eager", comparison.eager_ms)
    row("planned" if kept == "eager" else kept, comparison.planned_ms)
    if comparison.lower_bound_ms is not None:
        name = "est. lower bound" if comparison.is_bound_beaten else "lower bound"
        table.add_row(name, f"{comparison.lower_bound_ms:,.3f}", "", "", "", "", style="dim")
    figures = [f"\nspeedup {comparison.speedup:.2f}x"]
    if comparison.over_bound is not None:
        figures.append(f"{comparison.over_bound:.2f}x of the bound")
    if comparison.planner:
        figures.append(f"planner {plain(comparison.planner)}")
    caption = Text(", ".join(figures), style="default")
    caption.append("\nverdict: ")
    caption.append(kept, style="bold yellow" if kept == "eager" else "bold green")
    if comparison.why:
        caption.append(f" ({plain(comparison.why)})")
    if comparison.disagreement:
        caption.append(f"\n{comparison.disagreement}")
    caption.append(f"\n{comparison.result}")
    if comparison.is_bound_beaten:
        caption.append("\nthe lower bound is an estimate: a measured step has beaten it")
    for note in comparison.notes:
        caption.append(f"\nnote: {plain(note)}")
    table.caption = caption
    return table


def ops_table(graph: Graph, costs: Costs, top: int = 15, plan: Plan | None = None) -> Table:
    """The costliest ops, each where `plan` runs it, or at one thread."""
    rows = op_costs(graph, costs, plan)
    whole_us = sum(row.duration_us for row in rows)
    rows.sort(key=lambda row: -row.duration_us)
    table = styled_table(f"costliest ops of {len(rows):,}, together {duration_text(whole_us)}")
    table.expand = True  # names take what the figures leave
    table.add_column("op", no_wrap=True, ratio=6)
    table.add_column("layer", no_wrap=True, ratio=4)
    table.add_column("role", no_wrap=True)
    table.add_column("target", no_wrap=True, ratio=4)
    table.add_column("time us", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for row in rows[:top]:
        time = f"{row.duration_us:,.1f}" if row.source else "?"
        share = percent_text(row.duration_us / whole_us) if whole_us and row.source else ""
        op = row.op
        names = (_Short(op.name), _Short(op.layer), op.role.replace("_", " "), _Short(op.target.removeprefix("aten.")))
        table.add_row(*names, time, share)
    rest = rows[top:]
    if rest:
        rest_us = sum(row.duration_us for row in rest)
        share = percent_text(rest_us / whole_us) if whole_us else ""
        table.add_section()
        table.add_row(f"{count_text(len(rest), 'other op')}", "", "", "", f"{rest_us:,.1f}", share, style="dim")
    return table


def timeline_table(timeline: Timeline) -> Table:
    """Busy and idle time of each lane."""
    from rich.progress_bar import ProgressBar

    words = f"{timeline.source} step, {duration_text(timeline.makespan_us)}"
    table = styled_table(f"{words}, lanes busy {percent_text(timeline.utilisation)} of it")
    table.min_width = _MIN_WIDTH
    table.add_column("lane", no_wrap=True, overflow="ellipsis", max_width=28)
    for name in ("ops", "busy", "idle", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", width=16)
    for use in lane_uses(timeline):
        table.add_row(
            _text(use.lane),
            f"{use.ops:,}",
            duration_text(use.busy_us),
            duration_text(use.idle_us),
            percent_text(use.utilisation),
            ProgressBar(total=1.0, completed=use.utilisation, width=16, complete_style="green"),
        )
    return table


def plan_table(graph: Graph, plan: Plan) -> Table:
    """Device, number of ops and roles of each lane."""
    planner = f" by {plan.planner}" if plan.planner else ""
    table = styled_table(
        f"plan{plain(planner)}: {count_text(len(plan), 'op')} on {count_text(len(plan.lanes), 'lane')}"
    )
    table.add_column("lane", no_wrap=True, overflow="ellipsis", max_width=20)
    table.add_column("runs on", overflow="fold", max_width=28)
    table.add_column("ops", justify="right", no_wrap=True)
    table.add_column("roles", ratio=1)
    for lane in plan.lanes:
        counts = Counter(graph[op].role if op in graph.by_name else "unknown" for op in lane.ops)
        roles = ", ".join(f"{role.replace('_', ' ')} {n:,}" for role, n in counts.most_common())
        table.add_row(_text(lane.name), _text(lane_text(lane)), f"{len(lane.ops):,}", roles)
    return table


def styled_table(title: str) -> Table:
    """Return an empty table in the style of all reports."""
    from rich import box
    from rich.table import Table

    return Table(
        title=_text(title),
        title_style="bold",
        title_justify="left",
        caption_style="",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )


@dataclass(frozen=True)
class _Short:
    """A name whose middle is left out if the column is too narrow."""

    name: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(min(6, len(self.name)), len(self.name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield _text(shorten(plain(self.name), options.max_width))


def _text(text: str) -> Text:
    # A string would be read as markup: an op may be called "[/]".
    from rich.text import Text

    return Text(plain(text))
