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


@pytest.mark.parametrize(
    ("executor", "ranks", "optimizer", "seed"), [("python", 2, "adam", 1), ("native", 3, "sgd", 2)]
)
def test_any_division_of_the_ops_trains_as_one_process_does(executor, ranks, optimizer, seed):
    found = check_job("mixed", optimizer, ranks, seed, 10, executor)
    assert all(ops for _, _, _, ops, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "optimizer", "settings"),
    [
        ("mlp", "sgd", {"objective": "cut", "epsilon": 0.2}),
        ("resnet20", "sgd", {"objective": "load", "epsilon": 0.2}),
        ("lstm-cells", "adam", {"objective": "load", "epsilon": 0.2}),
        ("transformer", "adam", {"objective": "load", "epsilon": 0.2}),
        ("gpt2", "adam", {"objective": "load", "epsilon": 0.2}),
        ("gpt2", "sgd", {"objective": "time"}),
    ],
    ids=["mlp", "resnet20", "lstm cells", "transformer", "gpt2", "gpt2 by time"],
)
def test_models_partitioned_by_measured_costs_train_as_one_process_does(name, optimizer, settings, ranks):
    if name == "gpt2":
        pytest.importorskip("transformers")
    found = check_job(name, optimizer, ranks, settings | {"budget_s": 1.0}, 10, "auto")
    if "epsilon" in settings:
        assert all(ops for _, _, _, ops, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "resnet20", "lstm-cells", "transformer", "gpt2"])
def test_models_divided_at_random_train_as_one_process_does(name):
    if name == "gpt2":
        pytest.importorskip("transformers")
    check_job(name, "adam" if name in ("mlp", "transformer") else "sgd", 4, 3, 10, "auto")
