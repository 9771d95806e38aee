"""Probe by one step of a copy of a trial: random draws, and memory of a slot."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hocket.search.data import RandomState, epoch_batches
from hocket.search.training import Training

__all__ = ["Probe", "probe"]


@dataclass(frozen=True)
class Probe:
    """Results of a step."""

    draws: bool  # whether the model draws random numbers in training: each model then needs its own generator
    # memory of one more slot: parameters, buffers and state of the optimizer twice (in the slot, and in the trial's
    # own model), gradients, and tensors saved for the backward
    slot_bytes: int


def probe(training: Training) -> Probe:
    """Take a step of a copy; the trial itself and all generators stay as they are."""
    model, optimizer = copy.deepcopy((training.model.train(), training.optimizer))
    inputs, target = next(iter(epoch_batches(training.batches, 0, 0)))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with RandomState().active():
        device = training.device
        before = RandomState().on(device)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), training.precision():
            loss = training.loss(model(inputs), target)
        draws = not torch.equal(before, RandomState().on(device))
        loss.backward()
        optimizer.step()
    own = [*model.parameters(), *model.buffers()]
    for tensor in (*own, *_tensors((inputs, target))):  # these are counted below, or belong to all
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    states = _tensors(list(optimizer.state.values()))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    slot_bytes = 2 * (_bytes(own) + _bytes(states)) + _bytes(grads) + sum(kept.values())
    return Probe(draws, slot_bytes)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
