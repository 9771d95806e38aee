"""All of the B models or one, as what a program needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hocket.fusion.gradients import GradientMemory
from hocket.fusion.inputs import ModelAxis
from hocket.fusion.stacked import part
from hocket.fusion.store import Store

__all__ = ["ModelSlice", "Settings"]


@dataclass(frozen=True)
class Settings:
    """The user's settings of an array."""

    backend: str  # "auto", "rule", "vmap" or "loop"
    strict: bool  # whether an op without a rule is an error
    model_axis: ModelAxis  # what is settled about its arguments
    # ops without a rule, and their layers, that a warning has named
    warned: set[tuple[str, str]] = field(default_factory=set)


class ModelSlice:
    """All models of a store, or one of them."""

    def __init__(self, store: Store, settings: Settings, memory: GradientMemory, index: int | None = None) -> None:
        self.store = store
        self.settings = settings
        self.num_models = store.num_models if index is None else 1
        self.gradient_memory = memory
        self._index = index
        self._slice = slice(None) if index is None else slice(index, index + 1)

    def alone(self, index: int) -> ModelSlice:
        """One of the models."""
        return ModelSlice(self.store, self.settings, self.gradient_memory, index)

    def of_models(self, constant: Any) -> Any:
        """A constant of all models as these see it."""
        return constant if self._index is None else part(constant, self._index)

    def layers(self, name: str) -> tuple[nn.Module, ...]:
        """The layer of each model, without its tensors."""
        return self.store.layers(name)[self._slice]

    def separate_block(self, name: str) -> list[nn.Module] | None:
        """The models' own modules of a block that stays separate, or None."""
        blocks = self.store.separate_block(name)
        return None if blocks is None else blocks[self._slice]

    def generators_on(self, device: torch.device) -> tuple[torch.Generator, ...]:
        """One generator for each model on a device, or none where no seeds were given."""
        return self.store.generators_on(device)[self._slice]

    @property
    def is_seeded(self) -> bool:
        """True if every model draws random numbers from its own generator."""
        return self.store.seeds is not None
