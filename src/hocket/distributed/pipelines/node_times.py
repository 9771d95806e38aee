"""Durations of each node of a traced graph, forward and backward, by running it on its own."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map

from hocket.distributed.pipelines.traced import is_in_place, tensor_of

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
