r"""`Pulls`: receives versions for an executor whose calls each run on one version from beginning to end.

The version of a call is decided once: when the call begins, or during the call before, as soon as the first parameter
is free there and a newer version exists. Each value then comes when the last op that reads it is done::

    call 1   [ f1(w1) ][ f2(w2) ][ f3(w3) ]
    wire              | w1 of the next version | w2 ...      (f1 is done: w1 may come)

If the version is in memory already, its values arrive at once, without a transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hocket.distributed.agent_links import AgentLinks
from hocket.distributed.parts import server_name
from hocket.errors import PeerError
from hocket.execution.channels import Done
from hocket.tracing.state import Entry


@dataclass(frozen=True)
class _Decision:
    """The version of a call, and the number of the pull that brings it, or None if it is in memory."""

    version: int
    pull: int | None


class Pulls:
    """The channel of an agent's plan.

    Args:
        links: connections to all servers.
        places: the agent's values that change, by name.
        ahead: whether the next call's version may come while a call runs.
        every_call: whether each call pulls, even if it has its version.

    Attributes:
        held: the version to stay with, or None for the newest.
    """

    runs_ahead = True
    runs_behind = False

    def __init__(self, links: AgentLinks, places: Mapping[str, Entry], ahead: bool, every_call: bool) -> None:
        self.held: int | None = None
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
        """Return the version of a call, which is decided now if it was not before.

        Raises:
            VersionGoneError: the version that is held is gone.
            PeerError: a server is gone or silent.
        """
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
        """Wait until no transfer is under way, so that the model has one version.

        Raises:
            PeerError: a server is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._num_pending == 0)
            if self._failure is not None:
                raise self._failure

    def arrivals(self) -> dict[str, tuple[str, ...]]:
        """For each server the values of the last complete pull, in the order of their arrival."""
        self.synchronize()
        return {
            server_name(number): tuple(op.removeprefix("pull:") for op, _ in wire.arrived.get(self._num_pulls, []))
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
