"""Channels over wires: from a worker to a server, and from a server to all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from hocket.distributed.rejoin import LiveWorkers, WorkerLink
from hocket.distributed.wire import Wire
from hocket.errors import ExecutionError
from hocket.execution.channels import Done


class PushChannel:
    """A worker's gradients to one server. The next step does not wait for their delivery.

    A gradient that is written before it has been delivered is an error.
    """

    runs_ahead = False
    runs_behind = True

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        version = tensor._version

        def delivered(error: BaseException | None) -> None:
            if error is None and tensor._version != version:
                error = ExecutionError(f"{op!r}: the gradient was written between two steps, while it was sent")
            done(error)

        self._wire.send(op, tensor, epoch, delivered)


class PullChannel:
    """A worker's parameters from one server.

    Each is requested as soon as the last op that uses it is done, so those of the next step arrive during this one.

    `wait` waits for the values `names`, which may come a step ahead. One that no op here writes (`unwritten`) must
    not be written after it has arrived, for the server would not see it.
    """

    runs_ahead = True
    runs_behind = False

    def __init__(self, wire: Wire, names: Sequence[str], unwritten: Collection[str] = ()) -> None:
        self._wire = wire
        self._unwritten = frozenset(unwritten)
        self._versions: dict[str, int] = {}
        self._arrived = dict.fromkeys(names, 0)
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        if op in self._unwritten and self._versions.get(op, tensor._version) != tensor._version:
            done(ExecutionError(f"{op!r}: it was written between two steps, and only the server's value counts"))
            return

        def arrived(error: BaseException | None) -> None:
            self._versions[op] = tensor._version
            with self._changed:
                if op in self._arrived:
                    self._arrived[op] = epoch
                self._failure = self._failure or error
                self._changed.notify_all()
            done(error)

        self._wire.receive(op, tensor, epoch, arrived)

    def wait(self, epoch: int) -> None:
        """Wait until everything for a step has arrived."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or min(self._arrived.values(), default=epoch) >= epoch
            )
            if self._failure is not None:
                raise self._failure


class ServingChannel:
    """A server's parameters to all workers: done when the last one has them.

    Values that are sent at the end of a step are for the workers' next one.
    """

    runs_ahead = False
    runs_behind = False

    def __init__(self, workers: LiveWorkers) -> None:
        self._workers = workers

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        self.send_to(self._workers.now(), op, tensor, epoch, done)

    def send_to(self, workers: Sequence[WorkerLink], op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        """Send a value to some workers, as `begin` does to all."""
        last = _when_all(len(workers), done)

        def delivered(worker: WorkerLink, error: BaseException | None) -> None:
            last(self._workers.fatal(worker, error))

        for worker in workers:
            worker.wire.send(op, tensor, epoch + 1 - worker.since, partial(delivered, worker))


class SummingChannel:
    """The workers' gradients to a server: each arrives as the mean over the workers.

    They are summed in the order of the workers, not of arrival, so a step repeats bitwise. If a worker is lost in the
    middle of a step, its gradients that have arrived count.

    Values that are not `averaged` are those of worker 0.
    """

    runs_ahead = False
    runs_behind = False

    def __init__(self, workers: LiveWorkers, averaged: frozenset[str]) -> None:
        self._workers = workers
        self._averaged = averaged
        self._memory: dict[str, list[torch.Tensor]] = {}

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        others = self._memory.get(op)
        if others is None:
            others = self._memory[op] = [torch.empty_like(tensor) for _ in range(1, self._workers.num_workers)]
        memory = (tensor, *others)
        arrived: set[int] = set()

        def together(error: BaseException | None) -> None:
            if error is None and op in self._averaged and len(arrived) > 1:
                for worker in sorted(arrived)[1:]:
                    tensor.add_(memory[worker])
                tensor.div_(len(arrived))
            done(error)

        workers = self._workers.now()
        last = _when_all(len(workers), together)

        def received(worker: WorkerLink, error: BaseException | None) -> None:
            if error is None:
                arrived.add(worker.number)
            last(self._workers.fatal(worker, error))

        for worker in workers:
            worker.wire.receive(op, memory[worker.number], epoch - worker.since, partial(received, worker))


def _when_all(count: int, done: Done) -> Callable[[BaseException | None], None]:
    """Return a callback that calls `done` once: with the first error, or when it has been called `count` times."""
    lock = threading.Lock()
    left, failed = count, False

    def one_more(error: BaseException | None) -> None:
        nonlocal left, failed
        with lock:
            left -= 1
            tell = not failed and (error is not None or left == 0)
            failed = failed or error is not None
        if tell:
            done(error)

    return one_more
