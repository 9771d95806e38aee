"""Interference: pairs of ops that ran at the same time and would have been faster in turn, measured in place.

A cost is the duration of an op that runs alone. Two ops at once share caches and memory, so a plan made from costs may
predict times that the machine does not reach. Liu et al. ("Runtime Concurrency Control and Operation Scheduling for
High Performance Neural Network Training", IPDPS 2019, section III-D, discussion) record such cases and avoid co-running
them in later steps. A case is recognised like this::

    lane 0   |======= a =======|            a takes 190 us here, 100 alone, 60 with the cores of both lanes
    lane 1         |====== b ======|        b takes 150 us here,  90 alone, 50 with the cores of both lanes
                   |<- 120 us ->|
                                            while both run, a does 120/190 of its work and b 120/150.
                                            in turn, each with all the cores, that takes
                                            120/190 * 60 + 120/150 * 50 = 78 us: less than 120, so they interfere

Over the time together this is the weighted speedup of two programs on one machine (Eyerman and Eeckhout, "System-Level
Performance Metrics for Multiprogram Workloads", IEEE Micro 28(3), 2008: system throughput, the sum of each program's
progress): at or below 1 it gains nothing to run them at once. The costs alone show the planner where wide ops
are better run in turn, so a pair is only called interfering if each of the two was slowed as well.

An op's progress is assumed to be even over its run, so a partner may be blamed for the effect of another one. Most such
cases are excluded because the partner must have been slowed itself. One step on a shared machine is not enough: all
figures are medians over several timelines of the same plan, compared with the costs' medians, and a pair must have met
in most of the timelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from hocket.errors import InputError
from hocket.ir import Costs, Lane, Plan, Span, Timeline

# Shorter overlaps than the time to wake a lane are ignored.
MIN_OVERLAP_US = 5.0

# An op counts as slowed from here on; medians of a few steps are not better known than that.
SLOWED = 1.05


@dataclass(frozen=True)
class CoRun:
    """Two ops that ran side by side, and how they fared."""

    first: str  # the ops, in alphabetical order
    second: str
    overlap_us: float  # how long both ran at once
    # what the work they did in that time takes when they run one after the other, each at its best width on the cores
    # of both lanes
    in_turn_us: float
    first_slowdown: float  # duration here over duration alone at the same width
    second_slowdown: float

    @property
    def ops(self) -> tuple[str, str]:
        return self.first, self.second

    @property
    def gain_us(self) -> float:
        """The time that running them at once saved, negative if it cost time."""
        return self.in_turn_us - self.overlap_us

    @property
    def faster_together(self) -> bool:
        return self.gain_us > 0

    @property
    def interfered(self) -> bool:
        """True if each slowed the other, and running them in turn would have been no slower."""
        return not self.faster_together and min(self.first_slowdown, self.second_slowdown) >= SLOWED


def interfering(found: Iterable[CoRun]) -> tuple[tuple[str, str], ...]:
    """The pairs that interfered, the costliest first: what the planner ``concurrency`` takes as ``avoid``."""
    return tuple(pair.ops for pair in sorted(found, key=_by_gain) if pair.interfered)


def co_runs(timelines: Iterable[Timeline], plan: Plan, costs: Costs) -> tuple[CoRun, ...]:
    """The pairs of ops that ran side by side on lanes of cores of one device, those that lost most first.

    The timelines are measured, of several steps by `plan`, and the costs are those of ops that run alone.
    """
    seen = list(timelines)
    alone = _Alone(costs)
    met: dict[tuple[str, str], list[CoRun]] = {}
    for timeline in seen:
        for one, other in _meetings(timeline, _lanes_of(timeline, plan)):
            pair = _judged(one, other, plan, alone)
            met.setdefault(pair.ops, []).append(pair)
    found = [_typical(pairs) for pairs in met.values() if 2 * len(pairs) > len(seen)]
    return tuple(sorted((pair for pair in found if pair.overlap_us >= MIN_OVERLAP_US), key=_by_gain))


class _Alone:
    """Durations of ops that run alone: medians, computed from the minimum and spread of the costs."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[tuple[str, int, str], float] = {}

    def at(self, op: str, width: int, device: str) -> float:
        spread = self._costs.spread_us.get(op, {})
        found = self._costs.duration_us(op, width=width, device=device)
        return found + next((spread[key] for key in (f"{device}:{width}", device, str(width)) if key in spread), 0.0)

    def best(self, op: str, cores: int, device: str) -> float:
        """At its best width on up to `cores` cores."""
        key = (op, cores, device)
        if key not in self._known:
            self._known[key] = min(self.at(op, width, device) for width in range(1, cores + 1))
        return self._known[key]


def _judged(one: Span, other: Span, plan: Plan, alone: _Alone) -> CoRun:
    one, other = sorted((one, other))
    lanes = plan.lane_of[one.op], plan.lane_of[other.op]
    overlap_us = min(one.end_us, other.end_us) - max(one.start_us, other.start_us)
    both = sum(lane.width for lane in lanes)
    in_turn_us, slowdowns = 0.0, []
    for span, lane in zip((one, other), lanes, strict=True):
        in_turn_us += overlap_us / span.duration_us * alone.best(span.op, both, lane.device)
        usual_us = alone.at(span.op, lane.width, lane.device)
        slowdowns.append(span.duration_us / usual_us if usual_us else float("inf"))
    return CoRun(one.op, other.op, overlap_us, in_turn_us, *slowdowns)


def _typical(pairs: Sequence[CoRun]) -> CoRun:
    return CoRun(
        pairs[0].first,
        pairs[0].second,
        overlap_us=median(pair.overlap_us for pair in pairs),
        # The median of the ratio: a long meeting of one step must not weigh against a short one of another.
        in_turn_us=median(pair.in_turn_us / pair.overlap_us for pair in pairs) * median(p.overlap_us for p in pairs),
        first_slowdown=median(pair.first_slowdown for pair in pairs),
        second_slowdown=median(pair.second_slowdown for pair in pairs),
    )


def _lanes_of(timeline: Timeline, plan: Plan) -> dict[str, Lane]:
    for span in timeline.spans:
        if span.op not in plan.lane_of:
            raise InputError(f"co_runs: op {span.op!r} of the timeline is run by no lane of the plan")
    return {lane.name: lane for lane in plan.lanes if lane.kind == "cores"}


def _meetings(timeline: Timeline, lanes: dict[str, Lane]) -> Iterator[tuple[Span, Span]]:
    """All pairs of spans that overlap, on different lanes of one device: a sweep from left to right."""
    running: dict[str, Span] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.start_us, span.end_us)):
        if span.lane not in lanes or span.duration_us == 0:
            continue
        for lane, other in running.items():
            if lane != span.lane and other.end_us > span.start_us and lanes[lane].device == lanes[span.lane].device:
                yield other, span
        running[span.lane] = span


def _by_gain(pair: CoRun) -> tuple[float, str, str]:
    return pair.gain_us, pair.first, pair.second
