"""Channels over wires: of a worker to a server, and of a server to all workers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hocket.distributed.present import PresentWorker, PresentWorkers
from hocket.distributed.wire import Wire
from hocket.errors import ExecutionError
from hocket.execution.channels import Done

__all__ = ["PullChannel", "PushChannel", "ServingChannel", "SummingChannel"]


class PushChannel:
    """A worker's gradients on their way to one server, which the next step does not wait for.

    A gradient that is written before it was delivered is an error.
    """

    runs_ahead = False
    runs_behind = True

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        version = tensor._version

        def delivered(error: BaseException | None) -> None:
            if error is None and tensor._version != version:
                error = ExecutionError(
                    f"{op!r}: somebody has written the gradient between two steps, while it was sent"
                )
            done(error)

        self._wire.send(op, tensor, epoch, delivered)


class PullChannel:
    """A worker's parameters on their way from one server.

    They are asked for as soon as the last op that touches them is done, so those of the next step come during this one.

    Args:
        wire: to the server.
        names: of what may come a step ahead, and is waited for by `wait`.
    """

    runs_ahead = True
    runs_behind = False

    def __init__(self, wire: Wire, names: Sequence[str]) -> None:
        self._wire = wire
        self._names = tuple(names)
        self._arrived = dict.fromkeys(names, 0)
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        def arrived(error: BaseException | None) -> None:
            with self._changed:
                if op in self._arrived:
                    self._arrived[op] = epoch
                self._failure = self._failure or error
                self._changed.notify_all()
            done(error)

        self._wire.receive(op, tensor, epoch, arrived)

    def wait(self, epoch: int) -> None:
        """Sleep until everything for a step has arrived.

        Raises:
            PeerError: the server is gone.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or min(self._arrived.values(), default=epoch) >= epoch
            )
            if self._failure is not None:
                raise self._failure


class ServingChannel:
    """A server's parameters on their way to all workers; done when the last one has them.

    What is sent at the end of a step is for the workers' next one.
    """

    runs_ahead = False
    runs_behind = False

    def __init__(self, workers: PresentWorkers) -> None:
        self._workers = workers

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        self.send_to(self._workers.now(), op, tensor, epoch, done)

    def send_to(self, workers: Sequence[PresentWorker], op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        """As `begin`, to some of them."""
        last = _when_all(len(workers), done)

        def came(worker: PresentWorker, error: BaseException | None) -> None:
            last(self._workers.forgiven(worker, error))

        for worker in workers:
            worker.wire.send(op, tensor, epoch + 1 - worker.since, partial(came, worker))


class SummingChannel:
    """The workers' gradients on their way to a server: each arrives as the mean over the workers.

    They are added up in the order of the workers, whatever the order in which they arrive, so a step repeats bitwise.
    Of a worker that is lost in the middle of a step, those count that have arrived.

    Args:
        workers: those that take part.
        averaged: names of the values to average; of all others that of worker 0 is taken.
    """

    runs_ahead = False
    runs_behind = False

    def __init__(self, workers: PresentWorkers, averaged: frozenset[str]) -> None:
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

        there = self._workers.now()
        last = _when_all(len(there), together)

        def came(worker: PresentWorker, error: BaseException | None) -> None:
            if error is None:
                arrived.add(worker.number)
            last(self._workers.forgiven(worker, error))

        for worker in there:
            worker.wire.receive(op, memory[worker.number], epoch - worker.since, partial(came, worker))


def _when_all(count: int, done: Done) -> Callable[[BaseException | None], None]:
    """Calls `done` with the first error at once, or when all of `count` are done."""
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
