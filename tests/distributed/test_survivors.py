"""Jobs that go on without a worker: every update once, whole, and of the gradients that were there."""

import signal
import time

import pytest

from distributed.faulty import TIMEOUT_S, Stops, part_of_job, stop_in_mid_transfer
from distributed.ranks import Ranks, returned
from distributed.training import check_as_together, training


def survive(rank, say, victim_stops_at, steps, wait_s=30.0):
    """Train on; worker 1 waits somewhere in its third step to be killed or stopped. Worker 0 returns what it has."""
    stops = Stops(say, victim_stops_at if rank == 1 else None, wait_s)

    def before(fast, step):
        if step == 2:
            fast.synchronize()  # the gradients of its second step have arrived
            stops.at("before its request")
            if victim_stops_at == "in mid-transfer" and rank == 1:
                stop_in_mid_transfer(stops)

    return part_of_job(rank, steps, before, survive=True)


@pytest.mark.parametrize("place", ["before its request", "in mid-transfer"])
def test_survivors_go_on_and_every_step_updates_once(place):
    with Ranks(survive, 3, place, 6) as ranks:
        ranks.heard(1, place)
        ranks.signal(1)
        kind, found = ranks.end(0)
        assert kind == "returned", found
        assert ranks.end(2) == ("returned", 6)
    assert found["0.step"] == 6.0
    if place == "before its request":  # else its gradients count where they have arrived
        check_as_together(found, training("adam"), 2, 6, alone=range(2, 6))


@pytest.mark.parametrize("place", ["before its request", pytest.param("in mid-transfer", marks=pytest.mark.slow)])
def test_a_worker_that_is_stopped_is_left_behind_and_ends_when_it_goes_on(place):
    with Ranks(survive, 3, place, 6, 0.5) as ranks:
        ranks.heard(1, place)
        ranks.signal(1, signal.SIGSTOP)
        kind, found = ranks.end(0, 5 * TIMEOUT_S)
        assert kind == "returned", found
        assert ranks.end(2) == ("returned", 6)
        ranks.signal(1, signal.SIGCONT)
        text = ranks.raised(1)
    assert text.startswith("PeerError: worker 1 (rank 1) is out of the job, which goes on: "), text
    assert "server 0 (rank 2) lost worker 1 (rank 1)" in text
    assert found["0.step"] == 6.0
    if place == "before its request":
        check_as_together(found, training("adam"), 2, 6, alone=range(2, 6))


def rest(rank, say, seconds):
    """Worker 1 does something else between two steps, for longer than anybody waits for a silent rank."""
    return part_of_job(rank, 4, lambda fast, step: time.sleep(seconds if step == 2 and rank == 1 else 0.0))


@pytest.mark.slow
def test_a_slow_worker_is_waited_for_as_long_as_it_lives():
    found = returned(rest, 3, 1.5 * TIMEOUT_S)
    assert found[2] == 4
    check_as_together(found[0], training("adam"), 2, 4)
