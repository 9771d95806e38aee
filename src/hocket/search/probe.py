"""What a few steps of a trial show, taken on a copy: random draws, the memory that a slot takes, and the time."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hocket.search.data import RandomState, epoch_batches
from hocket.search.training import Training

__all__ = ["Probe", "probe"]


NUM_TIMED = 3


@dataclass(frozen=True)
class Probe:
    """What the steps showed.

    Attributes:
        draws: whether the model draws random numbers in training; each model then needs a generator of its own.
        slot_bytes: what one more slot takes: parameters, buffers and state of the optimizer twice (in the slot, and in
            the trial's own model), gradients, and what is kept for the backward.
        step_s: the time of the fastest step of one trial alone.
    """

    draws: bool
    slot_bytes: int
    step_s: float = math.inf


def probe(training: Training) -> Probe:
    """Take a few steps of a copy; the trial itself and all generators stay as they are.

    Raises:
        Exception: whatever the step raises.
    """
    model, optimizer = copy.deepcopy((training.model.train(), training.optimizer))
    inputs, target = next(iter(epoch_batches(training.batches, 0, 0)))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with RandomState().active():
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        before = RandomState().on(device)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = training.loss(model(inputs), target)
        draws = not torch.equal(before, RandomState().on(device))
        loss.backward()
        optimizer.step()
        step_s = min(_step_s(training, model, optimizer, inputs, target) for _ in range(NUM_TIMED))
    own = [*model.parameters(), *model.buffers()]
    for tensor in (*own, *_tensors((inputs, target))):  # these are counted below, or belong to all
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    states = _tensors(list(optimizer.state.values()))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    slot_bytes = 2 * (_bytes(own) + _bytes(states)) + _bytes(grads) + sum(kept.values())
    return Probe(draws, slot_bytes, step_s)


def _step_s(training: Training, model: Any, optimizer: Any, inputs: Any, target: Any) -> float:
    start = perf_counter()
    optimizer.zero_grad()
    training.loss(model(inputs), target).backward()
    optimizer.step()
    return perf_counter() - start


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
