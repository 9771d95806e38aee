"""Tensors that a step returns with a graph of autograd that its own backward has used up.

Eager returns a loss that requires a gradient, and a second backward through it raises. A planned step has no such
graph, so what it returns gets a node that raises the same error.
"""

from __future__ import annotations

from typing import Any

import torch

from hocket import native

SPENT = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(SPENT)


def with_spent_graph(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor as eager returns it: it requires a gradient, and a backward through its graph raises.

    The tensor is detached, and not used elsewhere. `name` is that of its autograd node in eager, empty for a leaf.
    """
    if not name:
        return tensor.requires_grad_()
    if native.available():
        result: torch.Tensor = native.load().with_spent_graph(tensor, name, SPENT)
        return result
    with torch.enable_grad():
        spent: torch.Tensor = _Spent.apply(tensor.requires_grad_())
    return spent
