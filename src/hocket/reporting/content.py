"""`Report`: the subject of a report, and all that its page, drawings and files show.

Of the gains between an eager and a planned step up to four kinds of steps are measured, and each difference is one::

    eager      [ Python | dispatch | ops ........................ ]
    serial     [ the same ops as native code, one after another ]      less Python and dispatch, memory is kept
    in form    [ the ops of the chosen form ............ ]             other kernels
    planned    [ the same ops on lanes ...... ]                        order, widths, ops side by side

How much of the first difference is Python, and how much is dispatch, is estimated from a record of eager's step. The
rest of it is what kept memory and shorter calls of the kernels are worth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hocket.ir import Costs, Graph, Op, Plan, Timeline
from hocket.reporting.comparison import Comparison


@dataclass(frozen=True)
class Gain:
    """A part of the difference between eager and planned, in milliseconds. It is negative if time was lost."""

    name: str
    saved_ms: float
    is_estimate: bool
    note: str


@dataclass(frozen=True)
class Attempt:
    """A form or a plan that a search tried."""

    form: str  # name of the form, empty for the only one
    planner: str  # made the plan, empty if the form was left out before
    duration_ms: float | None  # lower quartile of its steps, or None if none was compared
    outcome: str  # kept, or why not


def gains_of(
    *,
    eager_ms: float,
    planned_ms: float,
    serial_ms: float,
    in_form_ms: float | None = None,
    shares: Mapping[str, float] | None = None,
) -> tuple[Gain, ...]:
    """Return the gains, which add up to the difference.

    Times are lower quartiles: of eager's steps, of the planned ones, of eager's ops as native code, one after another,
    and of those of the plan's form, if it is another one. `shares` are of eager's time, by row of its record.
    """
    before_ms = serial_ms if in_form_ms is None else in_form_ms
    lanes = Gain("order and lanes", before_ms - planned_ms, False, "ops side by side, at other widths")
    forms = [] if in_form_ms is None else [Gain("form", serial_ms - in_form_ms, False, "other kernels and fewer ops")]
    first_ms = eager_ms - serial_ms
    if not shares:
        first = [Gain("Python, dispatch and memory", first_ms, False, "the same ops, as native code on kept memory")]
    else:
        python_ms, dispatch_ms = shares["Python"] * eager_ms, shares["dispatch"] * eager_ms
        first = [
            Gain("Python", python_ms, True, "by the record of eager's step"),
            Gain("autograd and dispatch", dispatch_ms, True, "by the record of eager's step"),
            Gain("kept memory, direct calls", first_ms - python_ms - dispatch_ms, True, "the rest of eager's own time"),
        ]
    return (*first, *forms, lanes)


def waterfall(gains: Sequence[Gain], eager_ms: float) -> list[tuple[float, float]]:
    """Return the times between which the bar of each gain lies, in milliseconds."""
    levels = list(itertools.accumulate((-gain.saved_ms for gain in gains), initial=eager_ms))
    return [(min(pair), max(pair)) for pair in itertools.pairwise(levels)]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step, its plan, and what was measured."""

    title: str  # names the subject of the report
    graph: Graph  # the step's ops
    plan: Plan  # the plan that is reported on
    costs: Costs  # durations of the ops
    timelines: Mapping[str, Timeline]  # name -> timeline, in the order in which they are drawn: eager first
    comparison: Comparison | None = None  # eager against planned, when both were measured
    # no plan is faster. The bound of `comparison` goes first. It is shown as an estimate if a measured step is faster.
    lower_us: float | None = None
    upper_us: float | None = None  # the time at which efficiency is 0
    baseline_plan: Plan | None = None  # the plan to compare with. Defaults to all ops on one lane in the graph's order.
    notes: Sequence[str] = ()  # lines about the environment
    gains: Sequence[Gain] = ()  # parts of the difference between eager and planned
    attempts: Sequence[Attempt] = ()  # the forms and plans that were tried
    # name of a timeline -> its heading, in place of its duration and use. Its rows are kinds of time of one thread.
    captions: Mapping[str, str] = field(default_factory=dict)
    further_ops: Sequence[Op] = ()  # ops of timelines that are not in `graph`

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

    @property
    def bound_name(self) -> str:
        """The name of the bound in texts."""
        return "estimated lower bound" if self.is_bound_beaten else "lower bound"

    @cached_property
    def drawn(self) -> Graph:
        """The graph with all further ops of the timelines."""
        further = tuple(op for op in self.further_ops if op.name not in self.graph.by_name)
        return replace(self.graph, ops=(*self.graph.ops, *further)) if further else self.graph

    @property
    def on_lanes(self) -> dict[str, Timeline]:
        """The timelines whose rows are lanes."""
        return {name: timeline for name, timeline in self.timelines.items() if name not in self.captions}
