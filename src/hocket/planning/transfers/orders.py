"""Orders of recvs: TicTac's two, and baselines.

The properties of TicTac, section 4.1 (Algorithm 1), updated while one recv after another is chosen.

With R the recvs that are still outstanding:

    op.M        time of the outstanding recvs that the op depends on
    recv.P      time of the ops that depend on this recv and on no other outstanding one
    recv.M+     the least M among ops that depend on this recv and on at least one other outstanding one

Ops come as groups (`hocket.planning.transfers.receives`). Times are multiples of a small unit, so that equal values
stay equal after any number of subtractions: ties are frequent in the paper's comparator.

Improvement of an order: recvs are moved elsewhere as long as the simulated step ends sooner.

TAC looks one recv ahead, so it may be 10% and more from the best order if two recvs unblock work only together. The
order of first use ignores times. From the better of the two, one recv at a time is moved to the place where the step
ends soonest (insertion neighbourhood, Osman, Potts: "Simulated annealing for permutation flow-shop scheduling", Omega
1989). The critical moment is the one after which the computing resource is never idle again. The step's end depends
only on the recvs that arrive before it and after it, so only moves across that moment can help::

    wire     [ a ][    b    ][ c ][ d ]
    compute       [  ]       [  ][    ][ ... ]        here it is c's arrival: a recv after c may move before it,
                              ^                       or c or a recv before it may move back
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, permutations, product
from math import factorial, inf, prod

import numpy as np
import numpy.typing as npt

from hocket.errors import InputError
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


# M+ of a recv that no op needs together with another one.
NEVER = int(np.iinfo(np.int64).max)

# The sum of all times stays below two to the power of this.
BITS = 61


@dataclass(frozen=True)
class Properties:
    """The time, P and M+ of each recv, in whole units, without meaning for recvs that have arrived."""

    times: Sequence[int]  # M of the recvs
    loads: Sequence[int]  # P
    impending: Sequence[int]  # M+, `NEVER` if no op needs this recv and another outstanding one


class Outstanding:
    """The recvs that are still to come."""

    def __init__(self, receives: Receives, times: Sequence[int], works: Sequence[int]) -> None:
        self._count = len(receives)
        self._recvs = np.arange(len(receives))  # those that are outstanding: the columns of what follows
        self._times = np.array(times, np.int64)
        self._works = np.array(works, np.int64)
        self._members = receives.members
        self._counts = self._members.sum(axis=1)
        self._left = self._members @ self._times  # M of each group
        self._keep(np.full(len(receives), True))

    def properties(self) -> Properties:
        """M, P and M+ of the recvs."""
        alone = self._counts == 1
        several = ~alone
        left = np.where(self._members[several], self._left[several, None], NEVER)
        return Properties(
            self._spread(self._times),
            self._spread(self._works[alone] @ self._members[alone]),
            self._spread(left.min(axis=0, initial=NEVER)),
        )

    def complete(self, recv: int) -> None:
        """Mark this recv as arrived."""
        at = int(np.searchsorted(self._recvs, recv))
        waiting = self._members[:, at]
        self._counts[waiting] -= 1
        self._left[waiting] -= self._times[at]
        self._keep(self._recvs != recv)

    def _keep(self, columns: npt.NDArray[np.bool_]) -> None:
        """Keep only these recvs, and the groups that wait for one of them."""
        rows = self._counts > 0
        self._members = self._members[rows][:, columns]
        self._counts, self._left, self._works = self._counts[rows], self._left[rows], self._works[rows]
        self._recvs, self._times = self._recvs[columns], self._times[columns]

    def _spread(self, values: npt.NDArray[np.int64]) -> list[int]:
        """Values of outstanding recvs as values of all recvs, with `NEVER` for the others."""
        found = np.full(self._count, NEVER, np.int64)
        found[self._recvs] = values
        return found.tolist()


def in_units(*durations_us: Sequence[float]) -> list[list[int]]:
    """Durations in whole units, where the unit is the smallest power of two of a microsecond that 64 bits allow."""
    total = sum(math.fsum(us) for us in durations_us)
    exponent = BITS - max(0, math.frexp(total)[1])
    return [[round(math.ldexp(us, exponent)) for us in row] for row in durations_us]


# The most moves tried, fewer in large steps, where one takes longer. The search takes a second at most.
MAX_TRIES = 4_000
MAX_WORK = 60_000_000
# Up to this many recvs every move is tried.
SMALL = 10


def searched_order(receives: Receives) -> Order:
    """The better of TAC and the order of first use, improved, and so at least as good on one computing resource."""
    starts = dict.fromkeys((tac_order(receives), receives.by_first_use))
    return min((improved(receives, start) for start in starts), key=receives.makespan_us)


def improved(receives: Receives, order: Order) -> Order:
    """`order` after moves of single recvs, each of which makes the step end sooner."""
    tries = min(MAX_TRIES, MAX_WORK // (1 + len(receives) * max(1, len(receives.groups))))
    best_us, critical_us = receives.critical(order)
    moved = True
    while moved:
        moved = False
        for candidate in _moves(receives, order, critical_us):
            if not tries:
                return order
            tries -= 1
            us, moment_us = receives.critical(candidate)
            if us < best_us * (1 - 1e-12):
                order, best_us, critical_us, moved = candidate, us, moment_us, True
                break
    return order


def _moves(receives: Receives, order: Order, critical_us: float) -> Iterator[Order]:
    """`order` with one recv elsewhere: near moves before far ones."""
    count = len(order)
    arrived = receives.arrivals_us(order)
    last = max((at for at, recv in enumerate(order) if arrived[recv] <= critical_us), default=-1)
    for distance in range(1, count):
        for first in range(count - distance):
            second = first + distance
            if count > SMALL and not first <= last <= second:
                continue
            middle = order[first + 1 : second]
            yield (*order[:first], *middle, order[second], order[first], *order[second + 1 :])
            if distance > 1:
                yield (*order[:first], order[second], order[first], *middle, *order[second + 1 :])
