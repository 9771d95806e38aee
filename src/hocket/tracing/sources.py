"""Sources: places that can be read, and most of them written, at any time.

A *source* holds the owner and the key, never the tensor itself, so a planned step always works on what the model and
the optimizer hold now.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hocket.pystate.places import Place


@dataclass(frozen=True, eq=False)
class StateOf:
    """``optimizer.state[parameter]``, asked for anew each time: loading a state exchanges all of these dicts."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor

    def __getitem__(self, key: Any) -> Any:
        return self.optimizer.state.get(self.parameter, {})[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.optimizer.state[self.parameter][key] = value


@dataclass(frozen=True, eq=False)
class GroupOf:
    """``optimizer.param_groups[position]``, asked for anew each time."""

    optimizer: torch.optim.Optimizer
    position: int

    def __getitem__(self, key: Any) -> Any:
        return self.optimizer.param_groups[self.position][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.optimizer.param_groups[self.position][key] = value


@dataclass(eq=False)
class ValueOf:
    """A place outside of models and optimizers (see `hocket.pystate.places`), as a table of one entry."""

    place: Place
    # the step writes into the list or dict that stands there, and makes no other one. Set when the step has been
    # recorded.
    in_place: bool = False

    def __getitem__(self, key: Any) -> Any:
        return self.place.get()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.place.set(value)


# Types of a batch besides tensors: a graph is for batches with the same values of these types in the same places.
PLAIN = (
    *(int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size, np.number, np.bool_),
)


@dataclass(frozen=True, eq=False)
class Entry:
    """``table[key]`` of a module's parameters or buffers, of an optimizer's state or of a parameter group.

    `kind` is ``parameter``, ``buffer``, ``state``, ``group``, or ``object`` for a value that belongs to neither model
    nor optimizer. `owner` names the parameter that a state belongs to. `path` leads to an element where the entry is a
    tuple, list or dict (Adam's ``betas``, the hidden state of an LSTM): such a container is made anew by `set`, unless
    the step writes into it, and written by `put`, unless it is a tuple.
    """

    kind: str
    name: str
    table: Any
    key: Any
    owner: str = ""
    layer: str = ""
    path: tuple[Any, ...] = ()

    def get(self) -> Any:
        value = self.table[self.key]
        for part in self.path:
            value = value[part]
        return value

    def set(self, value: Any) -> None:
        if self.path and type(self.table) is ValueOf and self.table.in_place:
            self.put(value)
        else:
            self.table[self.key] = _exchanged(self.table[self.key], self.path, value) if self.path else value

    def put(self, value: Any) -> None:
        """As `set`, into the lists and dicts that stand there."""
        if self.get() is not value:
            _put(self.table, (self.key, *self.path), value)

    def whole(self) -> Any:
        """The whole value at the place, of which this may be an element."""
        return self.table[self.key]


def _put(container: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value at the end of `path`, and make anew only the tuples on the way."""
    first, *rest = path
    following = container[first] if rest else None
    if isinstance(following, (list, dict)):
        _put(following, tuple(rest), value)
    else:
        container[first] = _exchanged(following, tuple(rest), value)


def _exchanged(container: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a tuple, list or dict with another value at the end of `path`."""
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(container, dict):
        made = copy(container)
        made[first] = _exchanged(container[first], rest, value)
        return made
    elements = list(container)
    elements[first] = _exchanged(elements[first], rest, value)
    return container._make(elements) if hasattr(container, "_make") else type(container)(elements)


@dataclass(frozen=True, eq=False)
class Gradient:
    """``parameter.grad``."""

    parameter: Entry
    kind: str = "gradient"

    @property
    def name(self) -> str:
        return f"{self.parameter.name}.grad"

    @property
    def owner(self) -> str:
        return self.parameter.name

    def get(self) -> Any:
        return self.parameter.get().grad

    def set(self, value: Any) -> None:
        self.parameter.get().grad = value


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of a tensor, which a step replaces: ``tensor.data = new``."""

    place: Entry
    kind: str = "memory"

    @property
    def name(self) -> str:
        return f"{self.place.name}.data"

    def get(self) -> Any:
        return self.place.get().data

    def set(self, value: Any) -> None:
        self.place.get().data = value


@dataclass(frozen=True, eq=False)
class BatchLeaf:
    """The tensor at one place of the batch."""

    index: int
    kind: str = "batch"
    owner: str = ""

    @property
    def name(self) -> str:
        return f"batch[{self.index}]"


@dataclass(frozen=True)
class LiveLeaf:
    """The number at one place of the batch, which another batch has another value of."""

    index: int


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the step closes over. It is used as it is."""

    name: str
    value: Any
    kind: str = "constant"
    owner: str = ""

    def get(self) -> Any:
        return self.value


@dataclass(frozen=True, eq=False)
class ItemOf:
    """The number inside a one-element tensor, as it is when the step begins (Adam's step count)."""

    source: Entry

    @property
    def name(self) -> str:
        return self.source.name

    def get(self) -> Any:
        return self.source.get().item()
