"""Looking ahead: a shorter plan for moldable ops, by search within a time budget.

The paper's strategies decide with the next op in view. Two facts about a step ask for more: an op on the critical path
is worth its width even where that wastes cores, and an op beside it is not. So widths are chosen by a price: at the
price ``p`` of a core, an op takes the width that minimises ::

    duration(w) + p * (w * duration(w)) / cores          time, and the area it takes from others

``p = 0`` gives every op its fastest width, a large ``p`` its most economical one. A sweep over prices finds a good
compromise (Turek, Wolf, Yu: "Approximate algorithms for scheduling parallelizable tasks", SPAA 1992, choose widths by
a bound on the makespan, and show that one such choice suffices for a constant factor). So does a sweep over equal lanes
of one width each, as a person would try them by hand.

From the best of these the search goes on by single changes: another width for an op, or another turn. It anneals
(Kirkpatrick, Gelatt, Vecchi: "Optimization by simulated annealing", Science 1983): at first it also accepts what makes
the plan a little longer, later only what does not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from time import perf_counter

from hocket.plan.moldable import NOBODY, Instance, Placement, longest_paths, makespan_us
from hocket.plan.order import in_order
from hocket.plan.pack import pack

__all__ = ["improve", "useful_widths"]

PRICES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 1e9)
TRIES_PER_OP = 150
HOT, COLD = 0.03, 0.0005  # shares of the makespan that may be lost at first, and at last


def improve(
    instance: Instance,
    start: Sequence[Placement],
    *,
    budget_s: float,
    wait_us: float = 0.0,
    apart: Mapping[int, AbstractSet[int]] = NOBODY,
    seed: int = 0,
) -> list[Placement]:
    """The shortest placements found within `budget_s` seconds, `start` included.

    The search is the same for the same seed as far as the budget goes.
    """
    deadline = perf_counter() + budget_s
    best = list(start)
    best_us = makespan_us(best)
    for widths in _starts(instance):
        if perf_counter() > deadline or best_us <= instance.lower_us:
            return best
        placed = pack(instance, widths, longest_paths(instance, widths), wait_us=wait_us, apart=apart)
        if makespan_us(placed) < best_us:
            best, best_us = placed, makespan_us(placed)
    if best_us <= instance.lower_us or instance.num_cores == 1:
        return best
    return _anneal(instance, best, deadline, wait_us, apart, random.Random(seed))


def useful_widths(durations_us: Sequence[float]) -> list[int]:
    """The widths of one op that are faster than every narrower one."""
    found: list[int] = []
    for width in range(1, len(durations_us)):
        if not found or durations_us[width] < durations_us[found[-1]]:
            found.append(width)
    return found


def _starts(instance: Instance) -> Iterator[list[int]]:
    cores = instance.num_cores
    for price in PRICES:
        widths = range(1, cores + 1)
        factors = [0.0, *(1.0 + price * width / cores for width in widths)]
        yield [min(widths, key=lambda width: of_op[width] * factors[width]) for of_op in instance.durations_us]
    for count in range(1, cores + 1):
        yield [cores // count] * len(instance.durations_us)


def _anneal(
    instance: Instance,
    best: list[Placement],
    deadline: float,
    wait_us: float,
    apart: Mapping[int, AbstractSet[int]],
    rng: random.Random,
) -> list[Placement]:
    choices = [useful_widths(of_op) for of_op in instance.durations_us]
    order, widths = _as_order(instance, best)
    now_us = best_us = makespan_us(best)
    tries = TRIES_PER_OP * len(order)
    for number in range(tries):
        if perf_counter() > deadline or best_us <= instance.lower_us:
            break
        op = rng.randrange(len(order))
        old_width, old_order = widths[op], order
        if len(choices[op]) > 1 and rng.random() < 0.5:
            widths[op] = rng.choice(choices[op])
        else:
            order = _moved(instance, order, op, rng)
        placed = in_order(instance, widths, order, wait_us=wait_us, apart=apart)
        tried_us = makespan_us(placed)
        heat_us = HOT * best_us * (COLD / HOT) ** (number / tries)
        if tried_us <= now_us or rng.random() < math.exp((now_us - tried_us) / heat_us):
            now_us = tried_us
            if tried_us < best_us:
                best, best_us = placed, tried_us
        else:
            widths[op], order = old_width, old_order
    return best


def _as_order(instance: Instance, placed: Sequence[Placement]) -> tuple[list[int], list[int]]:
    turn = {op: position for position, op in enumerate(instance.order)}
    widths = [0] * len(placed)
    for placement in placed:
        widths[placement.op] = len(placement.cores)
    return [p.op for p in sorted(placed, key=lambda p: (p.start_us, p.end_us, turn[p.op]))], widths


def _moved(instance: Instance, order: list[int], op: int, rng: random.Random) -> list[int]:
    at = order.index(op)
    rest = order[:at] + order[at + 1 :]
    low = max((rest.index(before) + 1 for before in instance.predecessors[op]), default=0)
    high = min((rest.index(after) for after in instance.successors[op]), default=len(rest))
    to = rng.randint(low, high)
    return [*rest[:to], op, *rest[to:]]
