"""One step over several ranks, each with any part of its graph: to the bit what one process computes."""

import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from distributed.ranks import Ranks, returned
from distributed.stages.trained import (
    Work,
    alone,
    check_as_alone,
    first_blocks,
    mixed,
    rank_of_stages,
    same,
    scattered,
    squared,
    stages_of,
    wide,
)
from hocket.distributed.job import captured_for
from hocket.distributed.stages.crossings import Borders
from hocket.errors import InputError
from support.refusals import refused

TIMEOUT_S = 4.0


def check_job(name, optimizer, ranks, division, steps, executor="python"):
    expected = alone(name, optimizer, steps)
    found = returned(rank_of_stages, ranks, name, optimizer, steps, division, executor, timeout_s=150)
    check_as_alone(found, expected)
    assert all(plan == found[0][4] for *_, plan in found)
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


def halves(work) -> dict[str, int]:
    """The first linear layer and its update on rank 0, everything else on rank 1."""
    captured = captured_for(work.step, work.model, work.optimizer, work.batches[0])
    rank_of = {
        op.name: int(
            not any(name.startswith(("first", "optimizer.first")) for name in (op.layer, *op.reads, *op.writes))
        )
        for op in captured.graph.ops
    }
    for ops, _ in Borders(captured).together:
        rank_of |= dict.fromkeys(ops, min(rank_of[op] for op in ops))
    return rank_of


def plain() -> Work:
    torch.manual_seed(5)
    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 5), relu=nn.ReLU(), last=nn.Linear(5, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return squared(model, optimizer, [torch.ones(3, 4), torch.zeros(3, 4)])


def twice(rank, say):
    return [rank_of_stages(rank, say, "mixed", "sgd", 3, seed) for seed in (1, 2)]


def test_a_process_takes_part_in_one_job_after_another():
    for found in zip(*returned(twice, 2, timeout_s=150), strict=True):
        check_as_alone(list(found), alone("mixed", "sgd", 3))


RESTARTED = """
import os, hocket
from hocket import zoo

job = zoo.load("mlp", depth=2, width=4)
with hocket.distribute.stages(job.step, job.model, job.optimizer, executor="python", timeout_s=30) as fast:
    for number in range(4):
        fast(job.batch(number))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os._exit(3)
open(f"over-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}", "w").close()
"""


def test_torchrun_starts_a_job_anew(tmp_path):
    (tmp_path / "job.py").write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*torchrun, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(each.name for each in tmp_path.glob("over-*")) == ["over-1-0", "over-1-1"]


def until_lost(rank, say, victim):
    work = plain()
    fast = stages_of(work, partition=scattered(work, 3, 4), timeout_s=TIMEOUT_S)
    for number in range(100):
        if number == 2 and rank == victim:
            say("here")
            threading.Event().wait(30)
        fast(work.batches[0])


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (2, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_ranks_end_and_name_who_is_lost(victim, number):
    with Ranks(until_lost, 3, victim) as ranks:
        ranks.heard(victim, "here")
        ranks.signal(victim, number)
        ranks.check_lost(victim)


def differs(rank, say, what):
    work, batch = plain(), torch.ones(3, 4)
    partition = halves(work)
    if what == "batch" and rank == 1:
        batch = batch * 2
    if what == "shape" and rank == 1:
        batch = torch.ones(5, 4)
    if what == "model" and rank == 1:
        work = mixed()
        batch = work.batches[0]
    if what == "frozen":
        work.model.first.weight.requires_grad_(False)
        partition = None
        if rank == 1:
            with torch.no_grad():
                work.model.first.weight.add_(1.0)
    if what == "split update" and rank == 0:
        captured = captured_for(work.step, work.model, work.optimizer, batch)
        name = next(op.name for op in captured.graph.ops if "first.weight" in op.writes)
        partition[name] = 1 - partition[name]
    if what == "closure":
        factor, step = torch.full((2,), 1.0 + rank), work.step
        work.step = lambda batch: step(batch * factor[0])
    with stages_of(work, partition=partition, timeout_s=TIMEOUT_S) as fast:
        fast(batch)
        if what == "restored":
            fast.gather()
            if rank == 0:
                work.model.load_state_dict(work.model.state_dict())
        if what == "closed":
            fast.close()
            fast.gather()
        if what == "interrupted" and rank == 1:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            fast(batch)  # rank 0 does not take part for now
        if what == "interrupted":
            threading.Event().wait(1)
        if what in ("save", "gather"):
            torch.distributed.init_process_group("gloo")
            (fast.state_dict if (what == "save") == (rank == 0) else fast.gather)()
        if what == "order" and rank == 1:
            fast.gather()
        if what == "second shape":
            fast(torch.ones(5, 4))
        fast(batch)


@pytest.mark.parametrize(
    ("what", "of_rank_0", "of_rank_1"),
    [
        ("batch", "rank 1 trains something else", r"rank 1 trains something else: batch 'leaf 0' is float32 \(3, 4\)"),
        ("shape", "rank 1 trains something else", r"float32 \(5, 4\) .* here, and float32 \(3, 4\)"),
        ("model", "rank 1 trains something else", "parameter 'first.weight' is float32"),
        ("frozen", "rank 1 trains something else", "constant 'first.weight' is"),
        (
            "split update",
            "InputError: distribute: ops .* have to share a rank: .* has one home",
            "rank 1 stops: rank 0",
        ),
        ("order", "lost rank 1", "rank 1 does something else than rank 0"),
        ("save", "lost rank 1", "rank 1 does something else than rank 0"),
        ("gather", "lost rank 1", "rank 1 does something else than rank 0"),
        ("closure", "rank 1 trains something else", r"constant 'constant_\d+, a tensor of shape \(2,\) from outside"),
        ("restored", "StaleCaptureError: .*was written at rank 0 after gather", "was written at rank 0 after gather"),
        (
            "closed",
            "ExecutionError: distribute: the step was closed",
            "ExecutionError: distribute: the step was closed",
        ),
        ("interrupted", r"the first to fail was rank 1: KeyboardInterrupt\(\)", "KeyboardInterrupt: "),
        ("second shape", "StaleCaptureError: .* not like the first one", "not like the first one"),
    ],
)
def test_what_differs_or_cannot_be_divided_is_named(what, of_rank_0, of_rank_1):
    with Ranks(differs, 2, what) as ranks:
        for rank, words in enumerate((of_rank_0, of_rank_1)):
            text = ranks.raised(rank, 40)
            assert re.search(words, text), text


def test_a_division_names_ops_and_ranks_that_are_not_there():
    work = plain()
    borders = Borders(captured_for(work.step, work.model, work.optimizer, work.batches[0]))
    rank_of = halves(work)
    borders.check(rank_of, 2)
    first, *others = rank_of
    with pytest.raises(InputError, match=rf"op '{first}' of the step is given to no rank"):
        borders.check({name: rank_of[name] for name in others}, 2)
    refused("the step has no op 'absent'", borders.check, rank_of | {"absent": 0}, 2)
    refused(rf"op '{first}' is given to rank 2, and there are 2", borders.check, rank_of | {first: 2}, 2)


def gathered_twice(rank, say, state):
    """Three steps, gather, three more, gather: shapes that are there after a step, and both checkpoints of rank 0."""
    work = plain()
    if rank == 0 and state is not None:
        work.model.load_state_dict({name: torch.from_numpy(value) for name, value in state[0].items()})
        work.optimizer.load_state_dict(checkpoint_of(state[1], work))
    found = []
    with stages_of(work, partition=halves(work)) as fast:
        for _ in range(2):
            for number in range(3):
                fast(work.batches[number % 2])
            shapes = {name: tuple(value.shape) for name, value in work.model.named_parameters()}
            fast.gather()
            values = {name: value.numpy().copy() for name, value in work.model.state_dict().items()}
            found.append((shapes, values, arrays(work.optimizer.state_dict())))
    return found


def arrays(state):
    """The tensors of an optimizer's state as what another process can be sent."""
    return {n: {key: value.numpy().copy() for key, value in of.items()} for n, of in state["state"].items()}


def checkpoint_of(moments, work):
    state = work.optimizer.state_dict()
    state["state"] = {n: {k: torch.from_numpy(v) for k, v in values.items()} for n, values in moments.items()}
    return state


def test_a_rank_holds_its_part_and_checkpoints_are_those_of_the_whole_model():
    work, wanted = plain(), []
    torch.set_num_threads(1)
    for _ in range(2):
        for number in range(3):
            work.step(work.batches[number % 2])
        wanted.append({name: value.numpy().copy() for name, value in work.model.state_dict().items()})
    first, second = returned(gathered_twice, 2, None, timeout_s=60)
    for shapes, _, _ in first:
        assert shapes["first.weight"] == (5, 4)
        assert shapes["last.weight"] == (0,)
    for shapes, values, _ in second:
        assert shapes["first.weight"] == values["first.weight"].shape == (0,)
        assert shapes["last.weight"] == (2, 5)
    for (_, values, _), expected in zip(first, wanted, strict=True):
        assert all(same(values[name], expected[name]) for name in expected)
    again, _ = returned(gathered_twice, 2, (first[0][1], first[0][2]), timeout_s=60)
    # The batches begin anew with the restart; so does one process that loads the checkpoint.
    work = plain()
    work.model.load_state_dict({name: torch.from_numpy(value) for name, value in first[0][1].items()})
    work.optimizer.load_state_dict(checkpoint_of(first[0][2], work))
    for number in range(3):
        work.step(work.batches[number % 2])
    assert all(same(again[0][1][name], value.numpy()) for name, value in work.model.state_dict().items())


def status_mib(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def peak_of_steps(rank, say, whole):
    """MiB beyond those of a process without a model, at the peak of three steps, after two."""
    before, work = status_mib("VmRSS"), wide(width=1536, depth=8, rows=32)
    found = nullcontext(work.step)
    if not whole:
        partition = {}
        if rank == 0:
            partition = first_blocks(captured_for(work.step, work.model, work.optimizer, work.batches[0]), 4)
        found = stages_of(work, partition=partition, executor="auto", timeout_s=120.0)
    with found as step:
        for number in range(5):
            if number == 2:
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            step(work.batches[0])
        return status_mib("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_of_a_rank_is_at_most_sixty_five_hundredths_of_the_whole():
    (whole,) = returned(peak_of_steps, 1, True, timeout_s=120)
    parts = returned(peak_of_steps, 2, False, timeout_s=200)
    assert max(parts) <= 0.65 * whole, (parts, whole)
