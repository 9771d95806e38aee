"""Channels for tests: sockets between threads of this process, and what breaks on them."""

import socket
import threading
from queue import SimpleQueue

import torch


class SocketEnd:
    """One end of a connection: sends and receives tensors in the order in which they are begun, each with its name."""

    def __init__(self, end: socket.socket, runs_ahead: bool = False, runs_behind: bool = False) -> None:
        self.runs_ahead, self.runs_behind = runs_ahead, runs_behind
        self.begun: list[tuple[str, int]] = []
        self._socket = end
        self._out: SimpleQueue = SimpleQueue()
        self._in: SimpleQueue = SimpleQueue()
        for work, todo in ((self._send, self._out), (self._receive, self._in)):
            threading.Thread(target=self._serve, args=(work, todo), daemon=True).start()

    def begin(self, op, tensor, epoch, done) -> None:
        self.begun.append((op, epoch))
        (self._out if op.startswith("send") else self._in).put((op.partition(":")[2], tensor, done))

    def push(self, name: str, tensor: torch.Tensor) -> None:
        """Send something that no step sends."""
        self._out.put((name, tensor, lambda error: None))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._out.put(None)
        self._in.put(None)

    def _serve(self, work, todo) -> None:
        while (task := todo.get()) is not None:
            name, tensor, done = task
            try:
                work(name, memoryview(tensor.detach().numpy()).cast("B") if tensor.ndim else tensor)
            except OSError as error:
                done(error)
            else:
                done(None)

    def _send(self, name, memory) -> None:
        self._socket.sendall(name.encode().ljust(64))
        self._socket.sendall(memory)

    def _receive(self, name, memory) -> None:
        came = self._exactly(bytearray(64)).decode().strip()
        if came != name:
            raise OSError(f"expected {name}, got {came}")
        self._exactly(memory)

    def _exactly(self, memory):
        left = memoryview(memory)
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise ConnectionResetError("the peer is gone")
            left = left[count:]
        return memory


def connection(runs_ahead: bool = False, runs_behind: bool = False) -> tuple[SocketEnd, SocketEnd]:
    one, other = socket.socketpair()
    return SocketEnd(one, runs_ahead, runs_behind), SocketEnd(other, runs_ahead, runs_behind)


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
