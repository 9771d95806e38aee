"""Facts about one op that runs: tensors and numbers among its arguments, and which of them it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hocket.tracing.program import leaves_in, map_leaves
from hocket.tracing.scalars.live import Live
from hocket.tracing.scalars.tape import TapeRef

# Kernels that write running statistics (while training) or scratch memory without saying so in their schema.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::mkldnn_rnn_layer_backward": ("workspace",),
}

# Shape, strides, dtype and device.
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)


@dataclass
class Note:
    """Facts about one recorded op."""

    phase: str  # ``forward``, ``backward`` or ``update``
    layer: str  # path of the module. A backward op has that of its forward op.
    reads: frozenset[int] = frozenset()  # roots of its tensor arguments
    writes: frozenset[int] = frozenset()
    returns: tuple[int | None, ...] = ()  # root of each returned value, in order (None if it is not a tensor)
    random: bool = False  # it draws from the default generator
    grad_mode: bool = False  # gradients were being recorded. Some kernels (oneDNN's LSTM) depend on that.
    # places in its arguments that are filled from the tape, as paths into (args, kwargs)
    scalars: dict[tuple[Any, ...], TapeRef] = field(default_factory=dict)
    # values that the step has put in places of Python's so far, if the op may raise
    effects_before: dict[Any, Any] = field(default_factory=dict)
    is_undone: bool = False  # where it raises, the step is undone, and made by eager

    @property
    def fresh(self) -> frozenset[int]:
        """Roots of what it makes."""
        return frozenset(root for root in self.returns if root is not None) - self.reads


def written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that `func` writes, declared or known."""
    schema = func._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    for position, argument in enumerate(schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name, True)
        if argument.name == "training" and not given:
            undeclared = ()
    for position, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in undeclared:
            if position < len(args):
                yield args[position]
            elif argument.name in kwargs:
                yield kwargs[argument.name]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an op's arguments or results."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor))


def filled_arguments(
    node: fx.Node, note: Note, value: Callable[[fx.Node], Any], number: Callable[[TapeRef], Any]
) -> tuple[Any, Any]:
    """The args and kwargs of a recorded op, with values in place of nodes, and numbers in those that the tape fills."""

    def filled(given: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(given, fx.Node):
            return value(given)
        if path in note.scalars:
            return number(note.scalars[path])
        if isinstance(given, (tuple, list)):
            return tuple(filled(element, (*path, at)) for at, element in enumerate(given))
        if isinstance(given, dict):
            return {key: filled(element, (*path, key)) for key, element in given.items()}
        return given

    defaults = {path[1]: number(each) for path, each in note.scalars.items() if len(path) == 2 and path[0] == 1}
    return filled(node.args, (0,)), filled(node.kwargs, (1,)) | defaults


def with_plain_numbers(args: Any, kwargs: Any) -> tuple[Any, Any, list[Live]]:
    """The arguments with the plain number in place of each symbolic one, and the live ones among these."""
    if not any(isinstance(value, _SYMBOLIC) for value in leaves_in((args, kwargs))):
        return args, kwargs, []
    live: list[Live] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Live):
            live.append(value)
            return value.plain
        return value.node.hint if isinstance(value, _SYMBOLIC) else value

    return map_leaves(args, plain), map_leaves(kwargs, plain), live


def has_size(name: str, tensor: torch.Tensor, like: Any = None, *others: Any, **options: Any) -> bool:
    """Return True for a call that resizes a tensor to the size that it has, which changes nothing."""
    size = getattr(like, "shape", like)
    return name != "aten::set_" and not (others or options) and tuple(size) == tuple(tensor.shape)


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return enough of a tensor to make a fake one of it."""
    if tensor.layout is not torch.strided:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def fake_of(layout: Any, made: dict[Layout, Any]) -> Any:
    """Return the fake tensor of this layout, for each of a list. `made` has those that were made before."""
    if isinstance(layout, list):
        return tuple(fake_of(each, made) for each in layout)
    if layout is not None and layout not in made:
        shape, stride, dtype, device = layout
        made[layout] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return None if layout is None else made[layout]
