"""The table of loops: each is a function that builds it, with the verdict that is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, labelled, mlp

__all__ = ["TABLE", "Row", "classifier", "fit", "parts", "row"]


@dataclass(frozen=True)
class Row:
    """One loop.

    Attributes:
        build: makes it.
        word: of the reason why it stays eager. None where it is planned.
    """

    build: Callable[[], Loop]
    word: str | None


TABLE: dict[str, Row] = {}


def row(word: str | None = None) -> Callable[[Callable[[], Loop]], Any]:
    """Register the builder below."""

    def register(build: Callable[[], Loop]) -> Callable[[], Loop]:
        TABLE[build.__name__] = Row(build, word)
        return build

    return register


def parts(lr: float = 0.05) -> tuple[nn.Sequential, torch.optim.Optimizer, list[Any]]:
    model = mlp(8, 6, 4)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), labelled()


def classifier(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def fit(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
