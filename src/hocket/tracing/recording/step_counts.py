"""Numbers that an optimizer or a model keeps in tensors, followed through what the step does to them.

Adam counts its steps in a tensor and asks for the number inside to correct its bias. The number is known before the
step, and what is done to the tensor since is arithmetic (``step += 1``), so it can be written on the tape. So can other
tensors that are computed of it: a rate in a tensor is divided by that correction before an op takes the number.
`torch.optim.swa_utils.AveragedModel` asks whether the count in its buffer is zero (``bool(n_averaged == 0)``). The
answer is a guard.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.sources import Constant, Entry, ItemOf

# Ops from a number that is known before the step to the one that is asked for, at the most.
_MAX_OPS = 8


class StepCounts:
    """Answers ``state["step"].item()``: the number the step began with, and what was done to it since.

    And ``(-lr / 2).item()`` of a rate, ``bool(count == 0)``, and ``int(pointer)`` of a buffer.
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
        if root in self.sources or self._adopted(root):
            is_followed = self.sources[root].kind != "buffer" or tensor.dtype is torch.int64
            return self._after(self.ops.writers.get(root, ()), root) if is_followed else None
        if tensor.dtype is torch.bool:
            return self._compared(tensor)
        return None if root in self.ops.outside else self._made(self.ops.node_of(tensor), _MAX_OPS)

    def _after(self, writers: Iterable[tuple[fx.Node, int]], root: int) -> Any:
        """The number in this memory when these ops have written it, or None."""
        value = self._begun(root)
        for node, position in writers:
            value = None if value is None else self._computed(node, position, value, _MAX_OPS)
        return value

    def _made(self, node: fx.Node, num_ops: int) -> Any:
        """The number in a tensor that ops have made of such numbers, or None."""
        note = self.ops.notes.get(node)
        if note is None or not num_ops or any(root in self.ops.writers for root in note.returns):
            return None
        if node in self.ops.constants:
            return self.ops.constants[node]  # which the step spells out
        if node.target is torch.ops.aten.full.default and self.ops.layouts[node][2] in _KINDS:
            return self.tape.apply(_in(self.ops.layouts[node][2], "fill"), 0, note.scalars.get((0, 1), node.args[1]))
        value = self._content(node.args[0], node, num_ops) if node.args else None
        return None if value is None else self._computed(node, 0, value, num_ops)

    def _content(self, operand: Any, reader: fx.Node, num_ops: int) -> Any:
        """The number in the tensor of a node when an op has read it, or None."""
        if not isinstance(operand, fx.Node):
            return None
        note = self.ops.notes.get(operand)
        root = self.ops.roots.get(operand) if note is None else next(iter(note.returns), None)
        if root not in self.sources:
            return self._made(operand, num_ops - 1)
        order = self.ops.order
        writers = [each for each in self.ops.writers.get(root, ()) if order.index(each[0]) < order.index(reader)]
        return self._after(writers, root)

    def _computed(self, node: fx.Node, position: int, value: Any, num_ops: int) -> Any:
        """The number that an op makes of this one, in the tensor at this position among its own, or None."""
        name = node.target._schema.name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")  # type: ignore[union-attr]
        if name not in _ARITHMETIC or node.kwargs.get("alpha", 1) != 1 or "rounding_mode" in node.kwargs:
            return None
        operands = [each[position] if isinstance(each, (list, tuple)) else each for each in node.args[:2]]
        found = [self.ops.layouts.get(each) for each in (node, *operands) if isinstance(each, fx.Node)]
        layouts = [each for each in found if isinstance(each, tuple)]  # a foreach op returns none, or a list
        dtype = layouts[0][2] if len({each[2] for each in layouts}) == 1 else None
        if dtype not in _KINDS or any(shape.numel() != 1 for shape, *_ in layouts):
            return None
        others = [self._operand(node, operand, position, num_ops) for operand in operands[1:]]
        return None if any(each is None for each in others) else self.tape.apply(_in(dtype, name), value, *others)

    def _adopted(self, root: int) -> bool:
        """Add a count that the step has from elsewhere and has written: that of an optimizer which is not known."""
        tensor = self.ops.outside.get(root)
        source = next((s for s in self.ops.sources.values() if isinstance(s, Constant) and s.value is tensor), None)
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

    def _operand(self, node: fx.Node, operand: Any, position: int, num_ops: int) -> Any:
        scalars = self.ops.notes[node].scalars
        reference = scalars.get((0, 1), scalars.get((0, 1, position)))
        if reference is not None:
            return reference
        if isinstance(operand, fx.Node):
            return self._content(operand, node, num_ops)
        return operand if isinstance(operand, (int, float)) else None


def _is_count(tensor: torch.Tensor) -> bool:
    """True for a tensor of one number that can be read, which a model recorded without its values does not have."""
    readable = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
    return tensor.numel() == 1 and readable and not tensor.is_complex()


@functools.cache
def _in(dtype: torch.dtype, name: str) -> Callable[..., Any]:
    """Arithmetic as torch does it on a tensor of one number."""
    kind, function = _KINDS[dtype], _ARITHMETIC[name]
    plain = int if kind is int else float

    def compute(*values: Any) -> float:
        with np.errstate(all="ignore"):
            return plain(function(*map(kind, values)))

    return compute


_KINDS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: int}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg")},
    "div": operator.truediv,
    "rsub": lambda number, other: other - number,
    **dict.fromkeys(("fill", "copy"), lambda number, other: other),
}
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    getattr(torch.ops.aten, name).Scalar: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
