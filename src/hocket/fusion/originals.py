"""The models that were fused, which no forward of a copy may reach.

    self.layer(x)                             the copy's layer, whose tensors are parts of the stacked ones
    LAYERS[self.number](x)                    the original's layer: it is not what trains
    (a closure, a default argument, a class, a cache, a weak reference, a helper that copies share: the same)

`copy.deepcopy` shares what code holds, and nothing says beforehand what a forward will reach. So the first calls of a
kind are recorded, also where no graph is wanted, and a recorder looks at the modules that are called and at tensors, if
they are no part of the model that it records.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion.rules.base import where
from hocket.fusion.shared_objects import named_tensors
from hocket.pystate.places import is_a

__all__ = ["Known", "Originals", "check_part", "stray"]

Known = Mapping[Any, tuple[int, str]]  # models and names, by what `_keys` gives


def stray(model: int, place: str) -> InputError:
    """The error for a part of a model that its copy does not have as its own."""
    return InputError(
        f"model {model}, {place}: no copy of the model takes it along: a closure, a global, a class, a cache or an "
        "object that copies share holds it, or its class says how it is copied; reach it through self, by attributes"
    )


def check_part(known: Known, part: Any) -> None:
    """Check that a module or tensor is none of these, and shares no memory with them.

    Raises:
        InputError: it is. The message names it.
    """
    for key in _keys(part):
        if key in known:
            raise stray(*known[key])


class Originals:
    """Weak references to the modules and tensors of the models that an array was made from, with their names."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        # what tells a part from others, whether it still lives, its model and its name
        self._parts: list[tuple[Any, Callable[[], bool], int, str]] = []
        for index, model in enumerate(models):
            self.add(model, index)

    def add(self, model: nn.Module, index: int) -> None:
        """A model has come into a slot."""
        named: list[tuple[str, Any]] = [*named_tensors(model), *model.named_modules()]
        self._parts += [(key, lives, index, where(name)) for name, part in named for key, lives in _keys(part).items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return Originals, ((),)  # a saved array has copies alone

    def known(self, inputs: Any) -> Known:
        """The parts that still live, but for inputs, which may be any tensors."""
        given = {key for leaf in pytree.tree_leaves(inputs) for key in _keys(leaf)}
        self._parts = [each for each in self._parts if each[1]()]
        return {key: (index, place) for key, _, index, place in self._parts if key not in given}


def _keys(part: Any) -> dict[Any, Callable[[], bool]]:
    """Return the keys by which a tensor, its memory or a module is recognised, each with a check that it lives."""
    if not is_a(part, (nn.Module, Tensor)):
        return {}
    reference = weakref.ref(part)
    found: dict[Any, Callable[[], bool]] = {id(part): lambda: reference() is not None}
    if is_a(part, Tensor) and part.layout is torch.strided and part.device.type in ("cpu", "cuda"):
        try:
            memory = part.untyped_storage()
            address = memory.data_ptr()
        except (NotImplementedError, RuntimeError):  # in a transform, or without data
            return found
        if address:
            kept = StorageWeakRef(memory)
            found[address] = lambda: not kept.expired()
    return found
