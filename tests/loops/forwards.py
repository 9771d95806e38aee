"""Loops with modules whose forward shows, keeps and looks up numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, loop, mlp, update


class Watched(nn.Module):
    """It shows the size of its output every tenth call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(inputs, outputs), 0

    def forward(self, x):
        self.calls += 1
        x = self.linear(x)
        if self.calls % 10 == 0:
            print(f"call {self.calls}: {x.mean().item():.4f}, {float(x.detach().abs().max()):.4f}")
        return x


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Watched(8, 12), nn.Linear(12, 4)
        self.sizes: dict[str, Any] = {}

    def forward(self, x):
        x = F.relu(self.first(x))
        self.sizes["hidden"] = float(x.detach().norm())
        return self.second(x)


def _trained(model: nn.Module, change: Any = None) -> Loop:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    given = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(10)]

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1])).item()

    def batch(n):
        if change is not None:
            change(model, n)
        return given[n % 10]

    return Loop(step, model, optimizer, batch, lambda: {"sizes": copy.copy(getattr(model, "sizes", None))})


@loop(planned=True)
def forward_that_prints_with_hooks() -> Loop:
    model = Network()
    model.first.register_forward_hook(lambda module, args, out: out * 1.5)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    return _trained(model)


@loop(planned=True)
def forward_exchanged_for_another() -> Loop:
    def change(model: Any, n: int) -> None:
        if n == 30:
            model.first.forward = lambda x: 2 * model.first.linear(x)
        if n == 45:
            del model.first.forward

    return _trained(Network(), change)


@loop(planned=True)
def forward_exchanged_in_its_class() -> Loop:
    class Own(Watched):
        def forward(self, x):
            return super().forward(x) * 0.9

    def other(self: Any, x: Any) -> Any:
        print("another one")
        return self.linear(x)

    def change(model: Any, n: int) -> None:
        if n == 30:
            Own.forward = other  # type: ignore[method-assign]

    model = Network()
    model.first = Own(8, 12)
    return _trained(model, change)


@loop(planned=True)
def training_step_of_a_module() -> Loop:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.logged, self.global_step = mlp(), {}, 0

        def log(self, name, value):
            self.logged[name] = float(value)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, number):
            x, y = batch
            out = self(x)
            loss = F.cross_entropy(out, y)
            self.log("accuracy", (out.argmax(1) == y).float().mean())
            self.log("loss", loss.detach())
            return loss

    task = Task()
    optimizer = torch.optim.Adam(task.parameters(), lr=0.01)
    given = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(10)]

    def step(batch):
        update(optimizer, task.training_step(batch, task.global_step))
        task.global_step += 1

    return Loop(step, task, optimizer, given, lambda: {"logged": task.logged, "step": task.global_step})
