"""What it takes until a schedule has decided: calls, seconds, and how much longer than eager steps would have taken.

Only the public face is used, so that an older version can be measured by the same file (its sources first on the path).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import hocket
from hocket import zoo

__all__ = ["measure", "run"]

EAGER_STEPS = 5
MAX_CALLS = 1000


def run(targets: tuple[str, ...], save: Callable[[dict[str, Any]], object] = lambda result: None) -> dict[str, Any]:
    """Measure each target (see `measure`); `save` gets the result so far after each."""
    result: dict[str, Any] = {"cores": hocket.Machine.here().cores, "targets": {}}
    for target in targets:
        result["targets"][target] = measure(target)
        save(result)
    return result


def measure(target: str) -> dict[str, Any]:
    """One target in a new schedule.

    Returns:
        ``eager_ms``, the median of eager steps before; ``calls`` and ``seconds`` until it is decided; ``over_eager_s``,
        these seconds less what as many eager steps take; ``verdict`` and ``why``.
    """
    job = zoo.load(target)
    eager_ms = []
    for number in range(EAGER_STEPS):
        start = perf_counter()
        job.step(job.batch(number))
        eager_ms.append((perf_counter() - start) * 1e3)
    fast = hocket.schedule(job.step, job.model, job.optimizer)
    start, calls = perf_counter(), 0
    while not fast.decided and calls < MAX_CALLS:
        fast(job.batch(calls))
        calls += 1
    seconds = perf_counter() - start
    fast.close()
    return {
        "eager_ms": median(eager_ms),
        "calls": calls,
        "seconds": seconds,
        "over_eager_s": seconds - calls * median(eager_ms) / 1e3,
        "verdict": str(fast.verdict),
        "why": fast.why,
    }
