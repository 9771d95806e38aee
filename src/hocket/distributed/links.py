"""An agent's way to the servers: it finds the job, compares what it has with it, and asks all servers as one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from hocket.distributed.desk import (
    ANSWER,
    ASK,
    JOB_KEY,
    JOINED_KEY,
    MEASURE,
    ORDER,
    PLACES,
    SEND,
    TAKE,
    agent_key,
    agent_parcels,
    fixed_name,
    pull_name,
)
from hocket.distributed.membership import connected, meet_at, waited
from hocket.distributed.parcels import packed
from hocket.distributed.parts import server_name
from hocket.distributed.setup import PROBE, PROBE_BYTES
from hocket.distributed.versions import NEWEST, Value, of_server, values_told
from hocket.distributed.wire import Wire
from hocket.errors import InputError, PeerError, VersionGoneError

__all__ = ["AgentLinks", "connect"]


class AgentLinks:
    """Wires of one agent to all servers.

    Attributes:
        values: all that the job has.
        wires: by the number of the server.
        timeout_s: how long a server is waited for.
    """

    def __init__(self, values: Sequence[Value], wires: Sequence[Wire], timeout_s: float) -> None:
        self.values, self.wires, self.timeout_s = tuple(values), tuple(wires), timeout_s

    def first(self) -> None:
        """Have all servers keep the newest version for this agent, and wait for the first one, as long as for a server.

        Raises:
            PeerError: none has been published in this time, or a server is gone or silent.
        """
        self._ask(self.wires[:1], TAKE, NEWEST)
        try:
            self.wires[0].get(ANSWER, torch.empty(3, dtype=torch.int64), self.timeout_s)
        except TimeoutError:
            raise PeerError(f"agent: the job has published no version for {self.timeout_s:g} s") from None
        self.take(None)

    def take(self, number: int | None) -> int:
        """Have all servers keep one version for this agent, and say which.

        Args:
            number: of the version; one that is to come is waited for. None: the newest that all have.

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

    def fixed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Receive what does not change, which servers send with the first version that they grant; raises as `take`."""
        for server, wire in enumerate(self.wires):
            for value in of_server(self.values, server, changes=False):
                if value.name in tensors:
                    wire.get(fixed_name(value.name), tensors[value.name])

    def send(self) -> None:
        """Let all servers send the version that they have granted."""
        self._ask(self.wires, SEND)

    def order(self, names: Sequence[str]) -> None:
        """Say in which order values are to come, once; each server has its own of them."""
        for server, wire in enumerate(self.wires):
            values = of_server(self.values, server, changes=True)
            place = {value.name: index for index, value in enumerate(values)}
            wanted = [values[place[name]] for name in names if name in place]
            wire.add((), packed((pull_name(value.name), value.size_bytes) for value in wanted), ordered=True)
            places = [place[value.name] for value in wanted]
            self._ask([wire], ORDER)
            wire.put(PLACES, torch.tensor(places + [-1] * (max(1, len(values)) - len(places))))
            wire.get(ANSWER, torch.empty(3, dtype=torch.int64))

    def rates(self) -> list[float]:
        """Bytes per second from each server, while all of them send."""
        began = time.perf_counter()
        self._ask(self.wires, MEASURE)
        for wire in self.wires:
            wire.get(PROBE, torch.empty(PROBE_BYTES, dtype=torch.uint8))
        return [PROBE_BYTES / (time.perf_counter() - began)] * len(self.wires)

    def close(self) -> None:
        """Take leave."""
        for wire in self.wires:
            wire.close()

    def _granted(self, wires: Sequence[Wire], number: int) -> list[tuple[int, int, int]]:
        self._ask(wires, TAKE, number)
        found = []
        for wire in wires:
            answer = torch.empty(3, dtype=torch.int64)
            wire.get(ANSWER, answer)
            granted, oldest, newest = answer.tolist()
            found.append((granted, oldest, newest))
        return found

    def _ask(self, wires: Sequence[Wire], command: int, number: int = 0) -> None:
        for wire in wires:
            wire.post(ASK, torch.tensor([command, number]))


def connect(address: str, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> AgentLinks:
    """Find the job at an address, compare, and lay a wire to each server.

    Args:
        address: ``HOST:PORT`` of the job's store: what torchrun tells its ranks as MASTER_ADDR and MASTER_PORT.
        tensors: the agent's own parameters and buffers.
        timeout_s: how long the job is waited for.

    Raises:
        InputError: an address that is none.
        PeerError: nobody answers there, or the job has another model, or another torch.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"agent: expected an address HOST:PORT, got {address!r}")
    wires: list[Wire] = []
    try:
        store = TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=timeout_s))
        job = json.loads(
            waited(store, JOB_KEY, f"agent: there is no job with parameter servers at {address}", timeout_s)
        )
        if job["torch"] != torch.__version__:
            raise PeerError(f"agent: the job runs torch {job['torch']}, and this is {torch.__version__}")
        values = values_told(job["values"], job["servers"], tensors)
        number = store.add(JOINED_KEY, 1)
        for server in range(job["servers"]):
            key = agent_key(number, server)
            wires.append(connected(store, key, 1, f"agent {number}", server_name(server), timeout_s))
            outgoing, incoming = agent_parcels(values, server)
            wires[-1].add(incoming, outgoing)
            meet_at(store, key, 1, server_name(server), timeout_s)
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        for wire in wires:
            wire.close()
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"agent: {address} does not answer as a job: {error}") from error
    return AgentLinks(values, wires, timeout_s)
