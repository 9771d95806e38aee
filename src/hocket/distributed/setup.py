"""The start of a job with parameter servers: every rank captures the step, all compare it, and wires are connected.

    capture | compare with rank 0 | divide | wires | worker 0's state to the servers | rates | rank 0's plan for all

Nothing that a peer sends is trusted: sizes, names and dtypes are those that this rank captured itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hocket.distributed.agent_server import Value, model_values
from hocket.distributed.description import described, difference
from hocket.distributed.job import COMMANDS, PROBE, PROBE_BYTES, JoinedJob, captured_for, check_choice, ending_on_error
from hocket.distributed.membership import Membership, join
from hocket.distributed.packets import Packet
from hocket.distributed.parts import Assignment, assigned
from hocket.distributed.rejoin import rejoined
from hocket.distributed.staging import check_default_streams, devices_of
from hocket.distributed.state import ShardState, begin_from_zeros, shard_state
from hocket.distributed.wire import Wire
from hocket.errors import InputError, PeerError
from hocket.tracing.captured import Captured
from hocket.tracing.sources import Entry


@dataclass(frozen=True)
class ShardedJob(JoinedJob):
    """A job whose parameters are divided between servers."""

    assignment: Assignment  # ops and values of each rank

    def shard(self, server: int) -> ShardState:
        """The state that a server keeps, as places of this rank."""
        return shard_state(self.captured, self.assignment, server)

    def value(self, buffer: str) -> torch.Tensor:
        """The present value of a parameter or a buffer."""
        places = self.captured.trace.places
        found: torch.Tensor = next(e for e in (*places.parameters, *places.tensors) if e.name == buffer).get()
        return found.detach()

    @cached_property
    def values(self) -> Mapping[str, tuple[Value, Entry]]:
        """Values that agents can have, each with its place at this rank."""
        return model_values(self.captured, self.assignment)

    @cached_property
    def given(self) -> tuple[tuple[Value, Entry], ...]:
        """Values that no server updates. Worker 0 gives them to server 0 when it publishes."""
        return tuple(pair for pair in self.values.values() if pair[0].from_worker)

    def give(self, changed_only: bool) -> None:
        """Send the present `given` values from worker 0 to server 0."""
        for value, entry in self.given:
            if value.changes or not changed_only:
                self.wires[0].post(_given_name(value), entry.get().detach().clone())

    def take_given(self, changed_only: bool) -> None:
        """Receive the `given` values into the model of server 0. Raises `PeerError` if worker 0 is gone."""
        for value, entry in self.given:
            if value.changes or not changed_only:
                self.wires[0].get(_given_name(value), entry.get())

    def add_packets(self, wire: Wire, other: int, shard: ShardState | None = None) -> None:
        """Add the packets of a wire that do not belong to the transfers of a plan, and those of a `shard`, if any."""
        state = shard.packets if shard is not None else []
        given = [Packet((_given_name(value),), (value.size_bytes,)) for value, _ in self.given]
        is_first = self.membership.number == other == 0
        up = [Packet((COMMANDS,), (self.command_bytes,)), *state, *(given if is_first else [])]
        down = [Packet((PROBE,), (PROBE_BYTES,)), *state]
        wire.add(*((up, down) if self.membership.is_worker else (down, up)))

    def begin_wires(self, shards: tuple[ShardState, ...] = ()) -> None:
        """Add the packets of all wires, and send `shards` from worker 0 to their servers."""
        for number, wire in self.wires.items():
            self.add_packets(wire, number, shards[number] if number < len(shards) else None)
        self.membership.meet("wired")
        for number, shard in enumerate(shards):  # of a server its own alone, over the wire to worker 0
            (shard.send if self.membership.is_worker else shard.receive)(self.wires[number])


def _given_name(value: Value) -> str:
    return f"given:{value.name}"


def joined_as(role: str, num_servers: int, timeout_s: float, **options: tuple[str, Sequence[str]]) -> Membership:
    """Take part in the job that torchrun has started, as a ``worker`` or a ``server``. Raises as those do.

    Each of the `options` comes with its choices. Other ranks read what is wrong, since they wait for this one.
    """
    number = num_servers if isinstance(num_servers, int) and num_servers > 0 else 1
    membership = rejoined(join(number, timeout_s))
    with membership.reporting_errors():
        if number != num_servers:
            raise InputError(f"distribute: expected num_servers to be a number of at least 1, got {num_servers!r}")
        for name, (given, choices) in options.items():
            check_choice(name, given, choices)
        actual = "worker" if membership.is_worker else "server"
        if actual != role:
            raise InputError(
                f"distribute: rank {membership.rank} is a {actual}; call hocket.distribute.{actual}(...) there"
            )
    return membership


def set_up(step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any, membership: Membership) -> ShardedJob:
    """Capture, compare, divide and connect, and send worker 0's state to the servers. Raises as `hocket.capture`."""
    with membership.reporting_errors():
        check_default_streams(devices_of(model))
        captured = captured_for(step, model, optimizer, batch)
        assignment = assigned(captured, membership.num_servers, num_workers=membership.num_workers)
        compare(membership, described(captured, membership.num_workers, membership.num_servers))
        shards = _shards(captured, assignment, membership)
        membership.meet("agreed")
        job = ShardedJob(membership, captured, membership.wires(), assignment)
    with ending_on_error(job.failed):
        job.begin_wires(shards)
    return job


def compare(membership: Membership, mine: Mapping[str, Mapping[str, str]]) -> None:
    """Raise a `PeerError` if this rank trains something else than rank 0, by their descriptions."""
    if membership.rank == 0:
        membership.announce("description", mine)
    elif (found := difference(mine, membership.announced("description", by=0))) is not None:
        raise PeerError(f"{membership.me} trains something else: {found}")


def _shards(captured: Captured, assignment: Assignment, membership: Membership) -> tuple[ShardState, ...]:
    """The states that this rank exchanges: all of them at worker 0, and its own at a server."""
    if membership.rank == 0:
        begin_from_zeros(captured)
        return tuple(shard_state(captured, assignment, server) for server in range(membership.num_servers))
    return () if membership.is_worker else (shard_state(captured, assignment, membership.number),)
