"""The ops of a step that a CUDA graph can hold, and those that run before and after it.

A graph repeats the addresses and the numbers that it was captured with, and it repeats nothing that the host does. So
an op is left out if it takes a number of the tape, looks at the outcome of a branch, or touches a tensor that is not on
the device: an optimizer's step count on the CPU, a batch that the step itself moves to the device. What depends on such
an op runs after it::

    before              | graph, replayed      | after
    batch to the device | forward, backward    | updates with this step's learning rate

*Before* are ops on tensors of the host that depend on none of the graph, *after* all others that are left out, and
whatever depends on them. Attention with dropout hands on the seed of its draws, which is on the device in a graph and
on the CPU outside of one. So it is left out where its backward is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.execution.streams.device import StreamDevice
from hocket.tracing.captured import Captured
from hocket.tracing.program import Action, Call
from hocket.tracing.raising import is_other_branch
from hocket.tracing.sources import BatchLeaf
from hocket.tracing.standing import value_now

_SEED = re.compile("philox|rng_state")


@dataclass(frozen=True)
class GraphParts:
    """The ops of a step by where they run. Each op is in one of the three sets."""

    before: frozenset[str]
    inside: frozenset[str]
    after: frozenset[str]


def graph_parts(captured: Captured, device: StreamDevice) -> GraphParts:
    """Divide the ops of a step that `device` runs."""
    graph, program = captured.graph, captured.program
    of_host = host_ops(captured, device)
    left_out = of_host | {a.name for a in program.actions if any(map(_is_of_this_step, a.calls))}
    while True:
        before: set[str] = set()
        after: set[str] = set()
        for name in graph.order:
            others = graph.predecessors[name]
            if name in of_host and before.issuperset(others):
                before.add(name)
            elif name in left_out or not after.isdisjoint(others):
                after.add(name)
        read = {slot for name in after for slot in program.by_name[name].reads}
        sowing = {a.name for a in program.actions if a.name not in after and not read.isdisjoint(_seeds(a))}
        if not sowing:
            return GraphParts(frozenset(before), frozenset(graph.order) - before - after, frozenset(after))
        left_out |= sowing


def _is_of_this_step(call: Call) -> bool:
    """Return True if the host gives a call a number, or looks at the outcome of a branch."""
    return bool(call.numbers) or is_other_branch(call.args)


def _seeds(action: Action) -> set[int]:
    """The slots of seeds and offsets of random numbers that an op with dropout hands on."""
    found: set[int] = set()
    for call in action.calls:
        schema = getattr(call.func, "_schema", None)
        if schema is None:
            continue
        given = dict(zip((argument.name for argument in schema.arguments), call.args, strict=False)) | call.kwargs
        if given.get("dropout_p", 0.0) != 0.0:
            names = {at: returned.name or "" for at, returned in enumerate(schema.returns)}
            found.update(slot for at, slot in call.outs.items() if at is not None and _SEED.search(names[at]))
    return found


def host_ops(captured: Captured, device: StreamDevice) -> frozenset[str]:
    """Ops that read or make a tensor that is not in the memory of this device.

    The places of the step's inputs are looked at. Where CPU tensors stand for those of a GPU, the counts of an
    optimizer that is neither capturable nor fused stay on the CPU. From there they follow by torch's rules: what is
    made is where ``device=`` says, an op in place leaves its tensor where it is, and any other result is on the device
    if one of the tensors read is, since a number on the CPU may be mixed with tensors of a device.
    """
    inputs = captured.program.inputs
    foreign = {
        slot
        for slot, value in input_tensors(captured).items()
        if not device.owns(value) or (value.device.type == "cpu" and _is_host_count(inputs[slot]))
    }
    found: set[str] = set()
    for action in (captured.program.prologue, *captured.program.actions):
        for call in action.calls:
            if _makes_foreign(call, foreign, device):
                foreign.update(call.outs.values())
        touched = {slot for call in action.calls for slot in (*call.reads, *call.outs.values())}
        if not foreign.isdisjoint(touched):
            found.add(action.name)
    return frozenset(found - {captured.program.prologue.name})


def input_tensors(captured: Captured) -> dict[int, torch.Tensor]:
    """The tensor of each input, by slot, as it is now, without those that are not there."""
    leaves, _ = tree_flatten(captured.batch)
    found: dict[int, torch.Tensor] = {}
    for slot, source in captured.program.inputs.items():
        value = leaves[source.index] if type(source) is BatchLeaf else value_now(source)
        value = captured.stand_ins.get(slot) if value is None else value
        if value is not None:
            found[slot] = value
    return found


def _makes_foreign(call: Call, foreign: set[int], device: StreamDevice) -> bool:
    where = call.kwargs.get("device")
    if where is not None:
        return not device.owns(where)
    schema = getattr(call.func, "_schema", None)
    is_in_place = schema is not None and any(
        a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )
    if is_in_place and call.reads:
        return call.reads[0] in foreign
    return not call.reads or all(slot in foreign for slot in call.reads)


def _is_host_count(source: Any) -> bool:
    """Return True for a step count that torch keeps on the CPU for parameters on a GPU (`torch.optim.Optimizer`)."""
    if getattr(source, "kind", "") != "state" or source.key != "step":
        return False
    optimizer, parameter = source.table.optimizer, source.table.parameter
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    return not (group.get("capturable") or group.get("fused"))
