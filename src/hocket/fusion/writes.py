r"""Writes in a graph: the values that they change, the readers of these, and activations done in place.

    v = h.view(-1)        an alias of h: the same memory, or a copy, depending on how the models lie in memory
    v += 1                a write
    return h              a later reader of an alias: must see the write

A write is followed if its other readers are reached by ops that certainly give views, such as a transposition. It is
refused if it may be lost, because an op between writer and reader copies where the memory does not fit, or if it goes
into a tensor that belongs to no layer, since each graph has a tensor of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from hocket.fusion.known_functions import is_write
from hocket.fusion.rules.base import IN_PLACE, find, is_watched, op_name

VIEWS = frozenset(
    (
        "transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "select", "narrow", "slice", "unsqueeze",
        "squeeze", "chunk", "tensor_split", "split", "split_with_sizes", "unbind", "diagonal", "expand", "expand_as",
        "broadcast_tensors", "getitem", "getattr",
    )
)  # fmt: skip
# A view or a copy in fused models where it is one in one model.
SAME_OR_NEW = frozenset(
    (
        "detach", "alias", "to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type", "type_as",
        "cpu", "cuda", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
        "feature_alpha_dropout", "requires_grad_", "detach_", "module",
    )
)  # fmt: skip
PERHAPS_VIEWS = frozenset(
    (
        "view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as", "contiguous", "_unsafe_view",
        "unsafe_view", "as_strided",
    )
)  # fmt: skip
NO_WRITES = frozenset(("requires_grad_", "detach_", "retains_grad_"))


@dataclass(frozen=True)
class _Memory:
    """The memory of a node: its owners, the node it is another name of, and if that is certain."""

    roots: frozenset[Any]
    name: fx.Node
    is_certain: bool


def find_writes(
    graph: fx.Graph, tensors: dict[fx.Node, str], constants: dict[fx.Node, Any], block: Callable[[str], nn.Module]
) -> tuple[dict[fx.Node, tuple[int, ...]], set[fx.Node], set[fx.Node], set[Any]]:
    """Find the writes of a graph. A write that may be lost is a `ValueError`.

    Returns the writes with all places of the values that they change, the values that each model has to own, views of
    written memory, and the memory written.
    """
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    last_use = {node: max((places[user] for user in node.users), default=-1) for node in nodes}
    memory: dict[fx.Node, _Memory] = {}
    writes: dict[fx.Node, tuple[int, ...]] = {}
    owned: set[fx.Node] = set()
    views: set[Any] = set()  # roots of what is written to and read
    written: set[Any] = set()
    for node in nodes:
        target = written_by(node, block)
        memory[node] = _memory_of(node, target, memory, tensors, constants)
        if target is None:
            continue
        own = memory[target]
        kinds = {root[0] for root in own.roots}
        written |= own.roots
        if "constant" in kinds:
            raise ValueError(f"{node.name}: writes into a tensor that is no parameter or buffer")
        readers = [
            other
            for other, known in memory.items()
            if known.name is not own.name and known.roots & own.roots and last_use[other] > places[node]
        ]
        is_kept = "tensor" in kinds and own.name.op != "get_attr" and own.name not in tensors
        if (readers or is_kept) and not all(each.is_certain for each in (own, *(memory[other] for other in readers))):
            raise ValueError(f"{node.name}: writes through a view, which may be a copy where models are fused")
        writes[node] = tuple(
            places[other] for other, known in memory.items() if known.name is own.name and other is not node
        )
        if readers:
            owned |= {root[1] for root in own.roots if root[0] == "value"}
        if readers or is_kept:
            views |= own.roots
    return writes, owned, {node for node, known in memory.items() if known.roots & views and _is_view(node)}, written


def _memory_of(
    node: fx.Node,
    target: fx.Node | None,
    memory: dict[fx.Node, _Memory],
    tensors: dict[fx.Node, str],
    constants: dict[fx.Node, Any],
) -> _Memory:
    if node in tensors:  # all nodes that read a tensor are names of one value
        first = next(other for other, name in tensors.items() if name == tensors[node])
        return _Memory(frozenset([("tensor", tensors[node])]), first, True)
    if node in constants:
        return _Memory(frozenset([("constant", id(constants[node]))]), node, True)
    if target is not None:
        return memory[target]
    fresh = _Memory(frozenset([("value", node)]), node, True)
    if not node.op.startswith("call_"):
        return fresh
    name = op_name(node.target) if node.op != "call_module" else "module"
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if any(isinstance(each, (list, fx.Node)) for each in index):
            return fresh  # by an index: a copy
    inputs = [memory[each] for each in node.all_input_nodes]
    is_view = name in VIEWS or name in SAME_OR_NEW
    if inputs and (is_view or name in PERHAPS_VIEWS or find(node.target) is None):
        roots = frozenset().union(*(each.roots for each in inputs))
        return _Memory(roots, node, is_view and all(each.is_certain for each in inputs))
    return fresh


def _is_view(node: fx.Node) -> bool:
    return node.op.startswith("call_") and op_name(node.target) in VIEWS


def written_by(node: fx.Node, block: Callable[[str], nn.Module]) -> fx.Node | None:
    """The value that a node writes over, or None."""
    if not node.op.startswith("call_"):
        return None
    name = op_name(node.target) or str(getattr(node.target, "__name__", ""))
    if isinstance(node.kwargs.get("out"), fx.Node):
        raise ValueError(f"{name}: writes into out=")
    first = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_module":
        return first if getattr(block(str(node.target)), "inplace", False) else None
    if isinstance(node.target, torch._ops.OpOverload):
        return first if node.target._schema.is_mutable else None
    if (
        (is_write(name) and name not in NO_WRITES)
        or (name in IN_PLACE and node.op == "call_function")
        or _is_asked(node)
    ):
        return first
    return None


def _is_asked(node: fx.Node) -> bool:
    """True if a function is called with ``inplace=True``."""
    if node.op != "call_function" or "inplace" in node.kwargs:
        return bool(node.kwargs.get("inplace"))
    if not inspect.isfunction(node.target) or len(node.args) < 2:
        return False
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names[: len(node.args)] and bool(node.args[names.index("inplace")])


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (torch.relu_, torch.relu),
    "relu6": (torch._C._nn.relu6_, functional.relu6),
}
# Ops that give new memory, and whose backward does not look at what is in it.
FRESH = frozenset(
    [*(f"{kind}{rank}d" for kind in ("conv", "conv_transpose") for rank in (1, 2, 3)), "linear", "add", "batch_norm"]
)


def in_place(node: fx.Node) -> Callable[..., Tensor] | None:
    """The function that computes an activation over its input, or None if there is none or its input is read again."""
    name = op_name(node.target) if node.op in ("call_function", "call_method") else None
    if name not in ACTIVATIONS or not node.args:
        return None
    source: Any = node.args[0]
    is_fresh = isinstance(source, fx.Node) and source.op != "call_module" and op_name(source.target) in FRESH
    if not is_fresh or len(source.users) > 1:
        return None
    over, beside = ACTIVATIONS[name]

    def activate(x: Any, *options: Any, **named: Any) -> Tensor:
        # To write over a view, autograd would have to put it back into its base.
        return beside(x) if x._is_view() or is_watched() else over(x)

    return activate
