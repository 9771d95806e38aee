"""A graph of AOTAutograd's, prepared: as it stands with boxed arguments, and with only what its ops compute returned.

AOTAutograd's graphs return much that no op computes: inputs that the backward needs, None, numbers, one value twice. A
planned call returns each computed value once, and `Outputs` puts the result together.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hocket.dynamo.images import channels_last, norms_in_place

# A graph of fewer ops leaves nothing to plan.
MIN_OPS = 2
_TORCHS_OPS = frozenset(("aten", "prim", "prims", "higher_order", "quantized"))
_TORCHS_MODULES = frozenset(("torch", "_operator", "operator", "math", "builtins"))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of functions
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Outputs:
    """Recipe of a graph's result: computed values, inputs and constants."""

    inputs: tuple[int, ...]  # positions of the inputs that are returned
    constants: tuple[Any, ...]  # values that are returned whatever the inputs are
    order: tuple[int, ...]  # of each output the position in: computed values, then these inputs, then these constants
    moves: bool  # the graph has numbers among its inputs, so that shapes differ between calls

    def put_together(self, computed: Sequence[Any], passed: Sequence[Any]) -> tuple[Any, ...]:
        """The graph's result, of computed values and the inputs at `inputs`."""
        found = (*computed, *passed, *self.constants)
        return tuple(found[place] for place in self.order)


def unchanged(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph of Dynamo's as a function, which stays as it is whatever a compiler makes of the graph."""
    own = copied(graph.graph)
    for node in own.find_nodes(op="call_function", target=tag_activation_checkpoint):
        node.target = checkpointed
    forward: Callable[..., Any] = fx.GraphModule(graph, own).forward
    return forward


def checkpointed(body: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Do what Dynamo writes down as an op of its own: that op leaves it to a compiler to draw the same numbers twice.

    The body gets buffers of modules as arguments, too, and writes them twice, as in eager: so torch's check that no
    argument is written is made here, without these.
    """
    own = body.meta.get("hocket")
    if own is None:
        own = body.meta["hocket"] = unchanged(body)
    tensors = [
        value
        for node, value in zip(body.graph.find_nodes(op="placeholder"), args, strict=True)
        if isinstance(value, torch.Tensor) and not value.is_inference() and "_buffers_" not in node.name
    ]
    versions = [each._version for each in tensors]
    runs = itertools.count()

    def run(*_: torch.Tensor) -> Any:
        if next(runs) and [each._version for each in tensors] != versions:
            raise RuntimeError("an argument of a checkpoint has been modified by an inplace operation")
        return own(*args)

    elsewhere = [each.new_empty(0) for each in tensors if each.device.type != "cpu"]  # whose generators are kept, too
    context = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    return checkpoint(run, *elsewhere, **{**options, "use_reentrant": False, "context_fn": context})


def boxed(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function of one list, which it empties: values are freed after their last use, as in eager."""
    own = copied(graph.graph)
    own.set_codegen(fx.graph._BoxedCodeGen())
    forward: Callable[[list[Any]], Any] = fx.GraphModule(graph, own).forward
    return forward


def computing(graph: fx.GraphModule) -> tuple[Callable[[list[Any]], Any], Outputs]:
    """The graph returning each computed value once, boxed, and how its result is put together."""
    own = copied(graph.graph)
    inputs = {node: place for place, node in enumerate(own.find_nodes(op="placeholder"))}
    end = own.output_node()
    returned = list(end.args[0])  # type: ignore[arg-type]
    computed = list(dict.fromkeys(n for n in returned if isinstance(n, fx.Node) and n not in inputs))
    passed = list(dict.fromkeys(n for n in returned if isinstance(n, fx.Node) and n in inputs))
    constants = [value for value in returned if not isinstance(value, fx.Node)]
    place_of: dict[Any, int] = {node: place for place, node in enumerate([*computed, *passed])}
    following = iter(range(len(place_of), len(place_of) + len(constants)))
    order = [place_of[value] if isinstance(value, fx.Node) else next(following) for value in returned]
    end.args = (computed,)
    own.set_codegen(fx.graph._BoxedCodeGen())
    module = fx.GraphModule(graph, own)
    moves = any(not isinstance(node.meta.get("val"), torch.Tensor) for node in inputs)
    return module.forward, Outputs(tuple(inputs[node] for node in passed), tuple(constants), tuple(order), moves)


def partitioned(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, lays_out: bool = False, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph as eager works: the forward keeps what eager's autograd would keep, and nothing is recomputed.

    Views are not kept beside their base but taken again in the backward: a model with linear layers would return a
    transposed view of each weight from each forward. Those that the forward returns in any case are read from there.
    With `lays_out`, images may get their channels last.
    """
    if not any("recompute" in node.meta for node in joint.graph.nodes):
        norms_in_place(joint)
        if lays_out:
            channels_last(joint, num_fwd_outputs)
    nodes = list(joint.graph.nodes)
    tagged = (place for place, node in enumerate(nodes) if node.meta.get("partitioner_tag") == "is_forward")
    end = max(tagged, default=-1)
    forward, backward = set(nodes[: end + 1]), nodes[end + 1 :]
    forward -= set(joint.graph.output_node().args[0][:num_fwd_outputs])  # type: ignore[index,arg-type]
    again: dict[fx.Node, fx.Node] = {}
    for node in backward:
        if node.op != "call_function":
            continue
        with joint.graph.inserting_before(node):
            for view in [each for each in node.all_input_nodes if each in forward and _is_view(each)]:
                node.replace_input_with(view, _taken_again(joint.graph, view, again))
    joint.recompile()
    return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def _taken_again(graph: fx.Graph, view: fx.Node, again: dict[fx.Node, fx.Node]) -> fx.Node:
    """The same view, of a view that is taken again or of the base."""
    if view not in again:
        (base,) = view.all_input_nodes
        base = _taken_again(graph, base, again) if _is_view(base) else base
        again[view] = made = graph.node_copy(view, lambda _: base)
        made.meta = {key: value for key, value in made.meta.items() if key != "partitioner_tag"}
    return again[view]


def _is_view(node: fx.Node) -> bool:
    is_view = getattr(node.target, "is_view", False) and isinstance(node.meta.get("val"), torch.Tensor)
    return is_view and len(node.all_input_nodes) == 1 and isinstance(node.all_input_nodes[0].meta["val"], torch.Tensor)


def averages(graph: fx.GraphModule) -> list[int]:
    """Positions of the inputs of a graph of Dynamo's that batch norms take: their averages, and weights if any."""
    inputs = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    norms = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "batch_norm"]
    return sorted({inputs[each] for node in norms for each in node.all_input_nodes[1:] if each in inputs})


def keeping_versions(run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """`run` without a new version for its arguments at these places.

    Eager's batch norms write their averages and count no version. A graph that copies into them would keep the results
    of the same model's calls before, which eager has made, from their backward.
    """
    if not places:
        return run

    def kept(*args: Any) -> Any:
        tensors = [
            each for place in places if isinstance(each := args[place], torch.Tensor) and not each.is_inference()
        ]
        versions = [tensor._version for tensor in tensors]
        try:
            return run(*args)
        finally:
            torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))

    return kept


def held_tensors(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Tensors that a graph of Dynamo's uses beside its inputs: an optimizer's parameters and state."""
    targets = dict.fromkeys(str(node.target) for node in graph.graph.find_nodes(op="get_attr"))
    found = [operator.attrgetter(target)(graph) for target in targets]
    return [value for value in found if isinstance(value, torch.Tensor)]


def foreign_call(graph: fx.GraphModule) -> str:
    """The name of a function in a graph of Dynamo's that is not torch's own. Empty if there is none."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op != "call_function":
                continue
            target = node.target
            if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                name = str(target)
                is_known = name.partition(".")[0] in _TORCHS_OPS
            else:
                name = f"{getattr(target, '__module__', None) or 'torch'}.{getattr(target, '__name__', target)}"
                is_known = name.partition(".")[0] in _TORCHS_MODULES
            if not is_known:
                return name
    return ""


def fills_in_zeros(graph: fx.GraphModule) -> bool:
    """True if a graph of Dynamo's has a function with a backward of its own and several results.

    Such a backward runs as soon as one result has a gradient, with zeros for the others. In AOTAutograd's graph it is
    in pieces, of which those for the others look as if they were not run.
    """
    found = [
        len(node.meta["example_value"]) - len(node.kwargs["non_differentiable_idx"])
        for module in graph.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply)
    ]
    return max(found, default=0) > 1


def digest(graph: fx.GraphModule) -> str:
    """A fingerprint of a graph of Dynamo's, the same in each process: its ops, and the shapes of what goes in."""
    parts: list[Any] = [torch.is_grad_enabled()]
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        shape = (
            (value.dtype, *value.shape, *value.stride(), value.requires_grad) if isinstance(value, torch.Tensor) else ""
        )
        parts.append((node.op, node.name, str(node.target), str(node.args), str(node.kwargs), str(shape)))
    return hashlib.sha256(_ADDRESS.sub("", repr(parts)).encode()).hexdigest()


def why_unplannable(graph: fx.GraphModule) -> str:
    """Why this graph runs as it stands. Empty if it may be planned."""
    num_ops = 0
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and (reason := _unplannable(tensor)):
                return f"{node.name} {reason}"
        if node.op in ("call_module", "call_method"):
            return f"it calls {node.target} as Python does"
        if node.op != "call_function" or node.target is operator.getitem or isinstance(value, _SYMBOLIC):
            continue
        num_ops += 1
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"{node.name} is a higher-order op"
        if not isinstance(node.target, torch._ops.OpOverload):
            return f"{node.name} is no op of torch's dispatcher"
    return "" if num_ops >= MIN_OPS else f"it has {num_ops} op(s)"


def _unplannable(tensor: torch.Tensor) -> str:
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "is not dense"
    return "is complex" if tensor.is_complex() else ""


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, with an output like its own."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
