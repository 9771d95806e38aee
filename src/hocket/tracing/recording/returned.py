"""The result of a step, leaf by leaf: values, numbers, tensors, and the autograd graphs of these."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from hocket.pystate.places import is_a, is_spent
from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.recording.step_arrays import StepValue
from hocket.tracing.scalars.live import Late, Live
from hocket.tracing.scalars.tape import TapeRef
from hocket.tracing.sources import PLAIN


def returned_leaf(
    ops: OpRecorder, leaf: Any, objects: Mapping[int, Any], line: str, detaches: bool
) -> tuple[str, Any, str | None]:
    """Find the kind of a leaf of a step's result and the source of its value (see `record.Result`).

    With `detaches` a tensor may be returned without the graph that a backward outside of the step would need. Where a
    graph cannot return the leaf, `ops` take the reason, with the line of the user's code.

    Returns:
        Kind, value, and the name of the autograd node of a tensor that requires a gradient, or None.
    """
    if isinstance(leaf, Late) and leaf.entry is not None:
        return "late", leaf.entry, None
    if isinstance(leaf, Late):
        return "item", ops.node_of(leaf.tensor), None
    if isinstance(leaf, Live):
        return "number", TapeRef(leaf.entry), None
    if isinstance(leaf, torch.Tensor):
        if id(leaf) in objects:
            return "place", objects[id(leaf)], None
        own = (
            []
            if isinstance(leaf, FakeTensor)
            else [name for name, value in vars(leaf).items() if not _is_mark(name, value)]
        )
        if own:
            ops.reasons.add("returns attributes", f"{_shown(leaf)} with an attribute {own[0]!r}", line)
        is_live = leaf.grad_fn is not None and not is_spent(leaf.grad_fn)
        if is_live and detaches:
            return "tensor", ops.node_of(leaf), None
        if leaf.retains_grad or (leaf.is_leaf and leaf.grad is not None):
            ops.reasons.add("retains a gradient", _shown(leaf), line)
        elif is_live:
            ops.reasons.add("returns a graph", _shown(leaf), line)
        name = None if not leaf.requires_grad else "" if leaf.grad_fn is None else leaf.grad_fn.name()
        return "tensor", ops.node_of(leaf), name
    if is_a(leaf, StepValue) and (tensor := leaf.tape.left_tensor(leaf)) is not None:
        return "array" if is_a(leaf.plain, np.ndarray) else "scalar", ops.node_of(tensor), None
    if is_a(leaf, StepValue) or not isinstance(leaf, PLAIN):
        ops.reasons.add("returns unseen", f"{type(leaf).__module__}.{type(leaf).__name__}", line)
    return "value", leaf, None


def _is_mark(name: str, value: Any) -> bool:
    """Return True for Dynamo's marks, and the backward of fused losses, for which a planned step has no use."""
    return name.startswith("_dynamo_") or (
        isinstance(value, partial) and str(value.func.__module__).startswith("hocket.")
    )


def _shown(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"
