"""Ranks that come to a place and wait there for what the test does to them."""

import threading
from collections.abc import Callable
from typing import Any

from distributed.training import Training, batches, tensors_of, training
from hocket import distribute
from hocket.distributed import records

TIMEOUT_S = 4.0


def serve(of: Training, timeout_s: float = TIMEOUT_S, **settings: Any) -> int:
    return distribute.server(
        of.step, of.model, of.optimizer, batches(0, 1)[0], timeout_s=timeout_s, executor="python", **settings
    )


def work(of: Training, timeout_s: float = TIMEOUT_S, **settings: Any) -> Any:
    return distribute.worker(of.step, of.model, of.optimizer, timeout_s=timeout_s, executor="python", **settings)


def part_of_job(
    rank: int,
    steps: int,
    before: Callable[[Any, int], None] = lambda fast, step: None,
    *,
    width: int = 300,
    timeout_s: float = TIMEOUT_S,
    num_servers: int = 1,
    survive: bool = False,
) -> Any:
    """A worker (rank 0 or 1) or a server of a whole job; a worker calls ``before(fast, step)`` ahead of each step."""
    of = training("adam", width=width)
    if rank >= 2:
        return serve(of, timeout_s, num_servers=num_servers, survive=survive)
    with work(of, timeout_s, num_servers=num_servers) as fast:
        for step, batch in enumerate(batches(rank, steps)):
            before(fast, step)
            fast(batch)
        fast.gather()
    return tensors_of(of)


class Stops:
    """Says that it has come to a place, and waits there to be killed, or stopped for a while."""

    def __init__(self, say, place, wait_s: float = 30.0) -> None:
        self.say, self.place, self.wait_s = say, place, wait_s

    def at(self, place: str) -> None:
        if place == self.place:
            self.say(place)
            threading.Event().wait(self.wait_s)


def stop_in_mid_transfer(stops: Stops) -> None:
    tell = records.Records.tell

    def told(end, *record):
        if record[0] == records.CHUNK and record[2] == 1:
            stops.at("in mid-transfer")
        tell(end, *record)

    records.Records.tell = told
