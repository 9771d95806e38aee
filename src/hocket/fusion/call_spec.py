"""How models are called: what a trace of one call depends on, but tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["CallSpec", "autocast", "modes"]


@dataclass(frozen=True)
class CallSpec:
    """How the model is called: the tree of its arguments, and the leaves that are not tensors.

    A forward may look at an argument's class and value in ways that no tracer sees (``type(x) is float``, a key of a
    dictionary), so a trace holds for these leaves only.
    """

    spec: Any
    constants: tuple[tuple[int, Any], ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Any]]:
        """The call and all leaves, in order."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        constants = tuple((index, _key(leaf)) for index, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        return CallSpec(spec, constants), leaves


def modes() -> tuple[Any, ...]:
    """What a forward may ask of torch itself, and a graph has as constants: grad mode, default dtype, autocast."""
    return (torch.is_grad_enabled(), torch.get_default_dtype(), autocast())


def autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """Whether autocast is on, and to which dtype, on the CPU and on CUDA."""
    return tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")])


class _Unknown:
    """An argument of a kind that nobody can compare: equal to none, not even to itself the next time."""


def _key(leaf: Any) -> Any:
    """What tells an argument from others: its class and value."""
    if isinstance(leaf, (bool, int, str, bytes, type(None), type, torch.dtype, torch.device, enum.Enum)):
        return type(leaf), leaf
    if type(leaf) in (float, complex):
        return type(leaf), repr(leaf)
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes") and not leaf.dtype.hasobject:
        return type(leaf), leaf.shape, leaf.dtype.str, leaf.tobytes()
    return _Unknown()
