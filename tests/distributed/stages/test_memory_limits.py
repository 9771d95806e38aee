"""How much memory the ranks of a divided step may hold."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from distributed.ranks import Ranks
from distributed.stages.trained import alone, flat, mixed, same, work_of
from hocket import distribute
from hocket.distributed.setup import captured_for
from hocket.distributed.stages.crossings import Borders
from hocket.distributed.stages.joined import joined_plan
from hocket.distributed.stages.memory_limits import (
    check_fits,
    check_peaks,
    limits_of,
    partitioned_within,
    peaks_of,
)
from hocket.errors import InputError
from hocket.planning.critical_path import serial_peak_bytes
from hocket.planning.partition import PartitionProblem, Tensor

SEARCH = {"objective": "load", "epsilon": None, "budget_s": 0.4, "rounds": 20, "seed": 0}


def chain(ops: int = 8) -> PartitionProblem:
    tensors = tuple(Tensor(op, (op + 1,), 8.0, 50.0) for op in range(ops - 1))
    waits = tuple((op, op + 1) for op in range(ops - 1))
    return PartitionProblem(
        tuple(f"op{at}" for at in range(ops)), np.ones((ops, 2)), tensors, waits, memory_bytes=np.ones(ops)
    )


def counts(found) -> list[float]:
    return np.bincount(found.part, minlength=2).tolist()


def test_limits_are_one_number_or_one_for_each_rank():
    assert limits_of(None, 2) is None
    assert limits_of(10, 2) == (10.0, 10.0)
    assert limits_of([10, 20], 2) == (10.0, 20.0)
    for wrong in (0, -1.0, [1.0], [1.0, 0.0]):
        with pytest.raises(
            InputError, match="expected memory_bytes to be a number above 0, or one for each of 2 ranks"
        ):
            limits_of(wrong, 2)


def test_a_partition_keeps_limits_that_its_objective_alone_does_not():
    alone_on_one = partitioned_within(chain(), SEARCH, (8.0, 8.0), 8.0, counts)
    assert sorted(counts(alone_on_one)) == [0, 8]  # moving a tensor takes longer than all ops
    found = partitioned_within(chain(), SEARCH, (5.0, 5.0), 8.0, counts)
    assert max(counts(found)) <= 5
    uneven = partitioned_within(chain(), SEARCH, (7.0, 2.0), 8.0, counts)
    assert counts(uneven)[0] <= 7
    assert counts(uneven)[1] <= 2
    fair = partitioned_within(chain(), SEARCH, None, 5.0, counts)
    assert max(counts(fair)) <= 5


def test_what_cannot_be_kept_is_an_error_only_where_it_was_asked_for():
    with pytest.raises(InputError, match=r"rank \d would hold \d bytes at its peak, and may hold 3; no division"):
        partitioned_within(chain(), SEARCH, (3.0, 3.0), 8.0, counts)
    assert sorted(counts(partitioned_within(chain(), SEARCH, None, 3.0, counts))) == [0, 8]


def test_the_peak_of_one_rank_alone_is_that_of_the_whole_and_copies_stay():
    work = mixed()
    captured = captured_for(work.step, work.model, work.optimizer, work.batches[0])
    borders, graph = Borders(captured), captured.graph
    on_one = dict.fromkeys(graph.by_name, 0)
    plan = joined_plan(graph, graph.order, on_one, (), 1)
    assert peaks_of([captured], plan) == (pytest.approx(serial_peak_bytes(graph)),)
    leader = {op: op for op in graph.by_name}
    for ops, _ in borders.together:
        names = {leader[op] for op in ops}
        leader |= {op: min(names) for op, at in leader.items() if at in names}
    rank_of = {op: len(at) % 2 for op, at in leader.items()}
    crossings = borders.crossings(rank_of, 2)
    parts = [borders.part(rank_of, crossings, rank) for rank in range(2)]
    plan = joined_plan(graph, graph.order, rank_of, crossings, 1)
    peaks = peaks_of(parts, plan)
    for rank, peak in enumerate(peaks):
        copies = sum(each.size_bytes for each in crossings if not each.lasts and each.to == rank)
        assert copies > 0
        assert copies < peak <= sum(b.size_bytes for b in parts[rank].graph.buffers)
    with pytest.raises(InputError, match="rank 1 would hold"):
        check_peaks(peaks, (peaks[0], peaks[1] - 1))
    check_peaks(peaks, peaks)
    largest = max(graph.ops, key=lambda op: op.size_bytes)
    with pytest.raises(InputError, match=r"op '.*' needs [\d,]+ bytes to run, and no rank may hold more than 10"):
        check_fits(graph, (10.0, 10.0))
    check_fits(replace(graph, buffers=()), (1.0,))
    assert largest.size_bytes > 10


def trained(rank, say, name, share):
    torch.set_num_threads(1)
    work = work_of(name, "adam")
    graph = captured_for(work.step, work.model, work.optimizer, work.batches[0]).graph
    limit = share * serial_peak_bytes(graph)
    torch.manual_seed(21)
    settings = {"memory_bytes": limit, "budget_s": 2.0, "executor": "python", "timeout_s": 60.0}
    with distribute.stages(work.step, work.model, work.optimizer, **settings) as fast:
        found = [flat(fast(batch)) for batch in work.batches[:3]]
        return found, fast.peaks_bytes, limit


@pytest.mark.slow
def test_ranks_within_limits_train_as_one_process_does():
    with Ranks(trained, 2, "mlp", 0.65) as ranks:
        (found, peaks, limit), (of_rank_1, none, _) = ranks.returned(100)
    expected, _, _ = alone("mlp", "adam", 3)
    for mine in (found, of_rank_1):
        assert all(same(a, b) for x, y in zip(mine, expected, strict=True) for a, b in zip(x, y, strict=True))
    assert 0 < min(peaks) <= max(peaks) <= limit
    assert none == ()


def test_a_step_that_fits_nowhere_ends_all_ranks_with_the_bytes():
    with Ranks(trained, 2, "mlp", 0.02) as ranks:
        for rank in range(2):
            kind, text = ranks.end(rank)
            assert kind == "raised"
            assert re.search(r"op '.*' needs [\d,]+ bytes to run, and no rank may hold more than", text)
