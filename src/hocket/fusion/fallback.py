"""Fallbacks for any op: torch's batching over the models, else the models one after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    is_batchedtensor,
)
from torch._functorch.predispatch import lazy_load_decompositions
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.known_functions import is_write
from hocket.fusion.stacked import Stacked, joined, map_tree, part, unwrap


def batched(target: Callable[..., Any], args: Any, kwargs: dict[str, Any], num_models: int) -> Any:
    """Call `target` under one level of torch's batching: ``torch.vmap`` without its 100 us of Python a call."""
    level = _vmap_increment_nesting(num_models, "different")

    def enter(leaf: Any) -> Any:
        return _add_batch_dim(leaf.tensor, 0, level) if isinstance(leaf, Stacked) else leaf

    def leave(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Stacked(_remove_batch_dim(leaf, level, num_models, 0)) if is_batchedtensor(leaf) else leaf
        if holds_tensors(leaf):
            raise ValueError("tensors in an object cannot leave vmap")
        return leaf

    try:
        own_args, own_kwargs = map_tree(args, enter), map_tree(kwargs, enter) if kwargs else kwargs
        result = target(*own_args, **own_kwargs)
        return leave(result) if isinstance(result, Tensor) else pytree.tree_map(leave, result)
    finally:
        _vmap_decrement_nesting()


def vmap(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], num_models: int) -> Any:
    """Call a function for all models under torch's batching. Each model draws its own random numbers."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, Stacked))
    tensors = [unwrap(leaf) for leaf in leaves if isinstance(leaf, (Stacked, Tensor))]
    if not any(isinstance(leaf, Stacked) for leaf in leaves):
        raise ValueError("nothing differs between the models")
    if torch.is_autocast_enabled(tensors[0].device.type):
        raise ValueError("vmap takes linear layers apart before autocast sees them")
    if are_mixed(leaves):
        raise ValueError("under vmap, numbers without axes change the type of a result as tensors with axes do")
    lazy_load_decompositions()
    grad = torch.is_grad_enabled()

    def of_leaves(*own: Any) -> Any:
        inner_args, inner_kwargs = pytree.tree_unflatten(own, spec)
        return target(*inner_args, **inner_kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            return batched(of_leaves, tuple(leaves), {}, num_models)
        finally:  # what fails in the middle may leave a grad mode behind
            torch.set_grad_enabled(grad)


def are_mixed(leaves: Sequence[Any]) -> bool:
    """True if numbers without axes stand beside tensors of another type: torch's promotion is another under vmap."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, (Stacked, Tensor))]
    return any(isinstance(leaf, Stacked) and not leaf.ndim for leaf in tensors) and (
        len({unwrap(leaf).dtype for leaf in tensors}) > 1
    )


def loop(targets: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
    """Call ``targets[i]`` with model i's part of the arguments."""
    shared = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    before = versions(shared)
    outs = []
    writes = is_write(getattr(targets[0], "__name__", str(targets[0])))
    for index, target in enumerate(targets):
        outs.append(target(*part(args, index, writes=writes), **part(kwargs, index, writes=writes)))
        if index + 1 < len(targets) and before != versions(shared):
            raise InputError(
                f"{where}: writes over a tensor that all models read; give each model its own, or clone it in the "
                "forward"
            )
    return stack_parts(outs, where)


def versions(leaves: Sequence[Any]) -> list[int]:
    """The number of writes into each tensor so far."""
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def stack_parts(outs: Sequence[Any], where: str) -> Any:
    """Join the output trees of all models, which have to be alike, into one tree of `Stacked`."""
    if set(map(type, outs)) == {Tensor}:
        return _stacked(outs, where)
    flat = [pytree.tree_flatten(out) for out in outs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise InputError(f"{where}: its output is {spec} in model 0, and something else in another model")
    columns = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if holds_tensors(leaves[0]):
            raise InputError(
                f"{where}: expected tensors in tuples, lists and dicts, got {type(leaves[0]).__name__}; if it is a "
                "dataclass, torch.export.register_dataclass makes it known"
            )
        columns.append(_stacked(leaves, where) if isinstance(leaves[0], Tensor) else joined(leaves))
    return pytree.tree_unflatten(columns, spec)


def _stacked(leaves: Sequence[Tensor], where: str) -> Stacked:
    if len(leaves) == 1:
        return Stacked(leaves[0].unsqueeze(0))
    shapes = {tuple(leaf.shape): index for index, leaf in reversed(list(enumerate(leaves)))}
    if len(shapes) > 1:
        listed = ", ".join(f"{shape} in model {index}" for shape, index in shapes.items())
        raise InputError(f"{where}: its output differs in shape: {listed}; name a larger block in separate=[...]")
    return Stacked(torch.stack(list(leaves)))


def holds_tensors(value: Any) -> bool:
    """True if a value is an object with tensors in its attributes, which `pytree` does not take apart."""
    if isinstance(value, Tensor) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(vars(value)))
