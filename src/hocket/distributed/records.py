"""Records: four numbers at a time, by which the two ends of a wire coordinate transfers.

Receives for records are posted ahead, so that they arrive in the order in which they were sent. An end that has sent no
record for a quarter of the timeout sends one that says it is alive. So an idle peer is never lost, and one that is
stopped, or whose link is down, is lost within the timeout.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import Any

import torch

REQUEST, CHUNK, ACK, LEAVE, FAILED, ALIVE = range(6)

TAG = 0
NUM_POSTED = 8
# Records that may be unsent before `tell` waits for the oldest.
MAX_UNSENT = 512
# Records of an idle end within the timeout: the peer tolerates that one or two come late.
ALIVE_PER_TIMEOUT = 4


def gloo_reason(error: BaseException) -> str:
    """The first line of an error, without gloo's source position and its general advice.

    Example:
        >>> gloo_reason(RuntimeError("[/gloo/pair.cc:537] Read error: reset by peer. This is typically caused by"))
        'Read error: reset by peer'
    """
    line = str(error).strip().partition("\n")[0]
    text = line.partition("] ")[2] if line.startswith("[/") else line
    return text.partition(". This is typically")[0] or type(error).__name__


class Records:
    """One end of the records of a wire. Any thread may send records, and one thread reads them."""

    def __init__(self, group: Any, other: int, timeout_s: float) -> None:
        self.silence_s = timeout_s / ALIVE_PER_TIMEOUT  # an end that has sent nothing for so long sends `ALIVE`
        self._group, self._other = group, other
        self._sent_at_s = monotonic()
        self._unsent: deque[tuple[Any, torch.Tensor]] = deque()
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        self._lock = threading.Lock()

    @property
    def is_silent(self) -> bool:
        """True if this end has sent nothing for `silence_s`."""
        return monotonic() - self._sent_at_s >= self.silence_s

    def tell(self, *record: int) -> None:
        """Send a record: its kind, and three numbers."""
        message = torch.tensor(record, dtype=torch.int64)
        with self._lock:
            self._sent_at_s = monotonic()
            self._unsent.append((self._group.send([message], self._other, TAG), message))
            if len(self._unsent) > MAX_UNSENT:
                self._unsent.popleft()[0].wait()

    def next(self) -> tuple[int, int, int, int]:
        """Wait for the next record of the peer other than `ALIVE`. A silent or lost peer is a `RuntimeError`."""
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
    """Begin a transfer by `move`, and wait until it is over, or up to a timeout, which is a `TimeoutError`."""
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
