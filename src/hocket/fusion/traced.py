"""What comes of recording a forward: its output, and its graph where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

__all__ = ["RecordedForward", "Traced"]


@dataclass(frozen=True)
class Traced:
    """A graph and what its nodes stand for.

    Attributes:
        graph: the ops of one model.
        inputs: for each placeholder that is an input, the number of the leaf among all leaves of the arguments.
        tensors: the names of the parameters and buffers that ``get_attr`` nodes stand for.
        constants: values of ``get_attr`` nodes that belong to no layer.
        out_spec: the tree of the output, of which the graph gives the leaves.
    """

    graph: fx.Graph
    inputs: dict[fx.Node, int]
    tensors: dict[fx.Node, str]
    constants: dict[fx.Node, Any]
    out_spec: Any

    def unflatten(self, out: Any) -> Any:
        """The output, from what the graph gives."""
        return pytree.tree_unflatten(list(out) if isinstance(out, (list, tuple)) else [out], self.out_spec)

    def layer(self, node: fx.Node) -> str:
        """The name of the innermost layer a node belongs to; empty for the model itself."""
        return str(node.target) if node.op == "call_module" else str(node.meta.get("layer", ""))


@dataclass(frozen=True)
class RecordedForward:
    """One forward that was recorded.

    Attributes:
        out: what it returned.
        looks: how far it looked at its tensors: `NOTHING`, `SHAPE` or `LAYOUT`.
        traced: its graph, or None.
        reason: why there is none.
        may_pass: whether there may be one next time, when what is made once is there.
        unknown: tensors that no op has given.
    """

    out: Any
    looks: int
    traced: Traced | None
    reason: str = ""
    may_pass: bool = False
    unknown: tuple[Tensor, ...] = ()
