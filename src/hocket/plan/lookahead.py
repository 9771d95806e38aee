"""Looking ahead: a shorter plan for moldable ops, by search within a time budget.

The paper's strategies decide with the next op in view. Two facts about a step ask for more: an op on the critical path
is worth its width even where that wastes cores, and an op beside it is not. So widths are chosen by a price: at the
price ``p`` of a core, an op takes the width that minimises ::

    duration(w) + p * (w * duration(w)) / cores          time, and the area it takes from others

``p = 0`` gives every op its fastest width, a large ``p`` its most economical one. A sweep over prices finds a good
compromise (Turek, Wolf, Yu: "Approximate algorithms for scheduling parallelizable tasks", SPAA 1992, choose widths by
a bound on the makespan, and show that one such choice suffices for a constant factor), and hill climbing from there
changes widths and turns of single ops, those first that stand on the chain which makes the plan as long as it is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from time import perf_counter

from hocket.plan.moldable import Instance, Placement, makespan_us
from hocket.plan.pack import pack

__all__ = ["improve"]

PRICES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 1e9)


def improve(
    instance: Instance,
    start: Sequence[Placement],
    *,
    budget_s: float,
    apart: Mapping[int, set[int]] = {},
    seed: int = 0,
) -> list[Placement]:
    """The shortest placements found within `budget_s` seconds, `start` included.

    The search is the same for the same seed as far as the budget goes.
    """
    deadline = perf_counter() + budget_s
    best = list(start)
    best_us = makespan_us(best)
    widths = [0] * len(instance.durations_us)
    for placement in start:
        widths[placement.op] = len(placement.cores)
    priority = list(instance.ranks_us)
    for price in PRICES:
        if perf_counter() > deadline:
            return best
        tried = _priced(instance, price)
        ranks = _ranks(instance, tried)
        placed = pack(instance, tried, ranks)
        if _legal(placed, apart) and makespan_us(placed) < best_us:
            best, best_us, widths, priority = placed, makespan_us(placed), tried, ranks
    return _climb(instance, best, widths, priority, deadline, apart, random.Random(seed))


def _priced(instance: Instance, price: float) -> list[int]:
    cores = instance.num_cores
    widths = range(1, cores + 1)
    return [
        min(widths, key=lambda width, of_op=of_op: (of_op[width] * (1.0 + price * width / cores), width))  # type: ignore[misc]
        for of_op in instance.durations_us
    ]


def _ranks(instance: Instance, widths: Sequence[int]) -> list[float]:
    ranks = [0.0] * len(widths)
    for op in reversed(instance.order):
        after = max((ranks[other] for other in instance.successors[op]), default=0.0)
        ranks[op] = instance.durations_us[op][widths[op]] + after
    return ranks


def _climb(
    instance: Instance,
    best: list[Placement],
    widths: list[int],
    priority: list[float],
    deadline: float,
    apart: Mapping[int, set[int]],
    rng: random.Random,
) -> list[Placement]:
    best_us = makespan_us(best)
    useful = [op for op, of_op in enumerate(instance.durations_us) if of_op[instance.best_width[op]] > 0]
    if not useful or instance.num_cores == 1:
        return best
    while perf_counter() < deadline:
        chain = _longest_chain(instance, best)
        op = rng.choice(chain) if chain and rng.random() < 0.7 else rng.choice(useful)
        old_width, old_priority = widths[op], priority[op]
        if rng.random() < 0.6:
            widths[op] = _other_width(instance, op, old_width, rng)
        else:
            priority[op] *= rng.choice((0.5, 0.9, 1.1, 2.0))
        placed = pack(instance, widths, priority)
        tried_us = makespan_us(placed)
        if tried_us <= best_us and _legal(placed, apart):
            best, best_us = placed, tried_us
        else:
            widths[op], priority[op] = old_width, old_priority
    return best


def _other_width(instance: Instance, op: int, width: int, rng: random.Random) -> int:
    fastest = instance.best_width[op]
    choices = {1, max(1, width // 2), max(1, width - 1), min(fastest, width + 1), min(fastest, width * 2), fastest}
    choices.discard(width)
    return rng.choice(sorted(choices)) if choices else width


def _longest_chain(instance: Instance, placed: Sequence[Placement]) -> list[int]:
    """Ops from the end of the step back to its start, each held up by the one before it."""
    by_end: dict[float, list[Placement]] = {}
    for placement in placed:
        by_end.setdefault(placement.end_us, []).append(placement)
    at = max(placed, key=lambda placement: placement.end_us, default=None)
    chain: list[int] = []
    while at is not None and len(chain) < len(placed):
        chain.append(at.op)
        before = set(instance.predecessors[at.op])
        held = [p for p in by_end.get(at.start_us, ()) if p.op in before or set(p.cores) & set(at.cores)]
        at = next((p for p in held if p.op != chain[-1] and p.start_us < p.end_us), None)
    return chain


def _legal(placed: Sequence[Placement], apart: Mapping[int, set[int]]) -> bool:
    if not apart:
        return True
    at = {placement.op: placement for placement in placed}
    return not any(
        at[first].start_us < at[second].end_us and at[second].start_us < at[first].end_us
        for first, others in apart.items()
        for second in others
    )
