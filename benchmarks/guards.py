"""What guards, watching and audits cost on every zoo step.

    python -m benchmarks guards mlp resnet20 -o guards.json

Guards are timed as a planned step meets them: nothing has changed since the last check. The audit's share is what its
schedule spends over 10,000 planned steps when one audit takes as long as the measured one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hocket import zoo
from hocket.autotune.audit import Audit, audited
from hocket.execution import executor
from hocket.ir import Machine
from hocket.profiling.tracer import serial_plan
from hocket.pystate.guards import Guards
from hocket.pystate.watch import PurityWatch
from hocket.tracing.capturing import capture_step

__all__ = ["measure", "run"]

CHECKS = 2000
STEPS = 10_000


def run(
    targets: tuple[str, ...],
    rounds: int = 5,
    *,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure each target, see `measure`; `save` is called with the result so far after each."""
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": Machine.here().cores,
        "torch": torch.__version__,
        "targets": {},
    }
    for target in targets:
        result["targets"][target] = measure(target, rounds)
        save(result)
    return result


def measure(target: str, rounds: int = 5) -> dict[str, float]:
    """Times of one target.

    Returns:
        ``groups`` that are guarded and ``values`` that were seen; ``check_us``, the median time of a check in a row of
        checks, and ``after_step_us``, of one after a planned step, which has emptied the caches, with its
        ``check_share`` of a planned step (serial plan, native lanes); ``watch_s``, what three watched steps take beyond
        three eager ones, and ``watch_steps``, the same in eager steps; ``audit_steps``, one audit in planned steps, and
        ``audit_share`` of 10,000.
    """
    job = zoo.load(target)
    watch = PurityWatch(job.step, (*job.models, *job.optimizers))
    watched = []
    for number in range(3):
        start = perf_counter()
        seen = watch.run(job.step, job.batch(number))
        watched.append(perf_counter() - start)
    eager = _times(job.step, job, rounds)
    guards = Guards(seen.after, watch)
    captured = capture_step(job.step, job.model, job.optimizer, job.batch(0), split=False)
    plan = serial_plan(captured, torch.get_num_threads(), Machine.here())
    lanes = executor(captured, plan, Machine.here())
    planned = _times(lanes, job, rounds + 2)
    assert guards.hold(), f"{target}: a guard fails where nothing has changed"
    checks = []
    for _ in range(rounds):
        start = perf_counter()
        for _ in range(CHECKS):
            guards.hold()
        checks.append((perf_counter() - start) / CHECKS)
    after_step = []
    for number in range(4 * rounds):
        lanes(job.batch(number))
        start = perf_counter()
        guards.hold()
        after_step.append(perf_counter() - start)
    start = perf_counter()
    found, _ = audited(captured, plan, lanes, job.batch(0), job.step)
    audit_s = perf_counter() - start
    assert found.equal, f"{target}: {found}"
    lanes.close()
    watch_s = sum(watched) - 3 * eager
    return {
        "groups": len(guards),
        "values": seen.after.num_values,
        "check_us": median(checks) * 1e6,
        "after_step_us": median(after_step) * 1e6,
        "check_share": median(after_step) / planned,
        "planned_ms": planned * 1e3,
        "eager_ms": eager * 1e3,
        "watch_s": watch_s,
        "watch_steps": watch_s / eager,
        "audit_steps": audit_s / planned,
        "audit_share": _audit_share(audit_s, planned),
    }


def _times(step: Any, job: Any, rounds: int) -> float:
    times = []
    for number in range(rounds):
        start = perf_counter()
        step(job.batch(number))
        times.append(perf_counter() - start)
    return median(times)


def _audit_share(audit_s: float, planned_s: float) -> float:
    audit = Audit()
    for number in range(1, STEPS + 1):
        audit.num_steps = number
        if number >= audit.due:
            audit.ended(audit_s, planned_s)
    return audit.num_audits * max(audit_s / planned_s - 1, 0.0) / STEPS
