"""What it takes until a schedule has decided: calls, seconds, and how much longer than eager steps would have taken.

Only the public face is used, so that an older version can be measured by the same file (its sources first on the path).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import hocket
from hocket import zoo

__all__ = ["measure", "run"]

EAGER_STEPS = 5
MAX_CALLS = 1000
# What a cold search may take (issue 14): this many times what eager would have taken, and so many seconds.
MAX_SHARE, MAX_FIXED_S = 1.25, 3.0


def run(targets: tuple[str, ...], save: Callable[[dict[str, Any]], object] = lambda result: None) -> dict[str, Any]:
    """Measure each target (see `measure`); `save` gets the result so far after each."""
    result: dict[str, Any] = {"cores": hocket.Machine.here().cores, "targets": {}}
    for target in targets:
        result["targets"][target] = measure(target)
        save(result)
    return result


def measure(target: str) -> dict[str, Any]:
    """One target in a new schedule that remembers nothing.

    Returns:
        ``eager_ms``, the median of eager steps before and after; ``calls`` and ``seconds`` until it is decided;
        ``over_eager_s``, these seconds less what as many eager steps take; ``within``: whether they are at most 1.25
        times that and 3 s; ``verdict`` and ``why``.
    """
    job = zoo.load(target)
    eager_ms: list[float] = []
    _eager_steps(job, eager_ms)
    options: dict[str, Any] = {"cache": False} if "cache" in inspect.signature(hocket.schedule).parameters else {}
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
    }


def _eager_steps(job: Any, eager_ms: list[float]) -> None:
    for number in range(EAGER_STEPS):
        start = perf_counter()
        job.step(job.batch(number))
        eager_ms.append((perf_counter() - start) * 1e3)
