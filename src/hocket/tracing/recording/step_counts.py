"""Step counts that an optimizer keeps in tensors, followed through what the step does to them.

Adam counts its steps in a tensor and asks for the number inside to correct its bias. The number is known before the
step, and what is done to the tensor since is arithmetic in place (``step += 1``), so it can be written on the tape.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.state import Entry, ItemOf


class StepCounts:
    """Answers ``state["step"].item()``: the number the step began with, and what was done to it since."""

    def __init__(self, tape: Tape, ops: OpRecorder, sources: list[Any], tensors: list[torch.Tensor]) -> None:
        self.tape = tape
        self.ops = ops
        counts = [
            (source, tensor)
            for source, tensor in zip(sources, tensors, strict=True)
            if isinstance(source, Entry) and source.kind in ("state", "group") and _is_count(tensor)
        ]
        self.sources = {ops.root(tensor): source for source, tensor in counts}
        self.begun = {ops.root(tensor): tensor.item() for _, tensor in counts}  # before the step
        self.leaves: dict[int, Any] = {}

    def __call__(self, tensor: torch.Tensor) -> Any:
        root = self.ops.root(tensor)
        source = self.sources.get(root)
        if source is None:
            return None
        if root not in self.leaves:
            self.leaves[root] = self.tape.leaf(ItemOf(source), self.begun[root], is_seen=False)
        value = self.leaves[root]
        for node, position in self.ops.writers.get(root, ()):
            operation = _ARITHMETIC.get(node.target)
            operand = self._operand(node, position) if operation else None
            if operation is None or operand is None:
                return None
            value = self.tape.apply(operation[tensor.dtype == torch.float32], value, operand)
        return value

    def _operand(self, node: fx.Node, position: int) -> Any:
        operand: Any = node.args[1]
        path: tuple[Any, ...] = (0, 1)
        if isinstance(operand, (list, tuple)):  # a number for each tensor
            operand, path = operand[position], (0, 1, position)
        if node.kwargs.get("alpha", 1) != 1:
            return None
        reference = self.ops.notes[node].scalars.get(path)
        if reference is not None:
            return reference
        if isinstance(operand, fx.Node):
            return self.ops.constants.get(operand)
        return operand if isinstance(operand, (int, float)) else None


def _is_count(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.layout is torch.strided and not tensor.is_complex()


def _add32(a: float, b: float) -> float:
    return float(np.float32(a) + np.float32(b))


def _mul32(a: float, b: float) -> float:
    return float(np.float32(a) * np.float32(b))


# What is done in place to a one-element tensor, in double and in single precision.
_aten = torch.ops.aten
_ARITHMETIC: dict[Any, tuple[Callable[..., float], Callable[..., float]]] = {
    _aten.add_.Tensor: (operator.add, _add32),
    _aten.mul_.Tensor: (operator.mul, _mul32),
    _aten._foreach_add_.Scalar: (operator.add, _add32),
    _aten._foreach_add_.Tensor: (operator.add, _add32),
    _aten._foreach_mul_.Scalar: (operator.mul, _mul32),
    _aten._foreach_mul_.ScalarList: (operator.mul, _mul32),
}
