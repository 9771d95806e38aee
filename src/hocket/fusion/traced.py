"""Recorded forwards, and the graphs of B models merged into one.

model 0:  mul(h, 0.1)     model 1:  mul(h, 0.2)      ->  mul(h, ModelValues(0.1, 0.2))
tensors that belong to no layer, of one shape        ->  stacked, (B, ...)
another op, another order, another module            ->  an error that names layer and op

Attributes do not show closures, defaults, ``functools.partial`` and globals, so the graphs are compared instead, with
every constant in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.rules.base import op_name, where
from hocket.fusion.stacked import ModelValues, as_type_of, is_same, joined


@dataclass(frozen=True)
class Traced:
    """A graph and what its nodes stand for."""

    graph: fx.Graph  # the ops of one model
    # for each placeholder that is an input, the number of the leaf among all leaves of the arguments
    inputs: dict[fx.Node, int]
    tensors: dict[fx.Node, str]  # the names of the parameters and buffers that ``get_attr`` nodes stand for
    constants: dict[fx.Node, Any]  # values of ``get_attr`` nodes that belong to no layer
    out_spec: Any  # the tree of the output, of which the graph gives the leaves

    def unflatten(self, out: Any) -> Any:
        """The model's output, made of the values that the graph returns."""
        return pytree.tree_unflatten(list(out) if isinstance(out, (list, tuple)) else [out], self.out_spec)

    def layer(self, node: fx.Node) -> str:
        """The name of the innermost layer a node belongs to, empty for the model itself."""
        return str(node.target) if node.op == "call_module" else str(node.meta.get("layer", ""))


@dataclass(frozen=True)
class Look:
    """A function of torch that a forward has asked for a value (see `hocket.fusion.questions`)."""

    graph: fx.Graph  # ends with the function
    given: tuple[Any, ...]  # for each placeholder the number of a leaf of the arguments, a buffer's name, or a constant
    answer: Any

    def ask(self, given: Sequence[Tensor]) -> Any:
        """The value for other tensors."""
        left, values = iter(given), dict[fx.Node, Any]()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(left)
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            target = getattr(Tensor, node.target) if node.op == "call_method" else node.target
            values[node] = target(*args, **kwargs)
        raise AssertionError("a graph without an output")

    def is_like(self, other: Look) -> bool:
        """True if both have the same value for the same tensors."""
        return self._content() == other._content()

    def _content(self) -> tuple[Any, ...]:
        return str(self.graph), [node.target for node in self.graph.nodes], list(map(id, self.given))


@dataclass(frozen=True)
class RecordedForward:
    """One forward that was recorded."""

    out: Any  # what it returned
    looks: int  # how far it looked at its tensors: `NOTHING`, `SHAPE` or `LAYOUT`
    traced: Traced | None  # its graph, or None
    reason: str = ""  # why there is none
    may_pass: bool = False  # whether there may be one next time, when what is made once is there
    unknown: tuple[Tensor, ...] = ()  # tensors that no op has given
    asked: tuple[Look, ...] = ()  # looks at values that follow from the inputs


def merged(traces: Sequence[Traced]) -> Traced:
    """The graph of the first model, with constants that differ as `ModelValues` or `Stacked`, and nothing else."""
    first = traces[0]
    columns = [list(traced.graph.nodes) for traced in traces]
    places = [{node: place for place, node in enumerate(nodes)} for nodes in columns]
    for row in zip(*columns, strict=False):
        _check_ops(traces, row)
        given = [(node.args, dict(node.kwargs)) for node in row]
        row[0].args, row[0].kwargs = _joined_tree(given, places, _described(first, row[0]))
    lengths = [len(nodes) for nodes in columns]
    if len(set(lengths)) > 1:
        model = next(index for index, length in enumerate(lengths) if length != lengths[0])
        raise InputError(f"models differ: {lengths[0]} ops in model 0, {lengths[model]} in model {model}")
    constants = {
        node: joined([traced.constants[own[place]] for traced, own in zip(traces, columns, strict=True)])
        for place, node in enumerate(columns[0])
        if node in first.constants
    }
    specs = [traced.out_spec for traced in traces]
    if any(spec != specs[0] for spec in specs):
        raise InputError(f"models differ: the output is {specs[0]} in model 0, not in all others")
    return replace(first, constants=constants)


class _NodePlace(int):
    """The value of a node, by its place in the graph."""


def _with_places(tree: Any, places: dict[fx.Node, int]) -> Any:
    """Arguments with nodes as `_NodePlace`. A node of another graph stays as it is."""
    return fx.node.map_aggregate(
        tree, lambda leaf: _NodePlace(places[leaf]) if isinstance(leaf, fx.Node) and leaf in places else leaf
    )


def _check_ops(traces: Sequence[Traced], row: Sequence[fx.Node]) -> None:
    first = row[0]
    for model, node in enumerate(row[1:], 1):
        same = node.op == first.op and (node.target is first.target or bool(node.target == first.target))
        same = same and traces[0].inputs.get(first) == traces[model].inputs.get(node)
        same = same and traces[0].tensors.get(first) == traces[model].tensors.get(node)
        if not same and not (first in traces[0].constants and node in traces[model].constants):
            mine, theirs = _described(traces[0], first), _described(traces[model], node)
            raise InputError(f"models differ: {mine} in model 0, {theirs} in model {model}")


def _described(traced: Traced, node: fx.Node) -> str:
    name = "the output" if node.op == "output" else op_name(node.target) or str(getattr(node.target, "__name__", node))
    return f"{where(traced.layer(node))}: {name}"


def _joined_tree(trees: Sequence[Any], places: Sequence[dict[fx.Node, int]], place: str) -> Any:
    """Arguments of one node of all models as one tree."""
    first = trees[0]
    rest = [_with_places(tree, own) for tree, own in zip(trees, places, strict=True)]
    if all(is_same(rest[0], each) for each in rest[1:]):
        return first
    if {type(tree) for tree in trees} == {type(first)}:
        if isinstance(first, (tuple, list)) and len({len(tree) for tree in trees}) == 1:
            found = [_joined_tree(each, places, place) for each in zip(*trees, strict=True)]
            return found if isinstance(first, list) else as_type_of(first, found)
        if isinstance(first, dict) and all(list(tree) == list(first) for tree in trees):
            return {key: _joined_tree([tree[key] for tree in trees], places, place) for key in first}
    leaves = [leaf for tree in trees for leaf in pytree.tree_leaves(tree)]
    if any(isinstance(leaf, (fx.Node, slice)) for leaf in leaves):
        raise InputError(f"models differ: {place}: its arguments are {trees[0]} in model 0, and other ones in others")
    return ModelValues(tuple(trees))
