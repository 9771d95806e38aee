"""The state that servers keep: where it begins, what belongs to a shard, and its way to and from worker 0.

Worker 0 has the model and the optimizer that the job starts with, perhaps of a checkpoint. Where its optimizer has no
state yet, servers begin with zeros: what Adam, RMSprop or SGD make of zeros in a planned step is what they make in
their first one. That is not so for all (SGD with dampening, NAdam), so worker 0 tries it, and refuses where it is not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.distributed.parcels import Parcel
from hocket.distributed.parts import Assignment
from hocket.distributed.wire import Wire
from hocket.errors import InputError
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.tracing.captured import Captured
from hocket.tracing.saved_state import Saved
from hocket.tracing.state import Entry, inventory

__all__ = ["ShardState", "begin_from_zeros", "has_state", "make_state", "shard_state"]

# How far the planned first step may be from the eager one, for a dtype of eight bytes, four, or fewer.
TOLERANCES = {8: 1e-9, 4: 1e-4}


@dataclass(frozen=True)
class ShardState:
    """What a server keeps, as places of a model and an optimizer: parameters, buffers and state.

    Attributes:
        server: which of them.
        tensors: the places.
        label: what its values are called by on the wire, where each name stands once.
    """

    server: int
    tensors: tuple[Entry, ...]
    label: str = "state"

    @property
    def parcels(self) -> list[Parcel]:
        """One for each tensor."""
        return [Parcel((self.name_of(entry),), (_size_bytes(entry.get()),)) for entry in self.tensors]

    def send(self, wire: Wire) -> None:
        """Send all of it.

        Raises:
            PeerError: the peer is gone or silent.
        """
        for entry in self.tensors:
            wire.put(self.name_of(entry), entry.get())

    def post(self, wire: Wire) -> None:
        """Send all of it, and do not wait; until it has arrived it stays as it is."""
        for entry in self.tensors:
            wire.post(self.name_of(entry), entry.get())

    def receive(self, wire: Wire) -> None:
        """Receive all of it, into its own memory; raises as `send`."""
        for entry in self.tensors:
            wire.get(self.name_of(entry), entry.get())

    def name_of(self, entry: Entry) -> str:
        """What a tensor is called on the wire."""
        return f"{self.label}{self.server}:{entry.name}"


def shard_state(captured: Captured, assignment: Assignment, server: int) -> ShardState:
    """What a server keeps; state that is not there yet is made of zeros."""
    ops = [captured.graph[name] for name in captured.graph.order if name in assignment.server_ops[server]]
    touched = {buffer for op in ops for buffer in (*op.reads, *op.writes)}
    touched |= {each.buffer for each in assignment.pulls if each.server == server}
    make_state(captured, touched)
    places = captured.trace.places
    return ShardState(server, tuple(e for e in (*places.parameters, *places.tensors) if e.name in touched))


def has_state(captured: Captured) -> bool:
    """Whether the optimizers have all the state that the step needs."""
    return all(_is_there(entry) for entry in _state_tensors(captured))


def make_state(captured: Captured, names: Collection[str]) -> None:
    """Make state of these names that is not there yet, of zeros, as most optimizers would."""
    examples = {id(source): captured.stand_ins.get(slot) for slot, source in captured.program.inputs.items()}
    for entry in _state_tensors(captured):
        example = examples.get(id(entry))
        if entry.name in names and example is not None and not _is_there(entry):
            entry.set(torch.zeros_like(example))


def begin_from_zeros(captured: Captured) -> None:
    """`make_state` of all state, after trying that a planned step makes of it what the optimizers' first step does.

    Raises:
        InputError: it does not; names the tensor.
    """
    places = captured.trace.places
    names = [entry.name for entry in _state_tensors(captured)]
    batch = [leaf for leaf in tree_flatten(captured.batch)[0] if isinstance(leaf, torch.Tensor)]
    saved = Saved(inventory(places.models, places.optimizers), batch)
    try:
        captured.step(captured.batch)
        eager = {name: value.detach().clone() for name, value in captured.state().items()}
    finally:
        saved.restore()
    make_state(captured, names)
    lanes = ThreadLanes(captured, Plan((Lane("all", captured.graph.order, width=torch.get_num_threads()),)))
    try:
        lanes(captured.batch)
        different = [name for name, value in captured.state().items() if not _alike(value.detach(), eager[name])]
    finally:
        lanes.close()
        saved.restore()
    if different:
        raise InputError(
            f"distribute: the optimizer's first step is not like those that follow: it leaves another {different[0]!r} "
            "than from a state of zeros; run one step before distributing it"
        )
    make_state(captured, names)


def _state_tensors(captured: Captured) -> Sequence[Entry]:
    return [entry for entry in captured.trace.places.tensors if entry.kind == "state"]


def _is_there(entry: Entry) -> bool:
    try:
        entry.get()
    except KeyError:
        return False
    return True


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    tolerance = TOLERANCES.get(one.element_size(), 1e-2)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _size_bytes(value: Any) -> int:
    return int(value.numel() * value.element_size())
