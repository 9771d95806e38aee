"""Accesses to memory of every op of a captured step, seen by running it: slow, but it trusts no schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from equivalence.compare import bits
from hocket.execution.base import below_autograd
from hocket.tracing.captured import Captured
from support.captures import run_action


@dataclass(frozen=True)
class Seen:
    """Storages of the arguments of one op, those among them that it changed, and those that it made."""

    given: frozenset[int]
    changed: frozenset[int]
    made: frozenset[int]
    random: bool

    def conflicts(self, later: Seen) -> bool:
        """Return True if the order of the two ops changes what `later` computes."""
        mine, its = self.changed | self.made, later.changed | later.made
        return bool(mine & (later.given | its) or self.given & its or (self.random and later.random))


def observe(captured: Captured) -> dict[str, Seen]:
    """Run the step once on copies, in program order, and watch every op."""
    frame = captured.rehearse()
    found = {}
    with below_autograd(), torch.random.fork_rng([]):
        for action in captured.program.actions:
            given = storages([frame.values[slot] for slot in action.reads])
            before = {key: content(tensor) for key, tensor in given.items()}
            random = torch.get_rng_state()
            run_action(action, frame.values, frame.numbers)
            after = storages([frame.values[slot] for slot in action.fills])
            found[action.name] = Seen(
                frozenset(given),
                frozenset(key for key, tensor in given.items() if not torch.equal(before[key], content(tensor))),
                frozenset(after) - frozenset(given),
                not torch.equal(random, torch.get_rng_state()),
            )
    return found


def storages(values: Any) -> dict[int, torch.Tensor]:
    """For each storage one tensor that lives in it."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.untyped_storage().nbytes()}


def content(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return bits(whole).clone()
