"""Products that a step computes part by part, computed at once. Used in the compiling process only.

A layer that is used several times in a step (a recurrent cell at each time, a layer of several inputs, a model over
microbatches) makes many small products, each of which reads the same matrix or adds to the same gradient:

- *Sums of products*: ``A1 B1 + A2 B2 + ...`` is ``[A1 A2 ...] [B1; B2; ...]``, so the gradient of a weight is one
  product, and is written once. They are joined where copying what they multiply is less than adding what they make.
- *Products by the same matrix*: ``A1 B``, ``A2 B``, ... are the rows of ``[A1; A2; ...] B``. They are joined only where
  nothing waits longer for it: those that no other product comes before, some at a time, and those that none comes
  after. What lies between is often a chain, beside which another chain can run.
- *A matrix that all of a chain's products read transposed*, as a layer's weight is, is copied once as they read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from hocket.ir import list_order

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default)
# A product of so few rows takes a third longer by a transposed matrix, and copying that repays with the sixth.
MAX_ROWS, MIN_USES = 128, 12
_TURNS = (_aten.t.default, _aten.permute.default)


def join_products(graph: fx.Graph, is_random: Callable[[Any], bool]) -> None:
    """Join the small products of a functional graph, whose last nodes alone write anything.

    Every node has its value, on fake tensors, as ``meta["val"]``. Nodes whose target `is_random` stay in their order.
    """
    made = _Making(graph, is_random)
    for node in list(graph.nodes):
        if _is_sum(node) and not (len(node.users) == 1 and all(map(_is_sum, node.users))):
            _join_sum(made, node)
    made.sort()
    for is_early in (True, False):
        _join_rows(made, is_early)
        made.sort()
    _copy_turned(made)
    made.sort()


class _Making:
    """Puts nodes into a graph, each at a place in its order."""

    def __init__(self, graph: fx.Graph, is_random: Callable[[Any], bool]) -> None:
        self.graph, self.is_random = graph, is_random
        self._joined: dict[tuple[int, tuple[fx.Node, ...]], fx.Node] = {}
        self.place: dict[fx.Node, float] = {node: number for number, node in enumerate(graph.nodes)}

    def __call__(self, place: float, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(target, args)
        with _value(node.all_input_nodes[0]).fake_mode:
            node.meta["val"] = target(*fx.node.map_arg(args, _value))
        self.place[node] = place
        return node

    def joined(self, place: float, nodes: Sequence[Any], axis: int) -> fx.Node:
        """Concatenate matrices along an axis. Transposed ones are concatenated untransposed. Results are cached."""
        if all(map(_is_turned, nodes)):
            return self(place, _aten.permute.default, self.joined(place, _inner(nodes), 1 - axis), [1, 0])
        key = axis, tuple(nodes)
        if key not in self._joined:
            self._joined[key] = self(place, _aten.cat.default, list(nodes), axis)
        made = self._joined[key]
        self.place[made] = min(self.place[made], place)
        return made

    def by_left(self, products: Iterable[fx.Node]) -> list[fx.Node]:
        """Products by the place of what they multiply first: those of the same matrices are joined in one order."""

        def place(product: fx.Node) -> float:
            left: Any = product.args[-2]
            return self.place[_unturned(left)[0]]

        return sorted(products, key=place)

    def sort(self) -> None:
        """Sort nodes behind their inputs, else by position. Unused nodes are removed."""
        numbers = {node: number for number, node in enumerate(self.graph.nodes)}
        after = dict(pairwise(node for node in numbers if self.is_random(node.target)))
        behind = set(after.values())
        waiting = {node: len(node.all_input_nodes) + (node in behind) for node in numbers}
        followers = {node: (*node.users, *([after[node]] if node in after else ())) for node in numbers}
        order = list(list_order(waiting, followers, lambda node: (self.place[node], numbers[node])))
        output = self.graph.output_node()
        for node in order:
            if node is not output:
                output.prepend(node)
        self.graph.eliminate_dead_code()
        left = set(self.graph.nodes)
        self._joined = {key: node for key, node in self._joined.items() if node in left}


def _value(node: Any) -> Any:
    return node.meta["val"]


def _is_turned(node: fx.Node) -> bool:
    return node.target in _TURNS and _value(node).dim() == 2 and list(node.args[1:]) in ([], [[1, 0]])


def _unturned(node: fx.Node, most_users: float = float("inf")) -> tuple[fx.Node, bool]:
    """Return the tensor below all transpositions, and whether their number is odd."""
    odd = False
    while _is_turned(node) and len(node.users) <= most_users:
        (node,), odd = node.all_input_nodes, not odd
    return node, odd


def _inner(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [each.all_input_nodes[0] for each in nodes]


def _is_sum(node: fx.Node) -> bool:
    """Return whether it is a sum of two different tensors of its own shape and dtype."""
    inputs = node.all_input_nodes
    if node.target is not _aten.add.Tensor or node.kwargs or len(inputs) != 2:
        return False
    values = [_value(each) for each in (node, *inputs)]
    return len({(value.shape, value.dtype) for value in values}) == 1


def _join_sum(made: _Making, root: fx.Node) -> None:
    parts: list[fx.Node] = []
    waiting = [root]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            (waiting if _is_sum(each) and len(each.users) == 1 else parts).append(each)
    place, totals = made.place[root], list[fx.Node]()
    for is_turned in (False, True):
        found = {part: product for part in parts if (product := _small_product(part, is_turned)) is not None}
        if len(found) < 2:
            continue
        products = made.by_left(found.values())
        left, right = ([each.args[n] for each in products] for n in (0, 1))
        total = made(place, _aten.mm.default, made.joined(place, left, 1), made.joined(place, right, 0))
        totals.append(made(place, _aten.permute.default, total, [1, 0]) if is_turned else total)
        parts = [each for each in parts if each not in found]
    if totals:
        total, *others = [*totals, *parts]
        for each in others:
            total = made(place, _aten.add.Tensor, total, each)
        if _value(total).stride() == _value(root).stride():  # a view of it may count on that
            root.replace_all_uses_with(total)


def _small_product(part: fx.Node, is_turned: bool) -> fx.Node | None:
    """The product that this part of a sum is, turned or as it is, if copying its operands is less than adding it."""
    part, odd = _unturned(part, most_users=1)
    if part.target is not _aten.mm.default or len(part.users) != 1 or odd != is_turned:
        return None
    (rows, inner), (_, columns) = (_value(each).shape for each in part.args)
    return part if inner * (rows + columns) <= rows * columns else None


def _join_rows(made: _Making, is_early: bool) -> None:
    """Make one product of those by one matrix that no product comes before, or after, and nothing that draws."""
    reached: set[fx.Node] = set()
    for node in made.graph.nodes if is_early else reversed(made.graph.nodes):
        beside: Iterable[fx.Node] = node.all_input_nodes if is_early else node.users
        if any(each in reached or each.target in _PRODUCTS or made.is_random(each.target) for each in beside):
            reached.add(node)
    groups: dict[Any, list[fx.Node]] = {}
    for node in made.graph.nodes:
        if node.target in _PRODUCTS[:2] and not node.kwargs and node not in reached:
            *added, _, right = node.args
            rows, columns = _value(node).shape
            if 2 * rows <= columns and all(_value(each).dim() == 1 for each in added):
                groups.setdefault((node.target, *added, *_unturned(right)), []).append(node)
    for nodes in groups.values():
        rows = _value(nodes[0]).shape[0]
        at_once = max(1, MAX_ROWS // rows) if is_early else len(nodes)
        nodes = made.by_left(nodes)
        for first in range(0, len(nodes), at_once):
            if len(part := nodes[first : first + at_once]) > 1:
                _join_group(made, part)


def _join_group(made: _Making, nodes: Sequence[fx.Node]) -> None:
    *added, _, right = nodes[0].args
    nodes = made.by_left(nodes)
    left: list[Any] = [node.args[-2] for node in nodes]
    place = max(made.place[each] for each in (*left, *nodes[0].all_input_nodes))
    total = made(place, nodes[0].target, *added, made.joined(place, left, 0), right)
    start = 0
    for node in nodes:
        end = start + _value(node).shape[0]
        node.replace_all_uses_with(made(place, _aten.slice.Tensor, total, 0, start, end))
        start = end


def _copy_turned(made: _Making) -> None:
    """Copy a matrix once that many products of few rows would each read transposed."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in made.graph.nodes:
        if node.target in _PRODUCTS[:2] and _value(node).shape[0] <= MAX_ROWS:
            right: Any = node.args[-1]
            matrix, odd = _unturned(right)
            # One row or column is the same either way.
            if odd and _value(matrix).is_contiguous() and min(_value(matrix).shape) > 1:
                groups.setdefault(matrix, []).append(node)
    for matrix, products in groups.items():
        if len(products) >= MIN_USES:
            place, rows = made.place[matrix], _value(matrix).shape[0]
            # A copy that is no join would be left in the layout of what it is a copy of.
            halves = [made(place, _aten.slice.Tensor, matrix, 0, *each) for each in ((0, rows // 2), (rows // 2, rows))]
            turned = [made(place, _aten.permute.default, half, [1, 0]) for half in halves]
            copied = made(place, _aten.cat.default, turned, 1)
            for product in products:
                product.args = (*product.args[:-1], copied)
