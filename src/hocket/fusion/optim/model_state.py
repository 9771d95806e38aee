"""What the state of a fused optimizer is: of which models, which of them are frozen, and what its entries are.

A fused parameter's state holds the entries of torch's optimizer with an axis of models in front; an optimizer of
`hocket.fusion.optim` says here which, and how one model's are told as torch's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from hocket.fusion.optim.options import Options
from hocket.fusion.optim.step_counts import per_model_counts

__all__ = ["ModelState"]


class ModelState(Options, ABC):
    """The part of `hocket.fusion.optim.base.FusedOptimizer` that describes its state.

    Attributes:
        torch_class: the optimizer of one plain model that this is B of.
        counts: whether its state holds a step count.
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]]
    counts: ClassVar[bool] = True
    _frozen: list[bool]
    _per_model_steps: bool  # whether fused parameters count the steps of each model on its own

    @property
    def frozen(self) -> tuple[bool, ...]:
        """For each model whether it is frozen."""
        return tuple(self._frozen)

    def freeze(self, model: int) -> None:
        """Leave this model as it is, parameters and state, in all steps to come."""
        self._frozen[self.checked_model(model)] = True
        self._hocket_version += 1
        self.count_per_model()

    def unfreeze(self, model: int) -> None:
        """Let this model take part in the steps again."""
        self._frozen[self.checked_model(model)] = False
        self._hocket_version += 1

    def finite_models(self) -> list[bool]:
        """For each model whether all of its gradients are finite."""
        ready = [p for p in self._slots if p.grad is not None and p.grad.numel()]
        if not ready:
            return [True] * self.num_models
        device = ready[0].device
        # A sum over everything is cheap, and finite only if all of it is; which model it was is asked when it is not.
        sums = torch.stack([_float(p.grad).sum().to(device, torch.float32) for p in ready])
        if bool(torch.isfinite(sums).all()):
            return [True] * self.num_models
        peaks = [self._slots.reduced(p, _float(p.grad), math.inf).to(device) for p in ready]
        return torch.stack([torch.isfinite(peak) for peak in peaks]).all(0).tolist()

    def count_per_model(self) -> None:
        """From now on count the steps of each model on its own."""
        self._per_model_steps = True
        per_model_counts(self.state, self._slots)

    @abstractmethod
    def entries(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The tensors that a parameter's state holds under these options."""

    @abstractmethod
    def make_state(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Put into `state` whatever entries it has not yet."""

    def plain_state(self, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """The state of one model, under its own plain options, as `torch_class` would hold it."""
        return state

    def tidy_state(self, state: dict[str, Any]) -> None:
        """Drop entries of a fused state that have nothing more to say."""


def _float(grad: torch.Tensor | None) -> torch.Tensor:
    """A gradient in which sums neither cancel in the complex plane nor overflow early."""
    assert grad is not None
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    return real.float() if real.dtype in (torch.float16, torch.bfloat16) else real
