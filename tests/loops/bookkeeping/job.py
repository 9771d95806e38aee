"""The job a bookkeeping step trains, the recorders it writes to, and the table of all steps."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from loops.loop import labelled, mlp

__all__ = ["STEPS", "Bar", "Job", "Meter", "Writer", "step"]


class Writer:
    """Keeps scalars, as a SummaryWriter does, or metrics, as wandb does."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, value, step))

    def log(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


class Bar:
    """A progress bar, as tqdm's."""

    def __init__(self) -> None:
        self.n, self.postfix, self.text = 0, {}, io.StringIO()

    def update(self, n=1):
        self.n += n
        if self.n % 5 == 0:
            self.text.write(f"\r{self.n} {self.postfix}")

    def set_postfix(self, **values):
        self.postfix = {key: f"{value:.3g}" for key, value in values.items()}


class Meter:
    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, deque(maxlen=4)

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
        self.values.append(value)

    @property
    def median(self):
        return sorted(self.values)[len(self.values) // 2]


@dataclass
class Job:
    """What a step trains, and what it keeps its books in.

    Attributes:
        state: everything that two runs are compared by besides the model and the optimizer.
    """

    model: Any = field(default_factory=mlp)
    rate: float = 0.05
    state: dict[str, Any] = field(default_factory=dict)
    batches: Any = field(default_factory=labelled)
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9)

    def train(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


STEPS: dict[str, Callable[[Job], Any]] = {}


def step(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
    STEPS[function.__name__] = function
    return function
