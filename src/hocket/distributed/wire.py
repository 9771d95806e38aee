r"""`Wire`: one end of the connection between a worker and a server, which carries values in a planned order.

A connection is a gloo process group of two; a peer that dies takes nothing else along. Gloo delivers a message straight
into the memory of a receive that was posted beforehand, but "sent" does not mean "delivered", and what was sent first
overtakes nothing. So the receiver says when it is ready, the sender when it sends, and the receiver what has arrived,
over a second connection, where what they say does not wait behind bytes that go the other way::

    receiver   post receives, REQUEST w ------.                     .--> ACK       .--> ACK, w is there
    sender     w is ready ...... its turn ....'--> CHUNK w, 0 ------'  CHUNK w, 1 -'

A parcel leaves when its value is ready, its memory at the other end is, and all before it in the order have left: a
counter at the sender. No more than four chunks are on their way, so that what is not part of the order (`put`) goes out
between two chunks of whatever is being sent. Records are four numbers; nothing else from the peer is interpreted, and
memory is only ever of the size that this end knows. A peer that is silent for the timeout is lost (`records.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any

import torch

from hocket.distributed.parcels import Moving, Parcel, WireLayout, bytes_of, is_direct, packed_bytes, unpack
from hocket.distributed.records import ACK, ALIVE, CHUNK, FAILED, LEAVE, REQUEST, Records, reason_in_words, wait_for
from hocket.distributed.turns import Leaving, Turns
from hocket.errors import PeerError
from hocket.execution.channels import Done

__all__ = ["Wire"]


class Wire:
    """One end of a connection; threads of its own send, receive, and listen to what the peer says.

    Args:
        group: a process group of two, for the bytes.
        records: another one, for what the ends say of them.
        place: this end's rank in it, 0 or 1.
        me: what this process is called in errors, such as ``worker 0 (rank 0)``.
        peer: what the other one is called.
        timeout_s: that of both groups: a peer that is silent for so long is lost.

    Attributes:
        failure: why nothing can be moved any more.
        arrived: for each epoch the names of ordered values, with the clock (ns) when each had arrived here.
    """

    def __init__(self, group: Any, records: Any, place: int, me: str, peer: str, timeout_s: float) -> None:
        self.me, self.peer = me, peer
        self.failure: PeerError | None = None
        self.arrived: dict[int, list[tuple[str, int]]] = {}
        self._group, self._other = group, 1 - place
        self._records = Records(records, 1 - place, timeout_s)
        self._outgoing, self._incoming = WireLayout(), WireLayout()
        self._sending: dict[tuple[int, int], Moving] = {}  # by number and epoch, until they have arrived
        self._receiving: dict[tuple[int, int], Moving] = {}
        self._requested: set[tuple[int, int]] = set()
        self._turns = Turns()
        self._posted = 0
        self._lost: BaseException | None = None  # why something that was posted has not arrived
        self._ordered_in: set[int] = set()
        self._coming: SimpleQueue[tuple[int, int, Moving | None]] = SimpleQueue()  # chunks, and at last a farewell
        self._count: dict[str, int] = {}
        self._said_goodbye = self._closed = False
        self._changed = threading.Condition()
        work = (self._listen, self._take, self._send)
        self._threads = [threading.Thread(target=each, name=f"hocket-wire-{peer}", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    def add(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, ordered: bool = False) -> None:
        """Parcels that this end will send and receive; the other end adds the same, the other way round.

        Args:
            outgoing: what is sent; if `ordered`, in this order and each once a step.
            incoming: what is received.
            ordered: whether they have turns; otherwise each is sent as soon as it can.

        Raises:
            InputError: a value that is there already.
        """
        with self._changed:
            numbers = self._outgoing.add(outgoing)
            received = self._incoming.add(incoming)
            if ordered:
                self._turns.add(numbers)
                self._ordered_in.update(received)

    def send(self, name: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        """Send a value for a step; `done` is called when it has arrived there, or with why it cannot."""
        number = self._outgoing.number[name]
        if (moving := self._joined(self._sending, self._outgoing, number, epoch, name, tensor, done)) is None:
            return
        parcel = self._outgoing.parcels[number]
        moving.memory = packed_bytes(parcel, [moving.values[member][0] for member in parcel.members])
        with self._changed:
            self._make_ready(number, epoch)

    def receive(self, name: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        """Receive a value for a step into `tensor`, whose memory is free; `done` as for `send`."""
        number = self._incoming.number[name]
        if (moving := self._joined(self._receiving, self._incoming, number, epoch, name, tensor, done)) is None:
            return
        parcel, tag = self._incoming.parcels[number], self._incoming.first_tag[number]
        tensors = [moving.values[member][0] for member in parcel.members]
        direct = is_direct(parcel, tensors)
        moving.memory = bytes_of(tensors[0]) if direct else torch.empty(parcel.size_bytes, dtype=torch.uint8)
        try:
            moving.works = [
                self._group.recv([moving.memory[begin:end]], self._other, tag + chunk)
                for chunk, (begin, end) in enumerate(map(parcel.chunk, range(parcel.num_chunks)))
                if end > begin
            ]
            self._records.tell(REQUEST, number, 0, epoch)
        except RuntimeError as error:  # the connection broke a moment ago
            self._fail(error)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send a value that is not in the order, and wait until it has arrived.

        Raises:
            PeerError: the peer is gone or silent.
        """
        wait_for(self.send, name, tensor, self._counted(f">{name}"), None)

    def post(self, name: str, tensor: torch.Tensor) -> None:
        """Send a value that is not in the order, and do not wait; if it fails, so does all that follows."""
        with self._changed:
            self._posted += 1
        self.send(name, tensor, self._counted(f">{name}"), self._delivered)

    def get(self, name: str, tensor: torch.Tensor, timeout_s: float | None = None) -> None:
        """Receive a value that is not in the order, and wait for it: as long as the peer lives, or so many seconds.

        Raises:
            PeerError: the peer is gone or silent.
            TimeoutError: it lives, and the value has not come.
        """
        wait_for(self.receive, name, tensor, self._counted(f"<{name}"), timeout_s)

    def flush(self) -> None:
        """Wait until all that was posted has arrived, as long as the peer lives; who takes leave before takes it away.

        Raises:
            PeerError: the peer is gone or silent, and has not taken everything.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._posted)
            if self._lost is not None:
                raise self._lost

    def close(self, reason: str = "", timeout_s: float = 5.0) -> None:
        """Take leave; with a `reason`, the peer fails."""
        if self.failure is None:
            try:
                self._say_goodbye(FAILED if reason else LEAVE)
            except RuntimeError as error:  # the connection broke a moment ago
                self._fail(error)
        for thread in self._threads[:2]:  # that receive
            thread.join(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads[2].join(timeout_s)

    def _delivered(self, error: BaseException | None) -> None:
        with self._changed:
            self._posted -= 1
            self._lost = self._lost or error
            self._changed.notify_all()

    def _counted(self, name: str) -> int:
        self._count[name] = self._count.get(name, 0) + 1
        return self._count[name]

    def _joined(
        self,
        moving: dict[tuple[int, int], Moving],
        layout: WireLayout,
        number: int,
        epoch: int,
        name: str,
        tensor: torch.Tensor,
        done: Done,
    ) -> Moving | None:
        """The parcel that a value completes; None if others are missing, or the wire has failed."""
        with self._changed:
            failure = self.failure
            if failure is None:
                found = moving.setdefault((number, epoch), Moving(epoch))
                found.values[name] = (tensor, done)
                return found if len(found.values) == len(layout.parcels[number].members) else None
        done(failure)
        return None

    def _make_ready(self, number: int, epoch: int) -> None:
        """Under the lock: a parcel whose values are there and whose receiver is ready waits for its turn."""
        moving = self._sending.get((number, epoch))
        if moving is not None and moving.memory is not None and (number, epoch) in self._requested:
            self._requested.discard((number, epoch))
            self._turns.ready[number] = moving
            self._changed.notify_all()

    def _send(self) -> None:
        try:
            while True:
                with self._changed:
                    while (number := self._turns.next()) is None and not (self._closed or self.failure):
                        self._changed.wait(self._records.silence_s)
                        self._say_alive()
                    if number is None:
                        return
                    moving = self._turns.ready[number]
                    chunk = moving.next_chunk
                    moving.next_chunk += 1
                    parcel = self._outgoing.parcels[number]
                    if moving.next_chunk == parcel.num_chunks:
                        self._turns.has_left(number)
                    leaving = Leaving(number, moving)
                    self._turns.on_the_way.append(leaving)
                # Without the lock: a send takes as long as the system takes to copy, and the peer answers meanwhile.
                begin, end = parcel.chunk(chunk)
                assert moving.memory is not None
                self._records.tell(CHUNK, number, chunk, moving.epoch)
                tag = self._outgoing.first_tag[number] + chunk
                work = self._group.send([moving.memory[begin:end]], self._other, tag) if end > begin else None
                with self._changed:
                    work = leaving.sent(work)
                if work is not None:
                    work.wait()
                del moving, leaving, work  # what was delivered is nobody's but its owner's, however long this waits
        except Exception as error:  # noqa: BLE001 (told to whoever waits for a transfer)
            self._fail(error)

    def _listen(self) -> None:
        """Follow the peer's records until it leaves."""
        try:
            while True:
                kind, number, chunk, epoch = self._records.next()
                if kind in (LEAVE, FAILED):
                    self._coming.put((kind, 0, None))  # after all that it has sent
                    return
                self._follow(kind, number, chunk, epoch)
        except Exception as error:  # noqa: BLE001 (told to whoever waits for a transfer)
            self._fail(error)

    def _follow(self, kind: int, number: int, chunk: int, epoch: int) -> None:
        layout = self._incoming if kind == CHUNK else self._outgoing
        if kind not in (REQUEST, CHUNK, ACK) or not 0 <= number < len(layout.parcels):
            raise PeerError(f"it said something unknown: {(kind, number, chunk, epoch)}")
        if kind == REQUEST:
            with self._changed:
                self._requested.add((number, epoch))
                self._make_ready(number, epoch)
        elif kind == CHUNK:
            moving = self._receiving.get((number, epoch))
            if moving is None or moving.memory is None or chunk != moving.next_chunk:
                name = layout.parcels[number].members[0]
                raise PeerError(f"it sends {name!r} for step {epoch}, and nobody asked for it")
            moving.next_chunk += 1
            self._coming.put((number, chunk, moving))
        else:
            with self._changed:
                left = self._turns.on_the_way.popleft()
                work = left.arrived()
                self._changed.notify_all()
            if work is not None:
                work.wait()
                work = None
            if chunk + 1 == layout.parcels[left.number].num_chunks:
                self._finish(self._sending, left.number, left.moving)

    def _take(self) -> None:
        """Wait for the chunks that the peer has announced, in this order, until it leaves or the wire fails."""
        try:
            while True:
                number, chunk, moving = self._coming.get()
                if self.failure is not None:
                    return
                if moving is not None:
                    self._arrive(number, chunk, moving)
                elif self._left(number):
                    return
        except Exception as error:  # noqa: BLE001 (told to whoever waits for a transfer)
            self._fail(error)

    def _left(self, kind: int) -> bool:
        """Take leave of a peer that has; whether nothing was missing."""
        self._say_goodbye(LEAVE)
        with self._changed:  # nothing can begin to move in between
            if kind == LEAVE and not (self._sending or self._receiving):
                self.failure = PeerError(f"{self.me}: {self.peer} has left")
                self._changed.notify_all()
                return True
        raise PeerError("it has failed" if kind == FAILED else "it has left")

    def _arrive(self, number: int, chunk: int, moving: Moving) -> None:
        parcel = self._incoming.parcels[number]
        if moving.works:
            moving.works[chunk].wait()
        is_last = chunk + 1 == parcel.num_chunks
        if is_last:
            assert moving.memory is not None
            unpack(parcel, moving.memory, [moving.values[member][0] for member in parcel.members])
            if number in self._ordered_in:
                now_ns = perf_counter_ns()
                self.arrived.setdefault(moving.epoch, []).extend((member, now_ns) for member in parcel.members)
                self.arrived.pop(moving.epoch - 3, None)
        self._records.tell(ACK, number, chunk, moving.epoch)
        if is_last:
            self._finish(self._receiving, number, moving)

    def _finish(self, of: dict[tuple[int, int], Moving], number: int, moving: Moving) -> None:
        with self._changed:
            of.pop((number, moving.epoch), None)
        waiting = [done for _, done in moving.values.values()]
        moving.values, moving.memory, moving.works = {}, None, []  # whoever is told may free it
        for done in waiting:
            done(None)

    def _say_alive(self) -> None:
        """Under the lock: unless this end has said something lately, or takes leave."""
        if self._records.is_silent and not (self._said_goodbye or self._closed or self.failure):
            self._records.tell(ALIVE, 0, 0, 0)

    def _say_goodbye(self, kind: int) -> None:
        with self._changed:
            if self._said_goodbye:
                return
            self._said_goodbye = True
        self._records.tell(kind, 0, 0, 0)

    def _fail(self, error: Exception) -> None:
        reason = reason_in_words(error)
        with self._changed:
            if self.failure is None:
                self.failure = PeerError(f"{self.me} lost {self.peer}: {reason}")
                self.failure.__cause__ = error
            failure = self.failure
            moving = (*self._sending.values(), *self._receiving.values())
            waiting = [done for each in moving for _, done in each.values.values()]
            self._sending, self._receiving = {}, {}
            self._changed.notify_all()
        self._coming.put((FAILED, 0, None))
        for done in waiting:
            done(failure)
