"""Costs of Hocket itself: capturing a step, profiling it, and the time between ops in the Python executor.

    python -m benchmarks overhead mlp resnet20

The overhead of an op is a step's time, less the time that native lanes spend inside ops, over the number of ops: for
eager, for Python lanes, and for native lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.bench import Save, by_target, ratios, unsaved
from hocket import zoo
from hocket.cli.console import table
from hocket.execution import executor
from hocket.ir import Machine
from hocket.profiling import profile
from hocket.profiling.tracer import serial_plan
from hocket.tracing import capture

TARGETS = ("mlp", "digits-cnn", "lenet", "lstm-cells", "transformer", "resnet20")
ROUNDS = 15


def run(targets: tuple[str, ...] = TARGETS, save: Save = unsaved) -> dict[str, Any]:
    """Measure each target, eager and planned in turn. See `measure` for the fields."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return by_target(targets, measure, save)
    finally:
        torch.set_num_threads(usual)


def measure(target: str) -> dict[str, float]:
    """Times of one target.

    Returns:
        ``ops``; ``eager_ms``, ``python_ms`` and ``native_ms`` (medians of interleaved steps on one thread, so that no
        thread waits for another); ``capture_steps`` and ``profile_steps`` (time to capture, and to profile with its
        defaults, in eager steps); ``op_us`` (mean time inside an op on native lanes); and for each way of running the
        time of a step that is not spent inside ops, by the number of ops: ``eager_overhead_us`` and so on.
    """
    job, machine = zoo.load(target), Machine.here()
    for number in range(3):
        job.step(job.batch(number))
    start = perf_counter()
    captured = capture(job.step, job.model, job.optimizer, job.batch(0), split=False)
    capture_s = perf_counter() - start
    start = perf_counter()
    profile(captured, machine=machine)
    profile_s = perf_counter() - start
    plan = serial_plan(captured, 1, machine)
    python, native = (executor(captured, plan, machine, kind=kind) for kind in ("python", "auto"))
    work: dict[str, Callable[[Any], Any]] = {"eager": job.step, "python": python, "native": native}
    times: dict[str, list[float]] = {label: [] for label in work}
    inside_ms: list[float] = []
    for number in range(ROUNDS + 2):
        for label, step in work.items():
            start = perf_counter()
            step(job.batch(number))
            times[label].append((perf_counter() - start) * 1e3)
        inside_ms.append(sum(span.duration_us for span in native.timeline().spans) / 1e3)
    ops = len(captured.graph)
    inside = median(inside_ms[2:])
    found = {label: median(values[2:]) for label, values in times.items()}
    return {
        "ops": ops,
        **{f"{label}_ms": value for label, value in found.items()},
        "capture_steps": capture_s * 1e3 / found["eager"],
        "profile_steps": profile_s * 1e3 / found["eager"],
        "op_us": inside / ops * 1e3,
        **{f"{label}_overhead_us": (value - inside) / ops * 1e3 for label, value in found.items()},
    }


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    figures = ("eager_overhead_us", "python_overhead_us", "native_overhead_us")
    rows = [
        (
            *(target, str(row["ops"]), f"{row['capture_steps']:.0f}", f"{row['profile_steps']:.0f}"),
            *(f"{row['op_us']:.1f}", *ratios(row, figures)),
        )
        for target, row in result["targets"].items()
    ]
    columns = ("target", "ops", "capture, steps", "profile, steps", "us in an op", "eager us", "python us", "native us")
    yield table("what Hocket itself costs (times between ops, per op)", columns, rows)
