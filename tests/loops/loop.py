"""`Loop`: one training loop as data, the registry of all of them, and the small models they train.

A loop is written as a function that builds it; the suite calls that function twice from the same seed, runs the first
one eagerly and the second one scheduled, and compares all that either run left behind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.steps import update

# The step after which a loop changes something, if it does so once: a verdict stands by then, and there are enough
# steps left for another one.
CHANGE = 70


def nothing(*_: Any) -> None:
    """The default between two steps."""


@dataclass(frozen=True, eq=False)
class Loop:
    """One loop, ready to run.

    Attributes:
        step, model, optimizer: what `hocket.schedule` is given.
        batches: a sequence to go round in, or a function from the number of the step, counted from 0.
        state: names and values of all Python state of the loop; called after every step.
        after: called after every step with its number and what it returned; the loop's own code outside the step.
        also: further steps of the same loop, each scheduled by itself; called after `step` in every round.
        close: called when the run is over.
        around: a context for each call, by its number.
    """

    step: Callable[[Any], Any]
    model: Any
    optimizer: Any
    batches: Sequence[Any] | Callable[[int], Any]
    state: Callable[[], Mapping[str, Any]] = dict
    after: Callable[[int, Any], None] = nothing
    also: tuple[Loop, ...] = ()
    close: Callable[[], None] = nothing
    around: Callable[[int], AbstractContextManager[Any]] = nullcontext

    def batch(self, n: int) -> Any:
        return self.batches(n) if callable(self.batches) else self.batches[n % len(self.batches)]

    @property
    def parts(self) -> tuple[Loop, ...]:
        """The loop itself, then those in `also`."""
        return (self, *self.also)


@dataclass(frozen=True)
class Case:
    """Recipe of a loop, and the expected verdict of its schedule.

    Attributes:
        build: makes the loop. See `built` for its parameters.
        planned: ``guard=False`` ends with a plan.
        word: if the schedule ends eager, its reason contains this.
    """

    name: str
    build: Callable[..., Loop]
    planned: bool = False
    word: str = ""


CASES: dict[str, Case] = {}


def loop(*, planned: bool = False, word: str = "") -> Callable[[Callable[..., Loop]], Any]:
    """Register the function below as the builder of a loop; see `Case` for the arguments."""

    def register(build: Callable[..., Loop]) -> Callable[..., Loop]:
        name = build.__name__
        if name in CASES:
            raise ValueError(f"there are two loops {name!r}")
        CASES[name] = Case(name, build, planned, word)
        return build

    return register


def mlp(inputs: int = 8, width: int = 12, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def labelled(count: int = 10, size: int = 6, inputs: int = 8, classes: int = 4) -> list[tuple[torch.Tensor, Any]]:
    return [(torch.randn(size, inputs), torch.randint(classes, (size,))) for _ in range(count)]


def task() -> tuple[nn.Sequential, torch.optim.Optimizer, list[tuple[torch.Tensor, Any]]]:
    """A classifier, its optimizer, and batches; what most loops need."""
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), labelled()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """Update a classifier by one batch, and return the loss."""
    return update(optimizer, classifier(model, batch))


def classifier(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def built(build: Callable[..., Loop], folder: Path) -> Loop:
    """Build a loop; the model, the optimizer and the batches of a task and the folder are given as it asks for them."""
    parameters = inspect.signature(build).parameters
    given: dict[str, Any] = {"folder": folder}
    if parameters.keys() & {"model", "optimizer", "batches"}:
        given |= zip(("model", "optimizer", "batches"), task(), strict=True)
    return build(**{name: given[name] for name in parameters if name in given})


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.Tensor]:
    """Return the step that does nothing but train the classifier."""

    def step(batch: Any) -> torch.Tensor:
        return train(model, optimizer, batch)

    return step
