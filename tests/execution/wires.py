"""Channels for tests: queues between threads of this process, and what breaks on them."""

import threading
from queue import SimpleQueue

import torch


class QueueEnd:
    """One end of a connection: sends and receives tensors in the order in which they are begun, each with its name."""

    def __init__(self, out: SimpleQueue, into: SimpleQueue, runs_ahead: bool, runs_behind: bool) -> None:
        self.runs_ahead, self.runs_behind = runs_ahead, runs_behind
        self._out, self._into = out, into
        self._begun: dict[str, SimpleQueue] = {"send": SimpleQueue(), "recv": SimpleQueue()}
        for work, begun in ((self._send, self._begun["send"]), (self._receive, self._begun["recv"])):
            threading.Thread(target=self._serve, args=(work, begun), daemon=True).start()

    def begin(self, op, tensor, epoch, done) -> None:
        way, _, name = op.partition(":")
        self._begun[way].put((name, tensor, done))

    def push(self, name: str, tensor: torch.Tensor) -> None:
        """Send something that no step sends."""
        self._begun["send"].put((name, tensor, lambda error: None))

    def close(self) -> None:
        for queue in (self._out, *self._begun.values()):
            queue.put(None)

    def _serve(self, work, begun) -> None:
        while (task := begun.get()) is not None:
            name, tensor, done = task
            done(work(name, tensor))

    def _send(self, name, tensor) -> None:
        self._out.put((name, tensor.detach().clone()))

    def _receive(self, name, tensor) -> OSError | None:
        sent = self._into.get()
        if sent is None or sent[0] != name:
            return ConnectionResetError("the peer is gone") if sent is None else OSError(f"got {sent[0]}, not {name}")
        tensor.copy_(sent[1])
        return None


def connection(runs_ahead: bool = False, runs_behind: bool = False) -> tuple[QueueEnd, QueueEnd]:
    one, other = SimpleQueue(), SimpleQueue()
    return QueueEnd(one, other, runs_ahead, runs_behind), QueueEnd(other, one, runs_ahead, runs_behind)


class ManualChannel:
    """Nothing arrives before the test says so."""

    def __init__(self, runs_ahead: bool = False, runs_behind: bool = False) -> None:
        self.runs_ahead, self.runs_behind = runs_ahead, runs_behind
        self.begun: dict[tuple[str, int], tuple] = {}
        self.changed = threading.Condition()

    def begin(self, op, tensor, epoch, done) -> None:
        with self.changed:
            self.begun[op, epoch] = (tensor, done)
            self.changed.notify_all()

    def wait_for(self, op: str, epoch: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (op, epoch) in self.begun, timeout=20), self.begun.keys()

    def arrive(self, op: str, epoch: int, value: torch.Tensor | None = None) -> None:
        self.wait_for(op, epoch)
        tensor, done = self.begun[op, epoch]
        if value is not None:
            tensor.copy_(value)
        done(None)

    def fail(self, op: str, epoch: int, error: BaseException) -> None:
        self.wait_for(op, epoch)
        self.begun[op, epoch][1](error)
