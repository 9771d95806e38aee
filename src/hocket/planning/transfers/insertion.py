r"""Improvement of an order: recvs are moved elsewhere as long as the simulated step ends sooner.

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

from collections.abc import Iterator

from hocket.planning.transfers.orders import Order, tac_order
from hocket.planning.transfers.receives import Receives

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
