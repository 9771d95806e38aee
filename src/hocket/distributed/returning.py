r"""Workers that come again: a process takes the place of one that is lost, while the job goes on.

It captures and compares as all did when the job began; each server lays a wire to it on a thread of its own; and worker
0, who orders the steps, has all servers let it in between the same two of them. So it takes part in whole steps only::

    new worker   comes ----. compares, plan of rank 0, wires ... ready            first step is k + 1
    server                 '-> old one lost? wire ------------'    let in --> its parameters after k
    worker 0      step k - 1            step k                  order LET_IN, order STEP
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hocket.distributed.membership import POLL_S, Membership, connected
from hocket.distributed.present import PresentWorker, PresentWorkers
from hocket.distributed.wire import Wire
from hocket.errors import PeerError

__all__ = ["READY", "SURVIVES", "Announcements", "ReturningWorkers", "announce", "come_again", "let_in", "take_part"]

# Workers that come again are numbered; each says in the store that it has come, with its rank, and that it is ready.
NUMBER, CAME, READY, SURVIVES = "hocket/number", "hocket/came", "hocket/ready", "hocket/survives"

log = logging.getLogger(__name__)


class Announcements:
    """What workers that come again say in the store, of one kind (`CAME` or `READY`).

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> ready = Announcements(store, READY)
        >>> store.add(NUMBER, 2), announce(store, READY, 2, "")
        (2, 1)
        >>> ready.new(), ready.new()
        ([2], [])
    """

    def __init__(self, store: Any, kind: str) -> None:
        self._store, self._kind = store, kind
        self._heard = 0
        self._known: set[int] = set()

    def new(self) -> list[int]:
        """The numbers of those that have not been returned before.

        Raises:
            RuntimeError: the store is gone.
        """
        heard = self._store.add(self._kind, 0)
        if heard == self._heard:
            return []
        self._heard = heard
        others = set(range(1, self._store.add(NUMBER, 0) + 1)) - self._known
        found = [number for number in sorted(others) if self._store.check([f"{self._kind}/{number}"])]
        self._known.update(found)
        return found


def announce(store: Any, kind: str, number: int, text: str) -> int:
    """Say something, and then that there is more; how many have said something of this kind."""
    store.set(f"{kind}/{number}", text)
    return int(store.add(kind, 1))


def come_again(membership: Membership) -> Membership:
    """The place of a process; one whose rank has taken part before is to take its place.

    Raises:
        PeerError: the job has ended, or does not go on without its workers, or not without this rank.
    """
    me, store = membership.name(membership.rank), membership.store
    if not store.check([f"hocket/planned/{membership.rank}"]):
        return membership
    if (ended := membership.why_ended()) is not None:
        raise PeerError(f"{me} cannot join again: {ended}")
    if membership.rank == 0 or not membership.is_worker or not store.check([SURVIVES]):
        raise PeerError(f"{me} has been part of this job, which does not go on without it; start a new one")
    coming = store.add(NUMBER, 1)
    announce(store, CAME, coming, json.dumps(membership.rank))
    return replace(membership, coming=coming)


def take_part(membership: Membership) -> int:
    """A worker that has come again, and is ready, waits until it is let in; how many steps there were before.

    Raises:
        PeerError: the job has ended, or a server or worker 0 is silent.
    """
    coming, workers = membership.coming, membership.num_workers
    membership.wait_for({_laid(coming, server): workers + server for server in range(membership.num_servers)})
    announce(membership.store, READY, coming, "")
    return int(membership.told(_since(coming), by=0))


def let_in(membership: Membership, coming: int, steps: int) -> None:
    """Worker 0 tells a worker that its first step is the one after so many; servers have been ordered to let it in."""
    membership.tell(_since(coming), steps)


class ReturningWorkers:
    """A server's side: lays a wire to each worker that comes again, and keeps it until worker 0 orders to let it in.

    Args:
        membership: the server's place in the job.
        workers: those that take part.
        lay: adds what the wire to a worker of this number carries.
    """

    def __init__(self, membership: Membership, workers: PresentWorkers, lay: Callable[[int, Wire], object]) -> None:
        self._membership, self._workers, self._lay = membership, workers, lay
        self._ready: dict[int, PresentWorker] = {}
        self._wires: list[Wire] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="hocket-returning", daemon=True)
        if workers.survive:
            self._watch.start()

    def __enter__(self) -> ReturningWorkers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        if self._workers.survive:
            self._watch.join()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close(reason=str(error) if error is not None else "")

    def let_in(self, coming: int, steps: int) -> PresentWorker:
        """A worker takes part from now on, after so many steps."""
        with self._lock:
            worker = replace(self._ready.pop(coming), since=steps)
        self._workers.add(worker)
        log.warning("hocket: %s takes part again, after %d steps", self._membership.name(worker.number), steps)
        return worker

    def _look(self) -> None:
        store = self._membership.store
        came = Announcements(store, CAME)
        while not self._over.wait(POLL_S):
            try:
                found = {coming: json.loads(store.get(f"{CAME}/{coming}")) for coming in came.new()}
            except RuntimeError:
                return  # the store is gone with whoever kept it: nobody can come any more
            for coming, rank in found.items():
                if rank in range(1, self._membership.num_workers):
                    threading.Thread(target=self._connect, args=(rank, coming), daemon=True).start()

    def _connect(self, rank: int, coming: int) -> None:
        me = self._membership
        while any(worker.number == rank for worker in self._workers.now()):
            if self._over.wait(POLL_S):  # the one before it is not lost yet
                return
        try:
            wire = connected(
                me.store, me.wire_key(rank, me.rank, coming), 1, me.name(me.rank), me.name(rank), me.timeout_s
            )
        except PeerError as error:
            log.warning("hocket: %s", error)
            return
        with self._lock:
            self._wires.append(wire)
            self._ready[coming] = PresentWorker(rank, wire, coming)
        if self._over.is_set():
            wire.close()
            return
        self._lay(rank, wire)
        with suppress(RuntimeError):
            me.store.set(_laid(coming, me.number), "")


def _laid(coming: int, server: int) -> str:
    return f"{CAME}/{coming}/{server}"


def _since(coming: int) -> str:
    return f"came/{coming}/since"
