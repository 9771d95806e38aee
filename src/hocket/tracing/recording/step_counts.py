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
from torch.utils._python_dispatch import _disable_current_modes

from hocket.tracing.recording.recorder import OpRecorder
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.state import Entry, ItemOf

__all__ = ["StepCounts"]


class StepCounts:
    """Answers ``state["step"].item()``: the number the step began with, and what was done to it since."""

    def __init__(self, tape: Tape, watch: OpRecorder, sources: list[Any], tensors: list[torch.Tensor]) -> None:
        self.tape = tape
        self.watch = watch
        self.sources = {
            watch.root(tensor): source
            for source, tensor in zip(sources, tensors, strict=True)
            if isinstance(source, Entry) and source.kind in ("state", "group") and tensor.numel() == 1
        }
        self.leaves: dict[int, Any] = {}

    def __call__(self, tensor: torch.Tensor) -> Any:
        root = self.watch.root(tensor)
        source = self.sources.get(root)
        if source is None:
            return None
        if root not in self.leaves:
            with _disable_current_modes():
                # Counted up already: what the leaf stands for in the trace is one step on (see `_moved`).
                self.leaves[root] = self.tape.leaf(ItemOf(source), tensor.item())
        value = self.leaves[root]
        for node, position in self.watch.writers.get(root, ()):
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
        reference = self.watch.notes[node].scalars.get(path)
        if reference is not None:
            return reference
        if isinstance(operand, fx.Node):
            return self.watch.constants.get(operand)
        return operand if isinstance(operand, (int, float)) else None


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
