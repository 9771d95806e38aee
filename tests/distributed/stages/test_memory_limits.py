"""Limits of memory for the ranks of a divided step."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from distributed.ranks import Ranks, returned
from distributed.stages.trained import alone, flat, mixed, same, stages_of, work_of
from hocket.checking import check, hazards
from hocket.distributed.job import captured_for
from hocket.distributed.stages.crossings import Borders, joined_graph, joined_order, joined_plan
from hocket.distributed.stages.planner import check_fits, check_peaks, held_within, limits_of
from hocket.ir import Plan
from hocket.planning.critical_path import serial_peak_bytes
from invariants import held_bytes
from support.refusals import refused


def test_limits_are_one_number_or_one_for_each_rank():
    assert limits_of(None, 2) is None
    assert limits_of(10, 2) == (10.0, 10.0)
    assert limits_of([10, 20], 2) == (10.0, 20.0)
    for wrong in (0, -1.0, [1.0], [1.0, 0.0], "2GB", ["1", "2"]):
        refused("expected memory_bytes to be a number above 0, or one for each of 2 ranks", limits_of, wrong, 2)


class Halves:
    """A step of which every other group of ops that have to share a rank is on rank 1."""

    def __init__(self, num_ranks: int = 2) -> None:
        work = mixed()
        self.captured = captured_for(work.step, work.model, work.optimizer, work.batches[0])
        borders, graph = Borders(self.captured), self.captured.graph
        leader = {op: op for op in graph.by_name}
        for ops, _ in borders.together:
            names = {leader[op] for op in ops}
            leader |= {op: min(names) for op, at in leader.items() if at in names}
        rank_of = {op: len(at) % num_ranks for op, at in leader.items()}
        self.crossings = borders.crossings(rank_of, num_ranks)
        self.parts = [borders.part(rank_of, self.crossings, rank) for rank in range(num_ranks)]
        self.plan = joined_plan(graph, graph.order, rank_of, self.crossings, 1)
        self.order = joined_order(graph, graph.order, self.crossings)


def test_the_peak_of_one_rank_alone_is_that_of_the_whole():
    work = mixed()
    captured = captured_for(work.step, work.model, work.optimizer, work.batches[0])
    graph = captured.graph
    plan = joined_plan(graph, graph.order, dict.fromkeys(graph.by_name, 0), (), 1)
    assert held_within([captured], plan, graph.order, [np.inf])[1] == (pytest.approx(serial_peak_bytes(graph)),)


def test_a_rank_that_holds_too_much_is_named_and_so_is_an_op():
    halves = Halves()
    _, peaks = held_within(halves.parts, halves.plan, halves.order, [np.inf] * len(halves.parts))
    for rank, peak in enumerate(peaks):
        copies = sum(each.size_bytes for each in halves.crossings if not each.lasts and each.to == rank)
        assert copies > 0
        assert peak <= sum(b.size_bytes for b in halves.parts[rank].graph.buffers)
    refused("rank 1 would hold", check_peaks, peaks, (peaks[0], peaks[1] - 1))
    check_peaks(peaks, peaks)
    graph = halves.captured.graph
    assert max(op.size_bytes for op in graph.ops) > 10
    refused(r"op '.*' needs [\d,]+ bytes to run, and no rank may hold more than 10", check_fits, graph, (10.0, 10.0))
    check_fits(replace(graph, buffers=()), (1.0,))


def held_in_a_run(halves: Halves, plan, chance: random.Random) -> list[float]:
    """The most that each rank holds in one run of all ranks, in which ops end and transfers arrive at random.

    A lane begins its ops in order: one of cores when the one before has ended, a channel as soon as that has begun. A
    transfer has memory at both ends once it has begun at both, and is over some time after that.
    """
    pairs = {each.send: each.recv for each in halves.crossings if not each.lasts}
    alone = {op for each in halves.crossings if each.lasts for op in (each.send, each.recv)}
    rank_of = {op.name: rank for rank, part in enumerate(halves.parts) for op in part.graph.ops}
    graphs = [part.graph for part in halves.parts]
    runs: list[list[tuple[str, str]]] = [[] for _ in graphs]
    begun: set[str] = set()
    ended: set[str] = set()
    at = dict.fromkeys((lane.name for lane in plan.lanes), 0)

    def waits_are_over(op: str) -> bool:
        return ended.issuperset((*graphs[rank_of[op]].predecessors[op], *plan.after.get(op, ())))

    def choices():
        for lane in plan.lanes:
            if at[lane.name] < len(lane.ops) and waits_are_over(op := lane.ops[at[lane.name]]):
                before = lane.ops[at[lane.name] - 1] if at[lane.name] and lane.kind == "cores" else None
                if before is None or before in ended:
                    yield "begin", op, lane.name
        for op in begun - ended:
            is_pair = op in pairs
            if op in alone or op not in {*pairs, *pairs.values()} or (is_pair and pairs[op] in begun):
                yield "end", op, ""

    while len(ended) < len(rank_of):
        found = list(choices())
        assert found, "ranks wait for each other"
        what, op, lane = chance.choice(found)
        if what == "begin":
            begun.add(op)
            at[lane] += 1
            runs[rank_of[op]].append((op, "start"))
            continue
        for over in (op, pairs[op]) if op in pairs else (op,):
            ended.add(over)
            runs[rank_of[over]].append((over, "end"))
    return [max(held_bytes(graph, run)) for graph, run in zip(graphs, runs, strict=True)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_run_holds_more_than_was_predicted_with_waits_and_without(num_ranks):
    halves = Halves(num_ranks)
    chance = random.Random(num_ranks)
    _, peaks = held_within(halves.parts, halves.plan, halves.order, [np.inf] * len(halves.parts))
    least_plan, least = held_within(halves.parts, halves.plan, halves.order, (0.0,) * num_ranks)
    assert sum(least) < sum(peaks)
    between = [(one + other) / 2 for one, other in zip(least, peaks, strict=True)]
    some_plan, some = held_within(halves.parts, halves.plan, halves.order, between)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(some, between, strict=True))
    same_plan, same_peaks = held_within(halves.parts, halves.plan, halves.order, peaks)
    assert (same_plan, same_peaks) == (halves.plan, peaks)
    joined = joined_graph(halves.parts, halves.crossings)
    for plan, predicted in ((halves.plan, peaks), (some_plan, some), (least_plan, least)):
        check(joined, plan)
        hazards(joined, plan)
        assert Plan.parse(str(plan)) == plan
        seen = np.max([held_in_a_run(halves, plan, chance) for _ in range(25)], axis=0)
        assert np.all(seen <= np.array(predicted) * (1 + 1e-9))
        assert np.all(seen >= 0.5 * np.array(predicted)), "the bound says something"


def trained(rank, say, name, share):
    work = work_of(name, "adam")
    graph = captured_for(work.step, work.model, work.optimizer, work.batches[0]).graph
    limit = share * serial_peak_bytes(graph)
    torch.manual_seed(21)
    with stages_of(work, memory_bytes=limit, budget_s=2.0) as fast:
        found = [flat(fast(batch)) for batch in work.batches[:3]]
        return found, fast.peaks_bytes, limit


@pytest.mark.slow
def test_ranks_within_limits_train_as_one_process_does():
    (found, peaks, limit), (of_rank_1, none, _) = returned(trained, 2, "mlp", 0.65, timeout_s=100)
    expected, _, _ = alone("mlp", "adam", 3)
    for mine in (found, of_rank_1):
        assert all(same(a, b) for x, y in zip(mine, expected, strict=True) for a, b in zip(x, y, strict=True))
    assert 0 < min(peaks) <= max(peaks) <= limit
    assert none == ()


def test_a_step_that_fits_nowhere_ends_all_ranks_with_the_bytes():
    with Ranks(trained, 2, "mlp", 0.02) as ranks:
        for rank in range(2):
            assert re.search(r"op '.*' needs [\d,]+ bytes to run, and no rank may hold more than", ranks.raised(rank))
