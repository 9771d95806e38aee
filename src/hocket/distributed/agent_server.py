r"""`AgentServer`: a server's side of agents, which come and go at any time and never disturb the training.

A thread looks for agents in the job's store, and each one gets a wire and a thread::

    agent    TAKE v, or the newest --.                  .--> SEND --> receives, in its own order
    server   .... v exists ......... '--> granted v ----'    sends, from its copy of v

An agent asks all servers for a version before it lets any of them send, so it has a version of all servers or none. A
granted version stays in memory until the agent's next request.

Rank 0 publishes versions: it orders all servers to copy their values between the same two steps. So a version is
consistent by construction, and its number, which is the number of steps before it, is the same at all servers. They
keep the last few versions. An older one stays in memory only while it is being sent to an agent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.distributed.description import kind_of
from hocket.distributed.job import PROBE, PROBE_BYTES
from hocket.distributed.membership import Membership, connected
from hocket.distributed.packets import Packet, pack
from hocket.distributed.parts import Assignment
from hocket.distributed.store import POLL_S, meet_at
from hocket.distributed.wire import Wire
from hocket.errors import HocketError, PeerError
from hocket.tracing.captured import Captured
from hocket.tracing.sources import Entry

KEPT_VERSIONS = 2
NEWEST = -1


@dataclass(frozen=True)
class Value:
    """A parameter or a buffer that agents receive."""

    name: str  # name in the model
    kind: str  # dtype and shape, as text
    size_bytes: int
    server: int  # number of the server that has it
    changes: bool  # True if the step writes it. Other values are sent once.
    from_worker: bool  # True if worker 0 gives it to the server when it publishes, since no server updates it

    @property
    def as_list(self) -> list[Any]:
        """The fields that agents read in the store."""
        return [self.name, self.kind, self.size_bytes, self.server, self.changes]

    @property
    def pull_name(self) -> str:
        """The name of a changing value on the wire, and in an agent's plan."""
        return f"pull:{self.name}"

    @property
    def fixed_name(self) -> str:
        """The name on the wire of a value that is sent once."""
        return f"fixed:{self.name}"


@dataclass(frozen=True)
class Version:
    """One server's values of a version: those that steps change, and those that never change."""

    number: int
    values: Mapping[str, torch.Tensor]
    fixed: Mapping[str, torch.Tensor]


class Versions:
    """The versions of a server. It publishes them, and threads that serve agents take them."""

    def __init__(self) -> None:
        self._versions: dict[int, Version] = {}
        self._closed = False
        self._changed = threading.Condition()

    def publish(self, version: Version) -> None:
        """Add the newest version, and drop the oldest."""
        with self._changed:
            self._versions[version.number] = version
            while len(self._versions) > KEPT_VERSIONS:
                del self._versions[min(self._versions)]
            self._changed.notify_all()

    def take(self, number: int) -> Version | None:
        """Wait for a version, or for any. Return None if it was dropped, or the server is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or max(self._versions, default=NEWEST - 1) >= number)
            if number == NEWEST and self._versions:
                number = max(self._versions)
            return self._versions.get(number)

    def range(self) -> tuple[int, int]:
        """The numbers of the oldest and of the newest version, or `NEWEST` twice if there is none."""
        with self._changed:
            return min(self._versions, default=NEWEST), max(self._versions, default=NEWEST)

    def close(self) -> None:
        """End all waits in `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def model_values(captured: Captured, assignment: Assignment) -> dict[str, tuple[Value, Entry]]:
    """All parameters and buffers of the model, with their places at this rank."""
    places, graph = captured.trace.places, captured.graph
    home = {each.buffer: each.server for each in assignment.pulls}
    for server, names in enumerate(assignment.server_ops):
        for name in names:
            home.update(dict.fromkeys(graph[name].writes, server))
    written = {buffer for op in graph.ops for buffer in op.writes} | {e.name for e in captured.trace.rebound}
    found = {}
    for entry in (*places.parameters, *places.tensors):
        if entry.kind in ("parameter", "buffer"):
            tensor = entry.get()
            size, name = tensor.nbytes, entry.name
            value = Value(name, kind_of(tensor), size, home.get(name, 0), name in written, name not in home)
            found[name] = (value, entry)
    return found


def announced_values(announced: Any, num_servers: int, mine: Mapping[str, torch.Tensor]) -> list[Value]:
    """The values that a job announces, or a `PeerError` if they do not fit an agent's own."""
    found = [_value(each, num_servers) for each in announced] if isinstance(announced, list) else []
    theirs = {value.name: value for value in found}
    for name, tensor in mine.items():
        here, there = kind_of(tensor), theirs[name].kind if name in theirs else "missing"
        if here != there or theirs[name].size_bytes != tensor.nbytes:
            raise PeerError(f"agent: {name!r} is {here} here, and {there} in the job")
    return found


def ordered_values(values: Sequence[Value], indices: Sequence[int]) -> list[Value]:
    """The values that an agent wants, in its order, by their indices, each once. Trailing indices of -1 fill up."""
    wanted = [index for index in indices if index != -1]
    if len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(len(values))):
        raise PeerError("it orders values that do not exist")
    return [values[index] for index in wanted]


def of_server(values: Collection[Value], server: int, *, changes: bool) -> list[Value]:
    """The changing, or the fixed, values of one server."""
    return [value for value in values if value.server == server and value.changes == changes]


def _value(announced: Any, num_servers: int) -> Value:
    if not isinstance(announced, list) or [type(each) for each in announced] != [str, str, int, int, bool]:
        raise PeerError(f"agent: the job says something unknown of a value: {announced!r}")
    name, kind, size_bytes, server, changes = announced
    if size_bytes < 0 or not 0 <= server < num_servers:
        raise PeerError(f"agent: the job says something unknown of {name!r}: {size_bytes} bytes on server {server}")
    return Value(name, kind, size_bytes, server, changes, from_worker=False)


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
