r"""Memory: what a plan may hold at once, whatever each op takes, and how far weight gradients may fall behind.

A weight gradient that is put off keeps its layer's activation alive, and the gradient that it reads. So a plan has a
peak of its own, beside that of running the ops one after another, which is what eager does. A simulated timeline would
tell the peak of one run; another run may be slower in one lane and hold more. So the bound is taken over *all* runs
that the plan allows: when an op starts, a buffer may be there unless the op that makes it surely comes later, or all
its users are surely done::

    spine   [ dA9 ][ dA8 ][ dA7 ][ dA6 ] ...        without a bound the side may still be at dW9 when the spine
    side    [ dW9 ][ dW8 ] ...                      is at dA1: then every activation is still there

    spine   [ dA9 ][ dA8 ][ dA7 ]|wait for dW9|[ dA6 ]        lag 2: at most two weight gradients behind

To keep a limit, the spine waits for the side: an op starts only when at most `lag` of the weight gradients before it in
the plan's order are not done. The largest lag whose bound is within the limit is taken, by bisection. Where even lag 0
is too much, because branches of the spine run far ahead of each other, every op waits for all ops that stand a certain
number of places before it; with a window of one the ops run one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hocket.ir import Buffer, Graph, Plan, launch_order

__all__ = ["PRECISION", "held_back", "peak_bytes", "serial_peak_bytes"]

PRECISION = 0.001


def serial_peak_bytes(graph: Graph, order: Sequence[str] | None = None) -> float:
    """The most bytes that are alive at once when ops run one after another and free what nobody needs any more.

    Args:
        graph: one step that knows its buffers.
        order: the ops' order; program order, which is eager's, when not given.

    Example:
        >>> from hocket.ir import Buffer, Op
        >>> ops = (Op("a", reads=("w",), writes=("x",)), Op("b", reads=("x",), writes=("y",)))
        >>> serial_peak_bytes(Graph(ops, buffers=(Buffer("x", 8.0), Buffer("y", 4.0), Buffer("w", 2.0, "lasting"))))
        14.0
    """
    order = graph.order if order is None else order
    last: dict[str, str] = {}
    for name in order:
        last.update(dict.fromkeys((*graph[name].reads, *graph[name].writes), name))
    size = {buffer.name: buffer.size_bytes for buffer in graph.buffers if buffer.life in ("step", "kept")}
    stays = {buffer.name for buffer in graph.buffers if buffer.life == "kept"}
    alive = _lasting_bytes(graph)
    peak = alive
    there: set[str] = set()
    for name in order:
        for buffer in graph[name].writes:
            if buffer in size and buffer not in there:
                there.add(buffer)
                alive += size[buffer]
        peak = max(peak, alive)
        for buffer in {*graph[name].reads, *graph[name].writes}:
            if buffer in there and buffer not in stays and last[buffer] == name:
                alive -= size[buffer]
    return peak


def peak_bytes(graph: Graph, plan: Plan, precision: float = 0.0) -> float:
    """The most bytes that can be alive at once in any run that `plan` allows: an upper bound, exact on one lane.

    Every lane starts and ends with the step. Without buffers in the graph it is 0.

    Args:
        graph: one step.
        plan: its plan.
        precision: small buffers, up to this part of all bytes, are taken to be alive all the time, which saves time.

    Raises:
        PlanError: the plan does not fit the graph, or its lanes wait for each other in a circle.
    """
    return _Bound(graph, plan, launch_order(graph, plan), precision).of(plan.after)


class _Bound:
    """The bound for plans that differ in `Plan.after` alone.

    Args:
        graph: one step.
        plan: gives the lanes.
        order: any order of all ops that lanes, edges and every `after` respect.
        precision: see `peak_bytes`.
    """

    def __init__(self, graph: Graph, plan: Plan, order: Sequence[str], precision: float) -> None:
        found, small_bytes = _large([b for b in graph.buffers if b.life in ("step", "kept")], precision)
        self._always_bytes = small_bytes + _lasting_bytes(graph)
        self._order = order
        self._place = {op: (lane, at) for lane, of_lane in enumerate(plan.lanes) for at, op in enumerate(of_lane.ops)}
        self._lanes = len(plan.lanes)
        self._across = {
            name: tuple(b for b in graph.predecessors[name] if self._place[b][0] != self._place[name][0])
            for name in order
        }
        column = {buffer.name: at for at, buffer in enumerate(found)}
        makers: dict[int, str] = {}
        last = np.full((len(found), self._lanes), -1)
        for name in graph.order:
            op, (lane, position) = graph[name], self._place[name]
            for buffer in (*op.reads, *op.writes):
                at = column.get(buffer)
                if at is not None:
                    last[at, lane] = max(last[at, lane], position)
                    if at not in makers and buffer in op.writes:
                        makers[at] = name
        last[[buffer.life == "kept" for buffer in found]] = np.iinfo(np.int64).max
        columns = list(makers)
        self._last = last[columns]
        self._sizes = np.array([found[at].size_bytes for at in columns])
        # Memory grows only when something is made, so it is enough to look at the starts of ops that make something.
        self._rows = list(dict.fromkeys(makers.values()))
        row = {name: at for at, name in enumerate(self._rows)}
        self._made_by = np.array([row[makers[at]] for at in columns], np.int64)
        self._places = np.array([self._place[name] for name in self._rows], np.int64).reshape(-1, 2)

    def of(self, after: Mapping[str, Sequence[str]]) -> float:
        """The bound with these waits."""
        if not self._rows:
            return self._always_bytes
        clocks: dict[str, list[int]] = {}  # how many ops of each lane are surely done when an op ends
        now = [[0] * self._lanes for _ in range(self._lanes)]
        for name in self._order:
            lane, position = self._place[name]
            clock = now[lane]
            for other in (*self._across[name], *after.get(name, ())):
                known = clocks[other]
                clock = [one if one > more else more for one, more in zip(clock, known, strict=True)]
            if clock is now[lane]:
                clock = clock.copy()
            clock[lane] = position + 1
            now[lane] = clocks[name] = clock
        done = np.array([clocks[name] for name in self._rows], np.int64)
        done[np.arange(len(done)), self._places[:, 0]] -= 1  # when it starts it knows all of that, but not itself
        return self._always_bytes + _most_alive(done, self._places, self._made_by, self._last, self._sizes)


def _large(buffers: Sequence[Buffer], precision: float) -> tuple[list[Buffer], float]:
    """The large ones, and the bytes of all others, which are at most `precision` of all bytes."""
    by_size = sorted(buffers, key=lambda buffer: buffer.size_bytes)
    allowed = precision * sum(buffer.size_bytes for buffer in buffers)
    small_bytes, count = 0.0, 0
    while count < len(by_size) and small_bytes + by_size[count].size_bytes <= allowed:
        small_bytes += by_size[count].size_bytes
        count += 1
    return by_size[count:], small_bytes


def _most_alive(
    done: npt.NDArray[np.int64],
    place: npt.NDArray[np.int64],
    made_by: npt.NDArray[np.int64],
    last: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.float64],
) -> float:
    """The largest sum of sizes over the buffers that may be alive when an op starts, over all ops.

    Args:
        done: for each op (row) and lane how many of the lane's ops are surely done when it starts.
        place: for each op its lane and its position there.
        made_by: for each buffer the row of the op that makes it.
        last: for each buffer and lane the position of its last user there; -1: none.
        sizes: of the buffers.
    """
    if not len(sizes):
        return 0.0
    alive = np.zeros((len(done), len(sizes)), bool)
    for lane in range(done.shape[1]):  # some user on this lane may not be done
        used = np.flatnonzero(last[:, lane] >= 0)
        alive[:, used] |= done[:, lane, None] <= last[None, used, lane]
    for lane in range(done.shape[1]):  # unless its maker surely starts only when the op is over
        mine = np.flatnonzero(place[:, 0] == lane)
        alive[mine] &= done[made_by, lane][None, :] <= place[mine, 1, None]
    return float((alive @ sizes).max())


def held_back(graph: Graph, plan: Plan, order: Sequence[str], side: Set[str] | None, limit_bytes: float) -> Plan | None:
    """`plan` with waits that keep its peak within `limit_bytes`, as few as it takes; None where none suffice.

    Args:
        graph: one step that knows its buffers.
        plan: any plan all of whose lanes keep `order`.
        order: the ops of the step.
        side: those among them that the others shall not leave too far behind, since they hold what the others made;
            None: no op may run too far ahead of any other.
        limit_bytes: the peak not to go beyond.
    """
    bound = _Bound(graph, plan, order, PRECISION)

    def fits(tried: Plan) -> bool:
        return bound.of(tried.after) <= limit_bytes

    if fits(plan):
        return plan
    if side is None:
        return _loosest(lambda window: _windowed(plan, order, window), 1, len(order), fits)
    return _loosest(lambda lag: _lagging(plan, order, side, lag), 0, len(side), fits)


def _loosest(make: Callable[[int], Plan], least: int, most: int, fits: Callable[[Plan], bool]) -> Plan | None:
    """The last of ``make(least)``, ..., ``make(most)`` that fits, where each allows more than the one before."""
    best = make(least)
    if not fits(best):
        return None
    low, high = least, most  # `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        tried = make(middle)
        if fits(tried):
            best, low = tried, middle
        else:
            high = middle
    return best


def _lagging(plan: Plan, order: Sequence[str], side: Set[str], lag: int) -> Plan:
    """`plan`, where no op starts as long as more than `lag` side ops before it in `order` are not done."""
    lane = {op: number for number, of_lane in enumerate(plan.lanes) for op in of_lane.ops}
    behind = deque[str]()  # side ops that may still be running
    over: dict[int, str] = {}  # for each lane the last side op that must be done by now
    told: dict[int, dict[int, str]] = {}  # for each lane what it has waited for
    after = dict(plan.after)
    for op in order:
        if op in side:
            behind.append(op)
            if len(behind) > lag:
                done = behind.popleft()
                over[lane[done]] = done
            continue
        knows = told.setdefault(lane[op], {})
        fresh = tuple(other for at, other in over.items() if at != lane[op] and knows.get(at) != other)
        if fresh:
            knows.update(over)
            after[op] = tuple(dict.fromkeys((*after.get(op, ()), *fresh)))
    return replace(plan, after=after)


def _windowed(plan: Plan, order: Sequence[str], window: int) -> Plan:
    """`plan`, where no op starts before everything that stands `window` or more places before it in `order` is done."""
    lane = {op: number for number, of_lane in enumerate(plan.lanes) for op in of_lane.ops}
    over: dict[int, str] = {}
    told: dict[int, dict[int, str]] = {}
    after = dict(plan.after)
    for at, op in enumerate(order):
        if at >= window:
            over[lane[order[at - window]]] = order[at - window]
        knows = told.setdefault(lane[op], {})
        fresh = tuple(other for number, other in over.items() if number != lane[op] and knows.get(number) != other)
        if fresh:
            knows.update(over)
            after[op] = tuple(dict.fromkeys((*after.get(op, ()), *fresh)))
    return replace(plan, after=after)


def _lasting_bytes(graph: Graph) -> float:
    touched = {name for op in graph.ops for name in (*op.reads, *op.writes)}
    return sum(b.size_bytes for b in graph.buffers if b.life in ("lasting", "input") and b.name in touched)
