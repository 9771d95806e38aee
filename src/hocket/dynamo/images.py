"""Rewrites of a joint graph of AOTAutograd's, before it is cut into a forward and a backward: for networks of images.

- `norms_in_place`: AOTAutograd's batch norms return new averages, which are copied into the old ones at the end. As in
  eager, they are written in place.
- `channels_last`: what goes into a convolution has its channels last in memory, from the forward to the backward, so
  that either graph can have the native ops of ``numerics="close"`` (`hocket.tracing.variants`). Parameters, gradients
  and all that the graph returns keep their layout.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from hocket.tracing.lowering.winograd import tiles_filters
from hocket.tracing.rerecording import CONVOLUTIONS

_aten = torch.ops.aten
_NORM, _NORM_BACKWARD = _aten.native_batch_norm.default, _aten.native_batch_norm_backward.default
_NEW_AVERAGES = {3: 3, 4: 4}  # of a functional batch norm: position among its results, and among its arguments
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
# Ops that ask how a tensor lies in memory, or say how another one does.
_ODD = {
    *(_aten.as_strided, _aten.as_strided_scatter, _aten.empty_strided, _aten.new_empty_strided, _aten._reshape_alias),
    *(_aten.view.dtype, _aten.view_as_real, _aten.view_as_complex, _aten.stride, _aten.is_contiguous),
}
_CONTIGUOUS = _aten.contiguous.default
_LAYOUTS = (torch.contiguous_format, torch.channels_last)


def norms_in_place(joint: fx.GraphModule) -> None:
    """Let batch norms write their averages themselves, where nothing else reads these."""
    for node in joint.graph.find_nodes(op="call_function", target=_aten._native_batch_norm_legit_functional.default):
        taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        copies = [_copy_of(taken.get(place), node, node.args[at]) for place, at in _NEW_AVERAGES.items()]
        if node.args[5] is not True or 0 not in taken or None in copies or len(taken) != len(node.users):
            continue
        for copy, place in zip(copies, _NEW_AVERAGES, strict=True):
            assert copy is not None
            joint.graph.erase_node(copy)
            for user in list(taken[place].users):  # a backward of a norm that trains does not look at them
                user.args = tuple(None if each is taken[place] else each for each in user.args)
            joint.graph.erase_node(taken[place])
        node.target = _NORM
        node.meta["val"] = node.meta["val"][:3]


def _copy_of(new: fx.Node | None, norm: fx.Node, average: Any) -> fx.Node | None:
    """The op that copies new averages into the graph's input, if norms alone use either."""
    if new is None or not isinstance(average, fx.Node) or average.op != "placeholder":
        return None
    copies = [user for user in new.users if user.target is _aten.copy_.default and user.args == (average, new)]
    others = [user for user in new.users if user not in copies]
    is_only = len(copies) == 1 and not copies[0].users and set(average.users) == {norm, copies[0]}
    is_unread = all(user.target is _NORM_BACKWARD and user.args[7] is True for user in others)
    return copies[0] if is_only and is_unread else None


def channels_last(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Give images their channels last, where native ops may take the place of torch's."""
    graph, end = joint.graph, joint.graph.output_node()
    inputs = list(dict.fromkeys(_images_of_convolutions(graph)))
    returned: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    layouts = {each: _layout(each.meta["val"]) for each in returned if _is_image(each)}
    if not _has_native_ops(graph) or None in layouts.values() or any(map(_is_odd, graph.nodes)):
        return
    for node in list(graph.nodes):
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):  # by places in memory
            for each in node.all_input_nodes:
                if _is_image(each):
                    node.replace_input_with(each, _laid_out(graph, each, torch.contiguous_format, node))
    for image in inputs:
        after = image.next
        while after.op == "placeholder":
            after = after.next
        users = [user for user in image.users if user is not end]
        made = _laid_out(graph, image, torch.channels_last, after)
        for user in users:
            user.replace_input_with(image, made)
    for place, each in enumerate(returned):
        if each in layouts and each.op != "placeholder":
            is_forward = place < num_fwd_outputs
            returned[place] = _laid_out(graph, each, layouts[each], each.next if is_forward else end)
    end.args = (returned,)


def _images_of_convolutions(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        for position in CONVOLUTIONS.get(node.target, ()):
            if _is_image(node.args[position]):
                yield node.args[position]


def _has_native_ops(graph: fx.Graph) -> bool:
    return any(
        node.args[5] is True if node.target is _NORM else tiles_filters(node.args[1].meta["val"].shape, node.args[3][0])
        for node in graph.nodes
        if node.target in (_NORM, _aten.convolution.default) and _is_image(node.args[0])
    )


def _is_odd(node: fx.Node) -> bool:
    """True for ops whose result depends on how an image lies in memory, and for images that are written."""
    schema = getattr(node.target, "_schema", None)
    is_written = schema is not None and schema.is_mutable and any(map(_is_image, node.all_input_nodes))
    return is_written or not _ODD.isdisjoint((node.target, getattr(node.target, "overloadpacket", None)))


def _is_image(value: Any) -> bool:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(found, torch.Tensor) and found.dim() == 4 and found.is_floating_point()


def _layout(value: torch.Tensor) -> Any:
    return next((each for each in _LAYOUTS if value.is_contiguous(memory_format=each)), None)


def _laid_out(graph: fx.Graph, image: fx.Node, layout: Any, before: fx.Node) -> fx.Node:
    """The image in a layout, made before a node. Where it has the layout already, the op hands it on."""
    with graph.inserting_before(before):
        made = graph.call_function(_CONTIGUOUS, (image,), {"memory_format": layout})
    made.meta = {**image.meta, "val": image.meta["val"].contiguous(memory_format=layout)}
    return made
