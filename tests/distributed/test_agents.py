"""Agents: each call on one whole version, what is gone is named, and one that leaves does not disturb the training.

Versions that servers keep, and what an agent believes of what a job says.
"""

import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from distributed.agents import TIMEOUT_S, Counting, rank_that_publishes, rank_that_stays, versions_seen
from distributed.ranks import Ranks
from hocket import distribute
from hocket.distributed.agent_server import NEWEST, Value, Version, Versions, announced_values, ordered_values
from hocket.errors import InputError, PeerError, StaleCaptureError, VersionGoneError
from hocket.ir import Plan
from support.refusals import fails


def address(ranks: Ranks) -> str:
    return f"127.0.0.1:{ranks.store.port}"


@contextmanager
def publishing(stages, agent, *given, workers=1, servers=1, count=1, timeout_s=TIMEOUT_S):
    """Ranks that have begun to publish, and agents of them."""
    with Ranks(rank_that_publishes, workers + servers, workers, servers, stages, timeout_s) as ranks:
        ranks.store.set("begin", "")
        with Ranks(agent, count, address(ranks), *given) as agents:
            yield ranks, agents


def ended(ranks: Ranks) -> list:
    """Return what ranks give that wait for their end only."""
    ranks.store.set("end", "")
    return ranks.returned()


@pytest.mark.parametrize(
    ("workers", "servers", "options"),
    [(1, 2, {"order": "reverse", "executor": "python"}), (2, 1, {"order": "layer", "ahead": False})],
    ids=["ahead, two servers", "two workers"],
)
def test_a_call_has_one_version(workers, servers, options):
    stages = [("begin", 1), ("go on", None if workers == 1 else 40), ("end", 0)]
    ways = {"workers": workers, "servers": servers, "count": 2}
    with publishing(stages, versions_seen, 40, options, **ways) as (ranks, agents):
        for agent in range(2):
            agents.heard(agent, "first")
        ranks.store.set("go on", "")
        found = agents.returned(120)
        published = ended(ranks)[0]
    for seen, arrivals, text in found:
        assert seen == sorted(seen)
        assert set(seen) <= set(published)
        assert len(set(seen)) > 2
        plan = Plan.parse(text)
        for server, names in arrivals.items():
            (lane,) = [lane for lane in plan.lanes if lane.device == f"{server}->cpu0"]
            assert names == tuple(op.removeprefix("pull:") for op in lane.ops)


def hold_versions(rank, say, address):
    batch = torch.ones(2, 200).double()
    with distribute.agent(Counting().eval(), address, timeout_s=TIMEOUT_S, executor="python") as fresh:
        assert fresh.hold(5) == 5  # the job has published it, and servers may be on their way to it
        fails(VersionGoneError, r"version 2 is gone, .*; the servers have 4 to 5", fresh.hold, 2)
        assert fresh.hold(4) == 4
        say("holds")
        held = [fresh(batch).tolist()[:9] for _ in range(3)]
        assert held == [[-4.0] * 9] * 3
        assert fresh.hold(7) == 7
        assert fresh(batch).tolist()[:9] == [-7.0] * 9
        fresh.follow()
        assert fresh(batch).tolist()[:9] == [-7.0] * 9
        say("waits")
        assert fresh.hold(9) == 9  # is to come
        assert fresh(batch).tolist()[:9] == [-9.0] * 9
        fails(VersionGoneError, "version 4 is gone", fresh.hold, 4)
        assert fresh(batch).tolist()[:9] == [-9.0] * 9
    return fresh.version


@pytest.mark.parametrize("servers", [1, 2])
def test_versions_are_held_and_what_is_gone_is_named(servers):
    stages = [("begin", 5), ("go on", 2), ("again", 2), ("end", 0)]
    with Ranks(rank_that_publishes, 1 + servers, 1, servers, stages) as ranks:
        ranks.store.set("begin", "")
        ranks.heard(0, "begin")
        with Ranks(hold_versions, 1, address(ranks)) as agents:
            agents.heard(0, "holds")
            ranks.store.set("go on", "")
            agents.heard(0, "waits")
            ranks.store.set("again", "")
            assert agents.returned() == [9]
        assert ended(ranks)[0] == list(range(1, 10))


def rest_between_calls(rank, say, address, seconds):
    """Calls, does something else for longer than anybody waits for a silent peer, and calls again."""
    batch = torch.ones(2, 200).double()
    with distribute.agent(Counting().eval(), address, timeout_s=seconds / 1.5, executor="python") as fresh:
        before = fresh(batch).tolist()[:9]
        say("rests")
        time.sleep(seconds)
        return before, fresh(batch).tolist()[:9]


def test_an_agent_that_is_idle_stays():
    stages = [("begin", 1), ("go on", 1), ("end", 0)]
    with publishing(stages, rest_between_calls, 4.5, timeout_s=3.0) as (ranks, agents):
        agents.heard(0, "rests")
        ranks.store.set("go on", "")
        assert agents.returned() == [([-1.0] * 9, [-2.0] * 9)]
        ended(ranks)


def wait_for_a_version(rank, say, address):
    with pytest.raises(PeerError, match=r"agent: the job has published no version for 1 s"):
        distribute.agent(Counting().eval(), address, timeout_s=1.0)


def test_a_job_that_publishes_nothing_is_said():
    with Ranks(rank_that_stays, 2) as ranks:
        ranks.heard(0, "there")
        with Ranks(wait_for_a_version, 1, address(ranks)) as agents:
            agents.returned()
        ended(ranks)


def call_until_lost(rank, say, address):
    with distribute.agent(Counting().eval(), address, timeout_s=TIMEOUT_S, executor="python") as fresh:
        while True:
            fresh(torch.ones(2, 200).double())
            say("called")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_agent_that_is_lost_does_not_disturb_the_training(number):
    stages = [("begin", None), ("end", 3)]
    with publishing(stages, call_until_lost) as (ranks, agents):
        agents.heard(0, "called")
        agents.signal(0, number)
        with Ranks(versions_seen, 1, address(ranks), 2, {"executor": "python"}) as others:
            others.returned()
        versions, steps = ended(ranks)
    assert steps == len(versions) >= 5


def test_agents_end_with_their_servers():
    with publishing([("begin", None), ("never", 0)], call_until_lost, servers=2) as (ranks, agents):
        agents.heard(0, "called")
        ranks.signal(2, signal.SIGKILL)
        text = agents.raised(0)
    assert text.startswith("PeerError: agent 1 lost server1: "), text


def refused(rank, say, address):
    """An agent names models that the job does not train, and calls that it cannot make."""
    batch = torch.ones(2, 200).double()
    with pytest.raises(
        PeerError, match=r"'layers.0' is float64 \(100, 100\) here, and float64 \(200, 200\) in the job"
    ):
        distribute.agent(Counting(100), address, timeout_s=TIMEOUT_S)
    other = Counting()
    other.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(PeerError, match=r"'extra' is float32 \(3,\) here, and missing in the job"):
        distribute.agent(other, address, timeout_s=TIMEOUT_S)
    with pytest.raises(InputError, match="expected an address HOST:PORT, got 'nowhere'"):
        distribute.agent(Counting(), "nowhere")
    with (
        distribute.agent(Counting(), address, timeout_s=TIMEOUT_S, executor="python") as fresh,
        pytest.raises(InputError, match=r"writes 'seen', which comes from servers; call model.eval\(\)"),
    ):
        fresh(batch)
    with (
        distribute.agent(Returning().eval(), address, timeout_s=TIMEOUT_S, executor="python") as fresh,
        pytest.raises(InputError, match=r"returns the memory of 'layers\.0', where the next version comes"),
    ):
        fresh(batch)
    model = Counting().eval()
    with distribute.agent(model, address, timeout_s=TIMEOUT_S, executor="python") as fresh:
        fresh(batch)
        fails(StaleCaptureError, "this call is not like the first one", fresh, batch[:1])
        assert fresh.hold() == 1
        assert model(batch[:1]).tolist()[:9] == [-1.0] * 9
        assert fresh(batch).tolist()[:9] == [-1.0] * 9
    return fresh.calls


class Returning(Counting):
    def forward(self, x):
        return self.layers[0].view(-1)


def test_what_cannot_be_is_refused_by_name():
    with publishing([("begin", 1), ("end", 0)], refused) as (ranks, agents):
        assert agents.returned() == [2]
        ended(ranks)


def test_nobody_at_the_address_is_said(capfd):
    with pytest.raises(PeerError, match=r"agent: 127\.0\.0\.1:1 does not answer as a job"):
        distribute.agent(Counting(), "127.0.0.1:1", timeout_s=1.0)
    assert capfd.readouterr().err == ""  # torch's store has written pages of C++ frames


WEIGHT = Value("weight", "float32 (2, 3)", 24, 0, True, False)


def test_a_version_that_is_to_come_is_waited_for():
    versions, found = Versions(), []
    waiting = [threading.Thread(target=lambda n=n: found.append(versions.take(n))) for n in (NEWEST, 4)]
    for thread in waiting:
        thread.start()
    versions.publish(Version(4, {}, {}))
    for thread in waiting:
        thread.join(20)
    assert [version.number for version in found] == [4, 4]
    assert versions.take(3) is None


def test_nobody_waits_for_a_server_that_takes_leave():
    versions, found = Versions(), []
    waiting = threading.Thread(target=lambda: found.append(versions.take(NEWEST)))
    waiting.start()
    versions.close()
    waiting.join(20)
    assert found == [None]


def test_what_a_job_says_is_compared_with_what_is_here():
    mine = {"weight": torch.zeros(2, 3)}
    assert announced_values([WEIGHT.as_list], 1, mine) == [WEIGHT]
    fails(PeerError, r"'weight' is float32 \(2, 3\) here, and missing in the job", announced_values, [], 1, mine)
    fails(PeerError, "'weight' is float32", announced_values, [["weight", "float32 (2, 3)", 2400, 0, True]], 1, mine)


@pytest.mark.parametrize(
    "told",
    [
        ["weight", "float32 (2, 3)", 24, 0],
        ["weight", "float32 (2, 3)", "24", 0, True],
        ["weight", "float32 (2, 3)", -1, 0, True],
        ["weight", "float32 (2, 3)", 24, 1, True],
        "weight",
    ],
)
def test_what_means_nothing_is_not_believed(told):
    fails(PeerError, "the job says something unknown", announced_values, [told], 1, {})


@pytest.mark.parametrize("places", [[0, 0], [1], [-2]])
def test_an_order_of_values_that_do_not_exist_is_refused(places):
    fails(PeerError, "it orders values that do not exist", ordered_values, [WEIGHT], places)
    assert ordered_values([WEIGHT], [0, -1]) == [WEIGHT]
