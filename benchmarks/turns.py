"""Contenders in turns: every one gets blocks of steps, round after round, in one process.

On a shared machine only ratios of what ran at nearly the same time mean anything, so contenders alternate. A block is a
few steps long, and its first steps are not counted: they find the caches, the threads and the heap as the one before
left them, which a training run would not.

After its block a contender's lanes are closed. libgomp counts the threads of all teams in the process, and where they
are more than the cores its idle threads hardly spin any more, so one contender's teams would slow down all the others.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

WARM_UP = 2


@dataclass
class Turns:
    """The times of one contender.

    Attributes:
        steps_ms: each counted step.
        faults: page faults per step, of each block.
    """

    steps_ms: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return median(self.steps_ms)

    def summary(self) -> dict[str, float]:
        """Median, tenth and ninetieth percentile, number of steps, and page faults per step."""
        ordered = sorted(self.steps_ms)
        return {
            "median_ms": self.median_ms,
            "p10_ms": ordered[len(ordered) // 10],
            "p90_ms": ordered[len(ordered) * 9 // 10],
            "steps": len(ordered),
            "page_faults": median(self.faults),
        }


def in_turns(
    contenders: Mapping[str, Callable[[Any], Any]], batch: Callable[[int], Any], *, rounds: int, block: int
) -> dict[str, Turns]:
    """Run `rounds` blocks of `block` counted steps of each contender.

    Args:
        contenders: the steps. One that runs in another process has a method `seconds`, which says what it took there.
            A method `close` ends the lanes after a block.
        batch: the batch of a number.
        rounds: how many blocks each gets.
        block: counted steps in a block. Two more come before them.
    """
    found = {label: Turns() for label in contenders}
    number = 0
    for _ in range(rounds):
        for label, step in contenders.items():
            gc.collect()
            faults = 0
            for position in range(-WARM_UP, block):
                data = batch(number)
                number += 1
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                took_ms = _took_s(step, data) * 1e3
                if position >= 0:
                    found[label].steps_ms.append(took_ms)
                    faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            found[label].faults.append(faults / block)
            if (close := getattr(step, "close", None)) is not None:
                close()
    return found


def summaries(found: Mapping[str, Turns]) -> dict[str, dict[str, Any]]:
    """Return the summary of each contender, and its speedup over eager."""
    eager_ms = found["eager"].median_ms
    return {
        "contenders": {label: turns.summary() for label, turns in found.items()},
        "speedup": {label: eager_ms / turns.median_ms for label, turns in found.items()},
    }


def title(result: Mapping[str, Any]) -> str:
    """Return the title of a table of such speedups."""
    return f"speedup over eager, {result['cores']} cores, torch {result['torch']}, medians of interleaved steps"


def _took_s(step: Callable[[Any], Any], batch: Any) -> float:
    if (elsewhere := getattr(step, "seconds", None)) is not None:
        return float(elsewhere(batch))
    start = perf_counter()
    step(batch)
    return perf_counter() - start
