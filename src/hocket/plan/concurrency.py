"""`concurrency`: the right width for each op, and other ops in the cores it leaves idle.

The four strategies of Liu et al. ("Runtime Concurrency Control and Operation Scheduling for High Performance Neural
Network Training", IPDPS 2019, section III-D), decided ahead of the step by the measured costs::

    cores
      68 |#####################|....   1  each op instance at its own best width
         |#####################|       2  one width for all instances of a kernel, that of its largest instance,
      48 |#####################|           since changing widths costs time
         |  conv (best at 48)  |oooo|  3  a ready op that fits into the idle cores and does not outlast what runs
       0 +---------------------------      goes beside it, at one of its three best widths (narrowest first)

    4  beside an op that takes all cores, small ops on the second hardware threads of the same cores

Without strategy 3 ops run one after another, as the framework would. Where nothing fits, the most expensive ready op
runs next. The width of strategy 3 gives way to that of strategy 2 when they differ by more than two threads.

Beyond the paper, `lookahead` improves the result by search (see `hocket.plan.lookahead`), and pairs of ops that were
measured to disturb each other (`avoid`) are kept apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine, Plan
from hocket.plan.base import Planner, cpu_devices
from hocket.plan.lookahead import improve
from hocket.plan.moldable import Instance, Placement, as_plan, instance_of, makespan_us

__all__ = ["Concurrency", "strategy_widths"]

# Empirical values of the paper: candidates per op, and threads by which strategy 3 may depart from strategy 2.
CANDIDATES = 3
MAX_DEPARTURE = 2


class Concurrency(Planner):
    """Strategies 1 to 3 of the paper, each switchable, and a search that starts from their plan.

    Args:
        strategies: which of 1, 2, 3 to apply; 2 builds on 1 and 3 on both.
        lookahead_ms: how long to search for something shorter; 0: the paper's plan as it is.
        avoid: pairs of ops that shall not run side by side.

    Example:
        >>> from hocket.ir import Costs, Graph, Machine, Op
        >>> costs = Costs({op: {"1": 30.0, "2": 25.0} for op in "ab"})
        >>> plan = Concurrency(lookahead_ms=20).plan(Graph((Op("a"), Op("b"))), costs, Machine.of(cores=2))
        >>> sorted(lane.ops for lane in plan.lanes)
        [('a',), ('b',)]
    """

    name = "concurrency"

    def __init__(
        self,
        strategies: Collection[int] = (1, 2, 3),
        lookahead_ms: float = 300.0,
        avoid: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.strategies = frozenset(strategies)
        if not self.strategies <= {1, 2, 3}:
            raise InputError(f"planner concurrency: expected strategies out of 1, 2, 3, got {sorted(self.strategies)}")
        if lookahead_ms < 0:
            raise InputError(f"planner concurrency: expected lookahead_ms >= 0, got {lookahead_ms}")
        self.lookahead_ms = lookahead_ms
        self.avoid = frozenset(frozenset(pair) for pair in avoid)

    def plan(self, graph: Graph, costs: Costs, machine: Machine) -> Plan:
        device = cpu_devices(machine)[0]
        instance = instance_of(graph, costs, device)
        widths = strategy_widths(graph, instance, self.strategies)
        apart = _apart(graph, self.avoid)
        if 3 in self.strategies:
            placed = _side_by_side(instance, widths, apart)
        else:
            placed = _one_by_one(instance, widths)
        if self.lookahead_ms:
            found = improve(instance, placed, budget_s=self.lookahead_ms / 1e3, apart=apart)
            if makespan_us(found) < makespan_us(placed):
                placed = found
        return as_plan(graph, placed, device, self.name)


def strategy_widths(graph: Graph, instance: Instance, strategies: Collection[int]) -> list[int]:
    """The width of each op by strategies 1 and 2; all cores where neither applies."""
    if 2 in strategies:
        largest: dict[str, int] = {}
        for op, described in enumerate(graph.ops):
            known = largest.get(described.target)
            if known is None or instance.durations_us[op][1] > instance.durations_us[known][1]:
                largest[described.target] = op
        return [instance.best_width[largest[described.target]] for described in graph.ops]
    if 1 in strategies:
        return list(instance.best_width)
    return [instance.num_cores] * len(graph)


def _apart(graph: Graph, avoid: Iterable[frozenset[str]]) -> dict[int, set[int]]:
    apart: dict[int, set[int]] = {}
    for pair in avoid:
        known = [graph.index[name] for name in pair if name in graph.index]
        if len(known) == 2:
            apart.setdefault(known[0], set()).add(known[1])
            apart.setdefault(known[1], set()).add(known[0])
    return apart


def _one_by_one(instance: Instance, widths: Sequence[int]) -> list[Placement]:
    placed, now_us = [], 0.0
    for op in instance.order:
        end_us = now_us + instance.durations_us[op][widths[op]]
        placed.append(Placement(op, tuple(range(widths[op])), now_us, end_us))
        now_us = end_us
    return placed


def _candidates(instance: Instance, op: int, usual: int) -> list[int]:
    """The widths strategy 3 may give `op`: its three fastest, unless they are far from what strategy 2 says."""
    durations = instance.durations_us[op]
    fastest = sorted(range(1, instance.num_cores + 1), key=lambda width: (durations[width], width))[:CANDIDATES]
    near = [width for width in fastest if abs(width - usual) <= MAX_DEPARTURE]
    return sorted(set(near or [usual]))


def _side_by_side(instance: Instance, widths: Sequence[int], apart: dict[int, set[int]]) -> list[Placement]:
    durations = instance.durations_us
    candidates = [_candidates(instance, op, widths[op]) for op in range(len(durations))]
    waiting = [len(before) for before in instance.predecessors]
    # The most expensive op first: it is the one to run when nothing fits, and the one to fit beside others.
    ready = sorted((op for op in instance.order if not waiting[op]), key=lambda op: -durations[op][widths[op]])
    idle = list(range(instance.num_cores))
    running: list[tuple[float, int, tuple[int, ...]]] = []
    placed: list[Placement] = []
    now_us = 0.0
    while ready or running:
        while ready and idle:
            chosen = _fitting(ready, candidates, durations, len(idle), now_us, running, apart)
            if chosen is None:
                break
            op, width = chosen
            ready.remove(op)
            cores = tuple(idle[:width])
            del idle[:width]
            end_us = now_us + durations[op][width]
            heappush(running, (end_us, op, cores))
            placed.append(Placement(op, cores, now_us, end_us))
        now_us = running[0][0]
        while running and running[0][0] <= now_us:
            _, op, cores = heappop(running)
            idle.extend(cores)
            for after in instance.successors[op]:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
        idle.sort()
        ready.sort(key=lambda op: -durations[op][widths[op]])
    return placed


def _fitting(
    ready: Sequence[int],
    candidates: Sequence[Sequence[int]],
    durations: Sequence[Sequence[float]],
    num_idle: int,
    now_us: float,
    running: Sequence[tuple[float, int, tuple[int, ...]]],
    apart: dict[int, set[int]],
) -> tuple[int, int] | None:
    """The op to start now and its width, or None: wait."""
    if not running:
        op = ready[0]
        return op, min(candidates[op], key=lambda width: durations[op][width])
    last_end_us = running[0][0] if len(running) == 1 else max(end_us for end_us, _, _ in running)
    beside = {op for _, op, _ in running}
    for op in ready:
        if apart.get(op, set()) & beside:
            continue
        for width in candidates[op]:
            if width <= num_idle and now_us + durations[op][width] <= last_end_us:
                return op, width
    for op in ready:
        # Nothing fits without outlasting what runs: the most expensive op whose width is there.
        if candidates[op][0] <= num_idle and not apart.get(op, set()) & beside:
            return op, candidates[op][0]
    return None
