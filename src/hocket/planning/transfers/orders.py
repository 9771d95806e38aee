"""Orders of recvs: TicTac's two, and baselines."""

from __future__ import annotations

import random
from itertools import chain, permutations, product
from math import factorial, inf, prod

from hocket.errors import InputError
from hocket.planning.transfers.outstanding import Outstanding, Properties, in_units
from hocket.planning.transfers.receives import Receives

Order = tuple[int, ...]

# Limits of `exact_order`: two to the power of this many sets of recvs, or this many combinations of orders.
MAX_RECVS = 16
MAX_ORDERS = 50_000


def tic_order(receives: Receives) -> Order:
    """Timing-independent communication scheduling (TicTac, Algorithm 2): by M+, with time 1 for recvs and 0 for ops.

    A recv that no op needs together with another one has no M+ and comes last. Ties go by name.
    """
    found = Outstanding(receives, [1] * len(receives), [0] * len(receives.groups)).properties()
    return tuple(sorted(receives.by_name, key=found.impending.__getitem__))


def tac_order(receives: Receives) -> Order:
    """Timing-aware communication scheduling (TicTac, Algorithm 3): repeatedly the recv that all others follow.

    A goes before B if ``min(P_B, M_A) < min(P_A, M_B)`` (Eq. 6, which Algorithm 3 prints the other way round), or if
    these are equal and ``M+_A < M+_B``. Ties go by name. The comparator is not transitive for ties (Johnson: "Optimal
    two- and three-stage production schedules", 1954, has the same rule), so recvs are selected one by one and not
    sorted, and the properties are updated after each.
    """
    left = list(receives.by_name)
    outstanding = Outstanding(receives, *in_units(receives.times_us, receives.works_us))
    order: list[int] = []
    while left:
        chosen = _first(left, outstanding.properties())
        left.remove(chosen)
        outstanding.complete(chosen)
        order.append(chosen)
    return tuple(order)


def _first(recvs: list[int], found: Properties) -> int:
    times, loads, impending = found.times, found.loads, found.impending
    best = recvs[0]
    load, time = loads[best], times[best]
    for recv in recvs:
        other_load, other_time = loads[recv], times[recv]
        mine = load if load < other_time else other_time  # min() would take half of TAC's time
        its = other_load if other_load < time else time
        if mine < its or (mine == its and impending[recv] < impending[best]):
            best, load, time = recv, other_load, other_time
    return best


def random_order(receives: Receives, seed: int) -> Order:
    """A uniformly random order, as in a system that pulls all parameters at once."""
    return tuple(random.Random(seed).sample(range(len(receives)), len(receives)))


def exact_order(receives: Receives) -> Order:
    """The order of the least makespan on one computing resource, without later sends.

    With one wire of one channel, the makespan after a set of recvs follows from that after the set without its last
    one, so the best order of every set follows from the best orders of smaller ones (Held, Karp 1962). With several
    links all combinations of their orders are tried.

    Raises:
        InputError: too many recvs for that.
    """
    if len(receives.channels) <= 1 and max(receives.channels, default=1) == 1:
        if len(receives) > MAX_RECVS:
            raise InputError(
                f"planner transfers: {len(receives)} recvs, and order='exact' looks at up to {MAX_RECVS}; take another"
            )
        return _best_by_subsets(receives)
    of_link = [
        [recv for recv in range(len(receives)) if receives.links[recv] == n] for n in range(len(receives.channels))
    ]
    count = prod(factorial(len(recvs)) for recvs in of_link)
    if count > MAX_ORDERS:
        raise InputError(
            f"planner transfers: {count:,} orders of the recvs of {len(of_link)} links, and order='exact' looks at up "
            f"to {MAX_ORDERS:,}; take another"
        )
    orders = (tuple(chain.from_iterable(parts)) for parts in product(*map(permutations, of_link)))
    return min(orders, key=receives.makespan_us)


def _best_by_subsets(receives: Receives) -> Order:
    count = len(receives)
    unblocked = [0.0] * (1 << count)  # the work that may start once these have arrived
    for group, us in zip(receives.groups, receives.works_us, strict=True):
        unblocked[group] += us
    for recv in range(count):
        for some in range(1 << count):
            if some >> recv & 1:
                unblocked[some] += unblocked[some ^ 1 << recv]
    # For each set of recvs: the earliest end of the work that it unblocks, and the last recv of that order.
    done: list[tuple[float, int]] = [(unblocked[0], -1)]
    arrived = [0.0]
    for some in range(1, 1 << count):
        low = (some & -some).bit_length() - 1
        arrived.append(arrived[some ^ 1 << low] + receives.times_us[low])
        best = (inf, -1)
        for recv in range(count):
            if some >> recv & 1:
                before = some ^ 1 << recv
                us = max(done[before][0], arrived[some]) + unblocked[some] - unblocked[before]
                best = min(best, (us, recv))
        done.append(best)
    order: list[int] = []
    some = (1 << count) - 1
    while some:
        recv = done[some][1]
        order.append(recv)
        some ^= 1 << recv
    return tuple(reversed(order))
