"""A device that is none: streams are queues, and what runs next is drawn at random among all that may run."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.execution.streams import StreamDevice


@dataclass(eq=False)
class Event:
    """Number of times that it was recorded, and how many of these have happened."""

    recorded: int = 0
    happened: int = 0
    at: float = 0.0


@dataclass(eq=False)
class Stream:
    priority: int
    queue: list[tuple[Any, ...]] = field(default_factory=list)


class Deferred(StreamDevice):
    """Runs what streams were given only when the caller's stream, which is the host itself here, has to wait."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []
        self.host = Stream(0)
        self.clock = 0.0
        self.waits = 0
        self._captures: list[tuple[Stream, tuple[Any, ...]]] | None = None

    def stream(self, priority: int, number: int = 0) -> Stream:
        self.streams.append(Stream(priority))
        return self.streams[-1]

    def current(self) -> Stream:
        return self.host

    default = current

    def event(self, timed: bool = False) -> Event:
        return Event()

    def record(self, event: Event, stream: Stream) -> None:
        event.recorded += 1
        self._put(stream, ("record", event, event.recorded))

    def wait(self, stream: Stream, event: Event) -> None:
        self.waits += 1
        self._put(stream, ("wait", event, event.recorded))

    def wait_on_host(self, event: Event) -> None:
        self.wait(self.host, event)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        self._put(stream, ("work", work))

    def elapsed_us(self, first: Event, second: Event) -> float:
        return second.at - first.at

    def synchronize(self) -> None:
        while any(stream.queue for stream in self.streams):
            self._advance()

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        self.synchronize()
        self._captures = []
        work()
        captured, self._captures = self._captures, None
        events = {entry[1] for _, entry in captured if entry[0] != "work"}
        # A graph knows the events of its own capture only.
        first = {event: min(e[2] for _, e in captured if e[0] != "work" and e[1] is event) for event in events}
        assert all(e[0] != "wait" or any(o[0] == "record" and o[1] is e[1] for _, o in captured) for _, e in captured)

        def replay() -> None:
            base = {event: event.recorded for event in events}
            for stream, entry in captured:
                if entry[0] == "work":
                    self._put(stream, entry)
                    continue
                number = base[entry[1]] + entry[2] - first[entry[1]] + 1
                entry[1].recorded = max(entry[1].recorded, number)
                self._put(stream, (entry[0], entry[1], number))

        return replay

    def _put(self, stream: Stream, entry: tuple[Any, ...]) -> None:
        if self._captures is not None:
            self._captures.append((stream, entry))
        elif stream is not self.host:
            stream.queue.append(entry)
        elif entry[0] == "record":
            entry[1].happened, entry[1].at = entry[2], self.clock
        else:
            while entry[1].happened < entry[2]:
                self._advance()

    def _advance(self) -> None:
        ready = [stream for stream in self.streams if stream.queue and self._may_run(stream.queue[0])]
        assert ready, "streams wait for each other, or for an event that nobody records"
        stream = self.chance.choice(ready)
        entry = stream.queue.pop(0)
        if entry[0] == "work":
            self.clock += 1.0
            # The host's modes at the time of the launch are those of a real launch; here they come later.
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                entry[1]()
        elif entry[0] == "record":
            entry[1].happened, entry[1].at = max(entry[1].happened, entry[2]), self.clock

    @staticmethod
    def _may_run(entry: tuple[Any, ...]) -> bool:
        return entry[0] != "wait" or entry[1].happened >= entry[2]
