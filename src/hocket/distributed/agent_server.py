r"""`AgentServer`: a server's side of agents, which come and go at any time and never disturb the training.

A thread looks for agents in the job's store, and each one gets a wire and a thread::

    agent    TAKE v, or the newest --.                  .--> SEND --> receives, in its own order
    server   .... v exists ......... '--> granted v ----'    sends, from its copy of v

An agent asks all servers for a version before it lets any of them send, so it has a version of all servers or none. A
granted version stays in memory until the agent's next request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from hocket.distributed.job import PROBE, PROBE_BYTES
from hocket.distributed.membership import Membership, connected
from hocket.distributed.packets import Packet, pack
from hocket.distributed.store import POLL_S, meet_at
from hocket.distributed.versions import NEWEST, Value, Version, Versions, of_server, ordered_values
from hocket.distributed.wire import Wire
from hocket.errors import HocketError, PeerError

# Keys of the store: the description of the job, and the number of agents that have come.
JOB_KEY, JOINED_KEY = "hocket/agents/job", "hocket/agents/joined"
# Values on the wire: a request (a command with a number), its answer, and the order of an agent's values.
REQUEST, ANSWER, INDICES = "request", "answer", "indices"
TAKE, SEND, MEASURE, ORDER = range(4)

log = logging.getLogger(__name__)


def agent_key(agent: int, server: int) -> str:
    """The store key of the wire between an agent and a server."""
    return f"hocket/agents/{agent}/{server}"


def agent_packets(values: Sequence[Value], server: int) -> tuple[list[Packet], list[Packet]]:
    """Packets between a server and any agent besides versions: those to the agent, and those from it."""
    fixed = [Packet((value.fixed_name,), (value.size_bytes,)) for value in of_server(values, server, changes=False)]
    size = 8 * max(1, len(of_server(values, server, changes=True)))
    return [Packet((ANSWER,), (24,)), Packet((PROBE,), (PROBE_BYTES,)), *fixed], [
        Packet((REQUEST,), (16,)),
        Packet((INDICES,), (size,)),
    ]


class AgentServer:
    """Serves agents until it is closed."""

    def __init__(self, membership: Membership, values: Sequence[Value], versions: Versions) -> None:
        self._membership, self._values, self._versions = membership, tuple(values), versions
        self._over = threading.Event()
        self._wires: list[Wire] = []
        self._lock = threading.Lock()
        self._watch = threading.Thread(target=self._look_for_agents, name="hocket-agents", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Close the wires to all agents."""
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
                return  # the store's host has exited, so no agent can join
            for agent in range(known + 1, joined + 1):
                threading.Thread(target=self._serve, args=(agent,), name=f"hocket-agent-{agent}", daemon=True).start()
            known = max(known, joined)

    def _serve(self, agent: int) -> None:
        """Answer the requests of one agent, on a separate thread."""
        me = self._membership
        key = agent_key(agent, me.number)
        try:
            wire = connected(me.store, key, 0, me.me, f"agent {agent}", me.timeout_s)
        except PeerError as error:
            log.info("hocket: %s", error)
            return
        with self._lock:
            self._wires.append(wire)
        try:
            wire.add(*agent_packets(self._values, me.number))
            meet_at(me.store, key, 0, f"agent {agent}", me.timeout_s)
            _AgentSession(wire, of_server(self._values, me.number, changes=True), self._versions).run()
        except (HocketError, RuntimeError) as error:  # the training goes on without the agent
            log.info("hocket: agent %d is gone: %s", agent, error)
        finally:
            wire.close()
            with self._lock:
                self._wires.remove(wire)


class _AgentSession:
    """Answers the requests of one agent until it leaves, which is a `PeerError`."""

    def __init__(self, wire: Wire, values: Sequence[Value], versions: Versions) -> None:
        self._wire, self._values, self._versions = wire, values, versions
        self._wanted: list[Value] = []
        self._granted: Version | None = None
        self._has_fixed = False
        self._num_pulls = 0

    def run(self) -> None:
        request = torch.empty(2, dtype=torch.int64)
        while True:
            self._wire.get(REQUEST, request)
            command, number = request.tolist()
            if command == TAKE:
                self._grant(number)
            elif command == SEND and self._granted is not None:
                self._send(self._granted)
            elif command == MEASURE:
                self._wire.post(PROBE, torch.zeros(PROBE_BYTES, dtype=torch.uint8))
            elif command == ORDER and not self._wanted:
                self._take_order()
            else:
                self._wire.close(reason="it sent an unknown request")
                raise PeerError(f"it sent an unknown request: {(command, number)}")

    def _grant(self, number: int) -> None:
        if self._granted is None or self._granted.number != number:
            self._granted = self._versions.take(number)
        granted = NEWEST if self._granted is None else self._granted.number
        self._wire.post(ANSWER, torch.tensor([granted, *self._versions.range()]))
        if self._granted is not None and not self._has_fixed:
            self._has_fixed = True
            for value, tensor in self._granted.fixed.items():
                self._wire.post(f"fixed:{value}", tensor)

    def _send(self, version: Version) -> None:
        self._num_pulls += 1
        for value in self._wanted:
            self._wire.send(value.pull_name, version.values[value.name], self._num_pulls, lambda error: None)
        self._granted = None  # the wire holds the values until they have arrived

    def _take_order(self) -> None:
        indices = torch.empty(max(1, len(self._values)), dtype=torch.int64)
        self._wire.get(INDICES, indices)
        self._wanted = ordered_values(self._values, indices.tolist())
        self._wire.add(pack((value.pull_name, value.size_bytes) for value in self._wanted), (), ordered=True)
        self._wire.post(ANSWER, torch.zeros(3, dtype=torch.int64))
