"""Cuts of a chain of ops into stages with the least largest stage, by dynamic programming.

All tensors that are written before a cut and read after it cross the cut, since a pipeline passes a tensor from stage
to stage until its last reader. So the cost of a cut does not depend on the other cuts, and the best cuts are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.errors import InputError


def cut_chain(
    takes_us: Sequence[float],
    crossing_us: Sequence[float],
    stages: int,
    *,
    kept_bytes: Sequence[float] | None = None,
    saved_bytes: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
    memory_bytes: float | None = None,
) -> tuple[int, ...]:
    """The first op of each stage but the first, for the least time of the slowest stage with its border transfers.

    Args:
        takes_us: the duration of each op.
        crossing_us: the cost on either side of a cut before each op, infinite where no cut may be.
        stages: the number of stages.
        kept_bytes: memory of each op between steps (parameters and their state).
        saved_bytes: memory that each op saves for one micro-batch.
        in_flight: the most micro-batches that each stage has begun and not finished.
        memory_bytes: memory of a stage, unlimited by default.

    Raises:
        InputError: there are fewer places to cut than needed, or no cuts fit the memory.

    Example:
        >>> cut_chain([1.0, 1.0, 4.0, 1.0], [0.0, 0.0, 0.0, 9.0], 2)
        (2,)
    """
    count = len(takes_us)
    crossing = np.append(np.asarray(crossing_us, np.float64), 0.0)
    crossing[:1] = 0.0
    places = np.flatnonzero(np.isfinite(crossing))
    if stages < 1 or stages > len(places) - 1 or count == 0:
        raise InputError(
            f"split: {stages} stages, and there are {max(len(places) - 2, 0)} places to cut {count} ops at"
        )
    before = np.concatenate([[0.0], np.cumsum(takes_us)])[places]
    load = before[None, :] - before[:, None] + crossing[places][:, None] + crossing[places][None, :]
    load[np.tri(len(places), dtype=np.bool_)] = np.inf
    kept = _between(kept_bytes, count, places)
    saved = _between(saved_bytes, count, places)
    best = np.where(np.arange(len(places)) == 0, 0.0, np.inf)
    choices = []
    for stage in range(stages):
        able = load
        if memory_bytes is not None:
            held = kept + saved * (1 if in_flight is None else in_flight[stage])
            able = np.where(held <= memory_bytes, load, np.inf)
        worst = np.maximum(best[:, None], able)
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    if not np.isfinite(best[-1]):
        raise InputError(f"split: no {stages} stages of {count} ops fit into {memory_bytes:,.0f} bytes each")
    ends = [len(places) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return tuple(int(places[end]) for end in reversed(ends[1:-1]))


def _between(values: Sequence[float] | None, count: int, places: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(np.zeros(count) if values is None else values)])[places]
    return sums[None, :] - sums[:, None]
