"""Channel lanes beside native lanes: threads of the interpreter that sleep on the same words.

An op on a native lane that waits for an arrival sleeps on the word of the channel op, which the channel's own thread
sets. The other way round, a thread for each channel lane sleeps on the words of the native ops that a transfer waits
for, and begins it. Neither holds the interpreter's lock or a core meanwhile.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, TypeAlias

from hocket.errors import ExecutionError
from hocket.execution.channels import Channel, ChannelOps
from hocket.ir import Plan, Synchronisation
from hocket.tracing.captured import Captured

_Frees: TypeAlias = "tuple[list[int], list[tuple[int, int]]]"

# The time that the interpreter's exit waits for a channel that does not return from `begin`.
EXIT_S = 5.0


class NativeChannels:
    """The channel lanes of a plan whose other lanes are native."""

    def __init__(self, captured: Captured, plan: Plan, channels: Mapping[str, Channel]) -> None:
        self.ops = ChannelOps(captured, plan, channels)
        self.epoch = 0  # number of the last step
        self.began_ns = 0  # when it began
        self._core: Any = None
        self._words: dict[str, int] = {}
        self._sync: Synchronisation | None = None
        self._frees: dict[str, _Frees] = {}
        self._todo: list[SimpleQueue[int | None]] = []
        self._threads: list[threading.Thread] = []
        self._pid = 0

    def awaited(self, sync: Synchronisation) -> set[str]:
        """The ops that need a word because a transfer waits for them, now or for the next step."""
        moved = [op for lane in self.ops.lanes for op in lane.ops]
        behind = {before for op in moved for before in self._gates(op, sync)}
        return behind.union(moved) if moved else set()

    def start(self, core: Any, words: Mapping[str, int], sync: Synchronisation, frees: Mapping[str, _Frees]) -> None:
        """A thread for each channel lane. `frees` are slots, and counters with slots, that its ops free at the end."""
        if not self.ops.lanes:
            return
        if self.epoch:
            raise ExecutionError("native lanes with channels cannot go on once they were closed; make a new executor")
        self._core, self._words, self._sync, self._frees = core, dict(words), sync, dict(frees)
        self._todo = [SimpleQueue() for _ in self.ops.lanes]
        for number, lane in enumerate(self.ops.lanes):
            arguments = (number, self._todo[number])
            self._threads.append(
                threading.Thread(target=self._serve, args=arguments, name=f"hocket-{lane.name}", daemon=True)
            )
            self._threads[-1].start()
        self._pid = os.getpid()
        atexit.register(self._exit)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one step of the core. It ends when all transfers of the step have arrived."""
        if self.ops.failure is not None:
            raise self.ops.failure
        self.epoch += 1
        self.began_ns = perf_counter_ns()
        for todo in self._todo:
            todo.put(self.epoch)
        try:
            yield
            self.ops.wait(self.epoch)
        except BaseException as error:
            if self.ops.failure is not None:
                raise self.ops.failure from None
            self.ops.stop(error)
            if self._core is not None:
                self._core.abort(str(error))  # wakes the threads of the channel lanes
            raise

    def close(self) -> None:
        """End the threads. A step in progress is aborted."""
        atexit.unregister(self._exit)
        if self._todo:
            self._core.abort("the lanes were closed")
        for todo in self._todo:
            todo.put(None)
        self._todo = []
        for thread in self._threads if os.getpid() == self._pid else ():
            if thread is not threading.current_thread():
                thread.join(EXIT_S)
        self._threads = []

    def _exit(self) -> None:
        """A thread that comes back from a native wait when the interpreter is gone ends the process with an error."""
        if os.getpid() == self._pid:
            self.close()

    def slot_value(self, slot: int) -> Any:
        return self._core.slot(slot)

    def fill_slot(self, slot: int, value: Any) -> None:
        self._core.put(slot, value)

    def has_arrived(self, op: str, epoch: int) -> None:
        self._core.arrived(self._words[op], epoch, *self._frees[op])

    def channel_failed(self, error: BaseException) -> None:
        self._core.abort(str(error))

    def _gates(self, op: str, sync: Synchronisation) -> list[str]:
        """Return the ops that must be over before `op` may begin for the next step: its users and its dependents."""
        gates = self.ops.gates(op)
        if gates is None:
            return []
        return [*gates, *(after for after, waited in sync.waits.items() if op in waited)]

    def _serve(self, number: int, todo: SimpleQueue[int | None]) -> None:
        sync = self._sync
        assert sync is not None
        waits = {op: [self._words[o] for o in sync.waits.get(op, ())] for op in self.ops.lanes[number].ops}
        ahead = {op: [self._words[o] for o in self._gates(op, sync)] for op in waits if self.ops.gates(op) is not None}
        while (epoch := todo.get()) is not None:
            for step, words_of in ((epoch, waits), (epoch + 1, ahead)):
                for op, words in words_of.items():
                    if not all(self._core.await_(word, epoch) for word in words):
                        break
                    self.ops.begin(op, step, self)
