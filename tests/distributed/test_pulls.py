"""Which version each call runs on, and by which pull its values come, over wires that only take notes."""

import threading
import time
from concurrent.futures import wait

import pytest
import torch

from hocket.distributed.agent_links import Pulls
from hocket.distributed.agent_server import Value
from hocket.errors import PeerError
from hocket.tracing.state import inventory


class Notes:
    """Links to one server, and the wire of it."""

    def __init__(self, *versions: int) -> None:
        self.values = tuple(Value(name, "float32 (1,)", 4, 0, True, False) for name in ("a", "b"))
        self.wires = (self,)
        self.versions = list(versions)
        self.sent = 0
        self.received: dict[tuple[str, int], object] = {}

    def take(self, number):
        return self.versions.pop(0) if number is None else number

    def send(self):
        self.sent += 1

    def receive(self, name, tensor, epoch, done):
        self.received[name, epoch] = done

    def deliver(self):
        for done in self.received.values():
            done(None)
        self.received = {}


class Arrived:
    def __init__(self) -> None:
        self.errors: list[object] = []

    def __call__(self, error) -> None:
        self.errors.append(error)


def pulls_of(links: Notes, *, ahead: bool = True, every_call: bool = False) -> Pulls:
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(1)) for name in ("a", "b")})
    places = {entry.name: entry for entry in inventory(model, []).parameters}
    pulls = Pulls(links, places, ahead, every_call)
    pulls.has_ops(["pull:a", "pull:b"])
    return pulls


def looked(pulls: Pulls) -> None:
    """Wait until a look ahead is over."""
    wait([pulls._looking])


def test_one_at_a_time_asks_the_servers():
    links, asking, both = Notes(1, 2), threading.Semaphore(1), []
    pulls = pulls_of(links)
    take = links.take

    def alone(number):
        both.append(not asking.acquire(blocking=False))
        pulls.begin("pull:a", torch.zeros(1), 1, Arrived())  # of a lane, while the call decides: it would look, too
        time.sleep(0.05)
        asking.release()
        return take(number)

    links.take = alone
    assert pulls.decide(1) == 1
    looked(pulls)
    assert both == [False]
    pulls.close()


def test_a_value_of_this_call_that_begins_late_is_of_this_calls_version():
    links = Notes(1, 2)
    pulls = pulls_of(links)
    assert pulls.decide(1) == 1
    arrived = [Arrived() for _ in range(4)]
    pulls.begin("pull:a", torch.zeros(1), 1, arrived[0])
    links.deliver()
    pulls.begin("pull:a", torch.zeros(1), 2, arrived[1])  # version 2 begins to come ...
    looked(pulls)
    assert list(links.received) == [("pull:a", 2)]
    pulls.begin("pull:b", torch.zeros(1), 1, arrived[2])  # ... and what begins only now is still of version 1
    assert list(links.received) == [("pull:a", 2), ("pull:b", 1)]
    pulls.begin("pull:b", torch.zeros(1), 2, arrived[3])
    links.deliver()
    assert [each.errors for each in arrived] == [[None]] * 4
    assert pulls.decide(2) == 2
    assert links.sent == 2
    pulls.close()


def test_a_version_that_is_there_comes_at_once():
    links = Notes(1, 1, 1)
    pulls = pulls_of(links)
    pulls.decide(1)
    for name in ("pull:a", "pull:b"):
        pulls.begin(name, torch.zeros(1), 1, Arrived())
    links.deliver()
    arrived = Arrived()
    pulls.begin("pull:a", torch.zeros(1), 2, arrived)
    looked(pulls)
    assert arrived.errors == []  # a newer one may yet be published before the next call
    assert pulls.decide(2) == 1
    assert arrived.errors == [None]
    assert (links.sent, links.received) == (1, {})
    pulls.close()


@pytest.mark.parametrize(("ahead", "every_call"), [(False, False), (False, True)])
def test_nothing_comes_ahead_where_it_must_not(ahead, every_call):
    links = Notes(1, 1 if every_call else 2)
    pulls = pulls_of(links, ahead=ahead, every_call=every_call)
    pulls.decide(1)
    pulls.begin("pull:a", torch.zeros(1), 2, Arrived())
    assert links.received == {}
    assert pulls.decide(2) == (1 if every_call else 2)
    assert list(links.received) == [("pull:a", 2)]
    links.deliver()
    pulls.close()


def test_a_held_version_comes_between_calls_and_stays():
    links = Notes(5, 6)
    pulls = pulls_of(links, ahead=False)
    assert pulls.hold(3) == 3
    assert pulls.decide(1) == 3
    for name in ("pull:a", "pull:b"):
        pulls.begin(name, torch.zeros(1), 1, Arrived())
    links.deliver()
    assert pulls.decide(2) == 3
    pulls.held = None
    assert pulls.decide(3) == 5
    pulls.close()


def test_what_is_not_decided_ends_with_the_agent():
    pulls = pulls_of(Notes(1), ahead=False)
    arrived = Arrived()
    pulls.begin("pull:a", torch.zeros(1), 1, arrived)
    pulls.close()
    assert isinstance(arrived.errors[0], PeerError)
