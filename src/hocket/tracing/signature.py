"""Signatures: the conditions that a graph was recorded under, which distinguishes calls of a schedule.

`signature_of` describes a call in Python values. Where a signature is met again, the native core learns to recognise it
(see ``native/signature.cpp``): the next such call costs about a microsecond instead of some tens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from hocket import native
from hocket.pystate.layout import instance_dict
from hocket.pystate.places import exact, is_a, is_plain, kind_of
from hocket.tracing.bound_places import BoundPlaces
from hocket.tracing.sources import PLAIN
from hocket.tracing.state import Inventory
from hocket.tracing.switches import switches

# Leaves of a batch that are followed where each batch has another one.
FOLLOWED_KINDS = (int, float, np.float64, str)
# Signatures that are remembered, and those of them that are recognised natively.
MAX_MET = 1000
MAX_KNOWN = 8


def signature_of(places: Inventory, batch: Any, live_leaves: Collection[int] = ()) -> tuple[Any, ...]:
    """Return the shapes of the batch, the modes of the modules, the gradients that exist, and torch's switches.

    Values of `live_leaves` (positions among the leaves of the batch that are not tensors) do not matter, where they
    are numbers or text: batches of another structure may have something else at such a position.

    Raises:
        KeyError: a parameter is no longer in its place.
    """
    leaves, spec = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    looks = _looks(places)
    shapes = tuple([_described(tensor, looks) for tensor in tensors])
    # 1, 1.0 and True are equal but do not compute the same; other values are described by their type only.
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    values = tuple(
        [
            (type(leaf), exact(leaf) if isinstance(leaf, PLAIN) and not is_live(leaf, place, live_leaves) else None)
            for place, leaf in enumerate(others)
        ]
    )
    # A tensor that stands in two places of the batch is one tensor in the graph.
    first: dict[int, int] = {}
    twice = tuple([first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)])
    modes = tuple([module.training for module in places.modules])
    parameters = [entry.get() for entry in places.parameters]
    if not all(isinstance(parameter, torch.Tensor) for parameter in parameters):
        raise KeyError("a parameter is gone")
    present = tuple([(p.requires_grad, p.grad is None) for p in parameters])
    return ((spec, _keys(batch)), shapes, values, twice, modes, present, places.versions(), switches())


def is_live(leaf: Any, place: int, live_leaves: Collection[int]) -> bool:
    """True if a leaf of the batch that is no tensor is read anew in each call."""
    return place in live_leaves and type(leaf) in FOLLOWED_KINDS


def _looks(places: Inventory) -> bool:
    """Return whether the step may ask tensors of its batch for more than their layout: a graph of Dynamo's does not."""
    return bool(places.parameters)


def _described(tensor: torch.Tensor, looks: bool) -> tuple[Any, ...]:
    """All by which a step can tell two tensors of its batch apart, besides their elements."""
    held: tuple[Any, ...] = ()
    with nullcontext() if _is_usual(tensor) else torch._C.DisableTorchFunctionSubclass():  # no code of its class
        if looks:
            has_graph = tensor.grad_fn is not None
            has_gradient = (not has_graph or tensor.retains_grad) and tensor.grad is not None  # else torch warns
            attributes = [
                (name, type(each), exact(each) if is_plain(each) else None)
                for name, each in (instance_dict(tensor) or {}).items()
            ]
            held = (has_graph, has_gradient, tuple(attributes))
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return (type(tensor), kind_of(tensor), strides, held)


def _keys(batch: Any) -> tuple[Any, ...]:
    """The keys of all dicts of a batch that are no text, with their types: torch's pytree takes True for 1."""
    if is_a(batch, dict):
        own = [(type(key), exact(key)) for key in batch if type(key) is not str and is_plain(key)]
        return (*own, *(key for value in batch.values() for key in _keys(value)))
    return tuple([key for value in batch for key in _keys(value)]) if is_a(batch, (list, tuple)) else ()


class Signature:
    """The result of `signature_of` as a key that is hashed once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Signature) and self.parts == other.parts)

    @property
    def values(self) -> tuple[tuple[type, Any], ...]:
        """Type and value of each leaf of the batch that is no tensor."""
        values: tuple[tuple[type, Any], ...] = self.parts[2]
        return values

    @property
    def shape(self) -> tuple[Any, ...]:
        """All but which gradients there are, and these values, of which only the types are left."""
        of_batch, shapes, values, *others, present, versions, switched = self.parts
        kinds = tuple(kind for kind, _ in values)
        return (of_batch, shapes, kinds, *others, tuple(trains for trains, _ in present), versions, switched)


def what_differs(signature: Signature, others: Iterable[Signature]) -> tuple[str, str]:
    """By what a signature differs from others, in words, and what helps."""
    if all(each.shape == signature.shape for each in others):
        return "sets of gradients at the beginning of a step", "drop all at its end (optimizer.zero_grad())"
    return "shapes of batches, or modes", "pad batches to a few shapes (bucketing)"


class Signatures:
    """Computes the signatures of calls."""

    def __init__(self) -> None:
        # the native check that recognised the last call, or None if Python had to describe it
        self.recognised: Any = None
        self._met: dict[tuple[Any, ...], Signature] = {}
        self._first_values: dict[Any, Any] = {}  # of the batch that was the first of its shape
        self._known: list[tuple[Any, Signature]] = []
        self._places: Inventory | None = None
        self._live: frozenset[int] = frozenset()

    def of(self, places: Inventory, batch: Any, live_leaves: Set[int] = frozenset()) -> Signature:
        """Return the signature of a call with `batch`, see `signature_of`."""
        if places is not self._places or live_leaves != self._live:
            self._places, self._live = places, frozenset(live_leaves)
            self._known.clear()
        for check, signature in self._known:
            if check.holds(batch):
                self.recognised = check
                return signature
        self.recognised = None
        parts = signature_of(places, batch, live_leaves)
        if parts in self._met:
            signature = self._met[parts]
            check = _native_check(places, batch, self._live)
            if check is not None:
                self._known.insert(0, (check, signature))
                del self._known[MAX_KNOWN:]
            return signature
        if len(self._met) >= MAX_MET:
            self._met.clear()
        return self._met.setdefault(parts, Signature(parts))

    def leaves_moved(self, signature: Signature, known: Collection[int]) -> list[int]:
        """Leaves of the batch, counted among those that are no tensors, by which it differs from one met before.

        Empty where there was none of its shape.
        """
        if len(self._first_values) > MAX_MET:
            self._first_values.clear()
        values = signature.values
        before = self._first_values.setdefault(signature.shape, values)
        moved = [n for n, (a, b) in enumerate(zip(before, values, strict=True)) if a != b]
        return [n for n in moved if n not in known or values[n][0] not in FOLLOWED_KINDS]


def _native_check(places: Inventory, batch: Any, live_leaves: Collection[int]) -> Any:
    """Return a native check for calls of this one's signature, or None if the native core has none."""
    if not native.available():
        return None
    leaves, _ = tree_flatten(batch)
    position, free = 0, []
    for leaf in leaves:
        free.append(not isinstance(leaf, PLAIN) or is_live(leaf, position, live_leaves))
        position += not isinstance(leaf, torch.Tensor)
    try:
        check = native.load().Signature(batch, free, _looks(places))
        seen = check.leaves()
        if len(seen) != len(leaves) or any(a is not b for a, b in zip(seen, leaves, strict=True)):
            return None  # torch's pytree sees another tree in it
        if any(isinstance(leaf, torch.Tensor) and not _is_usual(leaf) for leaf in leaves):
            return None
        bound = BoundPlaces(check)
        for module in places.modules:
            if hasattr(type(module), "training"):
                return None  # a property may say anything
            check.expect(bound.item(bound.object(vars(module)), "training"))
        for attributes in places.versioned:
            check.expect(bound.item(bound.object(attributes), "_hocket_version"))
        for entry in places.parameters:
            if not _is_usual(entry.get()):
                return None
            check.expect_parameter(bound.add(entry))
    except (TypeError, ValueError, LookupError):
        return None
    return check


def _is_usual(tensor: torch.Tensor) -> bool:
    """Return True if its attributes are torch's own."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)
