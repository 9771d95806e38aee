"""What Hocket itself costs: capturing a step, profiling it, and the time between ops in the Python executor.

    python -m hocket.bench.overhead mlp resnet20

The overhead of an op is the executor's time for a step, less the time spent inside ops, over the number of ops. It is
set beside eager's own: eager's time for a step, less the same time inside ops.
"""

from __future__ import annotations

import argparse
import json
import platform
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hocket import zoo
from hocket.capture import capture
from hocket.execute.threads import ThreadLanes
from hocket.ir import Machine
from hocket.profile import profile
from hocket.profile.tracer import one_lane

__all__ = ["TARGETS", "run"]

TARGETS = ("mlp", "digits-cnn", "lenet", "lstm-cells", "transformer", "resnet20")


def run(targets: tuple[str, ...] = TARGETS, *, rounds: int = 15) -> dict[str, Any]:
    """Measure each target, eager and planned in turn; see `measure` for the fields."""
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": Machine.here().cores,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "targets": {target: measure(target, rounds=rounds) for target in targets},
    }


def measure(target: str, *, rounds: int = 15) -> dict[str, float]:
    """Times of one target.

    Returns:
        ``ops``; ``eager_ms`` and ``planned_ms`` (medians of interleaved steps); ``capture_steps`` and
        ``profile_steps`` (time to capture, and to profile with its defaults, in eager steps); ``op_us`` (mean time
        inside an op); ``overhead_us`` (between two ops, planned) and ``eager_overhead_us``.
    """
    job = zoo.load(target)
    machine = Machine.here()
    for number in range(3):
        job.step(job.batch(number))
    start = perf_counter()
    captured = capture(job.step, job.model, job.optimizer, job.batch(0), split=False)
    capture_s = perf_counter() - start
    start = perf_counter()
    profile(captured, machine=machine)
    profile_s = perf_counter() - start
    executor = ThreadLanes(captured, one_lane(captured, torch.get_num_threads(), machine), machine)
    eager_ms: list[float] = []
    planned_ms: list[float] = []
    inside_ms: list[float] = []
    for number in range(rounds + 1):
        for times, work in ((eager_ms, job.step), (planned_ms, executor)):
            start = perf_counter()
            work(job.batch(number))
            times.append((perf_counter() - start) * 1e3)
        inside_ms.append(sum(span.duration_us for span in executor.timeline().spans) / 1e3)
    ops = len(captured.graph)
    eager, planned, inside = (median(times[1:]) for times in (eager_ms, planned_ms, inside_ms))
    return {
        "ops": ops,
        "eager_ms": eager,
        "planned_ms": planned,
        "capture_steps": capture_s * 1e3 / eager,
        "profile_steps": profile_s * 1e3 / eager,
        "op_us": inside / ops * 1e3,
        "overhead_us": (planned - inside) / ops * 1e3,
        "eager_overhead_us": (eager - inside) / ops * 1e3,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", default=TARGETS)
    print(json.dumps(run(tuple(parser.parse_args().target)), indent=1))
