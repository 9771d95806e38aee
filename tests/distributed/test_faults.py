"""A job whose ranks are killed, stopped, or train something else ends in time, and names the rank."""

import gc
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from benchmarks.namespaces import switched, unavailable_reason
from distributed.faulty import TIMEOUT_S, Stops, part_of_job, serve, stop_in_mid_transfer, work
from distributed.ranks import Ranks, listening, returned
from distributed.training import batches, check_as_together, tensors_of, training
from hocket import distribute
from hocket.distributed import server, setup, worker
from hocket.errors import PeerError, StaleCaptureError
from support.refusals import fails

NO_LINKS = unavailable_reason()
NAMES = ["worker 0 (rank 0)", "worker 1 (rank 1)", "server 0 (rank 2)"]


def until_lost(rank, say, victim, place, timeout_s):
    """Train until a rank is lost; one of them waits somewhere in its third step to be killed."""
    of = training("adam", width=400)
    stops = Stops(say, place if rank == victim else None)
    steps = 0
    if rank == 2:
        update = server.ShardedJob.receive_command

        def ordered(made):
            nonlocal steps
            command = update(made)
            steps += 1
            if steps == 3:
                stops.at("served")
            return command

        server.ShardedJob.receive_command = ordered
        return serve(of, timeout_s)
    fast = work(of, timeout_s)
    for step, batch in enumerate(batches(rank, 50)):
        if step == 2:
            stops.at("before its request")
            if place == "in mid-transfer" and rank == victim:
                stop_in_mid_transfer(stops)
        fast(batch)
        if step == 2:
            stops.at("after its push")
    assert isinstance(fast, worker.DistributedStep)


@pytest.mark.parametrize(
    ("victim", "place", "number"),
    [
        (1, "before its request", signal.SIGKILL),
        pytest.param(1, "in mid-transfer", signal.SIGKILL, marks=pytest.mark.slow),
        (0, "after its push", signal.SIGKILL),
        (1, "before its request", signal.SIGSTOP),
        (2, "served", signal.SIGKILL),
    ],
)
def test_ranks_end_and_name_who_is_lost(victim, place, number):
    with Ranks(until_lost, 3, victim, place, TIMEOUT_S) as ranks:
        ranks.heard(victim, place)
        ranks.signal(victim, number)
        ranks.check_lost(victim, NAMES)


@pytest.mark.slow
@pytest.mark.skipif(NO_LINKS is not None, reason=str(NO_LINKS))
@pytest.mark.parametrize("victim", [1, 2], ids=["of a worker", "of the server"])
def test_a_link_that_goes_down_ends_the_job_within_the_timeout_and_names_who_is_lost(victim):
    with switched([1000] * 3) as (address, ends):
        place = "served" if victim == 2 else "before its request"
        with Ranks(until_lost, 3, victim, place, TIMEOUT_S, host=address, ends=ends) as ranks:
            ranks.heard(victim, place)
            subprocess.run(ends[victim].command("ip", "link", "set", ends[victim].interface, "down"), check=True)
            ranks.check_lost(victim, NAMES, 5 * TIMEOUT_S)  # a receive, and what the lost store is asked and told


def late(rank, say):
    time.sleep(1.0 if rank == 1 else 0.0)
    return part_of_job(rank, 3, timeout_s=60.0)


def test_a_worker_that_comes_late_takes_part_from_the_first_step():
    found = returned(late, 3)
    assert found[2] == 3
    check_as_together(found[0], training("adam"), 2, 3)


def disagree(rank, say, what):
    of = training("sgd", dtype=torch.float32 if what == "dtype" and rank == 1 else torch.float64)
    if rank == 1 and what == "model":
        of = training("sgd", width=301)
    if rank == 1 and what == "parameter":
        of.model.extra = torch.nn.Parameter(torch.zeros(3).double())
        of.optimizer.add_param_group({"params": [of.model.extra]})
    if rank == 1 and what == "torch":
        plain = setup.described
        setup.described = lambda *job: plain(*job) | {"job": plain(*job)["job"] | {"torch": "2.0.1"}}
    if rank == 1 and what == "optimizer":
        of = training("adam")
    if rank == 1 and what == "frozen":
        of.model.first.weight.data.add_(1.0)
    if what == "frozen":
        of.model.first.weight.requires_grad_(False)
    if rank == 2:
        return serve(of)
    with work(of) as fast:
        fast(batches(rank, 1, torch.float32 if what == "dtype" and rank == 1 else torch.float64)[0])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "parameter 'first.weight' is float32 (300, 8) here, and float64 (300, 8) on rank 0"),
        ("model", "parameter 'first.weight' is float64 (301, 8) here, and float64 (300, 8) on rank 0"),
        ("parameter", "parameter 'extra' is float64 (3,) here, and missing on rank 0"),
        ("torch", f"job 'torch' is 2.0.1 here, and {torch.__version__} on rank 0"),
        ("optimizer", "optimizer '0' is Adam here, and SGD on rank 0"),
        ("frozen", "constant 'first.weight' is "),
    ],
)
def test_who_trains_something_else_is_refused_by_name(what, message):
    message = f"worker 1 (rank 1) trains something else: {message}"
    with Ranks(disagree, 3, what) as ranks:
        ends = [ranks.raised(rank) for rank in range(3)]
    assert ends[1].startswith(f"PeerError: {message}"), ends
    assert all(message in text for text in ends), ends


def impure(rank, say, how):
    of = training()
    calls = []

    def step(batch):
        if how == "writes":
            calls.append(len(calls))
            print(len(calls), end="")
        return of.step(batch) * scale[0]

    scale = [1.0]
    if rank == 2:
        return distribute.server(step, of.model, of.optimizer, batches(0, 1)[0], timeout_s=60.0)
    with distribute.worker(step, of.model, of.optimizer, timeout_s=60.0, executor="python") as fast:
        fast(batches(rank, 1)[0])
        scale[0] = 2.0
        fails(StaleCaptureError, r"scale\[0\].*1\.0 -> 2\.0.* changed since the first call", fast, batches(rank, 1)[0])
        scale[0] = 1.0
        x, y = batches(rank, 1)[0]
        fails(StaleCaptureError, "this call is not like the first one", fast, (x[:3], y[:3]))
        of.model.eval()
        fails(StaleCaptureError, "this call is not like the first one", fast, (x, y))
        of.model.train()
        fast((x, y))
    return fast.steps


def test_a_step_that_writes_python_state_is_refused():
    with Ranks(impure, 3, "writes") as ranks:
        assert "the step cannot be divided: it" in ranks.raised(0)


def test_what_a_step_reads_stays_as_it_was():
    assert returned(impure, 3, "reads") == [2, 2, 2]


def absent(rank, say):
    of = training()
    if rank == 1:
        threading.Event().wait(30)
    if rank == 2:
        return serve(of)
    work(of)(batches(rank, 1)[0])


def test_a_rank_that_does_not_come_is_named():
    with Ranks(absent, 3) as ranks:
        for rank in (0, 2):
            text = ranks.raised(rank)
            assert "has waited 4 s for worker 1 (rank 1)" in text or "lost" in text, text


def leaves(rank, say, how):
    of = training()
    if rank == 2:
        return serve(of)
    with work(of) as fast:
        if rank == 1 and how == "raises":
            raise ValueError("no data")
        if rank == 0:
            fast(batches(rank, 1)[0])


@pytest.mark.parametrize(("how", "why"), [("raises", "no data"), ("ends", "it has left before its first step")])
def test_a_rank_that_leaves_before_its_first_step_ends_the_job(how, why):
    with Ranks(leaves, 3, how) as ranks:
        for rank in (0, 2):
            assert f"worker 1 (rank 1): {why}" in ranks.raised(rank)


def given(rank, say, options):
    of = training()
    if rank == 1:
        return serve(of, 30.0)
    work(of, **options)(batches(rank, 1)[0])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"order": "best"}, "distribute: unknown order 'best'; available: auto, "),
        ({"timeout_s": 0}, "distribute: expected timeout_s to be a number of seconds above 0"),
        ({"num_servers": "1"}, "distribute: expected num_servers to be a number of at least 1, got '1'"),
        ({"num_servers": 2}, "distribute: 2 ranks, and 2 of them servers"),
    ],
)
def test_a_server_reads_what_is_wrong_with_the_options_of_a_worker(options, why):
    with Ranks(given, 2, options) as ranks:
        assert ranks.raised(0).startswith(f"InputError: {why}")
        assert f"stops: worker 0 (rank 0): {why}" in ranks.raised(1).replace("server 0 (rank 0)", "worker 0 (rank 0)")


def again(rank, say, saved, first, count):
    """Some steps from a checkpoint that only rank 0 has; without one, it is written, and rank 1 is killed later on."""
    of = training("adam")
    if rank == 2:
        return serve(of)
    if rank == 0 and saved is not None:
        model, optimizer = torch.load(saved, weights_only=True)
        of.model.load_state_dict(model)
        of.optimizer.load_state_dict(optimizer)
    with work(of) as fast:
        for batch in batches(rank, first + count)[first:]:
            fast(batch)
        fast.gather()
        if saved is None:
            if rank == 0:
                torch.save((of.model.state_dict(), of.optimizer.state_dict()), "checkpoint.pt")
                say("saved")
            for batch in batches(rank, 1000):
                fast(batch)
                time.sleep(0.02)
    return tensors_of(of) if rank == 0 else None


def test_a_restart_from_the_plain_models_checkpoint_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Ranks(again, 3, None, 0, 4) as ranks:
        ranks.heard(0, "saved")
        ranks.signal(1)
        assert [ranks.end(rank)[0] for rank in (0, 1, 2)] == ["raised", "died", "raised"]
    found = returned(again, 3, "checkpoint.pt", 4, 4)
    assert found[2] == 4
    check_as_together(found[0], training("adam"), 2, 8)


def go_on(rank, say):
    of = training("sgd")
    if rank == 2:
        serve(of)
    fast = work(of)
    for batch in batches(rank, 1000):
        fast(batch)
        say("under way")
        time.sleep(0.02)


def leave_nothing(rank, say):
    """Train until worker 1 is killed; which threads and ports are left then."""
    places = listening()
    fails(PeerError, r"lost worker 1 \(rank 1\)", go_on, rank, say)
    gc.collect()
    return [each.name for each in threading.enumerate() if "hocket" in each.name], listening() - places


def test_threads_and_ports_are_gone_after_a_fault():
    with Ranks(leave_nothing, 3) as ranks:
        ranks.heard(1, "under way")
        ranks.signal(1)
        assert ranks.end(0) == ranks.end(2) == ("returned", ([], set()))


def unpickle_nothing(rank, say):
    """A whole job in which whatever unpickles is noticed."""
    unpickled = []
    sys.addaudithook(lambda event, args: unpickled.append(args) if event == "pickle.find_class" else None)
    for name in ("load", "loads", "Unpickler"):
        setattr(pickle, name, lambda *args, **kwargs: unpickled.append(args))
    of = training("adam")
    if rank == 2:
        return serve(of), unpickled
    with work(of) as fast:
        for batch in batches(rank, 3):
            fast(batch)
        fast.publish()
        fast.gather()
    return fast.steps, unpickled


def test_nothing_of_a_peer_is_unpickled():
    assert returned(unpickle_nothing, 3) == [(3, [])] * 3
