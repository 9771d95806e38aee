"""Loops whose state changes between two calls: kinds of values, memory, results with graphs, ops in Python.

See `loops.step_changes` for layouts, aliases, modes, hooks, options and removals.
"""

import contextlib
import itertools
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loops.loop import Loop

CALLS = 44
# Calls before which something changes: while the step is watched, in the search, and once a plan stands.
CHANGES = (3, 9, 24, 31, 38)


@dataclass
class Program:
    """A loop: its step, and what happens outside of it.

    Attributes:
        change: called with 0, 1, ... before the calls of `CHANGES`.
        around: a context for each call, by its number.
        batch: makes the batch of a call, by its number, of a tensor.
        after: called with what each call returned.
        numbers: what to compare beside the model, the optimizer and what is returned.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[torch.Tensor], Any] = lambda batch: None
    change: Callable[[int], Any] = lambda number: None
    around: Callable[[int], Any] = lambda call: contextlib.nullcontext()
    batch: Callable[[int, torch.Tensor], Any] = lambda call, x: x
    after: Callable[[Any], Any] = lambda result: None
    numbers: list[Any] = field(default_factory=list)

    def trains(self, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The step: this loss, its gradients and an update."""

        def step(batch: torch.Tensor) -> torch.Tensor:
            self_.optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            self_.optimizer.step()
            return loss.detach()

        self_ = types.SimpleNamespace(optimizer=self.optimizer)
        self.step = step

    def loop(self) -> Loop:
        batches, kinds = [torch.randn(4, 6) for _ in range(5)], []

        def batch(call: int) -> Any:
            if call in CHANGES:
                self.change(CHANGES.index(call))
            return self.batch(call, batches[call % 5])

        def after(_: int, result: Any) -> None:
            if not isinstance(result, Exception):
                self.after(result)
            kinds.append([(type(each).__name__, getattr(each, "requires_grad", None)) for each in tree_leaves(result)])

        def state() -> dict[str, Any]:
            numbers = [each for each in self.numbers if not isinstance(each, torch.library.Library)]
            strides = [parameter.stride() for parameter in self.model.parameters()]
            return {"numbers": numbers, "kinds": kinds, "strides": strides}

        return Loop(self.step, self.model, self.optimizer, batch, state, after, around=self.around)


def program() -> Program:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    made = Program(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    made.trains(lambda batch: model(batch).square().mean())
    return made


CASES: dict[str, Callable[[], Program]] = {}


def case(make: Callable[[], Program]) -> Callable[[], Program]:
    CASES[make.__name__] = make
    return make


# ------------------------------------------------------------------------------------------ a value of another kind


@case
def element_of_a_deque_cleared() -> Program:
    made, past = program(), deque([torch.zeros(6)], maxlen=1)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        out = made.model(batch + past[0] if past else batch)
        past.append(out.detach().mean() * torch.ones(6))
        return out.square().mean()

    made.trains(loss_of)
    made.change = lambda number: past.clear()
    return made


@case
def float_that_moves_becomes_numpys_and_float() -> Program:
    made, config, values = program(), {"scale": 0.5}, {2: 0.25, 3: np.float32(0.5), 4: 1.0}

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return (made.model(batch).square() * config["scale"]).mean()

    made.trains(loss_of)
    made.change = lambda number: config.update(scale=values.get(number, config["scale"]))
    return made


@case
def list_that_is_appended_to_is_let_go() -> Program:
    made, kept = program(), {"log": True, "seen": []}

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        if kept.get("log"):
            kept["seen"].append(1.0)
        return made.model(batch).square().mean()

    made.trains(loss_of)
    made.change = lambda number: kept.clear() if number == 3 else None
    return made


# -------------------------------------------------------------------------------------------------- layout, aliases


@case
def state_of_the_optimizer_at_an_offset() -> Program:
    made = program()

    def change(number: int) -> None:
        for state in made.optimizer.state.values():
            if "momentum_buffer" in state:
                old = state["momentum_buffer"]
                memory = torch.zeros(old.numel() + number + 1)
                state["momentum_buffer"] = memory[number + 1 :].view(old.shape).copy_(old)

    made.change = change
    return made


# ------------------------------------------------------------------------- optimizers, removal, results with graphs


@case
def state_cleared_while_a_switch_flips() -> Program:
    made = program()

    def change(number: int) -> None:
        made.optimizer.state.clear()

    made.change = change
    made.around = lambda call: torch.backends.mkldnn.flags(enabled=call not in CHANGES)
    return made


@case
def update_outside_of_the_step() -> Program:
    made = program()
    made.step = lambda batch: made.model(batch).square().mean()

    def after(loss: torch.Tensor) -> None:
        made.optimizer.zero_grad()
        loss.backward()
        made.optimizer.step()

    made.after = after
    return made


@case
def parameters_and_kept_gradients_returned() -> Program:
    made = program()

    def step(batch: torch.Tensor) -> Any:
        made.optimizer.zero_grad()
        out = made.model(batch)
        out.retain_grad()
        out.square().mean().backward()
        made.optimizer.step()
        return out, made.model[0].weight, {"bias": made.model[4].bias.detach()}

    made.step = step
    kinds: list[Any] = []

    def after(result: Any) -> None:
        out, weight, rest = result
        kinds.append((type(weight), weight.requires_grad, out.grad is None, rest["bias"].requires_grad))
        made.numbers = [str(kinds), None if out.grad is None else out.grad.clone()]

    made.after = after
    return made


# ------------------------------------------------------------------------------------------ ops with Python kernels

_SCALES = {"now": 1.0, "calls": 0}
_NUMBER = itertools.count()


def _composite(name: str, kernel: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    library = torch.library.Library(f"between_calls_{next(_NUMBER)}", "DEF")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, kernel, "CompositeImplicitAutograd")
    return library, getattr(getattr(torch.ops, library.ns), name)


def _of_an_op(kernel: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    made = program()
    _SCALES.update(now=1.0, calls=0)
    library, op = _composite("scaled", kernel)
    made.trains(lambda batch: op(made.model(batch)).square().mean())
    made.change = lambda number: _SCALES.update(now=0.5 + number)
    made.numbers = [library, _SCALES]
    return made


@case
def composite_op_reads_a_global() -> Program:
    return _of_an_op(lambda x: x * _SCALES["now"])


@case
def composite_op_counts() -> Program:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        _SCALES["calls"] += 1
        return x * (0.5 if _SCALES["calls"] % 3 == 0 else 1.0)

    return _of_an_op(kernel)
