r"""A server's side of agents: they come and go at any time, and never disturb the training.

A thread looks for agents in the job's store, and each one gets a wire and a thread of its own::

    agent    TAKE v, or the newest --.                  .--> SEND --> receives, in its own order
    server   .... v is there .....   '--> granted v ----'    sends, from the copy that it has of v

An agent asks all servers before it lets any of them send: it has a version of all, or of none. What was granted stays
until it asks again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from hocket.distributed.membership import POLL_S, Membership, connected, meet_at
from hocket.distributed.parcels import Parcel, packed
from hocket.distributed.setup import PROBE, PROBE_BYTES
from hocket.distributed.versions import NEWEST, Value, Version, Versions, of_server, ordered_values
from hocket.distributed.wire import Wire
from hocket.errors import HocketError, PeerError

__all__ = [
    "ANSWER",
    "ASK",
    "JOB_KEY",
    "JOINED_KEY",
    "MEASURE",
    "ORDER",
    "SEND",
    "TAKE",
    "Desk",
    "agent_key",
    "agent_parcels",
    "fixed_name",
    "pull_name",
]

# Keys of the store: what the job says of itself, and how many agents have come.
JOB_KEY, JOINED_KEY = "hocket/agents/job", "hocket/agents/joined"
# What agents ask for: a command with a number.
ASK, ANSWER, PLACES = "ask", "answer", "places"
TAKE, SEND, MEASURE, ORDER = range(4)

log = logging.getLogger(__name__)


def agent_key(agent: int, server: int) -> str:
    """The key of the wire between an agent and a server, and of what they say before it is there."""
    return f"hocket/agents/{agent}/{server}"


def pull_name(value: str) -> str:
    """What a value that changes is called on a wire, and in an agent's plan."""
    return f"pull:{value}"


def fixed_name(value: str) -> str:
    """What a value that is sent once is called on a wire."""
    return f"fixed:{value}"


def agent_parcels(values: Sequence[Value], server: int) -> tuple[list[Parcel], list[Parcel]]:
    """What goes between a server and any agent besides a version: to the agent, and from it."""
    fixed = [
        Parcel((fixed_name(value.name),), (value.size_bytes,)) for value in of_server(values, server, changes=False)
    ]
    places = 8 * max(1, len(of_server(values, server, changes=True)))
    return [Parcel((ANSWER,), (24,)), Parcel((PROBE,), (PROBE_BYTES,)), *fixed], [
        Parcel((ASK,), (16,)),
        Parcel((PLACES,), (places,)),
    ]


class Desk:
    """Serves agents until it is closed.

    Args:
        membership: the server's place in the job.
        values: all values of the model.
        versions: what there is to send.
    """

    def __init__(self, membership: Membership, values: Sequence[Value], versions: Versions) -> None:
        self._membership, self._values, self._versions = membership, tuple(values), versions
        self._over = threading.Event()
        self._wires: list[Wire] = []
        self._lock = threading.Lock()
        self._watch = threading.Thread(target=self._look_for_agents, name="hocket-agents", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Take leave of all agents."""
        self._over.set()
        self._versions.close()
        self._watch.join()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()

    def _look_for_agents(self) -> None:
        known = 0
        while not self._over.wait(POLL_S):
            try:
                joined = self._membership.store.add(JOINED_KEY, 0)
            except RuntimeError:
                return  # the store is gone with whoever kept it: nobody can come any more
            for agent in range(known + 1, joined + 1):
                threading.Thread(target=self._serve, args=(agent,), name=f"hocket-agent-{agent}", daemon=True).start()
            known = max(known, joined)

    def _serve(self, agent: int) -> None:
        """All that one agent asks for, on a thread of its own."""
        me = self._membership
        key = agent_key(agent, me.number)
        try:
            wire = connected(me.store, key, 0, me.name(me.rank), f"agent {agent}", me.timeout_s)
        except PeerError as error:
            log.info("hocket: %s", error)
            return
        with self._lock:
            self._wires.append(wire)
        try:
            wire.add(*agent_parcels(self._values, me.number))
            meet_at(me.store, key, 0, f"agent {agent}", me.timeout_s)
            _AgentSession(wire, of_server(self._values, me.number, changes=True), self._versions).run()
        except (HocketError, RuntimeError) as error:  # its end is not the training's
            log.info("hocket: agent %d is gone: %s", agent, error)
        finally:
            wire.close()
            with self._lock:
                self._wires.remove(wire)


class _AgentSession:
    """What one agent asks for, one by one, until it leaves (a `PeerError`)."""

    def __init__(self, wire: Wire, values: Sequence[Value], versions: Versions) -> None:
        self._wire, self._values, self._versions = wire, values, versions
        self._wanted: list[Value] = []
        self._granted: Version | None = None
        self._has_fixed = False
        self._pulls = 0

    def run(self) -> None:
        ask = torch.empty(2, dtype=torch.int64)
        while True:
            self._wire.get(ASK, ask)
            command, number = ask.tolist()
            if command == TAKE:
                self._grant(number)
            elif command == SEND and self._granted is not None:
                self._send(self._granted)
            elif command == MEASURE:
                self._wire.post(PROBE, torch.zeros(PROBE_BYTES, dtype=torch.uint8))
            elif command == ORDER and not self._wanted:
                self._take_order()
            else:
                self._wire.close(reason="it asked for something unknown")
                raise PeerError(f"it asked for something unknown: {(command, number)}")

    def _grant(self, number: int) -> None:
        if self._granted is None or self._granted.number != number:
            self._granted = self._versions.take(number)
        granted = NEWEST if self._granted is None else self._granted.number
        self._wire.post(ANSWER, torch.tensor([granted, *self._versions.there()]))
        if self._granted is not None and not self._has_fixed:
            self._has_fixed = True
            for name, tensor in self._granted.fixed.items():
                self._wire.post(fixed_name(name), tensor)

    def _send(self, version: Version) -> None:
        self._pulls += 1
        for value in self._wanted:
            self._wire.send(pull_name(value.name), version.values[value.name], self._pulls, lambda error: None)
        self._granted = None  # what is on its way is held by the wire

    def _take_order(self) -> None:
        places = torch.empty(max(1, len(self._values)), dtype=torch.int64)
        self._wire.get(PLACES, places)
        self._wanted = ordered_values(self._values, places.tolist())
        self._wire.add(packed((pull_name(value.name), value.size_bytes) for value in self._wanted), (), ordered=True)
        self._wire.post(ANSWER, torch.zeros(3, dtype=torch.int64))
