"""A decision as figures for a table or a report: eager and planned side by side, the bounds, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hocket.autotune.decision import Decision, Verdict
from hocket.autotune.verification import Difference
from hocket.backends import Backend
from hocket.ir import Span, Timeline
from hocket.planning import efficiency
from hocket.reporting import Attempt, Comparison, Sample, lower_quartile

# Pairs of ops that a report names, of those that ran side by side and gained most, and ops that run at one width only.
REPORTED_PAIRS = REPORTED_OPS = 5


def comparison_of(
    target: str,
    decision: Decision,
    backend: Backend,
    difference: Difference | None,
    eager_ms: Sequence[float] = (),
    planned_ms: Sequence[float] = (),
) -> Comparison:
    """Compare eager with the best plan of a decision, by its own times or by those of interleaved steps.

    Without a plan there have to be times, those of `planned_ms` of whatever took its place.
    """
    found = decision.candidate
    own_ms = found.steps_ms if found else ()
    eager, planned = Sample.of(eager_ms or decision.eager_ms), Sample.of(planned_ms or own_ms)
    limits = backend.bounds(found.captured.graph, found.costs) if found else None
    measured = Timeline((Span("step", "step", 0.0, planned.lower_quartile * 1e3),), ("step",), "measured")
    return Comparison(
        target=target,
        device=backend.label,
        cores=backend.num_cores,
        ops=len(found.captured.graph) if found else 0,
        eager_ms=eager,
        planned_ms=planned,
        lower_bound_ms=limits.lower_us / 1e3 if limits else None,
        efficiency=efficiency(measured, limits) if limits else None,
        speedup=eager.lower_quartile / planned.lower_quartile,
        verdict=decision.kind,
        why=decision.reason,
        max_abs_diff=difference.max_abs_diff if difference else None,
        bitwise=difference is not None and difference.bitwise,
        planner=found.plan.planner if found else "",
        versions={"torch": torch.__version__},
        notes=backend.notes,
        speedup_interval=decision.promised,
    )


def attempts_of(decision: Decision) -> tuple[Attempt, ...]:
    """Return the plans that a decision has compared, and the forms that were left out before."""
    found = []
    for place, candidate in enumerate(decision.candidates):
        outcome = "slower" if place else "kept" if decision.best is not None else "the best plan, eager was kept"
        if decision.is_recalled:
            outcome += ", remembered from an earlier search"
        time_ms = lower_quartile(candidate.steps_ms) if candidate.steps_ms else None
        found.append(Attempt(candidate.form, candidate.plan.planner, time_ms, outcome))
    found += [Attempt(form, "", None, f"left out: {reason}") for form, reason in decision.left_out]
    return tuple(found)


def notes_of(decision: Decision, history: Sequence[Verdict]) -> tuple[str, ...]:
    """Return the notes of a report: earlier verdicts, and pairs of ops that gained or lost by running at once."""
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
    return (*lines, *_for_their_bits(decision))


def _for_their_bits(decision: Decision) -> Iterator[str]:
    """Yield a note on ops that run at one width only, so that nothing can run beside them if that is all cores."""
    costs = decision.candidate.costs if decision.candidate else None
    if costs is None or not costs.only_listed:
        return
    step_us = sum(min(durations.values()) for durations in costs.durations_us.values())
    bound = {op: next(iter(row.items())) for op, row in costs.durations_us.items() if len(row) == 1}
    wide = {op: us for op, (width, us) in bound.items() if width.isdecimal() and int(width) > 1}
    if not wide:
        return
    slowest = sorted(wide, key=lambda op: -wide[op])[:REPORTED_OPS]
    listed = ", ".join(f"{op} ({wide[op]:.0f} us)" for op in slowest)
    more = f" and {len(wide) - len(slowest)} more" if len(wide) > len(slowest) else ""
    yield (
        f"numerics='bitwise' lets {len(wide)} op(s), {sum(wide.values()) / step_us:.0%} of all ops' time, run with "
        f"eager's number of threads only, since another one changes their bits: {listed}{more}; "
        "numerics='rounding' lets them run beside others"
    )
