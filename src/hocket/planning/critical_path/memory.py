r"""Peak memory of a plan, whatever its ops take, and waits that keep it within a limit.

A postponed weight gradient keeps its layer's activation alive, and the gradient that it reads. So a plan may have a
higher peak than eager, which runs the ops one after another. A simulated timeline has the peak of one run, and another
run may be slower in one lane and hold more. So the peak is bounded over *all* runs that the plan allows.

Take any order of all ops and any moment of a run. Let `m` be the last op in that order that has started by then. All
buffers that are alive were written by `m` or an op before it, and are not among those whose last users had finished
when `m` started. So

    peak <= max over m of the bytes that were written by m or before it, and may still have a user when m starts

which depends only on the waits of `m`. `held_back` adds waits by this bound, op by op in the order::

    backbone   [ dA9 ][ dA8 ][ dA7 ][ dA6 ] ...        without a limit the side may still be at dW9 when the backbone
    side       [ dW9 ][ dW8 ] ...                      is at dA1: then every activation is still there

    backbone   [ dA9 ][ dA8 ][ dA7 ]|wait for dW9|[ dA6 ]        only where the next bytes would not fit, and only until
    side       [ dW9         ][ dW8 ] ...                        enough bytes are free

If `m` waits for all ops before it, its bound is that of running the ops one after another in that order. So every limit
can be kept that the order itself keeps. The caller chooses the orders to try,
of which `min_memory_order` gives one of small peak.

The memory of a plan on streams, each of which has a pool of its own.

A caching allocator gives a freed block to the stream that it was allocated on, and to no other (PyTorch's, see "Memory
management" in its notes on CUDA semantics; graphs keep to it, too). So what one stream has freed does not help another
one, and the step needs the sum of what each stream holds at most, whenever that is::

    one stream    |a a a|b b b|            b takes the block of a: 1 block
    two streams   |a a a|                  b is allocated on another stream: 2 blocks, though both never live at once
                        |b b b|

A value is freed at the first op of its own stream that comes after all of its users, as the executor of streams drops
it. The host allocates and frees in the order of the launches, so the sum is exact, up to what ops need within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from hocket.ir import Graph, Plan, launch_order, synchronisation

# Sums of the same sizes in another order differ by rounding.
ROUNDING = 1e-9
_NEVER = np.iinfo(np.int64).max


def serial_peak_bytes(graph: Graph, order: Sequence[str] | None = None) -> float:
    """The peak in bytes when ops run one after another and each buffer is freed after its last user.

    The order is by default program order, which is eager's.
    """
    return PartPeaks(graph, graph.order if order is None else order, 1).of([0] * len(graph))[0]


class PartPeaks:
    r"""The peaks of a graph's partitions, the least that plans of these parts can be limited to.

    Parts run their ops in one order. A tensor is copied to another part that reads it once its last writer is done, and
    each copy is freed after its last reader there::

        part 0   [ a ] --copy--> [ b ]                 a's value: until the copy is made, and b has read it
        part 1           [ copy ][ c ][ d ]            the copy: until d, if d is its last reader
    """

    def __init__(self, graph: Graph, order: Sequence[str], num_parts: int) -> None:
        self._num_parts = num_parts
        number = {buffer.name: at for at, buffer in enumerate(graph.buffers)}
        self.size_bytes = [buffer.size_bytes for buffer in graph.buffers]
        self._lasts = [buffer.life in ("lasting", "input") for buffer in graph.buffers]
        self._stays = [buffer.life == "kept" for buffer in graph.buffers]
        self._order = [graph.index[name] for name in order]
        self._writes = [[number[name] for name in dict.fromkeys(op.writes) if name in number] for op in graph.ops]
        self._touches = [
            [number[name] for name in dict.fromkeys((*op.writes, *op.reads)) if name in number] for op in graph.ops
        ]
        self._first_writer: dict[int, int] = {}
        self._last_writer: dict[int, int] = {}
        for op in self._order:
            for buffer in self._writes[op]:
                self._first_writer.setdefault(buffer, op)
                self._last_writer[buffer] = op

    def of(self, part: Sequence[int]) -> list[float]:
        """The peak of each part, in bytes."""
        return self._walked(part, None)[0]

    def at_peak(self, part: Sequence[int], number: int) -> list[int]:
        """The buffers that a part holds at its peak, by their positions in the graph, the largest first."""
        found = self._walked(part, number)[1]
        return sorted(found, key=lambda buffer: -self.size_bytes[buffer])

    def touching(self, part: Sequence[int], number: int, buffer: int) -> list[int]:
        """The ops of a part that touch a buffer."""
        return [op for op, touched in enumerate(self._touches) if part[op] == number and buffer in touched]

    def _walked(self, part: Sequence[int], watched: int | None) -> tuple[list[float], set[int]]:
        size = self.size_bytes
        last: dict[tuple[int, int], int] = {}  # the last op of each part that uses each buffer
        for op in self._order:
            for buffer in self._touches[op]:
                last[buffer, part[op]] = op
        held = [0.0] * self._num_parts
        there: set[tuple[int, int]] = set()
        copies: dict[int, list[int]] = {}  # for the last writer of a buffer, the buffers that are copied then
        for buffer, at in last:
            if self._lasts[buffer]:
                held[at] += size[buffer]
                there.add((buffer, at))
            elif buffer in self._last_writer and at != part[self._first_writer[buffer]]:
                copies.setdefault(self._last_writer[buffer], []).append(buffer)
        peaks = list(held)
        moment = {buffer for buffer, at in there if at == watched}
        for op in self._order:
            here = part[op]
            for buffer in self._writes[op]:
                if (buffer, here) not in there:
                    there.add((buffer, here))
                    held[here] += size[buffer]
            grown = [here]
            for buffer in dict.fromkeys(copies.get(op, ())):
                for at in range(self._num_parts):
                    if (buffer, at) in last and (buffer, at) not in there:
                        there.add((buffer, at))
                        held[at] += size[buffer]
                        grown.append(at)
            for at in grown:
                if held[at] > peaks[at]:
                    peaks[at] = held[at]
                    if at == watched:
                        moment = {buffer for buffer, place in there if place == at}
            for buffer in self._touches[op]:
                is_over = last[buffer, here] == op and not (self._lasts[buffer] or self._stays[buffer])
                if is_over and (buffer, here) in there:
                    held[here] -= size[buffer]
                    there.remove((buffer, here))
        return peaks, moment


def peak_bytes(graph: Graph, plan: Plan, order: Sequence[str] | None = None) -> float:
    """An upper bound of the peak in bytes over all runs that `plan` allows, exact on one lane.

    Every lane starts and ends with the step. The bound is 0 for a graph without buffers.

    Edges, lanes and added waits respect the `order`, by default that of launches. Some orders give tighter bounds
    than others.
    """
    found = _walk(graph, plan, launch_order(graph, plan) if order is None else order, None)
    assert found is not None
    return found[0]


def held_back(graph: Graph, plan: Plan, order: Sequence[str], limit_bytes: float) -> tuple[Plan, float] | None:
    """`plan` with waits that keep its peak within `limit_bytes`, and that peak, or None if `order` itself exceeds it.

    All lanes and added waits of `plan` keep `order`.
    """
    found = _walk(graph, plan, order, limit_bytes)
    if found is None:
        return None
    peak, added = found
    if not added:
        return plan, peak
    after = dict(plan.after)
    for op, waits in added.items():
        after[op] = tuple(dict.fromkeys((*after.get(op, ()), *waits)))
    return replace(plan, after=after), peak


def _walk(
    graph: Graph, plan: Plan, order: Sequence[str], limit_bytes: float | None
) -> tuple[float, dict[str, tuple[str, ...]]] | None:
    """The bound and the added waits, op by op in `order`, or None if the limit cannot be kept."""
    lanes = len(plan.lanes)
    place = {op: (lane, at) for lane, of_lane in enumerate(plan.lanes) for at, op in enumerate(of_lane.ops)}
    made = _Made(graph, plan, order, place)
    lasting = lasting_bytes(graph)
    if limit_bytes is not None and lasting > limit_bytes * (1 + ROUNDING):
        return None
    peak = lasting
    added: dict[str, tuple[str, ...]] = {}
    ended: dict[str, npt.NDArray[np.int64]] = {}  # the number of ops of each lane that are done when an op ends
    now = [np.zeros(lanes, np.int64) for _ in range(lanes)]
    for name in order:
        lane, position = place[name]
        clock = now[lane]
        assert clock[lane] == position, f"lane {plan.lanes[lane].name!r} does not keep the order at op {name!r}"
        for other in (*graph.predecessors[name], *plan.after.get(name, ())):
            if clock[place[other][0]] <= place[other][1]:
                clock = np.maximum(clock, ended[other])
        if made.start(name):
            alive = made.alive(clock)
            if limit_bytes is not None and lasting + alive.sum() > limit_bytes * (1 + ROUNDING):
                waits = made.to_free(clock, alive, lasting + alive.sum() - limit_bytes)
                if waits is None:
                    return None
                added[name] = waits
                for other in waits:
                    clock = np.maximum(clock, ended[other])
                alive = made.alive(clock)
            peak = max(peak, lasting + float(alive.sum()))
        clock = clock.copy()
        clock[lane] = position + 1
        now[lane] = ended[name] = clock
        made.forget(now)
    return peak, added


class _Made:
    """The buffers written so far, and the ops that may still use them."""

    def __init__(self, graph: Graph, plan: Plan, order: Sequence[str], place: dict[str, tuple[int, int]]) -> None:
        found = {buffer.name: buffer for buffer in graph.buffers if buffer.life in ("step", "kept")}
        self._lanes = plan.lanes
        turn = {op: at for at, op in enumerate(order)}
        rows: dict[str, int] = {}
        self._new: dict[str, list[int]] = {}
        for name in order:
            for buffer in graph[name].writes:
                if buffer in found and buffer not in rows:
                    rows[buffer] = len(rows)
                    self._new.setdefault(name, []).append(rows[buffer])
        self._sizes = np.array([found[buffer].size_bytes for buffer in rows])
        self._last = np.full((len(rows), len(plan.lanes)), -1, np.int64)  # the last position on each lane that uses it
        self._turn = np.full(len(rows), -1, np.int64)  # the last of all its users in the order
        for name in order:
            lane, position = place[name]
            for buffer in (*graph[name].reads, *graph[name].writes):
                row = rows.get(buffer)
                if row is not None:
                    self._last[row, lane] = max(self._last[row, lane], position)
                    self._turn[row] = turn[name]
        kept = [rows[name] for name in rows if found[name].life == "kept"]
        self._last[kept] = self._turn[kept] = _NEVER
        self._there = np.zeros(0, np.int64)
        self._now = -1  # the turn of the op that starts

    def start(self, name: str) -> bool:
        """Add the buffers that an op writes first, and return True if there are any."""
        self._now += 1
        new = self._new.get(name)
        if new:
            self._there = np.concatenate([self._there, np.array(new, np.int64)])
        return bool(new)

    def alive(self, clock: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The sizes of all buffers, with 0 for those whose users are done when `clock` ops of each lane are done."""
        used = (self._last[self._there] >= clock).any(axis=1)
        return np.where(used, self._sizes[self._there], 0.0)

    def to_free(
        self, clock: npt.NDArray[np.int64], alive: npt.NDArray[np.float64], excess_bytes: float
    ) -> tuple[str, ...] | None:
        """The ops to wait for to free `excess_bytes`, buffers with the earliest last users first."""
        turn = self._turn[self._there]
        free = np.flatnonzero((alive > 0) & (turn < self._now))
        free = free[np.argsort(turn[free], kind="stable")]
        freed = np.cumsum(alive[free])
        # Sums may fall short of the excess by rounding.
        enough = int(np.searchsorted(freed, excess_bytes * (1 - ROUNDING)))
        if enough == len(freed):
            return None
        last = self._last[self._there[free[: enough + 1]]].max(axis=0)
        return tuple(
            lane.ops[position]
            for lane, position, done in zip(self._lanes, last.tolist(), clock.tolist(), strict=True)
            if position >= done
        )

    def forget(self, now: Sequence[npt.NDArray[np.int64]]) -> None:
        """Drop, at every 64th op, the buffers that no lane with ops left can use any more."""
        if self._now % 64 == 0:
            running = [clock for at, clock in enumerate(now) if clock[at] < len(self._lanes[at].ops)]
            known = np.min(running, axis=0, initial=_NEVER)
            self._there = self._there[(self._last[self._there] >= known).any(axis=1)]


def lasting_bytes(graph: Graph) -> float:
    """Return the bytes that ops touch and that are the same memory in every step, and those of the batch."""
    touched = {name for op in graph.ops for name in (*op.reads, *op.writes)}
    return sum(b.size_bytes for b in graph.buffers if b.life in ("lasting", "input") and b.name in touched)


def min_memory_order(graph: Graph) -> tuple[str, ...]:
    """All ops in a topological order of small peak: always the ready op next that leaves the fewest bytes allocated.

    It serves limits below eager's peak, which only another order can keep. It is a heuristic, since the best order is
    NP-hard to find (Sethi: "Complete register allocation problems", 1975), so a limit that it misses may still be
    possible. Among equals the first in program order runs next.
    """
    size = {buffer.name: buffer.size_bytes for buffer in graph.buffers if buffer.life in ("step", "kept")}
    kept = {buffer.name for buffer in graph.buffers if buffer.life == "kept"}
    users: dict[str, set[str]] = {}
    for op in graph.ops:
        for buffer in (*op.reads, *op.writes):
            users.setdefault(buffer, set()).add(op.name)
    made: set[str] = set()
    place = {name: at for at, name in enumerate(graph.order)}

    def leaves_behind(name: str) -> float:
        op = graph[name]
        found = sum(size[b] for b in set(op.writes) if b in size and b not in made)
        touched = {*op.reads, *op.writes}
        return found - sum(size[b] for b in touched if b in size and b not in kept and users[b] == {name})

    waiting = {name: len(before) for name, before in graph.predecessors.items()}
    ready = [(leaves_behind(name), place[name], name) for name, count in waiting.items() if not count]
    heapify(ready)
    order: dict[str, None] = {}
    while ready:
        behind, at, name = heappop(ready)
        if name in order:
            continue
        now = leaves_behind(name)
        if now != behind:  # another user of its buffers has run in the meantime
            heappush(ready, (now, at, name))
            continue
        order[name] = None
        made.update(graph[name].writes)
        for buffer in {*graph[name].reads, *graph[name].writes}:
            users[buffer].discard(name)
            if len(users[buffer]) == 1:  # the last user now frees it
                (other,) = users[buffer]
                if not waiting[other] and other not in order:
                    heappush(ready, (leaves_behind(other), place[other], other))
        for after in graph.successors[name]:
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, (leaves_behind(after), place[after], after))
    return tuple(order)


def pool_bytes(graph: Graph, plan: Plan) -> float:
    """Return the bytes that all streams hold together, and what lasts from step to step."""
    sync, order = synchronisation(graph, plan), launch_order(graph, plan)
    makers: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    for name in order:
        for buffer in graph[name].writes:
            makers.setdefault(buffer, name)
        for buffer in dict.fromkeys((*graph[name].writes, *graph[name].reads)):
            users.setdefault(buffer, []).append(name)
    made: dict[str, list[tuple[str, float]]] = {}
    freed: dict[str, float] = {}  # by op, all of them on the op's own stream
    for buffer, size_bytes, life in graph.buffers:
        if life not in ("step", "kept") or buffer not in makers:
            continue
        maker = makers[buffer]
        made.setdefault(maker, []).append((buffer, size_bytes))
        last = _first_after(users[buffer], maker, plan, sync.clocks, sync.place) if life == "step" else None
        if last is not None:
            freed[last] = freed.get(last, 0.0) + size_bytes
    held = [0.0] * len(plan.lanes)
    peaks = [0.0] * len(plan.lanes)
    for name in order:
        lane = sync.place[name][0]
        held[lane] += sum(size_bytes for _, size_bytes in made.get(name, ()))
        peaks[lane] = max(peaks[lane], held[lane])
        held[lane] -= freed.get(name, 0.0)
    return lasting_bytes(graph) + sum(peaks)


def _first_after(
    users: list[str], maker: str, plan: Plan, clocks: dict[str, tuple[int, ...]], place: dict[str, tuple[int, int]]
) -> str | None:
    """The first op of the maker's stream that has ended after all users have, or None without one."""
    lane, position = place[maker]
    ops = plan.lanes[lane].ops
    for user in users:
        of_user, at = place[user]
        while clocks[ops[position]][of_user] <= at:
            position += 1
            if position == len(ops):
                return None
    return ops[position]
