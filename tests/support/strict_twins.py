"""Twins of which one is trained eagerly and one by a schedule on the strict device (`support.strict_cuda`)."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hocket.backends import SimulatedBackend, SimulatedClock
from hocket.ir import Machine
from hocket.session import Schedule
from support.steps import update
from support.strict_cuda import StrictCuda

NUM_STEPS = 60
A100 = Machine.preset("a100")


class Twins:
    """Two equal models and optimizers: one is trained eagerly, one by a schedule on the strict device.

    Step counts of an optimizer, but for capturable ones, stand for tensors on the CPU, as torch keeps them.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], device: StrictCuda | None = None) -> None:
        torch.manual_seed(0)
        self.device = device or StrictCuda()
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.models = [model, copy.deepcopy(model)]
        self.optimizers = [make(each.parameters()) for each in self.models]
        self.steps = [self.step_of(*pair) for pair in zip(self.models, self.optimizers, strict=True)]
        self.fast = scheduled(self.steps[1], self.models[1], self.optimizers[1], self.device)

    def step_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            return update(optimizer, model(batch).square().mean()).detach()

        return step

    def train(self, num_steps: int, batch: Callable[[int], Any] = lambda number: torch.randn(4, 8)) -> None:
        """Both make these steps, and are compared after each."""
        for number in range(num_steps):
            torch.manual_seed(1000 + number)
            given = batch(number)
            drawn = torch.get_rng_state()
            expected = self.steps[0](given)
            torch.set_rng_state(drawn)
            found = self.fast(given)
            self.mark_counts()
            assert same(expected, found), number
            assert same(self.state(0), self.state(1)), number

    def mark_counts(self) -> None:
        for group in self.optimizers[1].param_groups:
            for parameter in group["params"] if not group.get("capturable") and not group.get("fused") else ():
                count = self.optimizers[1].state[parameter].get("step")
                if isinstance(count, torch.Tensor):
                    self.device.on_host(count)

    def state(self, which: int) -> list[Any]:
        model, optimizer = self.models[which], self.optimizers[which]
        gradients = [parameter.grad for parameter in model.parameters()]
        kept = [list(optimizer.state[parameter].values()) for parameter in model.parameters()]
        return [list(model.state_dict().values()), gradients, kept]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    return bool(first == second)


def scheduled(step: Any, model: Any, optimizer: Any, device: StrictCuda, **options: Any) -> Schedule:
    clock = SimulatedClock()

    class OnStrict(SimulatedBackend):
        is_asynchronous = True  # as CUDA is: a verdict on it is not looked at again

        def __init__(self) -> None:
            super().__init__(A100, clock)
            self.device = device

    options = {"cache": False, "clock": clock, **options}
    return Schedule(step, model, optimizer, backend=OnStrict, **options)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    **{
        name: partial(getattr(torch.optim, name), lr=0.01)
        for name in ("Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}
