"""One step over several ranks, each with any part of its graph: to the bit what one process computes."""

from __future__ import annotations

import pytest

from distributed.ranks import Ranks
from distributed.staged import alone, rank_of_stages, same


def check_job(name, optimizer, ranks, division, steps, executor="python"):
    results, checkpoint, random_state = alone(name, optimizer, steps)
    with Ranks(rank_of_stages, ranks, name, optimizer, steps, division, executor) as job:
        found = job.returned(150)
    for rank, (mine, _, state, _, plan) in enumerate(found):
        assert plan == found[0][4]
        for step, (one, other) in enumerate(zip(results, mine, strict=True)):
            assert all(same(a, b) for a, b in zip(one, other, strict=True)), (rank, step)
        assert same(state, random_state), rank
    assert found[0][1].keys() == checkpoint.keys()
    for key, value in checkpoint.items():
        assert same(found[0][1][key], value), key
    ops = [op for _, _, _, mine, _ in found for op in mine]
    assert len(ops) == len(set(ops))
    return found


@pytest.mark.parametrize(("executor", "ranks", "optimizer", "seed"), [("python", 2, "adam", 1), ("native", 3, "sgd", 2)])
def test_any_division_of_the_ops_trains_as_one_process_does(executor, ranks, optimizer, seed):
    found = check_job("mixed", optimizer, ranks, seed, 10, executor)
    assert all(ops for _, _, _, ops, _ in found)
