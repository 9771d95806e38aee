"""Another version's scheduled steps against this one's: two processes, in turns, on the same targets.

Each process schedules the step with its own sources until it is decided, and then makes a block of steps whenever it is
asked to; the two never run at the same time. What is compared is what a caller pays: whole calls of the schedule.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import hocket
from hocket.reporting import lower_quartile

__all__ = ["measure", "run"]

STEPS_IN_A_ROW = 10

# Runs in both processes, so it asks for nothing that an older version lacks. A line in, a line of milliseconds out.
_WORKER = """
import inspect, json, sys
from time import perf_counter
import hocket
from hocket import zoo
job = zoo.load(sys.argv[1])
options = {"cache": False} if "cache" in inspect.signature(hocket.schedule).parameters else {}
fast, number = hocket.schedule(job.step, job.model, job.optimizer, **options), 0
while not fast.decided:
    fast(job.batch(number))
    number += 1
print(json.dumps({"calls": number, "verdict": str(fast.verdict), "why": fast.why}), flush=True)
for line in sys.stdin:
    work = job.step if line.split()[0] == "eager" else fast
    times = []
    for _ in range(int(line.split()[1])):
        batch = job.batch(number)
        start = perf_counter()
        work(batch)
        times.append((perf_counter() - start) * 1e3)
        number += 1
    print(json.dumps(times), flush=True)
"""


def run(
    other: Path,
    targets: tuple[str, ...],
    rounds: int = 10,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure each target with the sources in `other` and with those of this process.

    Returns:
        ``targets`` (see `measure`), and ``geometric_mean`` of their ratios.
    """
    result: dict[str, Any] = {"cores": hocket.Machine.here().cores, "targets": {}}
    for target in targets:
        result["targets"][target] = measure(other, target, rounds)
        ratios = [row["ratio"] for row in result["targets"].values()]
        result["geometric_mean"] = math.exp(sum(map(math.log, ratios)) / len(ratios))
        save(result)
    return result


def measure(other: Path, target: str, rounds: int) -> dict[str, Any]:
    """One target.

    Returns:
        For ``other`` and ``this``: ``calls`` until the decision, its ``verdict`` and ``why``, ``step_ms`` and
        ``eager_ms`` (lower quartiles); ``ratio``, the other's time over this one's, and ``low`` and ``high``, the
        quartiles of the ratios of single rounds.
    """
    here = Path(hocket.__file__).parents[1]
    with ExitStack() as stack:
        # One after the other: a search beside another one would decide by what it disturbs.
        old = stack.enter_context(_worker(other, target))
        found: dict[str, Any] = {"other": _answer(old)}
        new = stack.enter_context(_worker(here, target))
        found["this"] = _answer(new)
        times: dict[str, list[list[float]]] = {"other": [], "this": []}
        eager: dict[str, list[float]] = {"other": [], "this": []}
        for _ in range(rounds):
            for name, process in (("other", old), ("this", new)):
                times[name].append(_steps(process, "scheduled"))
                eager[name] += _steps(process, "eager")
    for name, row in found.items():
        row["step_ms"] = lower_quartile([step_ms for block in times[name] for step_ms in block])
        row["eager_ms"] = lower_quartile(eager[name])
    ratios = sorted(median(a) / median(b) for a, b in zip(times["other"], times["this"], strict=True))
    quarter = (len(ratios) - 1) // 4
    return {
        **found,
        "ratio": found["other"]["step_ms"] / found["this"]["step_ms"],
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
    }


def _steps(process: subprocess.Popen[str], kind: str) -> list[float]:
    """A block of steps; the first one finds the caches as another process left them, and is not counted."""
    assert process.stdin is not None
    process.stdin.write(f"{kind} {STEPS_IN_A_ROW + 1}\n")
    process.stdin.flush()
    times: list[float] = _answer(process)[1:]
    return times


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the comparison ended with status {process.wait()}")
    return json.loads(line)


@contextmanager
def _worker(sources: Path, target: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    command = [sys.executable, "-c", _WORKER, target]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
