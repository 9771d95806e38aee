"""Kinds of calls: the arguments, modes and answers for which one recording of the models holds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.fusion.known_functions import LAYOUT, SHAPE


@dataclass(frozen=True)
class CallSpec:
    """The tree of the arguments and the leaves that are not tensors, for which alone a recording holds."""

    spec: Any
    constants: tuple[tuple[int, Any], ...]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallSpec, list[Any]]:
        """The call and all leaves, in order."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        constants = tuple((index, _key(leaf)) for index, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        return CallSpec(spec, constants), leaves


def modes() -> tuple[Any, ...]:
    """Modes of torch that a forward may read and a graph has as constants: gradients, default dtype, autocast."""
    return (torch.is_grad_enabled(), torch.get_default_dtype(), autocast())


def autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """State and dtype of autocast on the CPU and on CUDA."""
    return tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")])


def _key(leaf: Any) -> Any:
    """The class and value of an argument."""
    if isinstance(leaf, (bool, int, str, bytes, type(None), type, torch.dtype, torch.device, enum.Enum)):
        return type(leaf), leaf
    if type(leaf) in (float, complex):
        return type(leaf), repr(leaf)
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes") and not leaf.dtype.hasobject:
        return type(leaf), leaf.shape, leaf.dtype.str, leaf.tobytes()
    return object()  # it equals nothing, so that the call is not cached


class Kind:
    """The key of a program, besides the state that forwards read: how the models are called."""

    def __init__(self, call: CallSpec, own: tuple[bool, ...], leaves: list[Any], training: bool) -> None:
        self.call = call
        self.own = own
        self._base = (call, own, training, modes(), repeated(leaves))
        self.answers: tuple[Any, ...] = ()
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def key(self, looks: int) -> Any:
        """The key for a forward that looks so far."""
        each = [(leaf.ndim, leaf.dtype, leaf.device, leaf.requires_grad) for leaf in self._tensors]
        shapes = [leaf.shape for leaf in self._tensors] if looks >= SHAPE else ()
        strides = [leaf.stride() for leaf in self._tensors] if looks >= LAYOUT else ()
        return (self._base, self.answers, *each, *shapes, *strides)

    def answered(self, answers: tuple[Any, ...]) -> Kind:
        """The same kind, where questions about values have these answers (see `hocket.fusion.questions`)."""
        other = copy(self)
        other.answers = answers
        return other


def repeated(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each tensor the place where it stands first, or nothing if no tensor stands twice."""
    addresses = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return () if len(set(addresses)) == len(addresses) else tuple(map(addresses.index, addresses))
