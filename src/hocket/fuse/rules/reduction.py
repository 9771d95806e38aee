"""Sums, means, extremes over axes: the same op, the axes moved; over everything means over everything of one model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hocket.fuse.rules.base import Site, rule
from hocket.fuse.rules.shape import shifted, wrapped
from hocket.fuse.stacked import Stacked, align, is_stacked

SEVERAL = ("sum", "mean", "amax", "amin", "std", "var", "logsumexp", "nansum", "nanmean")
ONE = ("prod", "any", "all", "argmax", "argmin", "max", "min", "median", "std", "var")


@rule(*dict.fromkeys((*SEVERAL, *ONE)))
def reduce(site: Site, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Any reduction; without an axis, over all elements of each model."""
    name = site.name
    if args and isinstance(args[0], (Stacked, Tensor)):  # max(a, b) is pointwise
        return Stacked(site.target(*align((input, *args))))
    if is_stacked((args, kwargs)) or (args and isinstance(args[0], bool)):
        return NotImplemented
    if "axis" in kwargs:
        kwargs = {**{key: value for key, value in kwargs.items() if key != "axis"}, "dim": kwargs["axis"]}
    axes = args[0] if args else kwargs.get("dim")
    rest = args[1:]
    kwargs = {key: value for key, value in kwargs.items() if key != "dim"}
    tensor = input.tensor
    if axes is None or (isinstance(axes, (tuple, list)) and not axes):
        if input.ndim == 0:
            tensor = tensor.unsqueeze(1)
        if kwargs.get("keepdim") or rest:
            return NotImplemented
        if name in SEVERAL:
            return Stacked(site.target(tensor, tuple(range(1, tensor.ndim)), **kwargs))
        flat = site.target(tensor.flatten(1), 1, **kwargs)
        return Stacked(flat if isinstance(flat, Tensor) else flat[0])
    if isinstance(axes, (tuple, list)):
        axes = tuple(axes)
    return wrapped(site.target(tensor, shifted(axes), *rest, **kwargs))


@rule("norm")
def norm(site: Site, input: Any, *args: Any, **kwargs: Any) -> Any:
    """The norm along given axes; a norm of everything falls back to vmap."""
    positional = [*args]
    if len(positional) >= 2:
        positional[1] = shifted(positional[1])
    elif kwargs.get("dim") is not None:
        kwargs = {**kwargs, "dim": shifted(kwargs["dim"])}
    else:
        return NotImplemented
    return Stacked(site.target(input.tensor, *positional, **kwargs))
