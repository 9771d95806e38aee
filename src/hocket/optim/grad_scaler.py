"""Gradient scaling for mixed precision, decided for each model on its own.

In half precision small gradients vanish, so losses are multiplied by a scale and gradients divided by it again
(Micikevicius et al.: "Mixed precision training", ICLR 2018, section 3.2). Whether a scale was too large shows in a
gradient that overflowed: then the step is left out and the scale halved. With one scale for B models, a single overflow
would cost all of them a step. Here each model has its scale, its count and its decision::

    losses (B,) * scale (B,)  --backward-->  gradients (B, ...) / scale (B, 1, ...)  --> overflow (B,)
                      ^                                                                     |
                      '---- halved where it overflowed, doubled after 2,000 good steps <----'--> which models step
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from hocket.errors import InputError
from hocket.optim.base import FusedOptimizer
from hocket.optim.hyper import Bound, by_model, check_whole, numbers_of, row

SHARED = ("growth_factor", "backoff_factor", "growth_interval")  # by all models


class GradScaler:
    """`torch.amp.GradScaler` of B models: a scale, and a decision about each step, for each of them.

    Args:
        num_models: B.
        device: where the scales are kept.
        init_scale: one, or B in a list.
        growth_factor: of a scale after `growth_interval` steps without an overflow.
        backoff_factor: of a scale after a step with an overflow.
        growth_interval: in steps.
        enabled: without, everything passes through.

    Raises:
        InputError: numbers out of bounds, a list of the wrong length, calls out of order.

    Example:
        >>> from hocket.optim import SGD
        >>> weights = torch.nn.Parameter(torch.ones(2, 3))
        >>> optimizer, scaler = SGD([weights], lr=0.5, num_models=2), GradScaler(2, init_scale=4.0)
        >>> losses = (weights * torch.tensor([[1.0], [float("inf")]])).sum(1)
        >>> scaler.scale(losses).sum().backward()
        >>> scaler.step(optimizer); scaler.update()
        >>> weights[:, 0].tolist(), scaler.get_scale().tolist()
        ([0.5, 1.0], [4.0, 2.0])
    """

    def __init__(
        self,
        num_models: int,
        device: torch.device | str = "cpu",
        init_scale: Any = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self.num_models = check_whole("num_models", num_models, 1)
        scales = numbers_of("init_scale", init_scale, num_models, Bound())
        self._growth_interval = check_whole("growth_interval", growth_interval, 1)
        if not growth_factor > 1.0:
            raise InputError(f"growth_factor: expected a number > 1, got {growth_factor!r}")
        if not 0.0 < backoff_factor < 1.0:
            raise InputError(f"backoff_factor: expected a number > 0 and < 1, got {backoff_factor!r}")
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._enabled = enabled
        self._first_scales = by_model(scales, num_models)
        self._scale = torch.tensor(self._first_scales, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros(num_models, dtype=torch.int32, device=device)
        self._begin()

    def is_enabled(self) -> bool:
        """True if this scales at all."""
        return self._enabled

    def get_scale(self) -> torch.Tensor:
        """The scale of each model, of shape (B,)."""
        return self._scale.clone() if self._enabled else torch.ones_like(self._scale)

    def scale(self, losses: torch.Tensor) -> torch.Tensor:
        """Per-model losses (first dimension B), each times its model's scale.

        Raises:
            InputError: a loss that has been summed over the models already.
        """
        if not self._enabled:
            return losses
        if losses.dim() == 0 or losses.shape[0] != self.num_models:
            raise InputError(
                f"losses: expected one for each model, of shape ({self.num_models}, ...), got {tuple(losses.shape)}; "
                "scale them before they are summed"
            )
        column = self._scale.to(losses.device).view(-1, *(1,) * (losses.dim() - 1))
        return losses * column

    def unscale_(self, optimizer: FusedOptimizer) -> None:
        """Divide the gradients by the scales, to look at them or to clip them before `step`."""
        if not self._enabled:
            return
        self._check(optimizer, "unscale_", self._overflows)
        with torch.no_grad():
            slots = optimizer._slots
            inverse = self._scale.double().reciprocal().float()
            for p, grad in slots.gradients():
                if grad.dtype == torch.float16:
                    raise InputError("unscale_: expected gradients of float32 parameters, got float16 ones")
                grad.mul_(slots.column(inverse.to(p.device), p).to(grad.dtype))
            self._overflows[id(optimizer)] = slots.not_finite()

    def step(self, optimizer: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, if that has not been done, and step the models whose gradients are finite.

        The others keep their parameters and their state, bit for bit. Waits for the gradients, as torch's does.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or kwargs:
            raise InputError("step: expected no closure while gradients are scaled")
        self._check(optimizer, "step", self._stepped)
        if id(optimizer) not in self._overflows:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        # From the first step on: a model then computes alike whether or not another overflows.
        optimizer.count_per_model()
        optimizer.step_without(self._overflows[id(optimizer)])
        return None

    def update(self, new_scale: Any = None) -> None:
        """Adapt the scales, once in each iteration, after the steps of all optimizers.

        Args:
            new_scale: one, or B, to set instead.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale.copy_(torch.as_tensor(numbers_of("new_scale", new_scale, self.num_models, Bound())))
        else:
            if not self._overflows:
                raise InputError("update: expected a call of step or unscale_ before it since the last update")
            overflow = torch.zeros_like(self._scale, dtype=torch.bool)
            overflow[sorted({model for models in self._overflows.values() for model in models})] = True
            tracker = torch.where(overflow, 0, self._growth_tracker + 1)
            grown = self._scale * self._growth_factor
            due = tracker == self._growth_interval
            kept = torch.where(due & torch.isfinite(grown), grown, self._scale)
            self._scale = torch.where(overflow, self._scale * self._backoff_factor, kept)
            self._growth_tracker = torch.where(due, 0, tracker).to(torch.int32)
        self._begin()

    def _begin(self) -> None:
        """Forget what has been unscaled and stepped since the last update."""
        self._overflows: dict[int, list[int]] = {}  # the models, of optimizers by their ids
        self._stepped: set[int] = set()

    def select_models(self, models: list[int]) -> None:
        """Keep these models, in this order: call it with what `optimizer.take` was called with."""
        index = torch.tensor(models, device=self._scale.device)
        self._scale, self._growth_tracker = self._scale[index], self._growth_tracker[index]
        self._first_scales = [self._first_scales[model] for model in models]
        self.num_models = len(models)
        self._begin()

    def refill(self, model: int, state: Mapping[str, Any] | None = None) -> None:
        """Begin anew in one slot: with its first scale, or with a plain state, one of those that `unfuse` gives."""
        scale = self._first_scales[model] if state is None else state["scale"]
        self._scale[model] = torch.as_tensor(numbers_of("scale", scale, 1, Bound()))
        self._growth_tracker[model] = 0 if state is None else state["_growth_tracker"]

    def state_dict(self) -> dict[str, Any]:
        """The state by torch's names, with B numbers where torch has one."""
        if not self._enabled:
            return {}
        numbers = {key: getattr(self, f"_{key}") for key in SHARED}
        return {"scale": self._scale.tolist(), **numbers, "_growth_tracker": self._growth_tracker.tolist()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, for as many models."""
        if not self._enabled:
            return
        rows = {key: row(key, state_dict[key], self.num_models) for key in ("scale", "_growth_tracker")}
        self._scale.copy_(torch.as_tensor(numbers_of("scale", rows["scale"], self.num_models, Bound())))
        self._growth_tracker.copy_(torch.tensor(rows["_growth_tracker"]))
        for key in SHARED:
            setattr(self, f"_{key}", state_dict[key])

    def unfuse(self) -> list[dict[str, Any]]:
        """B plain state dicts, one for each model, that `torch.amp.GradScaler` loads."""
        found = self.state_dict()
        return [
            {**found, "scale": scale, "_growth_tracker": count}
            for scale, count in zip(found["scale"], found["_growth_tracker"], strict=True)
        ]

    def _check(self, optimizer: Any, call: str, seen: Collection[int]) -> None:
        if not isinstance(optimizer, FusedOptimizer) or optimizer.num_models != self.num_models:
            of = f" of {optimizer.num_models} models" if isinstance(optimizer, FusedOptimizer) else ""
            raise InputError(
                f"optimizer: expected one of hocket.optim, of {self.num_models} models, "
                f"got {type(optimizer).__name__}{of}"
            )
        if id(optimizer) in seen:
            raise InputError(f"{call}: expected one call for each optimizer between two calls of update, got another")
