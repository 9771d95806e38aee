"""`Report`: the subject of a report, and all that its page, drawings and files show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hocket.ir import Costs, Graph, Op, Plan, Timeline
from hocket.reporting.comparison import Comparison
from hocket.reporting.gains import Attempt, Gain


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step, its plan, and what was measured.

    Attributes:
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
        gains: parts of the difference between eager and planned.
        attempts: the forms and plans that were tried.
        captions: name of a timeline -> its heading, in place of its duration and use. Its rows are kinds of time of
            one thread.
        further_ops: ops of timelines that are not in `graph`.
    """

    title: str
    graph: Graph
    plan: Plan
    costs: Costs
    timelines: Mapping[str, Timeline]
    comparison: Comparison | None = None
    lower_us: float | None = None
    upper_us: float | None = None
    baseline_plan: Plan | None = None
    notes: Sequence[str] = ()
    gains: Sequence[Gain] = ()
    attempts: Sequence[Attempt] = ()
    captions: Mapping[str, str] = field(default_factory=dict)
    further_ops: Sequence[Op] = ()

    @cached_property
    def bound_us(self) -> float | None:
        """The lower bound that is shown, None if none is known."""
        if self.comparison is not None and self.comparison.lower_bound_ms is not None:
            return self.comparison.lower_bound_ms * 1e3
        return self.lower_us if self.lower_us is not None and math.isfinite(self.lower_us) else None

    @cached_property
    def is_bound_beaten(self) -> bool:
        """True if a measured step is faster than the bound, which is then an estimate."""
        measured_us = [each.makespan_us for each in self.timelines.values() if each.source == "measured" and each.spans]
        if self.comparison is not None:
            measured_us += [sample.min * 1e3 for sample in (self.comparison.eager_ms, self.comparison.planned_ms)]
        return self.bound_us is not None and min(measured_us, default=math.inf) < self.bound_us

    @cached_property
    def drawn(self) -> Graph:
        """The graph with all further ops of the timelines."""
        further = tuple(op for op in self.further_ops if op.name not in self.graph.by_name)
        return replace(self.graph, ops=(*self.graph.ops, *further)) if further else self.graph

    @property
    def on_lanes(self) -> dict[str, Timeline]:
        """The timelines whose rows are lanes."""
        return {name: timeline for name, timeline in self.timelines.items() if name not in self.captions}
