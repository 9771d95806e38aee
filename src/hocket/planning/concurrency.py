"""`concurrency`: the best width for each op, and other ops on the cores that it leaves idle.

The four strategies of Liu et al. ("Runtime Concurrency Control and Operation Scheduling for High Performance Neural
Network Training", IPDPS 2019, section III-D), decided ahead of the step by the measured costs::

    cores
      68 |#####################|....   1  each op instance at its own best width
         |#####################|       2  one width for all instances of a kernel, that of its largest instance,
      48 |#####################|           since changing widths costs time
         |  conv (best at 48)  |oooo|  3  a ready op that fits into the idle cores and does not outlast what runs
       0 +---------------------------      runs beside it, at one of its three best widths (narrowest first)

    4  beside an op that takes all cores, small ops on the second hardware threads of the same cores

Without strategy 3 ops run one after another, as in the framework. If no op fits, the most expensive ready op runs next.
The width of strategy 2 replaces that of strategy 3 if they differ by more than two threads. The small ops of strategy 4
(the shortest at one thread first) go to the cores with the least load so far, and end no later than the wide op. The
slowdown is that of `hocket.simulation.smt`: while both threads of a core are busy, both run at the same reduced speed,
and the wide op ends with the slowest of its threads::

    core 0  sibling  |  [ small ][ small ]     |
            thread 0 |=======---------------===|      the small ops of the most loaded core delay the wide op,
    core 1  sibling  |  [   small   ]          |      and those of other cores do not delay it further
            thread 0 |=======---------=====|...|

An op that is fastest at nearly all cores leaves no room for others. With `halves`, half of its width is among its
candidates, and if no op runs, the two most expensive ready ops begin side by side if they end sooner than in sequence
(section II-C, Table III: two convolutions on 34 cores each, 1.38 times as fast as one after the other on 68).

Beyond the paper, a search improves the result (`hocket.planning.moldable.local_search`), small ops are first merged
into actions (`hocket.planning.moldable.clustering`), a lane that waits for another one wakes up some microseconds late,
and pairs of ops that were measured to disturb each other (`avoid`) are kept apart. The plan of the search, the paper's
plan and the serial one are simulated, and the shortest of them is the result.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine, Plan
from hocket.planning.base import Planner, cpu_devices
from hocket.planning.moldable.clustering import Coarse, coarsen
from hocket.planning.moldable.instance import Instance, Placement, as_plan, makespan_us, tabled
from hocket.planning.moldable.local_search import improve
from hocket.planning.moldable.sgs import Clock, CoreAllocator, members
from hocket.planning.serial import Serial
from hocket.simulation import simulate

# Empirical values of the paper: candidates per op, and threads by which strategy 3 may depart from strategy 2.
CANDIDATES = 3
MAX_DEPARTURE = 2
# On two cores a longer search shortens the zoo's plans by at most 0.3%, on 16 cores random graphs of 250 ops by 4%.
LOOKAHEAD_MS_PER_CORE = 50.0
MAX_LOOKAHEAD_MS = 300.0


class Concurrency(Planner):
    """Strategies 1 to 4 of the paper, each of which can be left out, and a search that starts from their plan.

    Args:
        strategies: those of 1, 2, 3 and 4 to apply. 4 has an effect only with 3, and on cores with sibling threads.
        lookahead_ms: duration of the search for a shorter plan, by default 50 ms for each core and at most 300 ms. 0
            gives the paper's plan.
        avoid: pairs of ops that may not run side by side.
        coarsen_us: merge small ops into actions of up to this duration. 0 merges none.
        wait_us: delay before an op starts after an op of another lane that it waits for.
        halves: let strategy 3 take half of an op's width. With a search on more than four cores, both ways are tried
            in any case.

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
        strategies: Collection[int] = (1, 2, 3, 4),
        lookahead_ms: float | None = None,
        avoid: Iterable[tuple[str, str]] = (),
        coarsen_us: float = 20.0,
        wait_us: float = 5.0,
        halves: bool = False,
    ) -> None:
        self.strategies = frozenset(strategies)
        if not self.strategies <= {1, 2, 3, 4}:
            got = sorted(self.strategies, key=str)
            raise InputError(f"planner concurrency: expected strategies out of 1, 2, 3, 4, got {got}")
        self.require_finite(lookahead_ms=lookahead_ms, coarsen_us=coarsen_us, wait_us=wait_us)
        self.lookahead_ms = lookahead_ms
        self.avoid = frozenset(frozenset(pair) for pair in avoid)
        self.coarsen_us = coarsen_us
        self.wait_us = wait_us
        self.halves = halves

    def compute_plan(self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float]) -> Plan:
        device = cpu_devices(machine)[0]
        coarse = coarsen(graph, costs, device, self.coarsen_us, earliest_us)
        apart = _apart(coarse, self.avoid)

        def made(placed: Sequence[Placement]) -> Plan:
            return coarse.expand(as_plan(coarse.graph, placed, device, self.name, apart), apart)

        ways = [self.halves]
        lookahead_ms = self.lookahead_ms
        if lookahead_ms is None:
            lookahead_ms = min(LOOKAHEAD_MS_PER_CORE * device.cores, MAX_LOOKAHEAD_MS)
        if lookahead_ms and 3 in self.strategies and device.cores > 2 * MAX_DEPARTURE:
            ways = [False, True]  # on fewer cores half of a width is among its neighbours
        instance = tabled(coarse.graph, coarse.table_us, coarse.earliest_us, self.wait_us, apart)
        by_strategies = [self._by_strategies(coarse.graph, instance, halves) for halves in ways]
        found = [made(placed) for placed in by_strategies]
        if {3, 4} <= self.strategies and device.smt > 1:
            found += [made(self._by_strategies(coarse.graph, instance, halves, device.smt_speedup)) for halves in ways]
        if not lookahead_ms:
            return found[-1]
        start = min(by_strategies, key=makespan_us)
        budget_s = lookahead_ms / 1e3
        found += [made(improve(instance, start, budget_s=budget_s))]
        found += [replace(Serial().compute_plan(graph, costs, machine, earliest_us), planner=self.name)]

        def takes_us(plan: Plan) -> float:
            return simulate(graph, plan, costs, machine, self.wait_us, earliest_us=earliest_us).makespan_us

        return min(found, key=takes_us)

    def _by_strategies(
        self, graph: Graph, instance: Instance, halves: bool, smt_speedup: float | None = None
    ) -> list[Placement]:
        widths = strategy_widths(graph, instance, self.strategies)
        if 3 not in self.strategies:
            return _one_by_one(instance, widths)
        candidates = strategy_candidates(instance, widths, self.strategies, halves)
        return Corunning(instance, widths, candidates, smt_speedup, in_pairs=halves).run()


def strategy_widths(graph: Graph, instance: Instance, strategies: Collection[int]) -> list[int]:
    """The width of each op by strategies 1 and 2, or all cores without them.

    The type of an op is its kernel and its role, since one kernel computes all gradients of a convolution.
    """
    if 2 in strategies:
        largest: dict[tuple[str, str], int] = {}
        for op, described in enumerate(graph.ops):
            known = largest.setdefault((described.target, described.role), op)
            if instance.durations_us[op][1] > instance.durations_us[known][1]:
                largest[described.target, described.role] = op
        return instance.usable([instance.best_width[largest[op.target, op.role]] for op in graph.ops])
    if 1 in strategies or 3 in strategies:
        return list(instance.best_width)
    return instance.usable([instance.num_cores] * len(graph))


def strategy_candidates(
    instance: Instance, widths: Sequence[int], strategies: Collection[int], halves: bool = False
) -> list[list[int]]:
    """The widths that strategy 3 may choose from: the three fastest that are near that of strategy 2.

    With `halves`, also half of the op's usual width.
    """
    found = []
    for durations, usual in zip(instance.durations_us, widths, strict=True):
        possible = [width for width in range(1, len(durations)) if durations[width] < float("inf")]
        candidates = sorted(possible, key=lambda width: (durations[width], width))[:CANDIDATES]
        if 2 in strategies:
            candidates = [width for width in candidates if abs(width - usual) <= MAX_DEPARTURE] or [usual]
        half = max(1, usual // 2)
        found.append(sorted({*candidates, half} if halves and half in possible else candidates))
    return found


def _apart(coarse: Coarse, avoid: Iterable[frozenset[str]]) -> dict[int, set[int]]:
    apart: dict[int, set[int]] = {}
    for pair in avoid:
        actions = {coarse.action_of[name] for name in pair if name in coarse.action_of}
        if len(actions) == 2:
            one, other = actions
            apart.setdefault(one, set()).add(other)
            apart.setdefault(other, set()).add(one)
    return apart


def _one_by_one(instance: Instance, widths: Sequence[int]) -> list[Placement]:
    placed, now_us, last_width = [], 0.0, 0
    for op in sorted(instance.order, key=instance.ready_us):
        width = widths[op]
        now_us = max(now_us, instance.ready_us(op))
        if last_width not in (0, width):
            now_us += instance.wait_us
        placed.append(Placement(op, tuple(range(width)), now_us, now_us + instance.durations_us[op][width]))
        now_us, last_width = placed[-1].end_us, width
    return placed


@dataclass
class Corunning:
    """Strategy 3, and strategy 4 too if `smt_speedup` is given.

    Where nothing runs, `in_pairs` begins the two most expensive ready ops side by side if that ends sooner. Times of
    ops that share cores leave wake-ups out.
    """

    instance: Instance
    widths: Sequence[int]  # those of strategies 1 and 2
    candidates: Sequence[Sequence[int]]  # those that strategy 3 may choose from, ascending
    smt_speedup: float | None = None
    in_pairs: bool = False

    def __post_init__(self) -> None:
        self._durations = self.instance.durations_us
        rows = zip(self._durations, self.candidates, strict=True)
        self._cost_us = [min(of_op[width] for width in mine) for of_op, mine in rows]
        self._clock = Clock(self.instance)
        self._ready: list[tuple[float, int]] = []  # the most expensive first
        self._are_ready(self._clock.first())

    def run(self) -> list[Placement]:
        clock = self._clock
        now_us = 0.0
        while self._ready or not clock.is_over:
            while self._ready and clock.cores.num_idle:
                if (chosen := self._next(now_us)) is None:
                    break
                op, width = chosen
                del self._ready[bisect_left(self._ready, (-self._cost_us[op], op))]
                clock.start(op, width)
                if self.smt_speedup is not None and width == self.instance.num_cores:
                    self._fill_siblings(clock.placed[-1], self.smt_speedup)
            now_us, found = clock.next(now_us)
            self._are_ready(found)
        return clock.placed

    def _are_ready(self, ops: Iterable[int]) -> None:
        for op in ops:
            insort(self._ready, (-self._cost_us[op], op))

    def _next(self, now_us: float) -> tuple[int, int] | None:
        """The op to start now and its width, or None to wait."""
        clock, durations = self._clock, self._durations
        if not clock.running:
            op = self._ready[0][1]
            return op, self._width_in_a_pair(op) or min(self.candidates[op], key=durations[op].__getitem__)
        left_us = max(end_us for end_us, _ in clock.running) - now_us - self.instance.wait_us
        num_idle = clock.cores.num_idle
        for _, op in self._ready[bisect_left(self._ready, (-left_us, -1)) :]:
            for width in self.candidates[op]:
                if width <= num_idle and durations[op][width] <= left_us and not clock.disturbs(op):
                    return op, width
        for _, op in self._ready:
            fitting = [width for width in self.candidates[op] if width <= num_idle]
            if fitting and not clock.disturbs(op):
                return op, min(fitting, key=durations[op].__getitem__)
        return None

    def _width_in_a_pair(self, op: int) -> int:
        """The width of `op` at which it and the next ready op end sooner side by side than in sequence, or 0."""
        if not self.in_pairs or len(self._ready) < 2:
            return 0
        other = self._ready[1][1]
        if other in self.instance.apart.get(op, frozenset()):
            return 0
        both_us, width = min(
            (
                (max(self._durations[op][one], self._durations[other][two]) + self.instance.wait_us, one)
                for one in self.candidates[op]
                for two in self.candidates[other]
                if one + two <= self.instance.num_cores
            ),
            default=(float("inf"), 0),
        )
        return width if both_us < self._cost_us[op] + self._cost_us[other] else 0

    def _fill_siblings(self, wide: Placement, speedup: float) -> None:
        """Strategy 4, from the start of the `wide` op to its end."""
        num_cores = self.instance.num_cores
        slowdown = 2 / speedup  # of an op that shares its cores
        end_us = [wide.end_us] * num_cores  # the end of the wide op's thread on each core
        siblings = CoreAllocator(num_cores)
        running: list[tuple[float, int, int]] = []  # the end of a small op, the op, and its siblings
        now_us = wide.start_us
        while True:
            for op in sorted((op for _, op in self._ready), key=lambda op: self._durations[op][1]):
                width = self.widths[op]
                small_us = self._durations[op][width]
                beside = {wide.op, *(other for _, other, _ in running)}
                if width > siblings.num_idle or not beside.isdisjoint(self.instance.apart.get(op, ())):
                    continue
                lane = siblings.choose_least(width, end_us)
                cores = members(lane)
                latest_us = min([end_us[core] for core in cores])
                if now_us + small_us > latest_us or now_us >= latest_us:
                    continue
                del self._ready[bisect_left(self._ready, (-self._cost_us[op], op))]
                siblings.take(lane)
                heappush(running, (now_us + small_us * slowdown, op, lane))
                self._clock.beside(op, lane << num_cores, now_us, now_us + small_us * slowdown)
                for core in cores:
                    end_us[core] += small_us * (slowdown - 1)
            if not running:
                break
            now_us, op, lane = heappop(running)
            siblings.give_back(lane, now_us)
            self._are_ready(self._clock.release(op, now_us))
        self._clock.stretch(wide, max(end_us))
