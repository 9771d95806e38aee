"""Shared parts of the tests of `array.losses`: arrays and plain models that train beside each other."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from tests.fusion.nets import VANISHING
from tests.fusion.oracle import assert_close, check_state, made
from tests.fusion.prefer import prefer
from tests.fusion.test_training import LEFT_OUT, close
from torch import Tensor, nn
from torch.nn import functional as F

import hocket

D = torch.float64
RATES = [0.05, 0.02, 0.1, 0.01, 0.03, 0.07, 0.04]
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "SGD": (
        lambda p, n: hocket.optim.SGD(p, lr=RATES[:n], momentum=0.9),
        lambda p, m: torch.optim.SGD(p, lr=RATES[m], momentum=0.9),
    ),
    "Adam": (lambda p, n: hocket.optim.Adam(p, lr=RATES[:n]), lambda p, m: torch.optim.Adam(p, lr=RATES[m])),
}
GO = "1 at a time with backward"


def twin_of(array: Any, how: str) -> Any:
    """The same array once more: "copied", or "saved" and loaded."""
    if how == "copied":
        return copy.deepcopy(array)
    file = io.BytesIO()
    torch.save(array, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def plain(losses: Tensor) -> Tensor:
    return losses.detach().as_subclass(Tensor)


class Runs:
    """An array that trains by `losses`, or by `loss` of its outputs, beside plain models that train alone.

    After each step the plain models get the array's numbers, so that each step is compared from the same start.
    """

    def __init__(
        self, models: list[nn.Module], optimizer: str = "SGD", net: str = "", by_outputs: bool = False, **options: Any
    ) -> None:
        self.by_outputs = by_outputs
        self.left_out = LEFT_OUT.get(net, {})
        self.vanishing = VANISHING.get(net, frozenset())
        self.array = hocket.fuse(copy.deepcopy(models), **options)
        self.models = models
        fused, alone = OPTIMIZERS[optimizer]
        self.optimizer = fused(self.array.parameters(), len(models))
        self.alone = [alone(model.parameters(), index) for index, model in enumerate(models)]

    def step(
        self, fn: Any, inputs: Any, targets: tuple[Any, ...] = (), own_inputs: Any = None, own_targets: Any = None
    ) -> None:
        """`own_inputs` and `own_targets` give what model i takes; by default all models take the same."""
        self.optimizer.zero_grad()
        if self.by_outputs:
            losses = self.array.loss(fn, self.array(inputs), *targets)
        else:
            losses = self.array.losses(fn, inputs, *targets)
        assert losses.shape == (len(self.models),)
        losses.backward()
        for index, (model, optimizer) in enumerate(zip(self.models, self.alone, strict=True)):
            optimizer.zero_grad()
            given = own_inputs(index) if own_inputs else (inputs,) if isinstance(inputs, Tensor) else inputs
            out = model(**given) if isinstance(given, dict) else model(*given)
            loss = fn(out, *(own_targets(index) if own_targets else targets)).sum()
            loss.backward()
            assert_close(plain(losses)[index], loss.detach(), f"loss of model {index}")
        check_state(self.array, self.models, self.vanishing)
        self.optimizer.step()
        for index, (model, optimizer) in enumerate(zip(self.models, self.alone, strict=True)):
            optimizer.step()
            state = self.array.state_dict(model=index)
            for name, tensor in model.state_dict().items():
                part = self.left_out.get(name, lambda each: each)
                if tensor.is_floating_point():
                    close(part(state[name]), part(tensor), 1e-9, f"{name} of model {index} after the step")
            model.load_state_dict(state)


X, Y = torch.linspace(-1, 1, 24, dtype=D).view(4, 6), torch.tensor([0, 1, 2, 1])
W = torch.tensor([0.5, -2.0, 3.0], dtype=D)


def linears(num_models: int = 3) -> list[nn.Module]:
    return made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), num_models)


def pair(monkeypatch, way=GO, make=linears, **options):
    """An array that runs this way, as it has been recorded already, and the same that goes the ordinary way."""
    prefer(monkeypatch, way)
    models = make()
    options = {"shared": True} | options
    array = hocket.fuse(copy.deepcopy(models), **options)
    array(X)
    return array, hocket.fuse(models, **(options | {"backend": "rule"}))


def ordinary(array, fn=F.cross_entropy, x=X, y=Y):
    return array.loss(fn, array(x), y)


def same_gradients(array, other, scale=1.0):
    for (name, found), expected in zip(array.named_parameters(), other.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert_close(found.grad, expected.grad * scale, name)
