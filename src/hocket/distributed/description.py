"""Descriptions of what a rank trains, as text: ranks whose descriptions differ are refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hocket.distributed.staging import bytes_of
from hocket.tracing.captured import Captured
from hocket.tracing.program import Call
from hocket.tracing.scalars.tape import TapeRef
from hocket.tracing.sources import Constant

# The description of values that a rank does not have: they are those of rank 0.
OF_RANK_0 = "that of rank 0"


def described(captured: Captured, num_workers: int, num_servers: int) -> dict[str, dict[str, str]]:
    """Describe, by kind and name, everything that must be the same at all ranks of a job."""
    places = captured.trace.places
    tensors = [entry for entry in places.tensors if entry.kind == "buffer"]
    written = {buffer for op in captured.graph.ops for buffer in op.writes}
    lasting = {buffer.name for buffer in captured.graph.buffers}
    constant = [e for e in (*places.parameters, *tensors) if e.name in lasting and e.name not in written]
    digests = {e.name: OF_RANK_0 if e.get().is_meta else digest(e.get()) for e in constant}
    if not num_servers:  # workers may have data of their own in a closure, and ranks of one step may not
        for source in captured.trace.sources.values():
            if isinstance(source, Constant):
                name = f"{source.name}, a tensor of shape {tuple(source.value.shape)} from outside the step"
                digests[name] = digest(source.value)
    return {
        "job": {"torch": torch.__version__, "workers": str(num_workers), "servers": str(num_servers)},
        "parameter": {entry.name: _kind(entry.get()) for entry in places.parameters},
        "buffer": {entry.name: _kind(entry.get()) for entry in tensors},
        "optimizer": _options(places.optimizers),
        "op": _ops(captured),
        "constant": digests,
    }


def _ops(captured: Captured) -> dict[str, str]:
    """Kernel and bytes of each op, and a digest of its calls' arguments other than tensors and its results' layouts.

    Ranks exchange results, so the layouts must be the same everywhere.
    """
    layouts = {
        slot: (tuple(value.shape), value.stride(), value.dtype)
        for node, slot in captured.lowered.slot_of.items()
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    }
    found = {}
    for op in captured.graph.ops:
        action = captured.program.by_name[op.name]
        calls = [(_function(call.func), *_given(call), call.outs) for call in action.calls]
        text = repr((calls, [layouts.get(slot) for slot in action.fills]))
        called = hashlib.sha256(text.encode()).hexdigest()[:8]
        found[op.name] = f"{op.target} of {op.size_bytes:g} bytes, called as {called}"
    return found


def _given(call: Call) -> Any:
    """The arguments of a call, without numbers of the optimizer, which rank 0 sends in each step, and without devices.

    Each rank may have another GPU.
    """
    names = {TapeRef: "a number", torch.device: "a device"}
    return tree_map_only((TapeRef, torch.device), lambda value: names[type(value)], (call.args, call.kwargs))


def _function(func: Any) -> str:
    return str(func) if isinstance(func, torch._ops.OpOverload) else f"{func.__module__}.{func.__qualname__}"


def difference(mine: Mapping[str, Mapping[str, str]], theirs: Mapping[str, Mapping[str, str]]) -> str | None:
    """The first difference between two descriptions, as text, or None."""
    for kind in theirs:
        here, there = mine.get(kind, {}), theirs[kind]
        for name in dict.fromkeys((*there, *here)):
            one, other = here.get(name, "missing"), there.get(name, "missing")
            if one not in (other, OF_RANK_0):
                return f"{kind} {name!r} is {one} here, and {other} on rank 0"
    return None


def kind_of(tensor: torch.Tensor) -> str:
    """The dtype and the shape of a tensor, as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _kind(tensor: torch.Tensor) -> str:
    trained = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else ", not trained"
    return kind_of(tensor) + trained


def _options(optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, str]:
    """Classes and options of optimizers, without the values of numbers, which rank 0 sends in each step."""
    found: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        found[str(number)] = type(optimizer).__name__
        for position, group in enumerate(optimizer.param_groups):
            found[f"{number}.{position}.params"] = str(len(group["params"]))
            for key, value in group.items():
                if key in optimizer.defaults:
                    found[f"{number}.{position}.{key}"] = _option(value)
    return found


def _option(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return str([_option(element) for element in value])
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return repr(value) if isinstance(value, (bool, str, type(None))) else f"a {type(value).__name__}"


def digest(tensor: torch.Tensor) -> str:
    """A hash of the bytes of a tensor, the same in every process."""
    return hashlib.sha256(bytes_of(tensor.detach().contiguous()).cpu().numpy().tobytes()).hexdigest()[:16]
