"""Cuts of a chain of ops into the stages of a pipeline, for the shortest step by a given schedule.

The start has the least largest stage, by dynamic programming (`chain`). Then one or a few neighbouring cuts at a time
move to nearby places, as long as the simulated step becomes shorter, or a rank above its memory limit holds less. With
one stage per rank the start is the result in most cases. With several, the sum of a rank's stages matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError
from hocket.planning.partition.contiguous import least_largest
from hocket.planning.partition.pipeline_order import PipelineOrder, pipeline_step_us, rank_memory_bytes

# The largest move of a cut, in places where a cut may be.
REACH = 12
# The most neighbouring cuts that move together: a growing stage may have to shift the next ones.
TOGETHER = 4


@dataclass(frozen=True, eq=False)
class Chain:
    """Ops in order, with their durations and memory, and the cost of a cut before each.

    Raises `InputError` at construction for lengths that differ.
    """

    forward_us: NDArray[np.float64]  # of each op, for one micro-batch
    backward_us: NDArray[np.float64]  # of each op, for one micro-batch
    crossing_bytes: NDArray[np.float64]  # bytes that cross a cut before each op, infinite where no cut may be
    kept_bytes: NDArray[np.float64]  # memory of each op between steps (parameters and their gradients)
    saved_bytes: NDArray[np.float64]  # memory that each op saves for one micro-batch

    def __post_init__(self) -> None:
        for name in ("forward_us", "backward_us", "crossing_bytes", "kept_bytes", "saved_bytes"):
            values = np.asarray(getattr(self, name), np.float64)
            object.__setattr__(self, name, values)
            if values.shape != self.forward_us.shape:
                raise InputError(f"chain: {name} has {values.size} values for {self.forward_us.size} ops")

    def __len__(self) -> int:
        return int(self.forward_us.size)


class StageSummary(NamedTuple):
    """The size of one stage."""

    rank: int  # the rank that runs it
    ops: int  # the number of its ops
    forward_us: float  # for one micro-batch
    backward_us: float  # for one micro-batch
    received_bytes: float  # over the border before it, for one micro-batch, one way
    kept_bytes: float  # parameters and their gradients
    saved_bytes: float  # for one micro-batch
    in_flight: int  # the most micro-batches that it has begun and not finished


@dataclass(frozen=True)
class PipelineCut:
    """Cuts of a chain, and the predicted step."""

    begins: tuple[int, ...]  # the position of the first op of each stage but the first
    order: PipelineOrder  # the schedule
    stages: tuple[StageSummary, ...]  # the size of each stage
    memory_bytes: tuple[float, ...]  # the peak memory of each rank
    step_us: float  # the simulated step


def cut_at(
    chain: Chain, begins: Sequence[int], order: PipelineOrder, latency_us: float, bytes_per_s: float
) -> PipelineCut:
    """The stages that begin at these ops, as many as the schedule has, and their simulated step."""
    if len(begins) != order.stages - 1:
        raise InputError(f"split: {len(begins) + 1} stages, and the schedule has {order.stages}")
    edges = np.array([0, *begins, len(chain)])

    def sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.diff(np.concatenate([[0.0], np.cumsum(values)])[edges])

    forward, backward = sums(chain.forward_us), sums(chain.backward_us)
    kept, saved = sums(chain.kept_bytes), sums(chain.saved_bytes)
    received = np.concatenate([[0.0], chain.crossing_bytes[list(begins)]])
    crossing_us = latency_us + received / bytes_per_s * 1e6
    stages = tuple(
        StageSummary(
            rank=order.rank_of[number],
            ops=int(edges[number + 1] - edges[number]),
            forward_us=float(forward[number]),
            backward_us=float(backward[number]),
            received_bytes=float(received[number]),
            kept_bytes=float(kept[number]),
            saved_bytes=float(saved[number]),
            in_flight=order.in_flight[number],
        )
        for number in range(order.stages)
    )
    step_us = pipeline_step_us(order, forward.tolist(), backward.tolist(), crossing_us.tolist())
    return PipelineCut(tuple(begins), order, stages, rank_memory_bytes(order, kept.tolist(), saved.tolist()), step_us)


def cut_for_schedule(
    chain: Chain, order: PipelineOrder, *, latency_us: float, bytes_per_s: float, memory_bytes: float | None = None
) -> PipelineCut:
    """Search for the cuts with the shortest step by `order`.

    The memory of a rank is unlimited by default.
    """
    # There and back: an activation one way, its gradient the other.
    border_us = 2 * (latency_us + chain.crossing_bytes / bytes_per_s * 1e6)
    begins = cut_chain(
        (chain.forward_us + chain.backward_us).tolist(),
        border_us.tolist(),
        order.stages,
        kept_bytes=chain.kept_bytes.tolist(),
        saved_bytes=chain.saved_bytes.tolist(),
        in_flight=order.in_flight,
        memory_bytes=memory_bytes,
    )

    def cost(cut: PipelineCut) -> tuple[float, float]:
        beyond = 0.0 if memory_bytes is None else sum(max(0.0, held - memory_bytes) for held in cut.memory_bytes)
        return beyond, cut.step_us

    best = cut_at(chain, begins, order, latency_us, bytes_per_s)
    places = np.flatnonzero(np.isfinite(chain.crossing_bytes))
    places = places[places > 0]
    while (
        better := _better(best, places, lambda b: cut_at(chain, b, order, latency_us, bytes_per_s), cost)
    ) is not None:
        best = better
    if cost(best)[0] > 0:
        raise InputError(
            f"split: no cuts into {order.stages} stages were found with which each of {len(order.ranks)} ranks holds "
            f"at most {memory_bytes:,.0f} bytes; the fullest holds {max(best.memory_bytes):,.0f}"
        )
    return best


def _better(
    cut: PipelineCut,
    places: NDArray[np.int64],
    made: Callable[[tuple[int, ...]], PipelineCut],
    cost: Callable[[PipelineCut], tuple[float, float]],
) -> PipelineCut | None:
    """The first better cut with one or a few neighbouring cuts moved, or None."""
    at = np.searchsorted(places, cut.begins)
    known = cost(cut)
    for first in range(len(at)):
        for behind in range(first + 1, min(first + TOGETHER, len(at)) + 1):
            for by in sorted(range(-REACH, REACH + 1), key=abs):
                moved = at.copy()
                moved[first:behind] += by
                if by and moved[0] >= 0 and moved[-1] < len(places) and np.all(np.diff(moved) > 0):
                    tried = made(tuple(places[moved].tolist()))
                    if cost(tried) < known:
                        return tried
    return None


def cut_chain(
    takes_us: Sequence[float],
    crossing_us: Sequence[float],
    stages: int,
    *,
    kept_bytes: Sequence[float],
    saved_bytes: Sequence[float],
    in_flight: Sequence[int],
    memory_bytes: float | None,
) -> tuple[int, ...]:
    """The first op of each stage but the first, for the least time of the slowest stage with its border transfers.

    By dynamic programming. A pipeline passes a tensor from stage to stage until its last reader, so the cost of a cut
    does not depend on the other cuts, and the best cuts are exact.

    A cut before an op costs its `crossing_us` on either side, infinite where no cut may be. A stage has to hold
    what its ops keep, and what they save for as many micro-batches as it has `in_flight`.
    """
    count = len(takes_us)
    crossing = np.append(np.asarray(crossing_us, np.float64), 0.0)
    crossing[:1] = 0.0
    places = np.flatnonzero(np.isfinite(crossing))
    if stages < 1 or stages > len(places) - 1 or count == 0:
        raise InputError(
            f"split: {stages} stages, and there are {max(len(places) - 2, 0)} places to cut {count} ops at"
        )

    def between(values: Sequence[float]) -> NDArray[np.float64]:
        sums = np.concatenate([[0.0], np.cumsum(values)])[places]
        return sums[None, :] - sums[:, None]

    load = between(takes_us) + crossing[places][:, None] + crossing[places][None, :]
    load[np.tri(len(places), dtype=np.bool_)] = np.inf
    kept, saved = between(kept_bytes), between(saved_bytes)

    def load_of(stage: int) -> NDArray[np.float64]:
        return load if memory_bytes is None else np.where(kept + saved * in_flight[stage] <= memory_bytes, load, np.inf)

    least_us, borders = least_largest(map(load_of, range(stages)), len(places))
    if not np.isfinite(least_us):
        raise InputError(f"split: no {stages} stages of {count} ops fit into {memory_bytes:,.0f} bytes each")
    return tuple(places[borders[1:-1]].tolist())
