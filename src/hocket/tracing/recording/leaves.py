"""Trainable tensors that are no places of the step: did it give them gradients?

Gradients of models and optimizers are places. A step may give others some, too: to a perturbation that it trains by
hand, to an auxiliary model. Those that it has from a closure become places when it is recorded again. For those of its
batch there is no place, and of those that it reads anew from a place nothing says whose the gradient is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hocket.tracing.reasons import Reasons


class Leaf:
    """Gradient of a tensor that belongs to no model, as it is at construction."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._requires_grad = tensor, tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._version = None if self._gradient is None else self._gradient._version

    @property
    def has_changed(self) -> bool:
        """The tensor has another gradient now, its gradient has been written, or it has come to require one."""
        now = self.tensor.grad if self.tensor.is_leaf else None
        version = None if now is None else now._version
        return now is not self._gradient or version != self._version or self.tensor.requires_grad != self._requires_grad

    def put_back(self) -> None:
        """Give the tensor its gradient back. Writes into that gradient are undone elsewhere."""
        self.tensor.grad = self._gradient


class OutsideLeaves:
    """The tensors of a step that cannot have a gradient by plan, as they are before it."""

    def __init__(self, batch: Iterable[Any], places: Mapping[Any, torch.Tensor]) -> None:
        self._of_kind = {
            "trains its batch": [Leaf(leaf) for leaf in batch if isinstance(leaf, torch.Tensor)],
            "trains unseen": [Leaf(tensor) for entry, tensor in places.items() if entry.kind == "object"],
        }

    def note(self, reasons: Reasons, line: str) -> None:
        """Add a reason for each that has got a gradient."""
        for kind, leaves in self._of_kind.items():
            for leaf in leaves:
                if leaf.has_changed:
                    reasons.add(kind, f"a tensor of shape {tuple(leaf.tensor.shape)}", line)

    def put_back(self) -> None:
        """Give each its gradient back."""
        for leaves in self._of_kind.values():
            for leaf in leaves:
                leaf.put_back()
