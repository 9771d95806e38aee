"""Lookahead: a search for a shorter plan of moldable ops within a time budget.

The paper's strategies look at one op at a time. But an op on the critical path should be wide even if that wastes
cores, and an op beside it should not. So the search tries widths of all ops at once (`widths`), each placed by
`parallel_sgs`, and continues from the best of them. A small graph is annealed (`annealing`). In a large one, where a
try takes milliseconds and only some dozens fit into the budget, widths and priorities are changed a few at a time, and
changes are kept unless the plan gets longer (hill climbing)::

    the chain of ops that determines the makespan       a --> b ==========> c --> d        change often one of these,
    ops with the same durations at every width          a', a'', ...  c'                   and ops that are like it

A try is given up as soon as an op starts so late that the longest path from it leads beyond the best makespan so far.

Simulated annealing of a small graph's plan: the order of ops and their widths.

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
from hocket.planning.moldable.sgs import parallel_sgs, serial_sgs
from hocket.planning.moldable.widths import allotments, ladder, useful_widths

# Each lane is a thread with its team: one more lane per core has to shorten the plan by this share.
LANE_SHARE = 0.003
# Up to this many ops the plan is annealed.
SMALL = 64
# Tries of the climb per op, at most.
TRIES_PER_OP = 20


def improve(instance: Instance, start: Sequence[Placement], *, budget_s: float, seed: int = 0) -> list[Placement]:
    """The best placements found within `budget_s` seconds, which are not longer than `start` and on few lanes.

    The search is deterministic by `seed` as far as the budget goes.
    """
    deadline = perf_counter() + budget_s
    trial = _Trial(instance, start)
    for widths in allotments(instance):
        if perf_counter() > deadline:
            return trial.best
        trial.better(widths, instance.ranks_at_us(widths))
    if trial.best_us <= instance.lower_us or instance.num_cores == 1:
        return trial.best
    rng = random.Random(seed)
    if len(start) <= SMALL:
        return min(trial.best, anneal(instance, trial.best, deadline=deadline, rng=rng), key=makespan_us)
    _climb(instance, trial, deadline, rng)
    return trial.best


class _Trial:
    """The best placements so far, with their widths and priorities."""

    def __init__(self, instance: Instance, start: Sequence[Placement]) -> None:
        self._instance = instance
        self._limit_us = makespan_us(start)
        self.best = list(start)
        self.best_us = self._limit_us
        self._score = self._scored(start)
        self.widths = [0] * len(start)
        for placement in start:
            self.widths[placement.op] = len(placement.cores)
        self.ranks = instance.ranks_at_us(self.widths)
        self.priority = self.ranks

    def better(self, widths: list[int], ranks: list[float], priority: list[float] | None = None) -> bool:
        """Place the ops at these widths and priorities, and keep the result if it is better than the best so far.

        The `ranks` are those at these widths, and the priorities by default.
        """
        # A plan of more lanes has to be shorter, and every plan has at least one lane.
        limit_us = min(self._limit_us, self._score / (1.0 + LANE_SHARE / self._instance.num_cores))
        latest_us = [limit_us - rank for rank in ranks]
        if min(latest_us, default=0.0) < 0.0:
            return False
        placed = parallel_sgs(self._instance, widths, priority or ranks, latest_us)
        if len(placed) < len(widths) or self._scored(placed) > self._score:
            return False
        self.best, self.best_us, self._score = placed, makespan_us(placed), self._scored(placed)
        self.widths, self.ranks, self.priority = widths, ranks, priority or ranks
        return True

    def _scored(self, placed: Sequence[Placement]) -> float:
        lanes = len({placement.cores for placement in placed})
        return makespan_us(placed) * (1.0 + LANE_SHARE * lanes / self._instance.num_cores)


def _climb(instance: Instance, trial: _Trial, deadline: float, rng: random.Random) -> None:
    """Change a few widths or priorities at a time, and keep what is not worse."""
    steps = ladder(instance.num_cores)
    alike = _alike(instance)
    chain: list[int] = []
    for _ in range(TRIES_PER_OP * len(alike)):
        if perf_counter() > deadline:
            break
        chain = chain or _longest_chain(instance, trial.best)
        op = rng.choice(chain) if rng.random() < 0.7 else rng.randrange(len(alike))
        what = rng.random()
        if what < 0.8:
            others = alike[op] if what < 0.3 else [op]
            if 0.3 <= what < 0.6:
                others = list(set(alike[op]).intersection([op, *chain]))
            widths = list(trial.widths)
            at = min(range(len(steps)), key=lambda at: abs(steps[at] - widths[op])) + rng.choice((-2, -1, 1, 2))
            for other in others:
                if trial.widths[other] == trial.widths[op]:
                    widths[other] = steps[min(max(at, 0), len(steps) - 1)]
            found = trial.better(widths, instance.ranks_at_us(widths))
        else:
            priority = list(trial.priority)
            factor = rng.choice((0.5, 0.9, 1.1, 2.0))
            for other in alike[op] if what < 0.9 else [op]:
                priority[other] *= factor
            found = trial.better(trial.widths, trial.ranks, priority)
        if found:
            chain = []


def _alike(instance: Instance) -> list[list[int]]:
    """For each op all ops with the same durations at every width, itself included."""
    groups: dict[tuple[float, ...], list[int]] = {}
    found = []
    for op, of_op in enumerate(instance.durations_us):
        group = groups.setdefault(tuple(of_op), [])
        group.append(op)
        found.append(group)
    return found


def _longest_chain(instance: Instance, placed: Sequence[Placement]) -> list[int]:
    """Ops from the end of the step back to its start, each delayed by the next one."""
    last_on: dict[int, Placement] = {}
    held_by: dict[int, int] = {}  # for each op the last to end of all that may have delayed it
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


ANNEALING_TRIES_PER_OP = 500
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
    tries, rounds = ANNEALING_TRIES_PER_OP * len(order), 0
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
