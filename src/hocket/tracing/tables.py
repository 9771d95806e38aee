"""Places as tables: what a step reads and writes is looked up anew each time, since loading a state exchanges dicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hocket.pystate.places import Place

__all__ = ["GroupOf", "StateOf", "ValueOf"]


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


@dataclass(frozen=True, eq=False)
class ValueOf:
    """A place outside of models and optimizers (see `hocket.pystate.places`), as a table of one entry."""

    place: Place

    def __getitem__(self, key: Any) -> Any:
        return self.place.get()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.place.set(value)
