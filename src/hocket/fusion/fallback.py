"""What serves any op: ``torch.vmap`` over the models, and, where that fails, the models one after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.constants import joined
from hocket.fusion.stacked import Stacked, part, unwrap

__all__ = ["loop", "stack_parts", "vmap"]


def vmap(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `target` for all models through ``torch.vmap``; every model draws its own random numbers.

    Raises:
        RuntimeError, ValueError: vmap cannot do it.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, Stacked))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]
    if not places:
        raise ValueError("nothing differs between the models")
    tensors = [unwrap(leaf) for leaf in leaves if isinstance(leaf, (Stacked, Tensor))]
    if torch.is_autocast_enabled(tensors[0].device.type):
        raise ValueError("vmap takes linear layers apart before autocast sees them")
    if len({tensor.dtype for tensor in tensors}) > 1 and any(leaves[place].ndim == 0 for place in places):
        raise ValueError("under vmap, numbers without axes change the type of a result as tensors with axes do")
    out_spec: Any = None
    is_tensor: list[bool] = []
    plain: list[Any] = []

    def of_one(*own: Tensor) -> tuple[Tensor, ...]:
        nonlocal out_spec, is_tensor, plain
        filled = list(leaves)
        for place, value in zip(places, own, strict=True):
            filled[place] = value
        inner_args, inner_kwargs = pytree.tree_unflatten(filled, spec)
        outs, out_spec = pytree.tree_flatten(target(*inner_args, **inner_kwargs))
        if any(_holds_tensors(out) for out in outs):
            raise ValueError("tensors in an object cannot leave vmap")
        is_tensor = [isinstance(out, Tensor) for out in outs]
        plain = [None if isinstance(out, Tensor) else out for out in outs]
        return tuple(out for out in outs if isinstance(out, Tensor))

    # What fails in the middle may leave a grad mode behind.
    with warnings.catch_warnings(), torch.set_grad_enabled(torch.is_grad_enabled()):
        warnings.filterwarnings("ignore", "There is a performance drop")
        results = torch.vmap(of_one, randomness="different")(*(leaves[place].tensor for place in places))
    given = iter(results)
    filled = [Stacked(next(given)) if tensor else value for tensor, value in zip(is_tensor, plain, strict=True)]
    return pytree.tree_unflatten(filled, out_spec)


def loop(targets: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
    """Call ``targets[i]`` with model i's part of the arguments."""
    shared = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    before = [leaf._version for leaf in shared if not leaf.is_inference()]
    outs = []
    for index, target in enumerate(targets):
        outs.append(target(*part(args, index), **part(kwargs, index)))
        if index + 1 < len(targets) and before != [leaf._version for leaf in shared if not leaf.is_inference()]:
            raise InputError(
                f"{where}: writes over a tensor that all models read; give each model its own, or clone it in the "
                "forward"
            )
    return stack_parts(outs, where)


def stack_parts(outs: Sequence[Any], where: str) -> Any:
    """The trees of all models as one tree of `Stacked`.

    Raises:
        InputError: the models' tensors differ in shape, or are in objects.
    """
    flat = [pytree.tree_flatten(out) for out in outs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise InputError(f"{where}: its output is {spec} in model 0, and something else in another model")
    columns = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if _holds_tensors(leaves[0]):
            raise InputError(
                f"{where}: expected tensors in tuples, lists and dicts, got {type(leaves[0]).__name__}; if it is a "
                "dataclass, torch.export.register_dataclass makes it known"
            )
        if not isinstance(leaves[0], Tensor):
            columns.append(joined(leaves))
            continue
        shapes = {tuple(leaf.shape): index for index, leaf in reversed(list(enumerate(leaves)))}
        if len(shapes) > 1:
            listed = ", ".join(f"{shape} in model {index}" for shape, index in shapes.items())
            raise InputError(f"{where}: its output differs in shape: {listed}; name a larger block in separate=[...]")
        columns.append(Stacked(torch.stack(leaves) if len(leaves) > 1 else leaves[0].unsqueeze(0)))
    return pytree.tree_unflatten(columns, spec)


def _holds_tensors(value: Any) -> bool:
    """Whether a value is an object around tensors; trees are taken apart, but what is in such an object is not seen."""
    if isinstance(value, Tensor) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(vars(value)))
