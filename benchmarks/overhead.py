"""Costs of Hocket itself: capturing a step, profiling it, and the time between ops in the Python executor.

The overhead of an op is a step's time, less the time that native lanes spend inside ops, over the number of ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.bench import Save, by_target, table_of, unsaved
from benchmarks.turns import in_turns, one_thread
from hocket import zoo
from hocket.execution import executor
from hocket.ir import Machine
from hocket.profiling import profile
from hocket.profiling.tracer import serial_plan
from hocket.tracing import capture

TARGETS = ("mlp", "digits-cnn", "lenet", "lstm-cells", "transformer", "resnet20")
ROUNDS = 15


def run(targets: tuple[str, ...] = TARGETS, save: Save = unsaved) -> dict[str, Any]:
    """Measure each target, eager and planned in turn, on one thread, so that no thread waits for another."""
    with one_thread():
        return by_target(targets, measure, save)


def measure(target: str) -> dict[str, float]:
    """Times of one target: of steps, to capture and to profile in eager steps, and per op inside it and outside."""
    job, machine = zoo.load(target), Machine.here()
    for number in range(3):
        job.step(job.batch(number))
    start = perf_counter()
    captured = capture(job.step, job.model, job.optimizer, job.batch(0), split=False)
    capture_ms = (perf_counter() - start) * 1e3
    start = perf_counter()
    profile(captured, machine=machine)
    profile_ms = (perf_counter() - start) * 1e3
    plan = serial_plan(captured, 1, machine)
    python, native = (executor(captured, plan, machine, kind=kind) for kind in ("python", "auto"))
    work: dict[str, Callable[[Any], Any]] = {"eager": job.step, "python": python, "native": native}
    ms = {label: median(found) for label, found in in_turns(work, job.batch, rounds=ROUNDS, block=1).items()}
    inside_ms = []
    for number in range(ROUNDS):
        native(job.batch(number))
        inside_ms.append(sum(span.duration_us for span in native.timeline().spans) / 1e3)
    native.close()
    inside, ops = median(inside_ms), len(captured.graph)
    return {
        "ops": ops,
        **{f"{label}_ms": value for label, value in ms.items()},
        "capture_steps": capture_ms / ms["eager"],
        "profile_steps": profile_ms / ms["eager"],
        "op_us": inside / ops * 1e3,
        **{f"{label}_overhead_us": (value - inside) / ops * 1e3 for label, value in ms.items()},
    }


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {
        **{"target": "{name}", "ops": "{ops}", "capture, steps": "{capture_steps:.0f}"},
        **{"profile, steps": "{profile_steps:.0f}", "us in an op": "{op_us:.1f}"},
        **{f"{label} us": f"{{{label}_overhead_us:.2f}}" for label in ("eager", "python", "native")},
    }
    yield table_of("what Hocket itself costs (times between ops, per op)", columns, result["targets"])
