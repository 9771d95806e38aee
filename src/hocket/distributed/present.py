"""Which workers a server has: some may be lost, and one that comes again takes their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hocket.distributed.wire import Wire

__all__ = ["PresentWorker", "PresentWorkers"]


@dataclass(frozen=True, eq=False)
class PresentWorker:
    """A worker as a server knows it.

    Attributes:
        number: of the worker.
        wire: to it.
        coming: see `Membership`.
        since: how many steps there were before its first one; on its wire, that one is step 1.
    """

    number: int
    wire: Wire
    coming: int = 0
    since: int = 0


class PresentWorkers:
    """The workers that take part in the steps of one server.

    Args:
        wires: to the workers that the job begins with.
        on_loss: called with a worker that is lost and why, once; None: the job does not go on without any.
    """

    def __init__(
        self, wires: Sequence[Wire], on_loss: Callable[[PresentWorker, BaseException], object] | None = None
    ) -> None:
        self._on_loss = on_loss
        self._by_number: dict[int, PresentWorker] = {
            number: PresentWorker(number, wire) for number, wire in enumerate(wires)
        }
        self._lock = threading.Lock()
        self.num_workers = len(wires)

    @property
    def survive(self) -> bool:
        """Whether the job goes on without any of them but worker 0, who gives orders."""
        return self._on_loss is not None

    def now(self) -> tuple[PresentWorker, ...]:
        """Those that are there, by their numbers."""
        found = [self._by_number.get(number) for number in range(self.num_workers)]
        return tuple(worker for worker in found if worker is not None)

    def add(self, worker: PresentWorker) -> None:
        """A worker takes the place of one that was lost."""
        with self._lock:
            self._by_number[worker.number] = worker

    def forgiven(self, worker: PresentWorker, error: BaseException | None) -> BaseException | None:
        """The error, unless it is that of a worker that the job goes on without."""
        if error is None or worker.number == 0 or self._on_loss is None:
            return error
        with self._lock:
            is_new = self._by_number.get(worker.number) is worker
            if is_new:
                del self._by_number[worker.number]
        if is_new:
            self._on_loss(worker, error)
        return None
