"""A graph that `torch.export` traced, as a chain to be cut: bytes, and where no cut may be.

`node_times` has the durations of each node, forward and backward, by running it on its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map

from hocket.errors import InputError
from hocket.planning.partition.pipeline_cut import Chain


def inline_grad_modes(traced: fx.GraphModule) -> None:
    """Replace blocks under ``torch.no_grad`` by their ops, and detach what they return.

    Torch's split takes every attribute that the graph reads for a tensor, and such a block is an attribute, too. Blocks
    that turn autocast off (as rotary embeddings have them) are replaced as well.
    """
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = node.target.name()
        if name == "wrap_with_set_grad_enabled":
            enabled, block, *given = node.args
        elif name == "wrap_with_autocast" and node.args[2] is False:
            _, _, _, _, block, *given = node.args
            enabled = True
        else:
            raise InputError(f"split_policy: node {node.name!r} is a block of kind {name}, which cannot be cut through")
        inner = getattr(traced, str(block.target))
        known = dict(zip([n for n in inner.graph.nodes if n.op == "placeholder"], given, strict=True))
        with traced.graph.inserting_before(node):
            for one in inner.graph.nodes:
                if one.op in ("placeholder", "output"):
                    continue
                known[one] = traced.graph.node_copy(one, known.__getitem__)
                known[one].meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack", {}))
            (result,) = next(n for n in inner.graph.nodes if n.op == "output").args
            for user in list(node.users):
                if user.target is not operator.getitem:
                    raise InputError(f"split_policy: {user.name!r} reads all results of block {node.name!r}")
                found = known[result[user.args[1]]]
                if not enabled:
                    value = found
                    found = traced.graph.call_function(torch.ops.aten.detach.default, (value,))
                    found.meta = dict(value.meta)
                user.replace_all_uses_with(found)
                traced.graph.erase_node(user)
        traced.graph.erase_node(node)
        if not block.users:
            traced.graph.erase_node(block)
    inline_again = any(
        isinstance(node.target, torch._ops.HigherOrderOperator) for node in traced.graph.nodes if node.op != "output"
    )
    if inline_again:  # a block in a block
        inline_grad_modes(traced)


def join_aliases(traced: fx.GraphModule) -> None:
    """Let a tensor that has several names be read by one of them."""
    first: dict[int, fx.Node] = {}
    for node in list(traced.graph.nodes):
        if node.op != "get_attr":
            continue
        value = _attribute(traced, node)
        kept = first.setdefault(id(value), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            traced.graph.erase_node(node)
            kept.meta.setdefault("val", value)
        else:
            node.meta.setdefault("val", value)


def read_by_one_alias(
    traced: fx.GraphModule, value: fx.Node, ops: Sequence[fx.Node], readers: Sequence[fx.Node]
) -> fx.Node:
    """Let the `readers` among the `ops` of a stage read a tensor of several names by one alias, and return that.

    Torch looks a tensor up from the modules that read it outwards, and in the first one that has names of it takes any,
    also that of a module which the stage does not have. So an alias in the module of a name reads it. A tensor of one
    name is returned itself.
    """
    tensor = _attribute(traced, value)
    named = (*traced.named_parameters(remove_duplicate=False), *traced.named_buffers(remove_duplicate=False))
    names = [name for name, each in named if each is tensor]
    if len(names) < 2:
        return value
    for name in sorted(names, key=lambda name: name != value.target):
        owner = name.rpartition(".")[0]
        entered = next((op for op in ops if owner in _modules(op)), ops[0])
        if not owner or any(ops.index(reader) < ops.index(entered) for reader in readers):
            continue
        value.target = name
        with traced.graph.inserting_before(entered):
            alias = traced.graph.call_function(torch.ops.aten.alias.default, (value,))
        outer = list(entered.meta["nn_module_stack"].items())
        inner = _modules(entered).index(owner) if owner in _modules(entered) else 0
        stack = dict(outer[: inner + 1]) if inner else dict([outer[0], (owner, (owner, "torch.nn.Module"))])
        alias.meta = {**entered.meta, "val": value.meta["val"], "nn_module_stack": stack}
        for reader in readers:
            reader.replace_input_with(value, alias)
        return alias
    raise InputError(
        f"split_policy: {value.target!r} is {names[1]!r}, too, and is read outside of the modules of both before them, "
        "where torch's pipelining does not find it; read it by calling one of these modules"
    )


def _modules(node: fx.Node) -> list[str]:
    """The names of the modules that a node runs in, from the model on."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def write_early(traced: fx.GraphModule) -> None:
    """Write into buffers right behind the last op that reads what is written, or the buffer.

    A forward that binds a buffer anew (``self.n += 1``) is traced as one that writes into it after all of its ops.
    """
    for write in list(traced.graph.nodes):
        if write.target is torch.ops.aten.copy_.default and not write.users:
            buffer, value = write.args[:2]
            if buffer.op == "get_attr" and value.op == "call_function":
                _last_reader(value, {value, buffer}, write).append(write)


def _last_reader(last: fx.Node, same: set[fx.Node], before: fx.Node | None = None) -> fx.Node:
    """The last node, before another one, that reads the memory of some tensors or writes into it, or else `last`."""
    for node in last.graph.nodes:
        if node is before:
            break
        if not same.isdisjoint(node.all_input_nodes):
            last = node
            same |= {node} if same.intersection(_views(node)) else set()
    return last


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The tensor, most likely a fake one, that stands for what a node makes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise InputError(f"split_policy: node {node.name!r} makes no tensor that is known beforehand")
    return value


def carries_gradients(node: fx.Node) -> bool:
    """True if gradients may go through what a node makes."""
    value = node.meta.get("val")
    is_whole = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return not is_whole and node.target is not torch.ops.aten.detach.default


def with_gradients(traced: fx.GraphModule) -> frozenset[fx.Node]:
    """The nodes whose tensors have gradients: trained parameters, and what is made of them."""
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        is_trained = node.op == "get_attr" and getattr(_attribute(traced, node), "requires_grad", False)
        if is_trained or (carries_gradients(node) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def chain_of(traced: fx.GraphModule, times: Mapping[str, tuple[float, float]]) -> tuple[tuple[fx.Node, ...], Chain]:
    """The nodes of a traced graph that call something, in its own order, and the chain that they are, in microseconds.

    No cut may be where something other than a tensor would cross it, or a complex one with a gradient (which torch does
    not send), or between a tensor and an op that changes it in place, nor among the ops that read a buffer which one of
    them changes.
    """
    nodes = list(traced.graph.nodes)
    ops = tuple(node for node in nodes if node.op not in ("placeholder", "get_attr", "output"))
    place = {node: position for position, node in enumerate(ops)}
    for node in ops:
        if node.name not in times:
            raise InputError(f"split_policy: no cost for node {node.name!r}")
    trained = with_gradients(traced)
    crossing = [0.0] * len(ops)
    kept, saved = [0.0] * len(ops), [0.0] * len(ops)

    def span(value: fx.Node) -> tuple[int, int]:
        users = [place.get(user, len(ops)) for user in value.users]
        begin = place.get(value, -1) if value.op != "get_attr" else min(users, default=0)
        return begin, min(max(users, default=begin), len(ops) - 1)

    for value in nodes:
        if value.op == "output" or not value.users:
            continue
        begin, end = span(value)
        found = value.meta.get("val")
        can_cross = isinstance(found, torch.Tensor) and not (found.is_complex() and value in trained)
        size = float(found.numel() * found.element_size()) if can_cross else float("inf")
        for cut in range(max(begin + 1, 1), end + 1):
            crossing[cut] += size
        if value.op == "get_attr" and isinstance(found, torch.Tensor):
            kept[begin] += size * (2 if found.requires_grad else 1)
        elif value in place and size < float("inf") and not _views(value):
            saved[place[value]] += size
    for node in ops:
        for changed in _changed(node):
            root = changed
            while root.op == "call_function" and _views(root):
                root = _views(root)[0]
            begin, _ = span(root)
            reader = _last_reader(node, {root}) if root.op == "get_attr" else node
            last = place.get(reader, len(ops) - 1)
            for cut in range(max(begin + 1, 1), last + 1):
                crossing[cut] = float("inf")
    forward, backward = (np.array([times[node.name][phase] for node in ops]) for phase in (0, 1))
    return ops, Chain(forward, backward, np.array(crossing), np.array(kept), np.array(saved))


def is_in_place(node: fx.Node) -> bool:
    """True if a node changes a tensor that it is given."""
    return bool(_changed(node))


def _changed(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors an op changes in place."""
    found = _arguments(node, writes=True)
    name = getattr(node.target, "__name__", "")
    if "batch_norm" in name or "instance_norm" in name:  # which change their statistics and have no such schema
        found += [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)]
    return found


def _views(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory an op's result may be."""
    return _arguments(node, writes=False) + _arguments(node, writes=True)


def _arguments(node: fx.Node, *, writes: bool) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [arg for arg in node.all_input_nodes if node.target is operator.getitem and not writes]
    found = []
    for position, argument in enumerate(schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(given, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write is writes:
            found.append(given)
    return found


def _attribute(traced: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(traced)


RUNS = 3
# A backward that cannot be measured takes twice its forward: a product for the input's gradient, one for the weight's.
BACKWARD = 2.0

# For each node its forward and its backward, in microseconds.
NodeTimes = dict[str, tuple[float, float]]


def node_times(traced: fx.GraphModule) -> NodeTimes:
    """The duration of each node for one micro-batch: the fastest of a few runs.

    Inputs are drawn (whole numbers are 0), buffers are put back, and so is the random generator. A node's backward is
    run on copies of its inputs, with a gradient of ones, right behind its forward.
    """
    like = [tensor_of(node) for node in traced.graph.nodes if node.op == "placeholder"]
    before = [(buffer, buffer.clone()) for buffer in traced.buffers()]
    timer = _Timer(traced)
    with torch.random.fork_rng(devices=[]):
        inputs = [
            (torch.randn if value.is_floating_point() else torch.zeros)(tuple(value.shape), dtype=value.dtype)
            for value in like
        ]
        for _ in range(RUNS):
            timer.needs_gradient.clear()
            with torch.no_grad():
                timer.run(*inputs)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
    return {name: (timer.forward_us[name], timer.backward_us[name]) for name in timer.forward_us}


class _Timer(fx.Interpreter):
    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.forward_us: dict[str, float] = {}
        self.backward_us: dict[str, float] = {}
        self.needs_gradient: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            result = super().run_node(n)
            if n.op == "get_attr" and isinstance(result, torch.Tensor) and result.requires_grad:
                self.needs_gradient.add(n)
            return result
        # Before the node runs: in place, it changes what its backward would be run on.
        backward_us = self._backward(n)
        start = perf_counter()
        result = super().run_node(n)
        forward_us = (perf_counter() - start) * 1e6
        self.forward_us[n.name] = min(forward_us, self.forward_us.get(n.name, forward_us))
        if backward_us is None:
            backward_us = BACKWARD * forward_us
        self.backward_us[n.name] = min(backward_us, self.backward_us.get(n.name, backward_us))
        return result

    def _backward(self, n: fx.Node) -> float | None:
        """Microseconds of a node's backward, or None if it cannot be measured."""
        if n.op != "call_function" or not any(node in self.needs_gradient for node in n.all_input_nodes):
            return 0.0

        def copied(node: fx.Node) -> Any:
            def copy(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                made = value.detach().clone()
                return made.requires_grad_(node in self.needs_gradient and made.is_floating_point())

            return tree_map(copy, self.env[node])

        with torch.enable_grad():
            known = {node: copied(node) for node in n.all_input_nodes}
            leaves = _differentiable(tree_flatten(list(known.values()))[0])
            if is_in_place(n):  # which may not be done to a leaf
                known = {node: tree_map(_behind_leaf, value) for node, value in known.items()}
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), known.__getitem__)
            try:
                made = _differentiable(tree_flatten(n.target(*args, **kwargs))[0])  # type: ignore[operator]
                if not made:
                    return 0.0
                self.needs_gradient.add(n)
                ones = [torch.ones_like(value) for value in made]
                start = perf_counter()
                torch.autograd.grad(made, leaves, ones, allow_unused=True)
            except RuntimeError:  # it has no derivative, or takes no copies
                self.needs_gradient.add(n)
                return None
        return (perf_counter() - start) * 1e6


def _behind_leaf(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _differentiable(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
