"""Ops that change rank while a job trains: to the bit what one process computes."""

import itertools
import signal
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed

from distributed.ranks import Ranks, returned
from distributed.stages.moving import Saver, moves_after, planted, rank_of_moves, saved_after
from distributed.stages.test_checkpoint import loaded
from distributed.stages.trained import alone, check_as_alone, check_same, divided_by, flat, same, stages_of, work_of
from distributed.training import tensors_of
from hocket import distribute
from hocket.adaptation.assistants import OpMove
from hocket.distributed.stages import rebalancing
from hocket.distributed.state import ShardState
from hocket.errors import InputError
from support.refusals import refused

STEPS = 11  # one more than any checkpoint comes after: rank 0 has the memory of all until then
TIMEOUT_S = 4.0


def check_moves(name, optimizer, ranks, seed, executor, times=2, every=3, has_values=True):
    expected = alone(name, optimizer, STEPS)
    with Ranks(rank_of_moves, ranks, name, optimizer, STEPS, seed, executor, times, every, has_values) as job:
        found = job.returned(200)
    check_as_alone(found, expected)
    assert all(plan == found[0][4] for _, _, _, _, plan, *_ in found)
    _, saved, _ = alone(name, optimizer, saved_after(times, every))
    for rank, (*_, meanwhile) in enumerate(found):
        assert meanwhile[0] == "moved"  # and then only
        assert rank or all(same(meanwhile[1][key], value) for key, value in saved.items())
    ops = [op for _, _, _, mine, *_ in found for op in mine]
    assert len(ops) == len(set(ops))
    migrations, _ = found[0][4]
    assert [step for step, *_ in migrations] == list(itertools.islice(moves_after(every), times))
    assert all(moved and size_bytes > 0 and not refused for _, moved, size_bytes, refused in migrations)
    last = {op: target for _, moved, _, _ in migrations for names, _, target in moved for op in names}
    assert all(op in found[rank][3] for op, rank in last.items())
    return found


def test_a_net_with_a_norm_and_dropout_trains_the_same_while_ops_move():
    found = check_moves("mixed", "adam", 2, 1, "native")
    seen = [seen for *_, seen, _, _ in found]
    assert seen[0] == seen[1]  # every rank decides by the same numbers
    assert all(share.slowdown > 0 and 0 < share.compute <= 1 for shares in seen[0] for share in shares)
    assert "after step 6: " in found[0][6]
    assert "bytes of state" in found[0][6]


def rank_that_saves_by_parts(rank, say, path):
    """A checkpoint by parts is asked for by another thread while ops move."""
    planted(1)
    work = work_of("mixed", "adam")
    distributed.init_process_group("gloo")
    saver = Saver(work, rank, lambda fast: dcp.save({"train": fast}, checkpoint_id=path))
    torch.manual_seed(21)
    with stages_of(work, partition=divided_by(work, rank, 1), rebalance=3) as fast:
        for number in range(saved_after(1, 3)):
            if number == saved_after(1, 3) - 1:
                saver.start(fast)
            fast(work.batches[number % len(work.batches)])
        saver.join()
        moved = [migration.step for migration in fast.migrations]
    distributed.destroy_process_group()
    return saver.found, moved


def test_a_checkpoint_that_is_asked_for_during_a_migration_is_that_of_after_it(tmp_path):
    with Ranks(rank_that_saves_by_parts, 2, tmp_path / "saved") as ranks:
        for found, moved in ranks.returned(100):
            assert found == ["moved", "saved"]
            assert moved == [saved_after(1, 3) - 1]
    read = work_of("mixed", "adam")
    with torch.no_grad():
        for parameter in read.model.parameters():
            parameter.add_(1.0)
    loaded(read, tmp_path / "saved")
    _, wanted, _ = alone("mixed", "adam", saved_after(1, 3))
    check_same(tensors_of(read), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "ranks", "executor", "times", "every"),
    [
        ("mlp", "adam", 2, "python", 2, 3),
        ("mixed", "sgd", 3, "python", 3, 2),
        ("mixed", "adam", 3, "native", 4, 1),
        ("transformer", "adam", 3, "auto", 2, 3),
        ("resnet20", "sgd", 2, "auto", 2, 3),
        ("lstm-cells", "adam", 2, "auto", 2, 2),
    ],
)
def test_models_train_the_same_while_ops_move(name, optimizer, ranks, executor, times, every):
    check_moves(name, optimizer, ranks, 3, executor, times, every)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "transformer"])
def test_ranks_that_begin_without_values_take_ops_over(name):
    check_moves(name, "adam", 3, 2, "auto", 3, 2, has_values=False)


def test_where_the_new_division_cannot_run_all_ranks_go_on_as_they_are():
    wanted, *_ = alone("mixed", "adam", STEPS)
    found = returned(rank_that_refuses, 2, timeout_s=100)
    for mine, words in found:
        for one, other in zip(wanted, mine, strict=True):
            assert all(same(a, b) for a, b in zip(one, other, strict=True))
        (line,) = words.splitlines()[1:]  # and is not tried again
        assert line.startswith("after step 4: not moved: ")
        assert line.endswith("have to share a rank: planted")


def rank_that_refuses(rank, say):
    def refuse(job, rank_of, order):
        raise InputError("have to share a rank: planted")

    rebalancing.divided_again = refuse
    rebalancing.decide = always_the_first_unit
    work = work_of("mixed", "adam")
    torch.manual_seed(21)
    rebalancing.Rebalancer._is_like = lambda look, before: True  # what is measured does not matter here
    with stages_of(work, partition=divided_by(work, rank, 1), rebalance=2, timeout_s=30.0) as fast:
        found = [flat(fast(work.batches[number % len(work.batches)])) for number in range(STEPS)]
        return found, str(fast)


def always_the_first_unit(shares, rules, assignment):
    return (OpMove(0, assignment[0], 1 - assignment[0]),)


def rank_that_is_lost(rank, say, victim, place, file):
    planted(1)
    work = work_of("mixed", "adam")
    torch.manual_seed(21)

    def stop(*_):
        say("here")
        threading.Event().wait(30)

    if rank == victim:
        setattr(*{"before": (rebalancing, "migrated"), "within": (ShardState, "post")}[place], stop)
    with stages_of(work, partition=divided_by(work, rank, 1), rebalance=2, timeout_s=TIMEOUT_S) as fast:
        for number in range(5):
            fast(work.batches[number % len(work.batches)])
            if number == 0:
                fast.gather()
                if rank == 0:
                    np.savez(file, **tensors_of(work))


@pytest.mark.parametrize(
    ("count", "victim", "place", "number"),
    [
        (2, 1, "within", signal.SIGKILL),
        pytest.param(3, 1, "before", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, 0, "within", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, 2, "within", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(3, 2, "before", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_ranks_end_and_name_who_is_lost_while_ops_move(tmp_path, count, victim, place, number):
    _, wanted, _ = alone("mixed", "adam", 1)
    with Ranks(rank_that_is_lost, count, victim, place, tmp_path / "checkpoint.npz") as ranks:
        ranks.heard(victim, "here")
        ranks.signal(victim, number)
        ranks.check_lost(victim)
    with np.load(tmp_path / "checkpoint.npz") as saved:  # of before
        check_same(saved, wanted)


def rank_of_another_mind(rank, say):
    decide = planted(1)
    decide.seen += [()] * rank  # ranks that decide otherwise, as if their numbers were others
    decide.times += rank
    work = work_of("mixed", "adam")
    with stages_of(work, partition=divided_by(work, rank, 1), rebalance=2, timeout_s=10.0) as fast:
        for number in range(5):
            fast(work.batches[number % len(work.batches)])


def test_ranks_that_decide_otherwise_are_named_before_anything_moves():
    with Ranks(rank_of_another_mind, 2) as ranks:
        assert "moves ops to other places than rank" in ranks.raised(1, 40)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rebalance": -1}, "expected rebalance to be a number of steps, or 0"),
        ({"rebalance": "10"}, "expected rebalance to be a number of steps, or 0"),
        ({"partition": "plan.txt"}, "expected partition to be a hocket.Plan or a rank for each op"),
        ({"timeout_s": float("inf")}, "expected timeout_s to be a number of seconds above 0 and less than a year"),
        ({"timeout_s": "60"}, "expected timeout_s to be a number of seconds above 0"),
    ],
)
def test_wrong_options_are_named(options, words):
    refused(words, distribute.stages, lambda: None, torch.nn.Linear(1, 1), None, **options)
