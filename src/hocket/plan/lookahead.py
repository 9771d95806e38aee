"""Looking ahead: a shorter plan for moldable ops, by search within a time budget.

The paper's strategies decide with the next op in view. Two facts about a step ask for more: an op on the critical path
is worth its width even where that wastes cores, and an op beside it is not. So the search tries whole allotments of
widths (`hocket.plan.allot`), each placed by `hocket.plan.pack`, and goes on from the best of them: a small graph is
annealed (`hocket.plan.anneal`); in a large one, where a try takes milliseconds and only a few fit into the budget,
widths and turns of a few ops are changed at a time, most of them on the chain that makes the plan as long as it is,
and what does not make it longer stays (hill climbing).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from time import perf_counter

from hocket.plan.allot import allotments, ladder
from hocket.plan.anneal import anneal
from hocket.plan.moldable import NOBODY, Instance, Placement, longest_paths, makespan_us
from hocket.plan.pack import pack

__all__ = ["improve"]

# Each lane is a thread with its team: a lane more per core has to make the plan shorter by this share.
LANE_SHARE = 0.003
# Up to this many ops orders are searched, not priorities.
SMALL = 64
# Tries of the climb per op, at most.
TRIES_PER_OP = 20


def improve(
    instance: Instance,
    start: Sequence[Placement],
    *,
    budget_s: float,
    wait_us: float = 0.0,
    apart: Mapping[int, AbstractSet[int]] = NOBODY,
    seed: int = 0,
) -> list[Placement]:
    """The best placements found within `budget_s` seconds: not longer than `start`, and on few lanes.

    The search is the same for the same seed as far as the budget goes.
    """
    deadline = perf_counter() + budget_s
    start_us = makespan_us(start)
    best = list(start)
    best_score = _score(instance, best)
    allotment: tuple[list[int], list[float]] | None = None
    for widths in allotments(instance):
        if perf_counter() > deadline:
            return best
        ranks = longest_paths(instance, widths)
        placed = pack(instance, widths, ranks, wait_us=wait_us, apart=apart)
        score = _score(instance, placed)
        if score < best_score and makespan_us(placed) <= start_us:
            best, best_score, allotment = placed, score, (widths, ranks)
    if makespan_us(best) <= instance.lower_us or instance.num_cores == 1:
        return best
    rng = random.Random(seed)
    if len(start) <= SMALL:
        annealed = anneal(instance, best, deadline=deadline, wait_us=wait_us, apart=apart, rng=rng)
        return min(best, annealed, key=makespan_us)
    if allotment is None:  # nothing was better than where it began, so go on from its widths
        widths = [0] * len(best)
        for placement in best:
            widths[placement.op] = len(placement.cores)
        allotment = widths, longest_paths(instance, widths)
    return _climb(instance, best, *allotment, deadline, wait_us, apart, rng)


def _score(instance: Instance, placed: Sequence[Placement]) -> float:
    lanes = len({placement.cores for placement in placed})
    return makespan_us(placed) * (1.0 + LANE_SHARE * lanes / instance.num_cores)


def _climb(
    instance: Instance,
    best: list[Placement],
    widths: list[int],
    priority: list[float],
    deadline: float,
    wait_us: float,
    apart: Mapping[int, AbstractSet[int]],
    rng: random.Random,
) -> list[Placement]:
    steps = ladder(instance.num_cores)
    limit_us, best_score = makespan_us(best), _score(instance, best)
    chain: list[int] = []
    for _ in range(TRIES_PER_OP * len(widths)):
        if perf_counter() > deadline:
            break
        chain = chain or _longest_chain(instance, best)
        new_widths, new_priority = list(widths), list(priority)
        for _ in range(rng.choice((1, 1, 10))):
            op = rng.choice(chain) if rng.random() < 0.6 else rng.randrange(len(widths))
            if rng.random() < 0.7:
                at = min(range(len(steps)), key=lambda at: abs(steps[at] - new_widths[op]))
                new_widths[op] = steps[min(max(at + rng.choice((-2, -1, 1, 2)), 0), len(steps) - 1)]
            else:
                new_priority[op] *= rng.choice((0.5, 0.9, 1.1, 2.0))
        if rng.random() < 0.3:
            new_priority = longest_paths(instance, new_widths)
        placed = pack(instance, new_widths, new_priority, wait_us=wait_us, apart=apart)
        score = _score(instance, placed)
        if score <= best_score and makespan_us(placed) <= limit_us:
            best, best_score, widths, priority, chain = placed, score, new_widths, new_priority, []
    return best


def _longest_chain(instance: Instance, placed: Sequence[Placement]) -> list[int]:
    """Ops from the end of the step back to its start, each held up by the one before it."""
    last_on: dict[int, Placement] = {}
    held_by: dict[int, int] = {}  # for each op the one that ends last of all it may have waited for
    end_us = [0.0] * len(placed)
    for placement in sorted(placed, key=lambda placement: placement.start_us):
        before = [last_on[core].op for core in placement.cores if core in last_on]
        before += instance.predecessors[placement.op]
        if before:
            held_by[placement.op] = max(before, key=end_us.__getitem__)
        end_us[placement.op] = placement.end_us
        for core in placement.cores:
            last_on[core] = placement
    chain: list[int] = []
    op = max(range(len(placed)), key=end_us.__getitem__, default=-1)
    while op >= 0 and len(chain) < len(placed):
        chain.append(op)
        op = held_by.get(op, -1)
    return chain
