"""Simulated annealing of a small graph's plan: the order of ops and their widths.

A try changes an op's width, its place in the order, or both. A longer plan is accepted with some chance, which shrinks
over time, so that the search can leave a local optimum (Kirkpatrick, Gelatt, Vecchi: "Optimization by simulated
annealing", Science 1983). Now and then the search returns to the best plan so far. The objective is the makespan and,
with a small weight, the mean end of all ops, since most single changes leave the makespan the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from time import perf_counter

from hocket.planning.moldable.instance import Instance, Placement, makespan_us
from hocket.planning.moldable.sgs import serial_sgs
from hocket.planning.moldable.widths import useful_widths

TRIES_PER_OP = 500
ROUNDS = 5  # the number of returns to the best plan
HOT, COLD = 0.05, 0.005  # first and last temperature, as a share of the makespan
MEAN_END_SHARE = 0.1


def anneal(
    instance: Instance, start: Sequence[Placement], *, deadline: float = math.inf, rng: random.Random
) -> list[Placement]:
    """Search for shorter placements, and return the shortest found, which may be those of `start`.

    The search cools down until `deadline` by `perf_counter`, or until its last try.
    """
    choices = [useful_widths(of_op) for of_op in instance.durations_us]
    best = list(start)
    best_us, now = makespan_us(best), _value(best)
    order, widths = _decisions(instance, best)
    best_decisions = list(order), list(widths)
    tries, rounds = TRIES_PER_OP * len(order), 0
    start_s = perf_counter()
    budget_s = max(deadline - start_s, 1e-6)
    for number in range(tries):
        done = max(number / tries, (perf_counter() - start_s) / budget_s)
        if best_us <= instance.lower_us or done >= 1:
            break
        if done * ROUNDS >= rounds:
            rounds += 1
            order, widths = list(best_decisions[0]), list(best_decisions[1])
            now = _value(best)
        op = rng.randrange(len(order))
        old_order, old_width = order, widths[op]
        what = rng.random()
        if what < 0.8 and len(choices[op]) > 1:
            widths[op] = _other_width(choices[op], old_width, rng)
        if what > 0.5:
            order = _moved(instance, order, op, rng)
        placed = serial_sgs(instance, widths, order)
        value = _value(placed)
        heat_us = HOT * best_us * (COLD / HOT) ** done
        if value <= now or rng.random() < math.exp((now - value) / heat_us):
            now = value
            if makespan_us(placed) < best_us:
                best, best_us = placed, makespan_us(placed)
                best_decisions = list(order), list(widths)
        else:
            order, widths[op] = old_order, old_width
    return best


def _value(placed: Sequence[Placement]) -> float:
    return makespan_us(placed) + MEAN_END_SHARE * sum(placement.end_us for placement in placed) / max(len(placed), 1)


def _decisions(instance: Instance, placed: Sequence[Placement]) -> tuple[list[int], list[int]]:
    """The order and the widths that lead to these placements."""
    turn = {op: position for position, op in enumerate(instance.order)}
    widths = [0] * len(placed)
    for placement in placed:
        widths[placement.op] = len(placement.cores)
    return [p.op for p in sorted(placed, key=lambda p: (p.start_us, p.end_us, turn[p.op]))], widths


def _other_width(choices: Sequence[int], width: int, rng: random.Random) -> int:
    """A neighbour of `width` among the useful ones, or any of them."""
    if rng.random() < 0.5:
        return rng.choice(choices)
    at = min(range(len(choices)), key=lambda at: abs(choices[at] - width)) + rng.choice((-1, 1))
    return choices[min(max(at, 0), len(choices) - 1)]


def _moved(instance: Instance, order: Sequence[int], op: int, rng: random.Random) -> list[int]:
    """The order with `op` elsewhere, after all ops that it waits for and before all that wait for it."""
    at = order.index(op)
    rest = [*order[:at], *order[at + 1 :]]
    low = max((rest.index(before) + 1 for before in instance.predecessors[op]), default=0)
    high = min((rest.index(after) for after in instance.successors[op]), default=len(rest))
    to = rng.randint(low, high)
    return [*rest[:to], op, *rest[to:]]
