"""What a decision amounts to, for a table or a report: eager and planned side by side, the bounds, and notes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hocket.autotune.candidate import Candidate
from hocket.autotune.decision import Decision, Verdict
from hocket.autotune.verification import Difference
from hocket.ir import Device, Machine, Span, Timeline
from hocket.planning import Bounds, bounds, efficiency
from hocket.reporting import Comparison, Sample

__all__ = ["bounds_of", "comparison_of", "device_of", "notes_of"]

# Pairs of ops that a report names, of those that ran side by side and gained most.
REPORTED_PAIRS = 5


def device_of(candidate: Candidate, machine: Machine) -> Device:
    """What a plan's ops run on."""
    return machine.by_name[next(lane.device for lane in candidate.plan.lanes if lane.ops)]


def bounds_of(candidate: Candidate, machine: Machine) -> Bounds:
    """Between which times any plan of this graph lies on the device that the candidate runs on."""
    return bounds(candidate.captured.graph, candidate.costs, Machine((device_of(candidate, machine),)))


def comparison_of(
    target: str,
    decision: Decision,
    machine: Machine,
    difference: Difference | None,
    eager_ms: Sequence[float] = (),
    planned_ms: Sequence[float] = (),
) -> Comparison:
    """Eager and the best plan of a decision side by side.

    Args:
        target: what it is called.
        decision: one that has a candidate.
        machine: what it ran on.
        difference: what a verification found.
        eager_ms: times of eager steps; those of the decision where none are given.
        planned_ms: times of planned steps, in turns with these.
    """
    found = decision.candidate
    assert found is not None, "there is a plan to compare"
    eager, planned = Sample.of(eager_ms or decision.eager_ms), Sample.of(planned_ms or found.steps_ms)
    limits, device = bounds_of(found, machine), device_of(found, machine)
    measured = Timeline((Span("step", "step", 0.0, planned.lower_quartile * 1e3),), ("step",), "measured")
    return Comparison(
        target=target,
        device=device.kind,
        cores=device.cores,
        ops=len(found.captured.graph),
        eager_ms=eager,
        planned_ms=planned,
        lower_bound_ms=limits.lower_us / 1e3,
        efficiency=efficiency(measured, limits),
        speedup=eager.lower_quartile / planned.lower_quartile,
        verdict=decision.kind,
        why=decision.reason,
        max_abs_diff=difference.max_abs_diff if difference else None,
        bitwise=difference is not None and difference.bitwise,
        planner=found.plan.planner,
        versions={"torch": torch.__version__},
    )


def notes_of(decision: Decision, history: Sequence[Verdict]) -> tuple[str, ...]:
    """What a report adds in words: earlier verdicts, and how pairs of ops fared side by side."""
    lines = [f"before that: {verdict}, because {verdict.why}" for verdict in history[-2::-1]]
    bad = [pair for pair in decision.co_runs if pair.interfered]
    good = [pair for pair in reversed(decision.co_runs) if pair.faster_together][:REPORTED_PAIRS]
    for words, pairs in (("faster side by side", good), ("interfered", bad[:REPORTED_PAIRS])):
        lines += [
            f"{words}: {pair.first} and {pair.second}, together for {pair.overlap_us:.0f} us that take "
            f"{pair.in_turn_us:.0f} us in turn"
            for pair in pairs
        ]
    if len(bad) > REPORTED_PAIRS:
        lines.append(f"interfered: {len(bad) - REPORTED_PAIRS} further pairs")
    return tuple(lines)
