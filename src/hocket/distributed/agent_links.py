"""`AgentLinks`: an agent's connections to the servers of a job, which it treats as one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import torch

from hocket.distributed.agent_server import (
    ANSWER,
    INDICES,
    JOB_KEY,
    JOINED_KEY,
    MEASURE,
    ORDER,
    REQUEST,
    SEND,
    TAKE,
    agent_key,
    agent_packets,
)
from hocket.distributed.job import PROBE, PROBE_BYTES
from hocket.distributed.membership import connected
from hocket.distributed.packets import pack
from hocket.distributed.parts import server_name
from hocket.distributed.store import meet_at, opened, waited
from hocket.distributed.versions import NEWEST, Value, announced_values, of_server
from hocket.distributed.wire import Wire
from hocket.errors import InputError, PeerError, VersionGoneError


class AgentLinks:
    """Wires of one agent to all servers.

    Attributes:
        values: all values of the job.
        wires: wires by the number of the server.
        timeout_s: how long a server is waited for.
    """

    def __init__(self, values: Sequence[Value], wires: Sequence[Wire], timeout_s: float) -> None:
        self.values, self.wires, self.timeout_s = tuple(values), tuple(wires), timeout_s

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wait for the first version, have all servers keep the newest one, and receive the values that never change.

        Raises:
            PeerError: no version is published within the timeout, or a server is gone or silent.
        """
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
        """Have all servers keep one version for this agent, and return its number.

        Args:
            number: number of the version, which is waited for if it is to come. None: the newest that all have.

        Raises:
            VersionGoneError: a server does not have it any more, or never had.
            PeerError: a server is gone or silent.
        """
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
    """Find the job at an address, compare its values with the agent's, and connect to each server.

    Args:
        address: ``HOST:PORT`` of the job's store, which torchrun gives its ranks as MASTER_ADDR and MASTER_PORT.
        tensors: parameters and buffers of the agent.
        timeout_s: how long the job is waited for.

    Raises:
        InputError: the address is malformed.
        PeerError: no job answers there, or it has another model or another torch.
    """
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
