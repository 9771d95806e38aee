"""Counts that an optimizer or a model keeps in tensors, followed through what the step does to them.

Adam counts its steps in a tensor and asks for the number inside to correct its bias. The number is known before the
step, and what is done to the tensor since is arithmetic in place (``step += 1``), so it can be written on the tape.
`torch.optim.swa_utils.AveragedModel` asks whether the count in its buffer is zero (``bool(n_averaged == 0)``). The
answer is a guard.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.sources import Constant, Entry, ItemOf


class StepCounts:
    """Answers ``state["step"].item()``: the number the step began with, and what was done to it since.

    And ``bool(count == 0)``, and ``int(pointer)`` of a buffer, for those that the step had not written yet.
    """

    def __init__(self, tape: Tape, ops: OpRecorder, sources: list[Any], tensors: list[torch.Tensor]) -> None:
        self.tape = tape
        self.ops = ops
        counts = [
            (source, tensor)
            for source, tensor in zip(sources, tensors, strict=True)
            if isinstance(source, Entry) and source.kind in ("state", "group", "buffer") and _is_count(tensor)
        ]
        self.sources: dict[int, Any] = {ops.root(tensor): source for source, tensor in counts}
        self.begun = {ops.root(tensor): tensor.item() for _, tensor in counts}  # before the step
        self.leaves: dict[int, Any] = {}

    def __call__(self, tensor: torch.Tensor) -> Any:
        root = self.ops.root(tensor)
        if root not in self.sources and not self._adopted(root):
            return self._compared(tensor) if tensor.dtype is torch.bool else None
        if self.sources[root].kind == "buffer" and (self.ops.writers.get(root) or tensor.dtype is not torch.int64):
            return None
        value = self._begun(root)
        for node, position in self.ops.writers.get(root, ()):
            operation = _ARITHMETIC.get(node.target)
            operand = self._operand(node, position) if operation else None
            if operation is None or operand is None:
                return None
            value = self.tape.apply(operation[tensor.dtype == torch.float32], value, operand)
        return value

    def _adopted(self, root: int) -> bool:
        """Add a count that the step has from elsewhere and has written: that of an optimizer which is not known."""
        tensor = self.ops.outside.get(root)
        source = next((s for s in self.ops.sources if isinstance(s, Constant) and s.value is tensor), None)
        if tensor is None or source is None or not _is_count(tensor):
            return False
        _, begun = self.ops.saved.get(tensor.untyped_storage()._cdata, (None, None))
        if begun is None or begun.nbytes() != tensor.nbytes:
            return False
        with _disable_current_modes():
            self.begun[root] = torch.empty(0, dtype=tensor.dtype).set_(begun).item()
        self.sources[root] = source
        return True

    def _begun(self, root: int) -> Any:
        if root not in self.leaves:
            self.leaves[root] = self.tape.leaf(ItemOf(self.sources[root]), self.begun[root], is_seen=False)
        return self.leaves[root]

    def _compared(self, tensor: torch.Tensor) -> bool | None:
        """The outcome of a comparison of a count with a number, which every later step must find."""
        node = self.ops.node_of(tensor)
        comparison = _COMPARISONS.get(node.target)
        if comparison is None or self.ops.notes[node].scalars or self.ops.writers.get(self.ops.root(tensor)):
            return None
        root = self.ops.roots.get(node.args[0])  # type: ignore[arg-type]
        operand, order = node.args[1], self.ops.order
        # Torch rounds and promotes where one of them is a fraction.
        if root not in self.sources or not type(self.begun[root]) is type(operand) is int:
            return None
        if any(order.index(writer) < order.index(node) for writer, _ in self.ops.writers.get(root, ())):
            return None
        return bool(self.tape.guard(comparison, self._begun(root), operand))

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
    """True for a tensor of one number that can be read, which a model recorded without its values does not have."""
    readable = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
    return tensor.numel() == 1 and readable and not tensor.is_complex()


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
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(_aten, name).Scalar: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
