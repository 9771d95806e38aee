"""Chains of ops that are one op together: found in the graph, run by `hocket.fusion.rules.pooled` where it applies.

conv1d -> BatchNorm1d -> (relu) -> amax(2)        a pointwise convolution whose maximum over the points is all
                                                   that anybody reads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.fusion.rules.base import is_watched, op_name
from hocket.fusion.rules.pooled import Norm, can_pool, pooled
from hocket.fusion.stacked import Stacked

__all__ = ["Chain", "find_chain"]

DEFAULTS: tuple[tuple[Any, ...], ...] = ((1, (1,)), (0, (0,), "valid"), (1, (1,)), (1,))  # stride, padding, ...


@dataclass(frozen=True)
class Chain:
    """Nodes that follow one another, each the only reader of the one before.

    Attributes:
        nodes: convolution, norm, perhaps ReLU, maximum.
        norm: the norm's layer in the first model, without its tensors.
        layer: its name.
    """

    nodes: tuple[fx.Node, ...]
    norm: nn.Module
    layer: str

    def pool(self, input: Any, weight: Any, bias: Any, lookup: Callable[[str], Any]) -> Tensor | None:
        """The whole chain for one model's plain tensors, or None where it has to go op by op."""
        assert isinstance(self.norm, nn.BatchNorm1d)
        gamma, beta = lookup("weight"), lookup("bias")
        tensors = (input, weight, bias, gamma, beta)
        if not self.norm.training or is_watched() or not all(isinstance(each, Tensor) for each in tensors):
            return None
        if weight.ndim != 3 or weight.shape[2] != 1 or not can_pool(input, weight, gamma):
            return None
        running = (lookup("running_mean"), lookup("running_var"))
        momentum = 0.0 if self.norm.momentum is None else self.norm.momentum
        tracked = self.norm.track_running_stats and running[0] is not None
        setting = Norm(momentum, self.norm.eps, len(self.nodes) == 4)
        out = pooled(input, weight, bias, gamma, beta, running if tracked else None, setting)
        counted = lookup("num_batches_tracked")
        if tracked and counted is not None:
            counted.add_(1)
        return out

    def pool_all(self, args: tuple[Any, ...], lookup: Callable[[str], Stacked | None], num_models: int) -> Any:
        """Model after model; see `pool`."""
        input, weight, bias = args[:3]
        if not isinstance(weight, Stacked) or not isinstance(bias, Stacked):
            return NotImplemented
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        found = {name: lookup(name) for name in names}
        parts = {name: None if each is None else each.tensor.unbind(0) for name, each in found.items()}
        outs: list[Tensor] = []
        for index in range(num_models):
            own = {name: None if each is None else each[index] for name, each in parts.items()}
            a = input.parts()[index] if isinstance(input, Stacked) else input
            out = self.pool(a, weight.parts()[index], bias.parts()[index], own.get)
            if out is None:
                if outs:  # what ran has moved running statistics
                    raise RuntimeError("models of a chain differ")
                return NotImplemented
            outs.append(out)
        return Stacked(torch.stack(outs))

    def rest(self, position: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node but the first, which is the node before."""
        node = self.nodes[position]
        return tuple(node.args[1:]), dict(node.kwargs)


def find_chain(node: fx.Node, layers: Callable[[str], tuple[nn.Module, ...]], known: Callable[[str], bool]) -> Any:
    """The chain that begins at a node, or None.

    Args:
        node: any node.
        layers: gives the layer of each model by name.
        known: whether a layer by this name is fused, and not separate.
    """
    if _name(node) != "conv1d" or node.kwargs or len(node.args) < 3 or not _is_plain(node.args[3:]):
        return None
    norm = _only_reader(node)
    if norm is None or norm.op != "call_module" or not known(str(norm.target)) or len(norm.args) != 1:
        return None
    if any(type(layer) is not nn.BatchNorm1d for layer in layers(str(norm.target))):
        return None
    nodes = [node, norm]
    follower = _only_reader(norm)
    if follower is not None and _name(follower) == "relu" and len(follower.args) == 1:
        nodes.append(follower)
        follower = _only_reader(follower)
    if follower is None or _name(follower) != "amax":
        return None
    axes = {**dict(zip(("dim", "keepdim"), follower.args[1:], strict=False)), **follower.kwargs}
    if axes.get("keepdim") or axes.get("dim") not in (2, -1, (2,), (-1,), [2], [-1]):
        return None
    return Chain((*nodes, follower), layers(str(norm.target))[0], str(norm.target))


def _name(node: fx.Node) -> str | None:
    return op_name(node.target) if node.op in ("call_function", "call_method") else None


def _only_reader(node: fx.Node) -> fx.Node | None:
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    return reader if reader is not None and reader.all_input_nodes == [node] and reader.args[:1] == (node,) else None


def _is_plain(options: tuple[Any, ...]) -> bool:
    return all(option in usual for option, usual in zip(options, DEFAULTS, strict=False))


def plain_lookup(layer: str, tensors: Mapping[str, Tensor]) -> Callable[[str], Any]:
    """A layer's own tensors by name."""
    return lambda name: tensors.get(f"{layer}.{name}")
