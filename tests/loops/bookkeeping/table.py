"""The table of loops: each is a function that builds it, with the verdict that is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Case, Loop, labelled, mlp

TABLE: dict[str, Case] = {}


def row(word: str = "") -> Callable[[Callable[[], Loop]], Any]:
    """Register the builder below. A word is of the reason why its step stays eager; without one it is planned."""

    def register(build: Callable[[], Loop]) -> Callable[[], Loop]:
        TABLE[build.__name__] = Case(build.__name__, build, planned=not word, word=word)
        return build

    return register


def parts() -> tuple[nn.Sequential, torch.optim.Optimizer, list[Any]]:
    model = mlp(8, 6, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), labelled()


def classifier(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
