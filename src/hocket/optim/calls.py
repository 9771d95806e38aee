"""`step` and `zero_grad` of an optimizer, without the names that torch gives to each call for a profiler.

On a small model the names take a tenth of the update, and so does the look for hooks. Where a profiler runs, or a hook
is registered, torch's own wrapper makes the call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer

__all__ = ["DirectCalls"]

GLOBAL_HOOKS = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)


class DirectCalls(torch.optim.Optimizer):
    """An optimizer whose update is `_step`."""

    @abstractmethod
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the losses again and returns them.
        """
        hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *GLOBAL_HOOKS)
        if torch._C._autograd._profiler_enabled() or any(hooks):
            return _observed_step(self) if closure is None else _observed_step(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients, or set them to zero."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


@torch.optim.Optimizer.profile_hook_step
def _observed_step(self: DirectCalls, closure: Callable[[], Any] | None = None) -> Any:
    return self._step(closure)
