"""How models are called: what a trace of one call depends on, but tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["CallSpec"]


@dataclass(frozen=True)
class CallSpec:
    """How the model is called: the tree of its arguments, and the leaves that are not tensors.

    Attributes:
        spec: the tree.
        constants: places of the leaves that are no tensors, and what tells their values from others; of floats only
            that they are floats, where `floats_are_open`.
        floats_are_open: whether a trace serves every value of the floats.
    """

    spec: Any
    constants: tuple[tuple[int, Any], ...]
    floats_are_open: bool

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], floats_are_open: bool) -> tuple[CallSpec, list[Any]]:
        """The call and all leaves, in order."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        constants = tuple(
            (index, float if floats_are_open and type(leaf) is float else _key(leaf))
            for index, leaf in enumerate(leaves)
            if not isinstance(leaf, Tensor)
        )
        return CallSpec(spec, constants, floats_are_open), leaves

    @property
    def has_floats(self) -> bool:
        """Whether a trace for other values of the floats could serve this call."""
        return any(kind is float for _, kind in self.constants)


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
