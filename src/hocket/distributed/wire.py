r"""`Wire`: one end of a connection between two ranks, which carries values in a planned order.

A connection is a gloo process group of two, so that a peer that dies breaks no other connection. Gloo delivers a
message into the memory of a receive that was posted beforehand, but "sent" does not mean "delivered", and messages
never overtake each other. So the receiver requests a packet, the sender announces each chunk, and the receiver
acknowledges it, over a second connection whose records do not wait behind bytes::

    receiver   post receives, REQUEST w ------.                      .--> ACK       .--> ACK, w has arrived
    sender     w is ready .... it is next ....'--> CHUNK w, 0 -------'  CHUNK w, 1 -'

A packet leaves when its values are ready, the peer has requested it, and all packets before it in the order have left.
Values of a GPU are copied to host memory when they are given to `send`, and waited for when they leave (`staging.py`).
At most four chunks are in flight, so that a value outside the order (`put`) is sent between two chunks of another one.
Records are four numbers. Nothing else from the peer is interpreted, and this end allocates only memory of sizes that it
knows. A peer that is silent for the timeout is lost (`records.py`).

Three threads serve a wire. `_send` sends chunks, `_listen` reads records, `_receive` waits for announced chunks. State
that they share (`Direction`, `SendQueue`, `_requested`) is guarded by the lock of `_changed`. Chunks go from `_listen`
to `_receive` through a queue, and the memory of a received packet belongs to `_receive` until the packet is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch

from hocket.distributed.packets import ChunkInFlight, Direction, Packet, PacketTransfer, SendQueue
from hocket.distributed.records import ACK, ALIVE, CHUNK, FAILED, LEAVE, REQUEST, Records, gloo_reason, wait_for
from hocket.errors import PeerError
from hocket.execution.channels import Done


class Wire:
    """One end of a connection: of two process groups of two, for the bytes and for the records."""

    def __init__(self, group: Any, records: Any, place: int, me: str, peer: str, timeout_s: float) -> None:
        self.me, self.peer = me, peer
        self.failure: PeerError | None = None  # the error after which nothing is sent or received any more
        # for each epoch the names of received ordered values, in the order of their arrival
        self.arrived: dict[int, list[str]] = {}
        self._group, self._other = group, 1 - place
        self._records = Records(records, 1 - place, timeout_s)
        self._outgoing, self._incoming = Direction(), Direction()
        self._requested: set[tuple[int, int]] = set()
        self._queue = SendQueue()
        self._num_posted = 0
        self._lost: BaseException | None = None  # the error of a posted value
        self._ordered_in: set[int] = set()
        self._chunks: SimpleQueue[tuple[int, int, PacketTransfer | None]] = SimpleQueue()  # the last item: a farewell
        self._count: dict[str, int] = {}
        self._said_goodbye = self._closed = False
        self._changed = threading.Condition()
        work = (self._listen, self._receive, self._send)
        self._threads = [
            threading.Thread(target=self._guarded, args=(each,), name=f"hocket-wire-{peer}", daemon=True)
            for each in work
        ]
        for thread in self._threads:
            thread.start()

    def add(self, outgoing: Sequence[Packet], incoming: Sequence[Packet], *, ordered: bool = False) -> None:
        """Add packets that this end sends and receives. The other end adds the same with the directions swapped.

        If `ordered`, each packet leaves once a step, in this order, else as soon as it can be sent.
        """
        with self._changed:
            numbers = self._outgoing.add(outgoing)
            received = self._incoming.add(incoming)
            if ordered:
                self._queue.add(numbers)
                self._ordered_in.update(received)

    def send(self, name: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        """Send a value for a step. `done` is called when it has arrived, or with the error if it cannot."""
        if (found := self._completed(self._outgoing, name, tensor, epoch, done)) is not None:
            number, transfer = found
            memory, transfer.waits = self._outgoing.packets[number].packed(self._outgoing.tensors(number, transfer))
            with self._changed:
                transfer.memory = memory
                self._enqueue(number, epoch)

    def receive(self, name: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        """Receive a value for a step into a tensor that nothing else uses. `done` is called as by `send`."""
        if (found := self._completed(self._incoming, name, tensor, epoch, done)) is None:
            return
        number, transfer = found
        packet, tag = self._incoming.packets[number], self._incoming.first_tag[number]
        tensors = self._incoming.tensors(number, transfer)
        transfer.memory = packet.memory(tensors)
        try:
            transfer.works = [
                self._group.recv([transfer.memory[begin:end]], self._other, tag + chunk)
                for chunk, (begin, end) in enumerate(map(packet.chunk, range(packet.num_chunks)))
                if end > begin
            ]
            self._records.tell(REQUEST, number, 0, epoch)
        except RuntimeError as error:  # the connection broke a moment ago
            self._fail(error)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send a value outside the order, and wait until it has arrived."""
        wait_for(self.send, name, tensor, self._counted(f">{name}"), None)

    def post(self, name: str, tensor: torch.Tensor) -> None:
        """Send a value outside the order, without waiting. If that fails, all later transfers fail."""
        with self._changed:
            self._num_posted += 1
        self.send(name, tensor, self._counted(f">{name}"), self._delivered)

    def get(self, name: str, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """Receive a value outside the order. A peer that lives and does not send it in time is a `TimeoutError`."""
        wait_for(self.receive, name, tensor, self._counted(f"<{name}"), timeout_s)

    def flush(self) -> None:
        """Wait until all posted values have arrived, as long as the peer lives. Closing a wire would discard them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_posted)
            if self._lost is not None:
                raise self._lost

    def close(self, reason: str = "", timeout_s: float = 5.0) -> None:
        """Leave. With a `reason`, the peer fails."""
        if self.failure is None:
            try:
                self._say_goodbye(FAILED if reason else LEAVE)
            except RuntimeError as error:  # the connection broke a moment ago
                self._fail(error)
        for thread in self._threads[:2]:  # those that receive
            thread.join(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads[2].join(timeout_s)

    def _delivered(self, error: BaseException | None) -> None:
        with self._changed:
            self._num_posted -= 1
            self._lost = self._lost or error
            self._changed.notify_all()

    def _counted(self, name: str) -> int:
        self._count[name] = self._count.get(name, 0) + 1
        return self._count[name]

    def _completed(
        self, way: Direction, name: str, tensor: torch.Tensor, epoch: int, done: Done
    ) -> tuple[int, PacketTransfer] | None:
        """Return the packet that a value completes, or None if others are missing or the wire has failed."""
        number = way.number[name]
        with self._changed:
            failure = self.failure
            if failure is None:
                found = way.transfers.setdefault((number, epoch), PacketTransfer(epoch))
                found.values[name] = (tensor, done)
                return (number, found) if len(found.values) == len(way.packets[number].members) else None
        done(failure)
        return None

    def _enqueue(self, number: int, epoch: int) -> None:
        """Queue a packet if its values are there and the peer has requested it. The caller holds the lock."""
        transfer = self._outgoing.transfers.get((number, epoch))
        if transfer is not None and transfer.memory is not None and (number, epoch) in self._requested:
            self._requested.discard((number, epoch))
            self._queue.ready[number] = transfer
            self._changed.notify_all()

    def _guarded(self, work: Any) -> None:
        """Run one of the threads. An error fails the wire, and so reaches all that wait for a transfer."""
        try:
            while work():
                pass
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _send(self) -> bool:
        """Send one chunk. Return False once the wire is closed."""
        with self._changed:
            while (number := self._queue.next()) is None and not (self._closed or self.failure):
                self._changed.wait(self._records.silence_s)
                if self._records.is_silent and not (self._said_goodbye or self._closed or self.failure):
                    self._records.tell(ALIVE, 0, 0, 0)
            if number is None:
                return False
            transfer = self._queue.ready[number]
            chunk = transfer.next_chunk
            transfer.next_chunk += 1
            packet = self._outgoing.packets[number]
            if transfer.next_chunk == packet.num_chunks:
                self._queue.has_left(number)
            leaving = ChunkInFlight(number, transfer)
            self._queue.in_flight.append(leaving)
        # Without the lock: a send takes as long as the system takes to copy, and the peer answers meanwhile.
        begin, end = packet.chunk(chunk)
        assert transfer.memory is not None
        for wait in transfer.waits if chunk == 0 else ():
            wait()  # for copies from a GPU, which end in the order in which they began
        self._records.tell(CHUNK, number, chunk, transfer.epoch)
        tag = self._outgoing.first_tag[number] + chunk
        work = self._group.send([transfer.memory[begin:end]], self._other, tag) if end > begin else None
        with self._changed:
            work = leaving.sent(work)
        if work is not None:
            work.wait()
        return True

    def _listen(self) -> bool:
        """Follow one record of the peer. Return False once it has left."""
        kind, number, chunk, epoch = self._records.next()
        if kind in (LEAVE, FAILED):
            self._chunks.put((kind, 0, None))  # after all chunks that it has sent
            return False
        way = self._incoming if kind == CHUNK else self._outgoing
        if kind not in (REQUEST, CHUNK, ACK) or not 0 <= number < len(way.packets):
            raise PeerError(f"it sent an unknown record: {(kind, number, chunk, epoch)}")
        if kind == REQUEST:
            with self._changed:
                self._requested.add((number, epoch))
                self._enqueue(number, epoch)
        elif kind == CHUNK:
            transfer = way.transfers.get((number, epoch))
            if transfer is None or transfer.memory is None or chunk != transfer.next_chunk:
                name = way.packets[number].members[0]
                raise PeerError(f"it sends {name!r} for step {epoch}, which was not requested")
            transfer.next_chunk += 1
            self._chunks.put((number, chunk, transfer))
        else:
            with self._changed:
                left = self._queue.in_flight.popleft()
                work = left.acknowledged()
                self._changed.notify_all()
            if work is not None:
                work.wait()
            if chunk + 1 == way.packets[left.number].num_chunks:
                self._finish(way, left.number, left.transfer)
        return True

    def _receive(self) -> bool:
        """Wait for one announced chunk. Return False once the peer has left or the wire has failed."""
        number, chunk, transfer = self._chunks.get()
        if self.failure is not None:
            return False
        if transfer is None:
            self._leave(number)
            return False
        packet = self._incoming.packets[number]
        if transfer.works:
            transfer.works[chunk].wait()
        is_last = chunk + 1 == packet.num_chunks
        if is_last:
            assert transfer.memory is not None
            packet.unpack(transfer.memory, self._incoming.tensors(number, transfer))
            if number in self._ordered_in:
                self.arrived.setdefault(transfer.epoch, []).extend(packet.members)
                self.arrived.pop(transfer.epoch - 3, None)
        self._records.tell(ACK, number, chunk, transfer.epoch)
        if is_last:
            self._finish(self._incoming, number, transfer)
        return True

    def _leave(self, kind: int) -> None:
        """Answer a peer that leaves: a `PeerError` if it has failed, or transfers are under way."""
        self._say_goodbye(LEAVE)
        with self._changed:  # nothing can begin in between
            if kind == FAILED or self._outgoing.transfers or self._incoming.transfers:
                raise PeerError("it has failed" if kind == FAILED else "it has left")
            self.failure = PeerError(f"{self.me}: {self.peer} has left")
            self._changed.notify_all()

    def _finish(self, way: Direction, number: int, transfer: PacketTransfer) -> None:
        with self._changed:
            way.transfers.pop((number, transfer.epoch), None)
        waiting = [done for _, done in transfer.values.values()]
        transfer.values, transfer.memory, transfer.works, transfer.waits = {}, None, [], ()  # `done` may free the value
        for done in waiting:
            done(None)

    def _say_goodbye(self, kind: int) -> None:
        with self._changed:
            if self._said_goodbye:
                return
            self._said_goodbye = True
        self._records.tell(kind, 0, 0, 0)

    def _fail(self, error: Exception) -> None:
        reason = gloo_reason(error)
        with self._changed:
            if self.failure is None:
                self.failure = PeerError(f"{self.me} lost {self.peer}: {reason}")
                self.failure.__cause__ = error
            failure = self.failure
            moving = (*self._outgoing.transfers.values(), *self._incoming.transfers.values())
            waiting = [done for each in moving for _, done in each.values.values()]
            self._outgoing.transfers, self._incoming.transfers = {}, {}
            self._changed.notify_all()
        self._chunks.put((FAILED, 0, None))
        for done in waiting:
            done(failure)
