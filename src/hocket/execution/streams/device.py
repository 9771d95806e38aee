"""Interface of a device with streams. It is small, so that everything above it can be tested without a device."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from hocket.errors import ExecutionError

_OF_CAPTURES = -1  # the number of the stream on which graphs are captured, which no lane has


class StreamDevice(ABC):
    """Streams, events between them, and graphs of both. Streams and events are opaque to the executors."""

    index: int | None = None  # of the CUDA device whose random generator its ops use, or None if they use the CPU's

    @abstractmethod
    def stream(self, priority: int, number: int = 0) -> Any:
        """Return a stream of this priority. The higher one runs first, as far as the device has levels for it.

        Each `number` is another stream. The same ones serve all executors, since libraries keep a workspace for each.
        """

    @abstractmethod
    def current(self) -> Any:
        """The stream that the caller's own ops go to."""

    @abstractmethod
    def default(self) -> Any:
        """The stream that the ops of a new thread go to."""

    @abstractmethod
    def event(self, timed: bool = False) -> Any:
        """Make an event, which can be recorded repeatedly. Only `timed` ones can be compared in time."""

    @abstractmethod
    def record(self, event: Any, stream: Any) -> None:
        """`event` happens when all that `stream` has been given so far is done."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of `stream` run after the last record of `event`. The host does not wait."""

    @abstractmethod
    def wait_on_host(self, event: Any) -> None:
        """Wait on the host, without the interpreter's lock, until the last record of `event` has happened."""

    @abstractmethod
    def launch(self, stream: Any, work: Callable[[], None]) -> None:
        """Give `stream` the ops that `work` calls."""

    @abstractmethod
    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory as bytes. Once dropped, it stays until the copies on streams that use it are done."""

    @abstractmethod
    def elapsed_us(self, first: Any, second: Any) -> float:
        """Return the time between two timed events, after waiting for both."""

    def owns(self, where: torch.Tensor | torch.device) -> bool:
        """Return True if a tensor, or what is made at a place, is in the memory of this device. By default all is."""
        return True

    @abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until all streams are done."""

    @abstractmethod
    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `work` on the current stream and on those that wait for it. Return the replay.

        Nothing has run when this returns. Memory of the ops stays allocated as long as the replay exists. Each replay
        records the timed events that `work` records. One that raises has run nothing, and drawn nothing.

        Raises:
            Exception: the launches cannot be captured. Nothing has run, and the current stream is what it was.
        """


class CudaDevice(StreamDevice):
    """The CUDA device of this index, or the current one."""

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ExecutionError("stream lanes need a CUDA device, and torch sees none here")
        self.index: int = torch.cuda.current_device() if index is None else index
        # Least and greatest, where greater means a lower number: (0, -5) on recent devices.
        self._least, self._greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static
        self._streams: dict[tuple[int, int], Any] = {}

    def stream(self, priority: int, number: int = 0) -> Any:
        level = max(self._greatest, self._least - max(0, priority))
        if (level, number) not in self._streams:
            self._streams[level, number] = torch.cuda.Stream(self.index, priority=level)
        return self._streams[level, number]

    def current(self) -> Any:
        return torch.cuda.current_stream(self.index)

    def default(self) -> Any:
        return torch.cuda.default_stream(self.index)

    def event(self, timed: bool = False) -> Any:
        # An external event is a node of a graph that is being captured, so that a replay records it; others only order.
        # A host that waits for one sleeps.
        return torch.cuda.Event(enable_timing=timed, external=timed, blocking=True)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def wait_on_host(self, event: Any) -> None:
        event.synchronize()

    def launch(self, stream: Any, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            work()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self.index):
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def elapsed_us(self, first: Any, second: Any) -> float:
        second.synchronize()
        return 1e3 * float(first.elapsed_time(second))

    def owns(self, where: torch.Tensor | torch.device) -> bool:
        place = where.device if isinstance(where, torch.Tensor) else where
        return place.type == "cuda" and place.index in (None, self.index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        # A pool of its own, all of which a replay writes over. At the next capture torch gives back the pools of graphs
        # that are gone, and a tuner closes each executor before another one runs.
        made, pool, before = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), self.current()
        # The model's device need not be the current one, and a graph of another device's stream is empty.
        with torch.cuda.device(self.index):
            # Memory that other work gives back during the capture must not be mistaken for the graph's.
            torch.cuda.synchronize(self.index)
            try:
                with self._capturing(made, pool):
                    work()
            except BaseException:
                self._mend(pool)
                # Torch raises at a capture's end before it goes back to the stream of the caller.
                torch.cuda.set_stream(before)
                raise

        generator = torch.cuda.default_generators[self.index]

        def replay() -> None:
            offset = generator.get_offset()
            with torch.cuda.device(self.index):
                try:
                    made.replay()
                except BaseException:
                    generator.set_offset(offset)  # torch counts the draws of a replay before it launches it
                    raise

        return replay

    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> torch.cuda.graph:
        # Torch's own stream for captures is of the device that was current at the first capture in the process.
        return torch.cuda.graph(graph, pool, self.stream(0, _OF_CAPTURES), capture_error_mode="thread_local")

    def _mend(self, pool: Any) -> None:
        """Take back what a failed capture leaves in torch: the allocator and the generators go on as if it captured.

        Then every later draw on the device raises, until a capture ends well.
        """
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self.index, pool)
        with suppress(Exception), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with self._capturing(torch.cuda.CUDAGraph(), None):
                pass
