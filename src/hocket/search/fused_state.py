"""Work of fused slots for each trial by itself: its state, the clipping of its gradients, its metric."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.optim import FusedOptimizer, ModelSlots, clip_grad_norm_, clip_grad_value_
from hocket.search.data import joined, size_of
from hocket.search.run import EpochResult, Run
from hocket.search.signature import fused_class
from hocket.search.trainer import CannotFuseError, averaged, metric_value
from hocket.search.training import Training

__all__ = ["NO_LIMIT", "bring_home", "clip", "fused_optimizer", "measured"]

NO_LIMIT = sys.float_info.max  # of gradients


def bring_home(run: Run, slots: ModelSlots, slot: int) -> None:
    """Put what a slot has made of a trial into its own model and optimizer, whose numbers are the trial's already."""
    assert run.random is not None
    state = slots.state(slot, run.made.model)
    optimizer, entries = run.made.optimizer, state.optimizers[0]["state"]
    params = [(p, group.get("fused")) for group in optimizer.param_groups for p in group["params"]]
    for index, (p, is_fused) in enumerate(params):
        optimizer.state[p] = entries.get(index, {})
        if is_fused and "step" in optimizer.state[p]:  # torch's kernel counts where the parameter is
            optimizer.state[p]["step"] = optimizer.state[p]["step"].to(p.device)
    for device, generator in (state.generators or {}).items():
        run.random.set_on(device, generator)


def fused_optimizer(array: Any, trainings: Sequence[Training], options: frozenset[str]) -> FusedOptimizer:
    """The fused optimizer of these plain ones, which goes on where they are."""
    first = trainings[0]
    kind = fused_class(first.optimizer)
    if kind is None:
        raise CannotFuseError(f"optimizer: {type(first.optimizer).__name__} has no fused form")
    stacked = array.all_tensors()
    names = {id(parameter): name for name, parameter in first.model.named_parameters()}
    groups = []
    for number, group in enumerate(first.optimizer.param_groups):
        own = [names.get(id(parameter)) for parameter in group["params"]]
        if any(name is None or name not in stacked for name in own):
            raise CannotFuseError(f"optimizer: group {number} has parameters that are not fused")
        groups.append({"params": [stacked[str(name)] for name in own]})
        if any(group.get(flag) for flag in ("differentiable", "capturable")):
            raise CannotFuseError("optimizer: differentiable and capturable have no fused form")
    optimizer = kind(groups)
    optimizer.load_unfused([each.optimizer.state_dict() for each in trainings])
    changing = options | ({"lr"} if any(each.scheduler is not None for each in trainings) else set())
    for group in optimizer.param_groups:
        for key in changing & set(optimizer.bounds):
            whole = group[key]
            if isinstance(whole, tuple):
                group[key] = tuple(optimizer.widened(group, part) for part in whole)
            else:
                group[key] = optimizer.widened(group, whole)
    return optimizer


def clip(array: Any, norms: Sequence[float], values: Sequence[float]) -> None:
    """Clip each trial's gradients by its own limits, `NO_LIMIT` for none."""
    for function, limits in ((clip_grad_norm_, norms), (clip_grad_value_, values)):
        if any(limit < NO_LIMIT for limit in limits):
            parameters = [parameter for _, parameter in array.named_parameters()]
            function(parameters, list(limits), num_models=len(limits))


def measured(
    array: Any, batches: Iterable[tuple[Any, Any]], active: Sequence[tuple[int, Run]], failed: dict[int, EpochResult]
) -> dict[int, Any]:
    """For each slot the mean of its metric, or the error that it raised, which is added to those that failed."""
    found: dict[int, list[tuple[float, int]]] = {slot: [] for slot, _ in active}
    trainings = {slot: run.training for slot, run in active if run.training is not None}
    first = next(iter(trainings.values()))

    def measure(outputs: Any, target: Any, size: int) -> None:
        is_plain = isinstance(outputs, torch.Tensor)  # by far the most outputs are, and small ones are many
        for slot, training in trainings.items():
            if slot in failed:
                continue
            try:
                own = outputs[slot] if is_plain else pytree.tree_map_only(torch.Tensor, itemgetter(slot), outputs)
                found[slot].append((metric_value(training.metric(own, target)), size))
            except InputError:
                raise
            except Exception as error:  # noqa: BLE001 - the user's code; this trial ends, no other one
                failed[slot] = EpochResult(error=f"{type(error).__name__}: {error}")

    array.eval()
    whole: list[tuple[Any, Any]] = []
    with torch.no_grad(), first.precision():
        for inputs, target in batches:
            outputs = array(inputs)
            if first.metric_interval == "epoch":
                whole.append((outputs, target))
            else:
                measure(outputs, target, size_of(target, inputs))
        if whole:
            outputs, targets = ([pair[place] for pair in whole] for place in (0, 1))
            measure(joined(outputs, dim=1), joined(targets), 1)
    return {slot: failed.get(slot) or averaged(found[slot]) for slot in trainings}
