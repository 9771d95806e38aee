"""Records: four numbers at a time, by which the two ends of a wire tell each other where they are.

Receives for them are posted ahead, so that they arrive in the order in which they were sent. An end that has said
nothing for a quarter of the timeout says that it is alive. So a peer that is idle is never lost, and one that is
stopped, or whose link is down, is lost within the timeout, whoever else waits for whatever.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import Any

import torch

__all__ = ["ACK", "ALIVE", "CHUNK", "FAILED", "LEAVE", "REQUEST", "Records", "reason_in_words", "wait_for"]

REQUEST, CHUNK, ACK, LEAVE, FAILED, ALIVE = range(6)

TAG = 0
NUM_POSTED = 8
# Records that may be unsent before the oldest is waited for.
MAX_UNSENT = 512
# How often an end that has nothing to say is heard within the timeout: one record may be late, and the next one, too.
ALIVE_PER_TIMEOUT = 4


def reason_in_words(error: BaseException) -> str:
    """The first line of an error, without the place in gloo's sources that it begins with, and the advice that follows.

    Example:
        >>> reason_in_words(RuntimeError("[/gloo/pair.cc:537] Read error: reset by peer. This is typically caused by"))
        'Read error: reset by peer'
    """
    line = str(error).strip().partition("\n")[0]
    words = line.partition("] ")[2] if line.startswith("[/") else line
    return words.partition(". This is typically")[0] or type(error).__name__


class Records:
    """One end of the records of a wire; any thread may tell, and one listens.

    Args:
        group: a process group of two.
        other: the peer's rank in it.
        timeout_s: that of the group.

    Attributes:
        silence_s: after so long without a record this end has to say that it is alive.
    """

    def __init__(self, group: Any, other: int, timeout_s: float) -> None:
        self.silence_s = timeout_s / ALIVE_PER_TIMEOUT
        self._group, self._other = group, other
        self._told_at_s = monotonic()
        self._unsent: deque[tuple[Any, torch.Tensor]] = deque()
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        self._lock = threading.Lock()

    @property
    def is_silent(self) -> bool:
        """Whether the peer has heard nothing of this end for `silence_s`."""
        return monotonic() - self._told_at_s >= self.silence_s

    def tell(self, *record: int) -> None:
        """Send a record: its kind, and three numbers."""
        message = torch.tensor(record, dtype=torch.int64)
        with self._lock:
            self._told_at_s = monotonic()
            self._unsent.append((self._group.send([message], self._other, TAG), message))
            if len(self._unsent) > MAX_UNSENT:
                self._unsent.popleft()[0].wait()

    def next(self) -> tuple[int, int, int, int]:
        """Wait for the peer's next record that says more than that it is alive.

        Raises:
            RuntimeError: the peer is gone, or silent for longer than the timeout.
        """
        while True:
            while len(self._posted) < NUM_POSTED:
                message = torch.empty(4, dtype=torch.int64)
                self._posted.append((self._group.recv([message], self._other, TAG), message))
            work, message = self._posted.popleft()
            work.wait()
            kind, number, chunk, epoch = message.tolist()
            if kind != ALIVE:
                return kind, number, chunk, epoch


def wait_for(move: Any, name: str, tensor: torch.Tensor, epoch: int, timeout_s: float | None) -> None:
    """Begin a move, and wait until it is over: as long as the peer lives, or so many seconds.

    Raises:
        TimeoutError: it is not over by then; or what the move failed with.
    """
    over = threading.Event()
    found: list[BaseException] = []

    def done(error: BaseException | None) -> None:
        found.extend([error] if error is not None else [])
        over.set()

    move(name, tensor, epoch, done)
    if not over.wait(timeout_s):
        raise TimeoutError(f"{name!r} has not come for {timeout_s:g} s")
    if found:
        raise found[0]
