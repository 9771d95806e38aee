"""`Contention`, the interface of resources whose simultaneous ops slow each other down.

`RateSharing` is the common part of a GPU and a network card: each op runs at a rate, and all rates are computed again
when an op begins or ends.

Links that pass the same network card share its rate.

A server may send to four workers over four links, but all of them pass its network card. Simultaneous transfers get
*max-min fair* rates (Bertsekas, Gallager: "Data Networks", 1992, section 6.5.2), as TCP flows of equal round-trip times
do: all rates rise together, and the rate of a transfer stops once its link or one of its cards is saturated::

    server card 100   ---.-- link to a (100) ---  rate 45      the link to c is saturated at 10,
                          |-- link to b (100) ---  rate 45      and the others share the remaining 90
                          '-- link to c  (10) ---  rate 10

The latency of a link uses no card. A transfer with a measured cost is on the wire for all of its duration but the
latency.

A GPU as a shared resource: how kernels on different streams slow each other down.

A kernel that runs alone on a GPU uses part of its multiprocessors and part of its memory's bandwidth (`Costs.shares`).
While several run, each is limited to the part that the ones before it leave::

    stream 0 (priority 1)   [==== asks for 0.6 ====][ 0.9 ]        goes first: rate 1
    stream 1 (priority 0)   [---- asks for 0.8, gets 0.4 -][ 0.8 ]    rate 0.4 / 0.8, later 0.1 / 0.8, then 1

Streams of higher priority are served first, and among equals the kernel that was ready first: a GPU assigns all blocks
of the first kernel, and the blocks of the next kernel get the remaining multiprocessors (Amert, Otterness, Yang,
Anderson, Smith: "GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed", RTSS 2017, section IV). A kernel's rate is
the remaining part over the part that it asks for, of multiprocessors or of bandwidth, whichever is smaller. So all
kernels together never exceed the device.

Two things are simplified: a kernel of higher priority gets its multiprocessors at once (on a GPU, when running blocks
end), and shares are averages over the duration of a kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from hocket.ir import Costs, Graph, Link, Machine, Plan, Share


class Contention(Protocol):
    """Lanes whose ops slow each other down.

    `next_us` is the time of the next possible change if no op begins before, infinity while no op runs.
    """

    @property
    def next_us(self) -> float: ...

    def __contains__(self, lane: int) -> bool:
        """Return True if the ops of this lane are among those."""

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        """Begin an op, which alone would take `work_us`, on an idle lane."""

    def ended(self, now_us: float) -> Sequence[tuple[int, float]]:
        """Remove the ops that have ended by `now_us`, and return them with their starts.

        Called after all ops that begin at `now_us`, and never later than `next_us`.
        """


class CombinedContention:
    """Several kinds of contention in one plan, of which each lane has at most one."""

    def __init__(self, *parts: Contention) -> None:
        self._parts = parts

    @property
    def next_us(self) -> float:
        return min((part.next_us for part in self._parts), default=float("inf"))

    def __contains__(self, lane: int) -> bool:
        return any(lane in part for part in self._parts)

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        next(part for part in self._parts if lane in part).begin(lane, op, work_us, now_us)

    def ended(self, now_us: float) -> Sequence[tuple[int, float]]:
        return [found for part in self._parts if part.next_us <= now_us for found in part.ended(now_us)]


class RateSharing(ABC):
    """Contention in which each op runs at a rate that changes only when an op begins or ends."""

    def __init__(self) -> None:
        self.next_us = inf
        self._running: dict[int, _OpAtRate] = {}
        self._is_stale = False  # the rates

    @abstractmethod
    def __contains__(self, lane: int) -> bool: ...

    @abstractmethod
    def _admit(self, lane: int, op: int, now_us: float) -> None:
        """Note an op that begins."""

    @abstractmethod
    def _dismiss(self, ops: Collection[int]) -> None:
        """Forget ops that have ended."""

    @abstractmethod
    def _rates(self, now_us: float) -> Mapping[int, float]:
        """The speed of each op from now on, between 0.0 (stopped) and 1.0 (as fast as alone)."""

    def _next_change_us(self, now_us: float) -> float:
        """The time at which rates change although no op begins or ends."""
        return inf

    def begin(self, lane: int, op: int, work_us: float, now_us: float) -> None:
        self._running[op] = _OpAtRate(work_us, now_us)
        self._admit(lane, op, now_us)
        self._is_stale = True
        self.next_us = now_us

    def ended(self, now_us: float) -> list[tuple[int, float]]:
        found = [(op, one.started_us) for op, one in self._running.items() if one.end_us <= now_us]
        if found:
            for op, _ in found:
                del self._running[op]
            self._dismiss([op for op, _ in found])
            # Their followers begin at this instant, so the rates are computed after those.
            self._is_stale = True
            self.next_us = now_us
        elif self._is_stale or now_us >= self.next_us:
            self._is_stale = False
            for op, rate in self._rates(now_us).items():
                self._running[op].go_on(rate, now_us)
            ends_us = min((one.end_us for one in self._running.values()), default=inf)
            self.next_us = min(ends_us, self._next_change_us(now_us))
        return found


class _OpAtRate:
    """A running op: its remaining work, its start, and its end at the present rate."""

    def __init__(self, work_us: float, now_us: float) -> None:
        self.started_us = self.end_us = inf
        self._left_us, self._since_us, self._rate = work_us, now_us, 0.0

    def go_on(self, rate: float, now_us: float) -> None:
        """Run at this rate from now on."""
        if rate > 0.0:
            self.started_us = min(self.started_us, now_us)
        if rate != self._rate:
            self._left_us = max(0.0, self._left_us - (now_us - self._since_us) * self._rate)
            self._since_us, self._rate = now_us, rate
            self.end_us = now_us + self._left_us / rate if rate > 0.0 else inf


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
    """The max-min fair rates of flows."""
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


class Multiprocessors(RateSharing):
    """The streams of a plan on the GPUs they share.

    `streams` has the GPU and the priority of each lane that is a stream of such a GPU. `shares` is by position in
    the graph, and None for ops that slow down no other op.
    """

    def __init__(self, streams: dict[int, tuple[str, int]], shares: Sequence[Share | None]) -> None:
        super().__init__()
        self._streams = streams
        self._shares = shares
        # By GPU: minus the priority, since when it is ready, and the op; the first in order is served first.
        self._queues: dict[str, list[tuple[int, float, int, int]]] = {device: [] for device, _ in streams.values()}

    def __contains__(self, lane: int) -> bool:
        return lane in self._streams

    def _admit(self, lane: int, op: int, now_us: float) -> None:
        device, priority = self._streams[lane]
        insort(self._queues[device], (-priority, now_us, lane, op))

    def _dismiss(self, ops: Collection[int]) -> None:
        for device, queue in self._queues.items():
            self._queues[device] = [entry for entry in queue if entry[3] not in ops]

    def _rates(self, now_us: float) -> dict[int, float]:
        found = {}
        for queue in self._queues.values():
            processors = bandwidth = 1.0
            for _, _, _, op in queue:
                share = self._shares[op]
                if share is None:
                    found[op] = 1.0
                    continue
                rate = min(1.0, processors / share.multiprocessors)
                if share.bandwidth:
                    rate = min(rate, bandwidth / share.bandwidth)
                if rate < _STANDSTILL:  # what rounding leaves over is nothing
                    rate = 0.0
                found[op] = rate
                processors = max(0.0, processors - rate * share.multiprocessors)
                bandwidth = max(0.0, bandwidth - rate * share.bandwidth)
        return found


_STANDSTILL = 1e-9


def multiprocessors_of(graph: Graph, plan: Plan, costs: Costs, machine: Machine) -> Multiprocessors | None:
    """The GPUs on which some op has a share, or None if there is no such op or only one stream."""
    streams: dict[int, tuple[str, int]] = {}
    shares: list[Share | None] = [None] * len(graph)
    if not costs.shares or sum(lane.kind == "stream" for lane in plan.lanes) < 2:
        return None
    index = graph.index
    for number, lane in enumerate(plan.lanes):
        if lane.kind == "stream" and lane.device in machine.by_name:
            streams[number] = (lane.device, lane.priority)
            for op in lane.ops:
                row = costs.shares.get(op)
                if row is not None:
                    shares[index[op]] = row.get(lane.device)
    return Multiprocessors(streams, shares) if any(shares) else None
