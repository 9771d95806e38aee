r"""`AgentLinks`: an agent's connections to the servers of a job, which it treats as one.

`Pulls` receives versions for an executor whose calls each run on one version from beginning to end.

The version of a call is decided once: when the call begins, or during the call before, as soon as the first parameter
is free there and a newer version exists. Each value then comes when the last op that reads it is done::

    call 1   [ f1(w1) ][ f2(w2) ][ f3(w3) ]
    wire              | w1 of the next version | w2 ...      (f1 is done: w1 may come)

If the version is in memory already, its values arrive at once, without a transfer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hocket.distributed.agent_server import (
    ANSWER,
    INDICES,
    JOB_KEY,
    JOINED_KEY,
    MEASURE,
    NEWEST,
    ORDER,
    REQUEST,
    SEND,
    TAKE,
    Value,
    agent_key,
    agent_packets,
    announced_values,
    of_server,
)
from hocket.distributed.job import PROBE, PROBE_BYTES
from hocket.distributed.membership import connected
from hocket.distributed.packets import pack
from hocket.distributed.parts import server_name
from hocket.distributed.store import meet_at, opened, waited
from hocket.distributed.wire import Wire
from hocket.errors import InputError, PeerError, VersionGoneError
from hocket.execution.channels import Done
from hocket.tracing.sources import Entry


class AgentLinks:
    """Wires of one agent to all servers, by the number of the server, and all values of the job."""

    def __init__(self, values: Sequence[Value], wires: Sequence[Wire], timeout_s: float) -> None:
        self.values, self.wires, self.timeout_s = tuple(values), tuple(wires), timeout_s

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wait for the first version, have all servers keep the newest, and receive what never changes."""
        self._request(self.wires[:1], TAKE, NEWEST)
        try:
            self.wires[0].get(ANSWER, torch.empty(3, dtype=torch.int64), self.timeout_s)
        except TimeoutError:
            raise PeerError(f"agent: the job has published no version for {self.timeout_s:g} s") from None
        self.take(None)
        for server, wire in enumerate(self.wires):
            for value in of_server(self.values, server, changes=False):
                if value.name in tensors:
                    wire.get(value.fixed_name, tensors[value.name])

    def take(self, number: int | None) -> int:
        """Have all servers keep version `number`, also one to come, or the newest that all have. Return its number."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            answers = self._granted(self.wires[:1], NEWEST if number is None else number)
            wanted = answers[0][0] if number is None else number
            if wanted < 0:
                raise PeerError(f"agent: {server_name(0)} takes leave")
            answers += self._granted(self.wires[1:], wanted)
            if all(granted == wanted for granted, _, _ in answers):
                return wanted
            if number is not None or time.monotonic() > deadline:
                oldest, newest = max(a[1] for a in answers), min(a[2] for a in answers)
                raise VersionGoneError(
                    f"agent: version {wanted} is gone, or was never published; the servers have {oldest} to {newest}"
                )

    def send(self) -> None:
        """Let all servers send the version that they have granted."""
        self._request(self.wires, SEND)

    def order(self, names: Sequence[str]) -> None:
        """Set, once, the order in which values are to come. Each server gets its own part of it."""
        for server, wire in enumerate(self.wires):
            values = of_server(self.values, server, changes=True)
            place = {value.name: index for index, value in enumerate(values)}
            wanted = [values[place[name]] for name in names if name in place]
            wire.add((), pack((value.pull_name, value.size_bytes) for value in wanted), ordered=True)
            indices = [place[value.name] for value in wanted]
            self._request([wire], ORDER)
            wire.put(INDICES, torch.tensor(indices + [-1] * (max(1, len(values)) - len(indices))))
            wire.get(ANSWER, torch.empty(3, dtype=torch.int64))

    def rates(self) -> list[float]:
        """Measure the bytes per second from each server, while all of them send."""
        began = time.perf_counter()
        self._request(self.wires, MEASURE)
        for wire in self.wires:
            wire.get(PROBE, torch.empty(PROBE_BYTES, dtype=torch.uint8))
        return [PROBE_BYTES / (time.perf_counter() - began)] * len(self.wires)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()

    def _granted(self, wires: Sequence[Wire], number: int) -> list[tuple[int, int, int]]:
        """Request a version, and return for each server the granted, the oldest and the newest one."""
        self._request(wires, TAKE, number)
        found = []
        for wire in wires:
            answer = torch.empty(3, dtype=torch.int64)
            wire.get(ANSWER, answer)
            granted, oldest, newest = answer.tolist()
            found.append((granted, oldest, newest))
        return found

    def _request(self, wires: Sequence[Wire], command: int, number: int = 0) -> None:
        for wire in wires:
            wire.post(REQUEST, torch.tensor([command, number]))


def connect(address: str, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> AgentLinks:
    """Find the job at an address, which is an `InputError` if malformed, compare values, and connect to each server."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"agent: expected an address HOST:PORT, got {address!r}")
    wires: list[Wire] = []
    try:
        store = opened(host, int(port), timeout_s)
        missing = f"agent: there is no job with parameter servers at {address}"
        job = json.loads(waited(store, JOB_KEY, missing, timeout_s))
        if job["torch"] != torch.__version__:
            raise PeerError(f"agent: the job runs torch {job['torch']}, and this is {torch.__version__}")
        values = announced_values(job["values"], job["servers"], tensors)
        number = store.add(JOINED_KEY, 1)
        for server in range(job["servers"]):
            key = agent_key(number, server)
            wires.append(connected(store, key, 1, f"agent {number}", server_name(server), timeout_s))
            outgoing, incoming = agent_packets(values, server)
            wires[-1].add(incoming, outgoing)
            meet_at(store, key, 1, server_name(server), timeout_s)
    except (RuntimeError, KeyError, TypeError, ValueError, OSError) as error:
        for wire in wires:
            wire.close()
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"agent: {address} does not answer as a job: {error}") from error
    return AgentLinks(values, wires, timeout_s)


@dataclass(frozen=True)
class _Decision:
    """The version of a call, and the number of the pull that brings it, or None if it is in memory."""

    version: int
    pull: int | None


class Pulls:
    """The channel of an agent's plan."""

    runs_ahead = True
    runs_behind = False

    def __init__(self, links: AgentLinks, places: Mapping[str, Entry], ahead: bool, every_call: bool) -> None:
        self.held: int | None = None  # the version to stay with, or None for the newest
        self._links, self._ahead, self._every_call = links, ahead, every_call
        values = [value for value in links.values if value.changes]
        self._places = {value.pull_name: places[value.name] for value in values if value.name in places}
        self._wire = {value.pull_name: links.wires[value.server] for value in values}
        self._unread: frozenset[str] = frozenset()  # values that no op reads
        self._decisions: dict[int, _Decision] = {}
        self._present: int | None = None  # the version that is in memory, or being received
        self._num_pulls = self._num_pending = 0
        self._waiting: dict[int, list[tuple[str, torch.Tensor, Done]]] = {}
        self._looking: Future[None] | None = None
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._deciding = threading.Lock()  # one thread at a time requests a version, and then decides
        self._pool = ThreadPoolExecutor(1, "hocket-agent")

    def has_ops(self, ops: Collection[str]) -> None:
        """Set the transfers of the plan. Other changing values are received beside it."""
        self._unread = frozenset(self._places) - frozenset(ops)

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        with self._changed:
            decision = self._decisions.get(epoch)
            if decision is None:
                self._waiting.setdefault(epoch, []).append((op, tensor, done))
                if self._ahead and self.held is None and self._looking is None:
                    self._looking = self._pool.submit(self._decide, epoch, look_ahead=True)
                return
        self._start(decision, op, tensor, done)

    def decide(self, epoch: int) -> int:
        """Return the version of a call, which is decided now if it was not before."""
        self._finish_look()
        if epoch not in self._decisions:
            self._decide(epoch, look_ahead=False)
        return self._decisions[epoch].version

    def hold(self, version: int | None) -> int:
        """Bring a version, or the newest, between two calls, and stay with it. Raises as `decide`."""
        self._finish_look()
        self.synchronize()
        with self._deciding:
            self.held = self._links.take(version)
        if self._num_pulls and self.held != self._present:
            with self._changed:
                self._begin_pull(self.held)
                pull = _Decision(self.held, self._num_pulls)
            for op, entry in self._places.items():
                self._start(pull, op, entry.get().detach(), lambda error: None)
            self.synchronize()
        return self.held

    def synchronize(self) -> None:
        """Wait until no transfer is under way, so that the model has one version."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._num_pending == 0)
            if self._failure is not None:
                raise self._failure

    def arrivals(self) -> dict[str, tuple[str, ...]]:
        """For each server the values of the last complete pull, in the order of their arrival."""
        self.synchronize()
        return {
            server_name(number): tuple(op.removeprefix("pull:") for op in wire.arrived.get(self._num_pulls, []))
            for number, wire in enumerate(self._links.wires)
        }

    def close(self) -> None:
        """Fail all transfers whose version has not been decided."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            waiting, self._waiting = self._waiting, {}
        for many in waiting.values():
            for _, _, done in many:
                done(PeerError("agent: the agent was closed"))

    def _finish_look(self) -> None:
        """Wait for a look ahead, and raise its error if it failed."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.result()

    def _decide(self, epoch: int, look_ahead: bool) -> None:
        with self._deciding:
            if epoch in self._decisions:
                return
            present = self._present
            stays = self.held is not None and self.held == present and not self._every_call
            version = self.held if stays else self._links.take(self.held)
            assert version is not None
            pulls = version != present or self._every_call
            if look_ahead and not pulls:
                return
            with self._changed:
                if pulls:
                    self._begin_pull(version)
                decision = _Decision(version, self._num_pulls if pulls else None)
                self._decisions[epoch] = decision
                self._decisions.pop(epoch - 2, None)
                waiting = self._waiting.pop(epoch, [])
        for op in self._unread if pulls else ():
            self._start(decision, op, self._places[op].get().detach(), lambda error: None)
        for op, tensor, done in waiting:
            self._start(decision, op, tensor, done)

    def _begin_pull(self, version: int) -> None:
        """Let the servers send all values of a version. The caller holds the lock."""
        self._present = version
        self._num_pulls += 1
        self._num_pending += len(self._places)
        self._links.send()

    def _start(self, decision: _Decision, op: str, tensor: torch.Tensor, done: Done) -> None:
        if decision.pull is None:
            done(None)
            return

        def arrived(error: BaseException | None) -> None:
            with self._changed:
                self._num_pending -= 1
                self._failure = self._failure or error
                self._changed.notify_all()
            done(error)

        self._wire[op].receive(op, tensor, decision.pull, arrived)
