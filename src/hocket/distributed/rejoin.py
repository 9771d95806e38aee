r"""Lost workers and workers that rejoin: a process takes the place of a lost one, while the job goes on.

It captures and compares as all ranks did when the job began. Each server connects to it on a separate thread. Worker 0,
who sends the commands, has all servers admit it between the same two steps, so that it takes part in whole steps only::

    new worker   rejoins --. compares, plan of rank 0, wires ... ready            first step is k + 1
    server                 '-> old one lost? wire ------------'     admit --> its parameters after k
    worker 0      step k - 1            step k                  command REJOIN, command STEP
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hocket.distributed.membership import Membership
from hocket.distributed.store import POLL_S
from hocket.distributed.wire import Wire
from hocket.errors import PeerError

# Rejoining workers are numbered, and each announces in the store that it has come, with its rank, and that it is ready.
NUMBER, CAME, READY, SURVIVES = "hocket/number", "hocket/came", "hocket/ready", "hocket/survives"

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class WorkerLink:
    """A worker as a server sees it."""

    number: int
    wire: Wire
    rejoin: int = 0  # see `Membership`
    since: int = 0  # number of steps of the job before its first one, which is step 1 on its wire


class LiveWorkers:
    """The workers that take part in the steps of one server.

    At the beginning they are those of `wires`, by their numbers. `on_loss` is called once with a worker that is
    lost, and the error. Without it losing any worker ends the job.
    """

    def __init__(
        self, wires: Mapping[int, Wire], on_loss: Callable[[WorkerLink, BaseException], object] | None = None
    ) -> None:
        self._on_loss = on_loss
        self._by_number = {number: WorkerLink(number, wire) for number, wire in wires.items()}
        self._lock = threading.Lock()
        self.num_workers = len(wires)

    @property
    def survive(self) -> bool:
        """True if the job goes on without any of them but worker 0, who sends the commands."""
        return self._on_loss is not None

    def now(self) -> tuple[WorkerLink, ...]:
        """The workers that take part now, sorted by their numbers."""
        found = [self._by_number.get(number) for number in range(self.num_workers)]
        return tuple(worker for worker in found if worker is not None)

    def add(self, worker: WorkerLink) -> None:
        """Put a worker in the place of a lost one."""
        with self._lock:
            self._by_number[worker.number] = worker

    def fatal(self, worker: WorkerLink, error: BaseException | None) -> BaseException | None:
        """Return the error if it ends the job. Otherwise the worker is removed."""
        if error is None or worker.number == 0 or self._on_loss is None:
            return error
        with self._lock:
            is_new = self._by_number.get(worker.number) is worker
            if is_new:
                del self._by_number[worker.number]
        if is_new:
            self._on_loss(worker, error)
        return None


class Announcements:
    """Announcements of one kind (`CAME` or `READY`) by rejoining workers, read from the store."""

    def __init__(self, store: Any, kind: str) -> None:
        self._store, self._kind = store, kind
        self._num_read = 0
        self._known: set[int] = set()

    def new(self) -> list[int]:
        """The numbers of workers that were not returned before. A lost store is a `RuntimeError`."""
        count = self._store.add(self._kind, 0)
        if count == self._num_read:
            return []
        self._num_read = count
        others = set(range(1, self._store.add(NUMBER, 0) + 1)) - self._known
        found = [number for number in sorted(others) if self._store.check([f"{self._kind}/{number}"])]
        self._known.update(found)
        return found


def announce(store: Any, kind: str, number: int, text: str) -> int:
    """Write an announcement, and return how many of its kind there are."""
    store.set(f"{kind}/{number}", text)
    return int(store.add(kind, 1))


def rejoined(membership: Membership) -> Membership:
    """The place of a process, as a rejoining worker if its rank has taken part before, and the job can take it."""
    me, store = membership.me, membership.store
    if not store.check([f"hocket/planned/{membership.rank}"]):
        return membership
    if (ended := membership.why_ended()) is not None:
        raise PeerError(f"{me} cannot join again: {ended}")
    if membership.rank == 0 or not membership.is_worker or not store.check([SURVIVES]):
        raise PeerError(f"{me} has been part of this job, which does not go on without it; start a new one")
    rejoin = store.add(NUMBER, 1)
    announce(store, CAME, rejoin, json.dumps(membership.rank))
    return replace(membership, rejoin=rejoin)


def wait_until_admitted(membership: Membership) -> int:
    """Announce that a rejoining worker is ready, and return the number of steps before its first one."""
    rejoin, workers = membership.rejoin, membership.num_workers
    membership.wait_for({_connected_key(rejoin, server): workers + server for server in range(membership.num_servers)})
    announce(membership.store, READY, rejoin, "")
    return int(membership.announced(_since(rejoin), by=0))


def admit(membership: Membership, rejoin: int, steps: int) -> None:
    """Tell a worker, at worker 0, that its first step is the one after `steps`. Servers were asked to admit it."""
    membership.announce(_since(rejoin), steps)


class RejoiningWorkers:
    """Connects a server to rejoining workers, and keeps their wires until worker 0 orders to admit them.

    `prepare` adds the packets of the wire to a worker of this number.
    """

    def __init__(self, membership: Membership, workers: LiveWorkers, prepare: Callable[[int, Wire], object]) -> None:
        self._membership, self._workers, self._prepare = membership, workers, prepare
        self._ready: dict[int, WorkerLink] = {}
        self._wires: dict[int, Wire] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="hocket-rejoin", daemon=True)
        if workers.survive:
            self._watch.start()

    def __enter__(self) -> RejoiningWorkers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        if self._workers.survive:
            self._watch.join()
        with self._lock:
            wires = list(self._wires.values())
        for wire in wires:
            wire.close(reason=str(error) if error is not None else "")

    def admit(self, rejoin: int, steps: int) -> WorkerLink:
        """Let a worker take part from now on, after this number of steps."""
        with self._lock:
            worker = replace(self._ready.pop(rejoin), since=steps)
        self._workers.add(worker)
        log.warning("hocket: %s takes part again, after %d steps", self._membership.name(worker.number), steps)
        return worker

    def _look(self) -> None:
        store = self._membership.store
        came = Announcements(store, CAME)
        while not self._over.wait(POLL_S):
            try:
                found = {rejoin: json.loads(store.get(f"{CAME}/{rejoin}")) for rejoin in came.new()}
            except RuntimeError:
                return  # the store's host has exited, so no worker can rejoin
            for rejoin, rank in found.items():
                if rank in range(1, self._membership.num_workers):
                    threading.Thread(target=self._connect, args=(rank, rejoin), daemon=True).start()

    def _connect(self, rank: int, rejoin: int) -> None:
        me = self._membership
        while any(worker.number == rank for worker in self._workers.now()):
            if self._over.wait(POLL_S):  # the process before it is not lost yet
                return
        try:
            wire = me.wire(rank, rejoin)
        except PeerError as error:
            log.warning("hocket: %s", error)
            return
        with self._lock:
            self._wires[rejoin] = wire
            self._ready[rejoin] = WorkerLink(rank, wire, rejoin)
        if self._over.is_set():
            wire.close()
            return
        self._prepare(rank, wire)
        with suppress(RuntimeError):
            me.store.set(_connected_key(rejoin, me.number), "")


def _connected_key(rejoin: int, server: int) -> str:
    return f"{CAME}/{rejoin}/{server}"


def _since(rejoin: int) -> str:
    return f"came/{rejoin}/since"
