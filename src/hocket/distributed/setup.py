"""How a job begins: every rank captures the step, all compare what they captured, and wires are laid.

    capture | compare with rank 0 | divide | wires | worker 0's state to the servers | rates | rank 0's plan for all

Nothing of a peer is believed before: sizes, names and dtypes are those that this rank captured itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hocket.distributed.description import described, difference
from hocket.distributed.membership import Membership
from hocket.distributed.parcels import Parcel
from hocket.distributed.parts import Assignment, assigned
from hocket.distributed.state import ShardState, begin_from_zeros, has_state, shard_state
from hocket.distributed.versions import Value, model_values
from hocket.distributed.wire import Wire
from hocket.errors import PeerError
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from hocket.tracing.state import Entry

__all__ = [
    "CLOSE",
    "GATHER",
    "LET_IN",
    "LOAD",
    "ORDERS",
    "PROBE",
    "PROBE_BYTES",
    "PUBLISH",
    "SAVE",
    "STEP",
    "Setup",
    "captured_for",
    "lay_wire",
    "lay_wires",
    "rates_of",
    "set_up",
    "take_rates",
]

# What rank 0 orders, or all ranks agree on; the numbers of its optimizers come with it.
STEP, GATHER, CLOSE, PUBLISH, LET_IN, SAVE, LOAD = range(7)
ORDERS, PROBE = "orders", "probe"
PROBE_BYTES = 4 << 20


@dataclass(frozen=True)
class Setup:
    """A rank that knows what it trains, with whom, and who does what.

    Attributes:
        membership: its place in the job.
        captured: the whole step.
        assignment: who runs what of it.
        wires: to each server, or of a server to each worker.
    """

    membership: Membership
    captured: Captured
    assignment: Assignment
    wires: tuple[Wire, ...]

    @cached_property
    def rates(self) -> tuple[Entry, ...]:
        """The optimizers' own numbers: rates, decays (and not what schedulers note). Those of worker 0 count."""
        return rates_of(self.captured)

    def order(self, command: int, argument: int = 0) -> None:
        """Worker 0 tells all servers what to do, and its rates.

        Only for the last order it waits: a server listens again when all workers have its parameters, and a step
        computes long before.
        """
        values = torch.tensor([command, argument, *(float(entry.get()) for entry in self.rates)], dtype=torch.float64)
        for wire in self.wires:
            (wire.put if command == CLOSE else wire.post)(ORDERS, values)

    def ordered(self) -> tuple[int, int]:
        """A server waits for what worker 0 tells it, a command with an argument, and takes its rates.

        Raises:
            PeerError: worker 0 is gone or silent.
        """
        values = torch.empty(2 + len(self.rates), dtype=torch.float64)
        self.wires[0].get(ORDERS, values)
        command, argument, *rates = values.tolist()
        take_rates(self.rates, rates)
        return int(command), int(argument)

    def shard(self, server: int) -> ShardState:
        """The state that a server keeps, at this rank's own places."""
        return shard_state(self.captured, self.assignment, server)

    def value(self, buffer: str) -> torch.Tensor:
        """What is in a buffer of the model now."""
        places = self.captured.trace.places
        found: torch.Tensor = next(e for e in (*places.parameters, *places.tensors) if e.name == buffer).get()
        return found.detach()

    @cached_property
    def values(self) -> Mapping[str, tuple[Value, Entry]]:
        """What agents can have, with the places of it at this rank."""
        return model_values(self.captured, self.assignment)

    @cached_property
    def given(self) -> tuple[tuple[Value, Entry], ...]:
        """What server 0 has from worker 0 when that publishes: what no server updates."""
        return tuple(pair for pair in self.values.values() if pair[0].from_worker)

    def give(self, changed_only: bool) -> None:
        """Worker 0 sends server 0 what that does not update itself, as it is now."""
        for value, entry in self.given:
            if value.changes or not changed_only:
                self.wires[0].post(given_name(value.name), entry.get().detach().clone())

    def take_given(self, changed_only: bool) -> None:
        """Server 0 receives it, into its own model; raises `PeerError` if worker 0 is gone."""
        for value, entry in self.given:
            if value.changes or not changed_only:
                self.wires[0].get(given_name(value.name), entry.get())

    def close(self, error: BaseException | None = None, *, tell: bool = True) -> None:
        """Take leave of all peers; with an error, they fail, and every rank can read why, unless that is left out."""
        if error is not None and tell:
            self.membership.fail(error)
        for wire in self.wires:
            wire.close(reason=str(error) if error is not None else "")

    def failed(self, error: BaseException) -> PeerError:
        """What to raise for an error of a step: it names the rank that failed first, or says that this one is out."""
        if (why := self.membership.why_out()) is not None:
            self.close(error, tell=False)
            return PeerError(f"{self.membership.name(self.membership.rank)} is out of the job, which goes on: {why}")
        first = self.membership.first_failure()
        self.close(error)
        text = self.membership.signed(error)
        return PeerError(text if first is None else f"{text}; the first to fail was {first}")


def given_name(value: str) -> str:
    """What a value is called on the wire that worker 0 gives to server 0."""
    return f"given:{value}"


def rates_of(captured: Captured) -> tuple[Entry, ...]:
    """The optimizers' own numbers: rates, decays (and not what schedulers note)."""
    numbers = [entry for entry in captured.trace.places.numbers if entry.kind == "group"]
    return tuple(entry for entry in numbers if entry.key in entry.table.optimizer.defaults)


def take_rates(entries: Sequence[Entry], rates: Sequence[float]) -> None:
    """Put the rates of another rank in place of this one's; a whole number stays one."""
    for entry, rate in zip(entries, rates, strict=True):
        is_whole = isinstance(entry.get(), int) and float(rate).is_integer()
        entry.set(int(rate) if is_whole else rate)


def captured_for(step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any) -> Captured:
    """The step, captured while each trained parameter has a gradient: what adds to gradients that it finds, shows."""
    models = model if isinstance(model, (list, tuple)) else [model]
    bare = [p for one in models for p in one.parameters() if p.requires_grad and p.grad is None]
    for parameter in bare:
        parameter.grad = torch.zeros_like(parameter)
    try:
        return capture(step, model, optimizer, batch)
    finally:
        for parameter in bare:
            parameter.grad = None


def set_up(step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any, membership: Membership) -> Setup:
    """Capture, compare, divide, connect; and the servers get the state that worker 0 has.

    Raises:
        CaptureError, InputError: the step cannot be captured, or divided; says why.
        PeerError: another rank trains something else, has failed, or does not come.
    """
    try:
        captured = captured_for(step, model, optimizer, batch)
        assignment = assigned(captured, membership.num_servers, num_workers=membership.num_workers)
        _agree(captured, membership)
        shards = _shards(captured, assignment, membership)
        membership.meet("agreed")
        made = Setup(membership, captured, assignment, tuple(membership.wires()))
    except BaseException as error:
        membership.fail(error)
        raise
    try:
        lay_wires(made, shards)
    except BaseException as error:
        raise made.failed(error) from error
    return made


def _agree(captured: Captured, membership: Membership) -> None:
    mine = described(captured, membership.num_workers, membership.num_servers)
    if membership.rank == 0:
        membership.tell("description", mine)
    elif (found := difference(mine, membership.told("description", by=0))) is not None:
        raise PeerError(f"{membership.name(membership.rank)} trains something else: {found}")


def _shards(captured: Captured, assignment: Assignment, membership: Membership) -> tuple[ShardState, ...]:
    """The states that this rank exchanges: worker 0 all of them, a server its own."""
    if membership.rank == 0:
        if not has_state(captured):
            begin_from_zeros(captured)
        return tuple(shard_state(captured, assignment, server) for server in range(membership.num_servers))
    return () if membership.is_worker else (shard_state(captured, assignment, membership.number),)


def lay_wires(made: Setup, shards: tuple[ShardState, ...] = ()) -> None:
    """What wires carry besides transfers of a plan; `shards` go from worker 0 to their servers now.

    Raises:
        PeerError: another rank has failed, or does not come.
    """
    for number, wire in enumerate(made.wires):
        lay_wire(made, wire, number, shards[number] if number < len(shards) else None)
    made.membership.meet("wired")
    for shard, wire in zip(shards, made.wires, strict=False):  # a server's first wire leads to worker 0
        (shard.send if made.membership.is_worker else shard.receive)(wire)


def lay_wire(made: Setup, wire: Wire, other: int, shard: ShardState | None = None) -> None:
    """What one wire carries besides transfers of a plan.

    Args:
        made: the job.
        wire: to a server, or of a server to a worker.
        other: the number of that.
        shard: what goes over it between worker 0 and its server.
    """
    state = shard.parcels if shard is not None else []
    given = [Parcel((given_name(value.name),), (value.size_bytes,)) for value, _ in made.given]
    is_first = made.membership.number == other == 0
    up = [Parcel((ORDERS,), (8 * (2 + len(made.rates)),)), *state, *(given if is_first else [])]
    down = [Parcel((PROBE,), (PROBE_BYTES,)), *state]
    wire.add(*((up, down) if made.membership.is_worker else (down, up)))
