"""The state that a rank keeps (parameters, buffers, optimizer state): its tensors, its start, and its transfer.

Rank 0 has the model and the optimizer that the job starts with, perhaps of a checkpoint. If its optimizer has no state
yet, the state begins as zeros: Adam, RMSprop and SGD make of zeros in a planned step what they make in their first one.
Other optimizers do not (SGD with dampening, NAdam), so rank 0 tries it, and refuses those.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_flatten

from hocket.distributed.packets import Packet
from hocket.distributed.parts import Assignment
from hocket.distributed.wire import Wire
from hocket.errors import InputError
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.tracing.captured import Captured
from hocket.tracing.saved_state import Saved
from hocket.tracing.sources import Entry
from hocket.tracing.standing import value_now
from hocket.tracing.state import inventory

# Tolerances of the planned first step against the eager one, by the bytes of an element. 1e-2 for smaller ones.
TOLERANCES = {8: 1e-9, 4: 1e-4}


@dataclass(frozen=True)
class ShardState:
    """State that one rank keeps, as places of a model and an optimizer."""

    owner: int  # number of the server, or the rank
    tensors: tuple[Entry, ...]
    label: str = "state"  # prefix of the values' names on the wire, where each name is used once

    @property
    def packets(self) -> list[Packet]:
        """One packet for each tensor."""
        return [Packet((self.name_of(entry),), (entry.get().nbytes,)) for entry in self.tensors]

    def send(self, wire: Wire) -> None:
        """Send all tensors, and wait."""
        for entry in self.tensors:
            wire.put(self.name_of(entry), entry.get())

    def post(self, wire: Wire) -> None:
        """Send all tensors without waiting. They must not change until they have arrived."""
        for entry in self.tensors:
            wire.post(self.name_of(entry), entry.get())

    def receive(self, wire: Wire) -> None:
        """Receive all tensors into their own memory. Raises as `send`."""
        for entry in self.tensors:
            wire.get(self.name_of(entry), entry.get())

    def name_of(self, entry: Entry) -> str:
        """The name of a tensor on the wire."""
        return f"{self.label}{self.owner}:{entry.name}"


def shard_state(captured: Captured, assignment: Assignment, server: int) -> ShardState:
    """The state that a server keeps. Missing optimizer state is created as zeros."""
    ops = [captured.graph[name] for name in captured.graph.order if name in assignment.server_ops[server]]
    touched = {buffer for op in ops for buffer in (*op.reads, *op.writes)}
    touched |= {each.buffer for each in assignment.pulls if each.server == server}
    make_state(captured, touched)
    places = captured.trace.places
    return ShardState(server, tuple(e for e in (*places.parameters, *places.tensors) if e.name in touched))


def make_state(captured: Captured, names: Collection[str]) -> None:
    """Create missing optimizer state of these names as zeros."""
    examples = {id(source): captured.stand_ins.get(slot) for slot, source in captured.program.inputs.items()}
    for entry in _state_tensors(captured):
        example = examples.get(id(entry))
        if entry.name in names and example is not None and value_now(entry) is None:
            entry.set(torch.zeros_like(example))


def begin_from_zeros(captured: Captured) -> None:
    """Create missing optimizer state as zeros, or raise an `InputError` if the optimizers begin otherwise."""
    if all(value_now(entry) is not None for entry in _state_tensors(captured)):
        return
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


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    tolerance = TOLERANCES.get(one.element_size(), 1e-2)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
