"""`Undo`: what a step writes and draws before it branches on what it has computed, kept so that it can be put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hocket.tracing.state import Gradient


@dataclass(frozen=True)
class Undo:
    """The places and draws to keep in each step (see `hocket.tracing.recording.outcomes`).

    Attributes:
        written: places of tensors that are written before the last branch.
        draws: random numbers are drawn before it.
        gradients: gradients that are exchanged for others after it. A planned step drops them when it begins.
    """

    written: tuple[Any, ...]
    draws: bool
    gradients: tuple[Gradient, ...]

    def keep(self) -> Kept:
        """The content of all of it now."""
        tensors = [source.get() for source in self.written]
        return Kept(
            [(tensor, tensor.detach().clone()) for tensor in tensors if tensor is not None],
            torch.get_rng_state() if self.draws else None,
            [(gradient, gradient.get()) for gradient in self.gradients],
        )


@dataclass(frozen=True)
class Kept:
    """Contents from before a step.

    Attributes:
        tensors: tensors, each with its content.
        random_state: of the default generator.
        gradients: gradients, each with its tensor.
    """

    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    random_state: torch.Tensor | None
    gradients: list[tuple[Gradient, Any]]

    def put_back(self) -> None:
        """Undo what the step has done since."""
        with torch.no_grad():
            for tensor, content in self.tensors:
                tensor.copy_(content)
        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
        for gradient, value in self.gradients:
            gradient.set(value)
