"""A worker that is lost and comes again takes part from a whole step on; every update once, of all that were there."""

import os
import signal
import time

import pytest

from distributed.faulty import Stops, part_of_job, serve, work
from distributed.ranks import Ranks, ended
from distributed.training import batches, check_as_together, training

STEPS = 150


def train(rank, say, servers=1, wait_s=30.0):
    """Rank 1 is killed or stopped before its third step; rank 0 goes slowly until another one is there."""
    stops = Stops(say, "before its request" if rank == 1 else None, wait_s)

    def before(fast, step):
        if step == 2:
            fast.synchronize()  # the gradients of its second step have arrived; else they count where they have
            stops.at("before its request")
        if step > 2 and not fast._membership.store.check(["there"]):
            time.sleep(0.1)

    return part_of_job(rank, STEPS, before, width=100, num_servers=servers, survive=True)


def come_again(rank, say, servers=1, width=100):
    """Worker 1 from the step on that it is let in; its model was another one before. Which step, and what it has."""
    of = training("adam", width=width)
    for parameter in of.model.parameters():
        parameter.data.add_(1.0)
    with work(of, 20.0, num_servers=servers) as fast:
        mine = batches(rank, STEPS)
        first = fast.start(mine[0])
        say("let in")
        for batch in mine[first:]:
            fast(batch)
        assert fast.steps == STEPS
        fast.gather()
    return first, fast.arrivals(), {name: value.numpy().copy() for name, value in of.model.state_dict().items()}


def assert_whole(ranks, servers):
    """Every update happened once, on the micro-batches of all that took part in its step."""
    ranks.heard(1, "let in")
    ranks.store.set("there", "")
    found, (first, arrivals, its), *counted = ranks.returned(120)
    assert counted == [STEPS] * servers
    assert found["0.step"] == STEPS
    assert 2 < first < STEPS
    assert all(arrivals.values())
    check_as_together(found, training("adam", width=100), 2, STEPS, alone=range(2, first))
    for name in its:
        assert (its[name] == found[name]).all(), name


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_that_comes_again_takes_part_from_a_whole_step_on(servers):
    with Ranks(train, 2 + servers, servers) as ranks:
        ranks.heard(1, "before its request")
        ranks.signal(1, signal.SIGKILL)
        kind, text = ranks.beside(1, come_again, servers, 101)
        assert kind == "raised"
        assert text.startswith("PeerError: worker 1 (rank 1) trains something else: parameter 'first.weight' is"), text
        ranks.start_again(1, come_again, servers)
        assert_whole(ranks, servers)


@pytest.mark.slow
def test_a_worker_that_was_stopped_is_replaced_and_out_when_it_goes_on():
    with Ranks(train, 3, 1, 0.5) as ranks:
        ranks.heard(1, "before its request")
        ranks.signal(1, signal.SIGSTOP)
        before, stopped = ranks.start_again(1, come_again), ranks.replaced[0]
        ranks.heard(1, "let in")
        os.kill(stopped.pid, signal.SIGCONT)
        kind, text = ended(before)
        assert_whole(ranks, 1)
    assert kind == "raised"
    assert text.startswith("PeerError: worker 1 (rank 1) is out of the job, which goes on: "), text


def stay(rank, say, survive):
    """A rank that runs a step and stays until the test says so."""
    of = training("sgd", width=20)
    if rank == 2:
        return serve(of, survive=survive)
    with work(of) as fast:
        fast(batches(rank, 1)[0])
        say("there")
        while not fast._membership.store.check(["end"]):
            time.sleep(0.02)
    return fast.steps


@pytest.mark.parametrize(("survive", "others"), [pytest.param(True, [0, 2], marks=pytest.mark.slow), (False, [1])])
def test_who_cannot_join_again_is_told_so_and_the_job_goes_on(survive, others):
    names = ["worker 0 (rank 0)", "worker 1 (rank 1)", "server 0 (rank 2)"]
    with Ranks(stay, 3, survive) as ranks:
        ranks.heard(0, "there")
        for rank in others:
            message = (
                f"PeerError: {names[rank]} has been part of this job, which does not go on without it; start a new one"
            )
            assert ranks.beside(rank, stay, survive) == ("raised", message)
        ranks.store.set("end", "")
        assert ranks.returned() == [1, 1, 1]
        message = "PeerError: worker 1 (rank 1) cannot join again: the job is over"
        assert ranks.beside(1, stay, survive) == ("raised", message)
