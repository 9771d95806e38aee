"""Contenders in turns: every one gets blocks of steps, round after round, in one process.

On a shared machine only ratios of what ran at nearly the same time mean anything, so contenders alternate, forth and
back. A block is a few steps long, and its first steps are not counted: they find the caches, the threads and the heap
as the one before left them, which a training run would not.

After its block a contender's lanes are closed. libgomp counts the threads of all teams in the process, and where they
are more than the cores its idle threads hardly spin any more, so one contender's teams would slow down all the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch


def in_turns(
    contenders: Mapping[str, Callable[[Any], Any]],
    batch: Callable[[int], Any] = lambda number: None,
    *,
    rounds: int,
    block: int,
    warm_up: int = 2,
    settle: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """Return the milliseconds of the counted steps of each contender, in `rounds` blocks of `block` steps.

    A contender that runs in another process has a method `seconds`, which says what it took there. A method `close`
    ends the lanes after a block. `settle` waits for what a step has begun.
    """
    found: dict[str, list[float]] = {label: [] for label in contenders}
    number = 0
    for turn in range(rounds):
        for label in list(contenders)[:: -1 if turn % 2 else 1]:
            gc.collect()
            step = contenders[label]
            elsewhere = getattr(step, "seconds", None)
            for position in range(-warm_up, block):
                data = batch(number)
                number += 1
                start = clock()
                took_s = elsewhere(data) if elsewhere else step(data)
                settle()
                took_s = took_s if elsewhere else clock() - start
                if position >= 0:
                    found[label].append(took_s * 1e3)
            if (close := getattr(step, "close", None)) is not None:
                close()
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Let ops have one thread in the block."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def summaries(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return the summary of each contender, and its speedup over eager."""
    ordered = {label: sorted(times_ms) for label, times_ms in found.items()}
    return {
        "contenders": {
            label: {
                "median_ms": median(times_ms),
                "p10_ms": times_ms[len(times_ms) // 10],
                "p90_ms": times_ms[len(times_ms) * 9 // 10],
                "steps": len(times_ms),
            }
            for label, times_ms in ordered.items()
        },
        "speedup": {label: median(ordered["eager"]) / median(times_ms) for label, times_ms in ordered.items()},
    }


def title(result: Mapping[str, Any]) -> str:
    """Return the title of a table of such speedups."""
    return f"speedup over eager, {result['cores']} cores, torch {result['torch']}, medians of interleaved steps"
