"""Calls and seconds until a schedule has decided, and the excess over eager steps.

Cold, where nothing is remembered; and warm, in another process that finds what the first one has decided. Only the
public face is used, so that an older version can be measured by the same file (its sources first on the path).
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any

import hocket
from hocket import zoo

__all__ = ["measure", "run"]

EAGER_STEPS = 5
MAX_CALLS = 1000
# What a cold search may take: this many times what eager would have taken, and so many seconds.
MAX_SHARE, MAX_FIXED_S = 1.25, 3.0
REMEMBERS = "cache" in inspect.signature(hocket.schedule).parameters


def run(targets: tuple[str, ...], save: Callable[[dict[str, Any]], object] = lambda result: None) -> dict[str, Any]:
    """Measure each target (see `measure`) cold, and ``warm`` in a new process. `save` gets the result so far."""
    result: dict[str, Any] = {"cores": hocket.Machine.here().cores, "targets": {}}
    for target in targets:
        with tempfile.TemporaryDirectory() as folder:
            result["targets"][target] = measure(target, folder)
            if REMEMBERS:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    result["targets"][target]["warm"] = pool.submit(measure, target, folder).result()
        save(result)
    return result


def measure(target: str, folder: str) -> dict[str, Any]:
    """One target in a new schedule.

    Args:
        target: a zoo name.
        folder: where decisions are remembered.

    Returns:
        ``eager_ms``, the median of eager steps before and after; ``calls`` and ``seconds`` until it is decided;
        ``over_eager_s``, these seconds less what as many eager steps take; ``within``: whether they are at most 1.25
        times that and 3 s; ``verdict`` and ``why``; ``recalled``: whether it was remembered; ``planned_from``: the
        first call that a plan of the comparison may have made, counted from 1.
    """
    job = zoo.load(target)
    eager_ms: list[float] = []
    _eager_steps(job, eager_ms)
    stages: list[str] = []
    options: dict[str, Any] = {}
    if REMEMBERS:
        options = {"cache": folder, "on_progress": lambda stage, number: stages.append(stage)}
    fast = hocket.schedule(job.step, job.model, job.optimizer, **options)
    start, calls = perf_counter(), 0
    while not fast.decided and calls < MAX_CALLS:
        fast(job.batch(calls))
        calls += 1
    seconds = perf_counter() - start
    fast.close()
    _eager_steps(job, eager_ms)
    eager_s = calls * median(eager_ms) / 1e3
    return {
        "eager_ms": median(eager_ms),
        "calls": calls,
        "seconds": seconds,
        "over_eager_s": seconds - eager_s,
        "within": seconds <= MAX_SHARE * eager_s + MAX_FIXED_S,
        "verdict": str(fast.verdict),
        "why": fast.why,
        "recalled": REMEMBERS and fast.decision.is_recalled,
        "planned_from": stages.index("compare") + 1 if "compare" in stages else None,
    }


def _eager_steps(job: Any, eager_ms: list[float]) -> None:
    for number in range(EAGER_STEPS):
        start = perf_counter()
        job.step(job.batch(number))
        eager_ms.append((perf_counter() - start) * 1e3)
