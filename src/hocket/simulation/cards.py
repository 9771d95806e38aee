r"""Links that pass the same network card share its rate.

A server may send to four workers over four links, but all of them pass its network card. Simultaneous transfers get
*max-min fair* rates (Bertsekas, Gallager: "Data Networks", 1992, section 6.5.2), as TCP flows of equal round-trip times
do: all rates rise together, and the rate of a transfer stops once its link or one of its cards is saturated::

    server card 100   ---.-- link to a (100) ---  rate 45      the link to c is saturated at 10,
                          |-- link to b (100) ---  rate 45      and the others share the remaining 90
                          '-- link to c  (10) ---  rate 10

The latency of a link uses no card. A transfer with a measured cost is on the wire for all of its duration but the
latency.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple

from hocket.ir import Link, Machine, Plan
from hocket.simulation.contention import RateSharing


class _Flow(NamedTuple):
    """A running transfer: its link, and the time from which it uses the cards."""

    link: Link
    from_us: float


class SharedCards(RateSharing):
    """The channels of a plan whose links pass network cards."""

    def __init__(self, links: Mapping[int, Link], bytes_per_s: Mapping[str, float]) -> None:
        super().__init__()
        self._links = links
        self._bytes_per_s = bytes_per_s
        self._flows: dict[int, _Flow] = {}

    def __contains__(self, lane: int) -> bool:
        return lane in self._links

    def _admit(self, lane: int, op: int, now_us: float) -> None:
        link = self._links[lane]
        self._flows[op] = _Flow(link, now_us + link.latency_us)

    def _dismiss(self, ops: Collection[int]) -> None:
        for op in ops:
            del self._flows[op]

    def _rates(self, now_us: float) -> dict[int, float]:
        rates = dict.fromkeys(self._flows, 1.0)
        sending = {op: flow.link for op, flow in self._flows.items() if flow.from_us <= now_us}
        given = max_min_rates(
            [link.bytes_per_s for link in sending.values()],
            [link.cards for link in sending.values()],
            self._bytes_per_s,
        )
        for (op, link), bytes_per_s in zip(sending.items(), given, strict=True):
            rates[op] = bytes_per_s / link.bytes_per_s
        return rates

    def _next_change_us(self, now_us: float) -> float:
        return min((flow.from_us for flow in self._flows.values() if flow.from_us > now_us), default=inf)


def max_min_rates(
    limits: Sequence[float], cards: Sequence[Sequence[str]], bytes_per_s: Mapping[str, float]
) -> list[float]:
    """The max-min fair rates of flows.

    Example:
        >>> max_min_rates([100.0, 100.0, 10.0], [["server"]] * 3, {"server": 100.0})
        [45.0, 45.0, 10.0]
    """
    rates = [0.0] * len(limits)
    rising = dict.fromkeys(range(len(limits)))
    left = dict(bytes_per_s)
    level = 0.0
    while rising:
        users = {card: sum(card in cards[flow] for flow in rising) for card in left}
        shares = {card: level + left[card] / count for card, count in users.items() if count}
        reached = min([*shares.values(), *(limits[flow] for flow in rising)])
        full = {card for card, share in shares.items() if share <= reached}
        for card, count in users.items():
            left[card] = max(0.0, left[card] - (reached - level) * count)
        level = reached
        for flow in list(rising):
            if limits[flow] <= level or not full.isdisjoint(cards[flow]):
                rates[flow] = level
                del rising[flow]
    return rates


def cards_of(plan: Plan, machine: Machine) -> SharedCards | None:
    """The channels whose links pass network cards, or None if there are none."""
    links: dict[int, Link] = {}
    for number, lane in enumerate(plan.lanes):
        if lane.kind == "channel" and lane.ops:
            link = machine.link(*lane.ends)
            if link.cards:
                links[number] = link
    if not links:
        return None
    return SharedCards(links, {card.name: card.bytes_per_s for card in machine.cards})
