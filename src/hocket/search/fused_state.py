"""State of a trial in a fused slot, the fused optimizer of several trials, and the clipping of their gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hocket.optim import FusedOptimizer, ModelSlots, clip_grad_norm_, clip_grad_value_
from hocket.search.run import Run
from hocket.search.signature import fused_class
from hocket.search.trainer import CannotFuseError
from hocket.search.training import Training

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
