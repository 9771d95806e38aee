"""A compiled graph with its gradients as one node of autograd, in place of AOTAutograd's own.

Three things that AOTAutograd does are not eager's. It hands zeros to the backward for outputs that no gradient reaches,
so that what only they depend on gets zeros, where eager leaves None and an optimizer with momentum moves nothing. It
adds up the gradients of an input that a graph uses several times before autograd adds those of other uses (another call
of the graph, a penalty on weights), where eager adds one after another (`split_sums`). And what it has computed cannot
be differentiated twice::

    outputs that got a gradient     backward
    all                             the graph that AOTAutograd made, a region
    some                            the same without the others' gradients and what depends on these alone, a region
    any, with create_graph=True     Dynamo's graph again, differentiated by autograd

The second kind saves work, too: a language model that returns its logits beside its loss adds no zeros to the gradient
of the logits. The third has eager's gradients but for rounding, since sums of gradients are made in another order. So
it is for one call: from the next on the graph runs as it stands (`hocket.dynamo.contest`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch.utils._pytree import tree_leaves

from hocket.dynamo.graphs import copied

Boxed = Callable[[list[Any]], Any]
_OWN = frozenset((OutputType.non_alias, OutputType.unsafe_view_alias))
_ADD = torch.ops.aten.add.Tensor
_VERSION = operator.attrgetter("_version")
# An input with more gradients than this gets their sum: each of them would be kept until autograd adds them.
MAX_PARTS = 8


class Differentiable:
    """A graph of Dynamo's that runs by AOTAutograd's graphs of it.

    Args:
        original: the graph as it stands.
        forward: boxed, of the graph's inputs. Returns the outputs, and what the backward needs.
        graph: the backward, of what it needs and the gradients of those outputs that may have one.
        draws: the forward draws random numbers.
        meta: AOTAutograd's notes on the graph.
        compile: makes a boxed function of a backward graph.
        repeated: positions of the inputs of the further gradients that the backward returns behind one for each input.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        forward: Boxed,
        graph: fx.GraphModule,
        draws: bool,
        meta: Any,
        compile: Callable[[fx.GraphModule], Boxed],
        repeated: Sequence[int],
    ) -> None:
        self.original, self.forward, self.draws, self.repeated = original, forward, draws, repeated
        # called when gradients are asked for that can be differentiated again
        self.on_twice: Callable[[], object] = lambda: None
        self._graph, self._compile = graph, compile
        self._backward: dict[frozenset[int], Boxed] = {frozenset(): compile(graph)}
        infos = meta.output_info
        self.num_outputs = len(infos)
        self.checked = meta.tensors_saved_for_backwards_with_vc_check_slice
        self.unchecked = meta.tensors_saved_for_backwards_no_vc_check_slice
        self.inputs = {place: each.base_idx for place, each in enumerate(infos) if each.output_type not in _OWN}
        self.views = [place for place, each in enumerate(infos) if each.output_type is OutputType.unsafe_view_alias]
        self.constant = [place for place, each in enumerate(infos) if not each.requires_grad]
        self.trained = _trained(meta)
        given = graph.graph.find_nodes(op="placeholder")
        self._num_saved = len(given) - len(self.trained)
        self._layouts = [(node.meta["val"].shape, node.meta["val"].stride()) for node in given[self._num_saved :]]
        self.writes = bool(meta.mutated_graph_handled_indices)
        self._versions = meta.mutated_graph_handled_indices_seen_by_autograd

    def __call__(self, *args: Any) -> Sequence[Any]:
        """The outputs of the graph."""
        if self._versions:
            torch.autograd.graph.increment_version([args[place] for place in self._versions])
        outputs: Sequence[Any] = _Node.apply(self, *args, *(args[place] for place in self.repeated))
        if not self.inputs:
            return outputs
        return [args[self.inputs[place]] if place in self.inputs else each for place, each in enumerate(outputs)]

    @torch._dynamo.disable  # compiled autograd would compile what is behind it
    def gradients(self, needed: Sequence[torch.Tensor], given: Sequence[Any]) -> Sequence[Any]:
        """A gradient for each input and for each repeated one, or None."""
        arrived = [given[place] for place in self.trained]
        missing = frozenset(n for n, each in enumerate(arrived) if each is None)
        laid_out = [_laid_out(each, *self._layouts[n]) for n, each in enumerate(arrived) if each is not None]
        backward = self._backward.get(missing)
        if backward is None:
            pruned = without_gradients(self._graph, self._num_saved, missing)
            backward = self._backward[missing] = self._compile(pruned)
        found: Sequence[Any] = backward([*needed, *laid_out])
        return found

    @torch._dynamo.disable
    def gradients_again(
        self, args: Sequence[Any] | None, random_state: torch.Tensor | None, given: Sequence[Any]
    ) -> list[Any]:
        """The same with a graph of their own, for gradients of gradients.

        `args` are those of the forward, or None if they have been written, by it or since, which is a RuntimeError
        here. `random_state` is that before the forward, or None if it draws no numbers, and `given` has None where no
        gradient of an output has arrived.
        """
        self.on_twice()
        if args is None:
            raise RuntimeError(
                "a graph of backend='hocket' whose inputs have been written, by itself (a batch norm's averages) or "
                "since, cannot be differentiated twice; from the next call on it runs as it stands, where it can"
            )
        with torch.enable_grad(), torch.random.fork_rng(devices=(), enabled=random_state is not None):
            if random_state is not None:
                torch.set_rng_state(random_state)
            outputs = self.original(*args)
            pairs = [(output, each) for output, each in zip(outputs, given, strict=True) if each is not None]
            leaves = {n: each for n, each in enumerate(args) if isinstance(each, torch.Tensor) and each.requires_grad}
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                list(leaves.values()),
                [each for _, each in pairs],
                create_graph=True,
                allow_unused=True,
            )
        of_leaf = dict(zip(leaves, found, strict=True))
        return [of_leaf.get(n) for n in range(len(args))] + [None] * len(self.repeated)


class _Node(torch.autograd.Function):
    """A call of a `Differentiable`."""

    @staticmethod
    def forward(ctx: Any, graph: Differentiable, *args: Any) -> tuple[Any, ...]:
        args = args[: len(args) - len(graph.repeated)]
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        ctx.args, ctx.versions = (None, []) if graph.writes else (args, _versions(args))
        ctx.random_state = torch.get_rng_state() if graph.draws else None
        found = graph.forward(list(args))
        ctx.save_for_backward(*map(_alone, found[graph.checked]))
        ctx.unchecked = list(map(_alone, found[graph.unchecked]))
        outputs = list(found[: graph.num_outputs])
        for place in graph.views:
            outputs[place] = torch.ops.aten._unsafe_view(outputs[place], outputs[place].shape)
        for place in graph.inputs:
            outputs[place] = None
        ctx.mark_non_differentiable(*(v for n in graph.constant if isinstance(v := outputs[n], torch.Tensor)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        graph: Differentiable = ctx.graph
        if torch.is_grad_enabled():
            args = ctx.args if ctx.args is None or _versions(ctx.args) == ctx.versions else None
            return None, *graph.gradients_again(args, ctx.random_state, given)
        needed = [*ctx.saved_tensors, *ctx.unchecked]
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # they are freed after their last use
            ctx.maybe_clear_saved_tensors()
            ctx.args = ctx.unchecked = None
        return None, *graph.gradients(needed, given)


def differentiable(
    original: Callable[..., Any],
    num_inputs: int,
    forward: tuple[fx.GraphModule, Boxed],
    backward: fx.GraphModule,
    meta: Any,
    compile: Callable[[fx.GraphModule], Boxed],
    repeated: Sequence[int] = (),
) -> Differentiable | None:
    """A graph with its gradients, or None where AOTAutograd does more around it: views, subclasses, tokens."""
    graph, run = forward
    given = graph.graph.find_nodes(op="placeholder")
    if len(given) != num_inputs or not all(isinstance(node.meta.get("val"), torch.Tensor) for node in given):
        return None
    if not torch.is_grad_enabled() or torch._C._is_any_autocast_enabled() or _draws(backward):
        return None
    does_more = (
        meta.num_mutated_inp_runtime_indices
        or meta.num_intermediate_bases
        or meta.indices_of_inputs_that_requires_grad_with_mutations_in_bw
        or meta.num_symints_saved_for_bw
        or meta.num_opaque_objects_saved_for_bw
        or meta.grad_enabled_mutation is not None
        or meta.tokens
        or meta.num_backward_tokens
        or meta.is_rng_op_functionalized
        or meta.dynamic_outputs
    )
    kinds = {each.output_type for each in meta.output_info}
    is_plain = all(isinstance(each, PlainTensorMeta) for each in (*meta.subclass_inp_meta, *meta.subclass_tangent_meta))
    if does_more or not is_plain or kinds - _OWN - {OutputType.is_input}:
        return None
    return Differentiable(original, run, backward, _draws(graph), meta, compile, repeated)


def num_trained(meta: Any) -> int:
    """Return how many outputs may have a gradient."""
    return len(_trained(meta)) + int(meta.num_intermediate_bases)


def split_sums(graph: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, list[int]]:
    """A backward graph that returns the gradient of each use of an input, and the inputs of all but the first of each.

    Autograd marks the sums that it makes. As many of them belong to an input as it has further uses: others are of what
    is computed of it, such as a residual stream, whose gradient arrives as one.
    """
    own = copied(backward.graph)
    end = own.output_node()
    output = graph.graph.output_node()
    found, further, places = list(end.args[0]), [], []  # type: ignore[arg-type]
    inputs = graph.graph.find_nodes(op="placeholder")
    if len(inputs) != len(found):  # ops that check values, such as those of linear algebra, have tokens for their order
        return backward, []
    for place, given in enumerate(inputs):
        num_uses = sum(tree_leaves((user.args, user.kwargs)).count(given) for user in given.users if user is not output)
        first, parts = found[place], list[Any]()
        while len(parts) < num_uses - 1 and isinstance(first, fx.Node) and first.meta.get("is_gradient_acc"):
            first, part = first.args
            parts.insert(0, part)
        if 0 < len(parts) < MAX_PARTS:
            found[place] = first
            further += parts
            places += [place] * len(parts)
    end.args = ([*found, *further],)
    own.eliminate_dead_code()
    return fx.GraphModule(backward, own), places


def without_gradients(graph: fx.GraphModule, num_saved: int, missing: frozenset[int]) -> fx.GraphModule:
    """A backward graph for the case that the gradients at some positions are `missing`, which it does not take.

    Autograd runs no node that no gradient reaches, whatever it computes, but gives zeros beside gradients that do.
    The graph's inputs are what was saved, then the gradients.
    """
    pruned = copied(graph.graph)
    given = pruned.find_nodes(op="placeholder")[num_saved:]
    depends = set(given)  # on gradients
    dead = {node for place, node in enumerate(given) if place in missing}
    for node in pruned.nodes:
        inputs = [each for each in node.all_input_nodes if each in depends] if node.op == "call_function" else []
        if not inputs:
            continue
        depends.add(node)
        absent = [each for each in inputs if each in dead]
        if len(absent) == len(inputs):
            dead.add(node)
        elif len(absent) == 1 and node.target is _ADD and len(inputs) == 2 and _are_alike(node, inputs):
            (live,) = set(inputs) - dead
            node.replace_all_uses_with(live)
            pruned.erase_node(node)
        else:
            for each in absent:
                with pruned.inserting_before(node):
                    node.replace_input_with(each, _zeros(pruned, each))
    end = pruned.output_node()
    end.args = ([None if each in dead else each for each in end.args[0]],)  # type: ignore[union-attr]
    for node in reversed(pruned.nodes):
        if node in dead:
            pruned.erase_node(node)
    pruned.eliminate_dead_code()
    return fx.GraphModule(graph, pruned)


def _are_alike(node: fx.Node, inputs: Sequence[fx.Node]) -> bool:
    """True if a sum has no factor, and either of its inputs could stand in its place."""
    values = [each.meta["val"] for each in (node, *inputs)]
    return not node.kwargs and len({(value.shape, value.stride(), value.dtype) for value in values}) == 1


def _zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    made = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), options)
    made.meta["val"] = value
    return made


def _trained(meta: Any) -> list[int]:
    """Outputs whose gradients the backward takes."""
    return [
        place
        for place, each in enumerate(meta.output_info)
        if each.output_type in _OWN
        and issubclass(each.raw_type, torch.Tensor)
        and getattr(each, "requires_grad_for_backward", each.requires_grad)
    ]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Count how often each was written. Tensors of inference mode do not count that."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [0 if each.is_inference() else each._version for each in tensors]


def _draws(graph: fx.GraphModule) -> bool:
    seeded = torch.Tag.nondeterministic_seeded
    return any(seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one that keeps no base alive by autograd's notes on views.

    A view of a parameter that was taken below autograd counts as a leaf with a gradient, by plan and at times op by op.
    """
    is_odd = tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, torch.nn.Parameter)
    return tensor.detach() if is_odd or tensor._is_view() else tensor


def _laid_out(gradient: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A gradient with the memory layout that the backward was made for."""
    if gradient.stride() == stride:
        return gradient
    return gradient.new_empty_strided(shape, stride).copy_(gradient)  # as many as are taken at once
