"""How the models of the fuse bench are trained: optimizer, rates, precision; and a model, plain or fused, in training.

A `Net` is one plain model or B fused ones, and knows how its loss is taken, so the same lines train both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hocket import optim as fused_optim
from hocket.errors import InputError
from hocket.fusion.model import Array

OPTIMIZERS = ("sgd", "adam")
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Training:
    """How models are trained.

    Attributes:
        precision: of `PRECISIONS`: "float32", or under autocast to bfloat16 or float16, the latter with a `GradScaler`.
        optimizer: "sgd", with momentum, or "adam".
        own_rates: whether each model has a rate and a weight decay of its own, as in a search.
        own_batches: whether each model has a batch of its own. Else all share one.
    """

    precision: str = "float32"
    optimizer: str = "sgd"
    own_rates: bool = False
    own_batches: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"bench fuse: optimizer: expected one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.precision not in PRECISIONS:
            raise InputError(f"bench fuse: precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    @property
    def amp(self) -> bool:
        """True if forwards run under autocast."""
        return self.precision != "float32"

    def autocast(self, device: str) -> torch.autocast:
        """Return the context of forwards."""
        return torch.autocast(device, torch.float16 if self.precision == "float16" else torch.bfloat16, self.amp)

    def scaler_of(self, model: nn.Module, device: str) -> Any:
        """The scaler of a model's losses, or of fused ones. None where none is needed."""
        if self.precision != "float16":
            return None
        if isinstance(model, Array):
            return fused_optim.GradScaler(model.num_models, device)
        return torch.amp.GradScaler(device)

    def rates(self, first: int, size: int) -> tuple[list[float], list[float]]:
        """Rates and weight decays of these models."""
        if not self.own_rates:
            return [1e-3] * size, [0.0] * size
        numbers = range(first, first + size)
        return [1e-3 * (1 + n / 8) for n in numbers], [1e-4 * (1 + n % 4) for n in numbers]

    def optimizer_of(self, model: nn.Module, first: int) -> Any:
        """The optimizer of model number `first`, or of the fused models from that number on."""
        options: dict[str, Any] = {"lr": 1e-3}
        if self.optimizer == "sgd":
            options["momentum"] = 0.9
        if self.own_rates:
            rates, decays = self.rates(first, model.num_models if isinstance(model, Array) else 1)
            own = {"lr": rates, "weight_decay": decays}
            options |= own if isinstance(model, Array) else {name: values[0] for name, values in own.items()}
        library: Any = fused_optim if isinstance(model, Array) else torch.optim
        return {"sgd": library.SGD, "adam": library.Adam}[self.optimizer](model.parameters(), **options)


SHARED = Training()


class Net:
    """A plain model or B fused ones, and its optimizer."""

    def __init__(self, model: Any, training: Training, first: int = 0) -> None:
        self.model: Any = model
        self.device = next(model.parameters()).device.type
        self.training = training
        self.scaler = training.scaler_of(model, self.device)
        self.optimizer = training.optimizer_of(model, first)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.training.autocast(self.device):
            return self.model(*args, **kwargs)

    def loss(self, fn: Callable[..., Tensor], inputs: Any, *targets: Tensor) -> Tensor:
        """The loss, or B losses, of what the model gives for these inputs."""
        if not isinstance(self.model, Array):
            return self.loss_of(fn, self(**inputs) if isinstance(inputs, dict) else self(inputs), *targets)
        with self.training.autocast(self.device):
            return self.model.losses(partial(_in_single, fn) if self.training.amp else fn, inputs, *targets)

    def loss_of(self, fn: Callable[..., Tensor], out: Any, *targets: Tensor) -> Tensor:
        """The loss, or B losses, of this output, in single precision, as torch's losses are under autocast."""
        fn = partial(_in_single, fn) if self.training.amp else fn
        return self.model.loss(fn, out, *targets) if isinstance(self.model, Array) else fn(out, *targets)

    def backward(self, losses: Tensor) -> None:
        """Each model's gradients of its own loss, scaled where that is needed."""
        (losses if self.scaler is None else self.scaler.scale(losses)).sum().backward()

    def update(self) -> None:
        """One step of the optimizer."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def _in_single(fn: Callable[..., Tensor], out: Any, *targets: Tensor) -> Tensor:
    return fn(out.float() if isinstance(out, Tensor) else out, *targets)
