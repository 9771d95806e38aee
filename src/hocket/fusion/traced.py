"""What comes of recording a forward: its output, and its graph where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

__all__ = ["RecordedForward", "Traced"]


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
        """The output, from what the graph gives."""
        return pytree.tree_unflatten(list(out) if isinstance(out, (list, tuple)) else [out], self.out_spec)

    def layer(self, node: fx.Node) -> str:
        """The name of the innermost layer a node belongs to; empty for the model itself."""
        return str(node.target) if node.op == "call_module" else str(node.meta.get("layer", ""))


@dataclass(frozen=True)
class RecordedForward:
    """One forward that was recorded."""

    out: Any  # what it returned
    looks: int  # how far it looked at its tensors: `NOTHING`, `SHAPE` or `LAYOUT`
    traced: Traced | None  # its graph, or None
    reason: str = ""  # why there is none
    may_pass: bool = False  # whether there may be one next time, when what is made once is there
    unknown: tuple[Tensor, ...] = ()  # tensors that no op has given
