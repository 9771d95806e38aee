"""The thread that reads tensors in an order, and how others wait for them.

It reads along the order, a chunk at a time, until all tensors have arrived. A thread that needs a tensor sleeps until
it is there, and that tensor is read next. Then the order continues after it, because the tensors that follow it in a
model are mostly needed next::

    order       a  b  c  d  e  f
    read        a  b                    the forward asks for d
                         d  e  f
                   c                    tensors that were passed over come last

A source that cannot go back is read in its order, whichever tensor is needed.

What is in the page cache is read at once: to wait for it takes longer than to copy it. Holding a tensor until it
arrives costs some 45 us of Python, and the page cache delivers gigabytes per second. So the call to `hocket.load` reads
the cached part of a file on disk itself, up to the first page that is missing (``preadv`` with ``RWF_NOWAIT``), and the
remaining tensors stream.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hocket.errors import ExecutionError
from hocket.loading.landing import CHUNK_BYTES, MAX_TOGETHER, Landing
from hocket.loading.sources import DiskSource
from hocket.loading.weights import StoredTensor, Weights


@dataclass(eq=False)
class PendingTensor:
    """A tensor that is to arrive."""

    name: str  # used in errors
    stored: StoredTensor  # the tensor of the file, of at least one byte
    landing: Landing | None  # the memory that it is read into, or None once it has arrived or reading has failed
    # called when it has arrived, before waiting threads continue
    on_arrival: list[Callable[[], object]] = field(default_factory=list)
    place: int = 0  # position in the order
    read_bytes: int = 0  # how many bytes have been read or are being read
    is_there: bool = False  # True if it has arrived

    @property
    def is_read(self) -> bool:
        """True if all of its reads have begun."""
        return self.read_bytes == self.stored.entry.size_bytes


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that is read at once."""

    arrival: PendingTensor
    landing: Landing
    begin: int
    end: int


class WeightStream:
    """Reads `arrivals` in a separate thread, in their order as long as no thread waits for another one.

    `weights` are closed when all has been read, or reading has failed.
    """

    def __init__(self, weights: Weights, arrivals: Sequence[PendingTensor]) -> None:
        self._weights = weights
        self._arrivals = list(arrivals)
        for place, arrival in enumerate(self._arrivals):
            arrival.place = place
        self.at_end: list[Callable[[], object]] = []  # called when all has been read, or reading has failed
        self._place = 0
        self._wanted: deque[PendingTensor] = deque()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hocket weights", daemon=True)

    def start(self) -> None:
        """Begin to read. If the system has no thread left, waiting threads get that error, too."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._fail(error)
            raise

    def wait(self, arrival: PendingTensor) -> None:
        """Sleep until a tensor has arrived, which is read next. An `ExecutionError` says why it will not."""
        if os.getpid() != self._process:
            raise ExecutionError(
                f"{arrival.name!r} was still being read from {self._weights.name} when the process was forked; call "
                "hocket.loading.finish(model) before"
            )
        if threading.get_ident() == self._thread.ident:
            raise ExecutionError(f"{self._weights.name}: reading it needs {arrival.name!r}, which it has yet to read")
        with self._changed:
            if not arrival.is_there:
                self._wanted.append(arrival)
            self._changed.wait_for(lambda: arrival.is_there or self._failure is not None)
            if not arrival.is_there:
                raise ExecutionError(
                    f"{arrival.name!r} has not arrived: {self._weights.name}: "
                    f"{type(self._failure).__name__}: {self._failure}"
                ) from self._failure

    def join(self) -> None:
        """Sleep until reading has ended or failed. The thread that reads returns at once."""
        if os.getpid() == self._process and self._thread.ident not in (None, threading.get_ident()):
            self._thread.join()

    def _run(self) -> None:
        try:
            # Parameters that were made in inference mode can be written in inference mode only.
            with torch.inference_mode():
                while self._read(self._next()):
                    pass
        except BaseException as error:  # noqa: BLE001 - of the user's reader, raised again in waiting threads
            self._fail(error)
        else:
            self._end()

    def _fail(self, error: BaseException) -> None:
        # The user's memory must not be kept alive, not even by the frame in which reading failed.
        traceback.clear_frames(error.__traceback__)
        with self._changed:
            self._failure = error
            self._end()
            for arrival in self._arrivals:
                arrival.landing = None
            self._changed.notify_all()

    def _end(self) -> None:
        self._weights.close()
        for call in self.at_end:
            call()
        self.at_end.clear()

    def _read(self, pieces: Sequence[_Piece]) -> bool:
        """Read these pieces. Returns False if there are none."""
        if not pieces:
            return False
        stored = pieces[0].arrival.stored
        buffers = [piece.landing.buffer(piece.begin, piece.end) for piece in pieces]
        stored.source.fill(stored.entry.offset + pieces[0].begin, buffers)
        for piece in pieces:
            piece.landing.landed(piece.begin, piece.end)
        self._arrived([p.arrival for p in pieces if p.end == p.arrival.stored.entry.size_bytes])
        return True

    def _arrived(self, arrivals: Sequence[PendingTensor]) -> None:
        for arrival in arrivals:
            for call in arrival.on_arrival:
                call()
        with self._changed:
            for arrival in arrivals:
                arrival.landing, arrival.is_there = None, True
                arrival.on_arrival.clear()
            self._changed.notify_all()

    def _next(self) -> list[_Piece]:
        """Return what to read next: a part of a large tensor, or adjacent small ones, or nothing at the end."""
        with self._changed:
            first = self._choose()
            if first is None:
                return []
            self._place = first.place
            if first.read_bytes or first.stored.entry.size_bytes > CHUNK_BYTES:
                return [_begun(first)]
            return [_begun(arrival) for arrival in _side_by_side(first, self._window(first))]

    def _window(self, first: PendingTensor) -> list[PendingTensor]:
        """Return a tensor and those after it in the order that may be read with it."""
        found, size_bytes = [], 0
        for arrival in self._arrivals[first.place : first.place + MAX_TOGETHER]:
            size_bytes += arrival.stored.entry.size_bytes
            if size_bytes > CHUNK_BYTES:
                break
            if not arrival.read_bytes:
                found.append(arrival)
        return found

    def _choose(self) -> PendingTensor | None:
        """Return the next tensor that has not been read: one that a thread waits for, or the next in the order."""
        while self._wanted:
            wanted = self._wanted.popleft()
            if not wanted.is_read and not self._weights.is_sequential:
                return wanted
        count = len(self._arrivals)
        for step in range(count):
            arrival = self._arrivals[(self._place + step) % count]
            if not arrival.is_read:
                return arrival
        return None


def _begun(arrival: PendingTensor) -> _Piece:
    begin = arrival.read_bytes
    arrival.read_bytes = min(begin + CHUNK_BYTES, arrival.stored.entry.size_bytes)
    assert arrival.landing is not None
    return _Piece(arrival, arrival.landing, begin, arrival.read_bytes)


def _side_by_side(first: PendingTensor, window: Sequence[PendingTensor]) -> list[PendingTensor]:
    """Return the tensors of `window` that form a contiguous range with `first`, in the order of the file."""
    by_place = sorted(window, key=lambda arrival: arrival.stored.place)
    begin = at = by_place.index(first)
    while begin and by_place[begin - 1].stored.touches(by_place[begin].stored):
        begin -= 1
    while at + 1 < len(by_place) and by_place[at].stored.touches(by_place[at + 1].stored):
        at += 1
    return by_place[begin : at + 1]


# The call must return soon: copying this many bytes takes a quarter of a second.
MAX_BYTES = 1 << 30


def read_cached(landings: Mapping[str, tuple[StoredTensor, Landing]]) -> frozenset[str]:
    """Read cached tensors in the order of their files, up to the first byte that is not cached. Return their names.

    Nothing is read if they have more than `MAX_BYTES` together. The memory of tensors that did not arrive is undefined.
    """
    if sum(stored.entry.size_bytes for stored, _ in landings.values()) > MAX_BYTES:
        return frozenset()
    found: list[str] = []
    for names in _adjacent({name: stored for name, (stored, _) in landings.items()}):
        stored, _ = landings[names[0]]
        source = stored.source
        if not isinstance(source, DiskSource):
            return frozenset(found)
        sizes = [landings[name][0].entry.size_bytes for name in names]
        buffers = [landings[name][1].buffer(0, size) for name, size in zip(names, sizes, strict=True)]
        try:
            count = source.read_now(stored.entry.offset, buffers)
        except OSError:
            return frozenset(found)  # the thread that reads it again reports the error
        if count < sum(sizes):
            return frozenset(found)
        with torch.inference_mode():  # as the thread that streams
            for name, size in zip(names, sizes, strict=True):
                landings[name][1].landed(0, size)
        found += names
    return frozenset(found)


def _adjacent(tensors: Mapping[str, StoredTensor]) -> list[list[str]]:
    """Group names in the order of their files, adjacent tensors together, up to the limits of one call."""
    found: list[list[str]] = []
    size_bytes = 0
    before: StoredTensor | None = None
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].place):
        size_bytes += stored.entry.size_bytes
        follows = before is not None and before.touches(stored)
        if follows and size_bytes <= CHUNK_BYTES and len(found[-1]) < MAX_TOGETHER:
            found[-1].append(name)
        else:
            found.append([name])
            size_bytes = stored.entry.size_bytes
        before = stored
    return found
