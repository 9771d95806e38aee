"""Random training programs as source text: a model, a step made of a few pieces, and the code between its steps.

``python -m loops.programs 17`` prints program 17.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from loops.loop import Loop
from loops.pieces import PIECES, Piece

TOP = """
import contextvars
import copy
import functools
import itertools
import os
import random
from collections import Counter, deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop


class Box:
    def __init__(self, x):
        self.x = x


class Slot:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x
"""

MODELS = (
    "nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))",
    "nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2))",
    "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))",
)
OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.05)",
    "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.Adam(model.parameters(), lr=0.01)",
    "torch.optim.AdamW(model.parameters(), lr=0.01)",
)
RESULTS = ("loss", "loss, *further", "{'loss': loss, 'further': further}", "loss.item()", "None")
WRAPPERS = (
    "",
    "wrapped = functools.partial(step)",
    "wrapped = functools.wraps(step)(lambda batch: step(batch))",
    "class Owner:\n    def step(self, batch):\n        return step(batch)\nwrapped = Owner().step",
)


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        planner: what it is scheduled with.
        planned: the step is pure and at rest in the end, so that there has to be a plan.
    """

    seed: int
    model: str
    optimizer: str
    result: str
    wrapper: str
    planner: str
    pieces: tuple[Piece, ...]

    @property
    def planned(self) -> bool:
        return all(piece.planned for piece in self.pieces)

    @property
    def source(self) -> str:
        lines = [TOP, *self._of("module"), "", "", "def build():"]
        inside = [
            f"model = {self.model}",
            f"optimizer = {self.optimizer}",
            "batches = [(torch.randn(5, 4), torch.randn(5, 2)) for _ in range(7)]",
            *self._of("declare"),
            "",
            "def step(batch):",
            *_indented(self._step()),
            "",
            "def after(n, result):",
            *_indented([*self._bindings(("after",)), *self._of("after"), "pass"]),
            "",
            "def state():",
            *_indented([f"return {{{', '.join(f'{n!r}: {e}' for p in self.pieces for n, e in p.state.items())}}}"]),
            "",
            *self.wrapper.splitlines(),
            f"return Loop({'wrapped' if self.wrapper else 'step'}, model, optimizer, batches, state, after)",
        ]
        return "\n".join([*lines, *_indented(inside)]) + "\n"

    def build(self) -> Loop:
        """Execute the source in a module of its own, and build the loop."""
        name = f"<program {self.seed}>"
        source = self.source
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": f"program_{self.seed}"}
        exec(compile(source, name, "exec"), space)
        return space["build"]()

    def _step(self) -> list[str]:
        return [
            *self._bindings(("before", "loss", "gradients", "end")),
            "x, y = batch",
            "further = []",
            *self._of("before"),
            "loss = F.mse_loss(model(x), y)",
            *self._of("loss"),
            "optimizer.zero_grad()",
            "loss.backward()",
            *self._of("gradients"),
            "optimizer.step()",
            *self._of("end"),
            f"return {self.result}",
        ]

    def _of(self, part: str) -> list[str]:
        return [line for piece in self.pieces for text in getattr(piece, part) for line in text.splitlines()]

    def _bindings(self, parts: Iterable[str]) -> list[str]:
        text = "\n".join(line.strip() for part in parts for line in self._of(part))
        bound = [line.split(" = ")[0] for line in text.splitlines() if " = " in line]
        lines = []
        for word, names in (("nonlocal", "nonlocals"), ("global", "globals")):
            found = [name for piece in self.pieces for name in getattr(piece, names) if name in bound]
            lines += [f"{word} {', '.join(found)}"] if found else []
        return lines


def program(seed: int) -> Program:
    """The program of this seed; about every third one is made of pieces that leave the step pure."""
    rng = Random(seed)
    pure = rng.random() < 0.35
    pieces: list[Piece] = []
    wanted = rng.randrange(1, 5)
    while len(pieces) < wanted:
        piece = rng.choice(PIECES)(rng, len(pieces))
        if piece.planned or not pure:
            pieces.append(piece)
    parts = [rng.choice(options) for options in (MODELS, OPTIMIZERS, RESULTS, WRAPPERS)]
    return Program(seed, *parts, rng.choice(["serial", "auto", "concurrency", "critical-path"]), tuple(pieces))


def smallest(failing: Program, fails: Callable[[Program], bool]) -> Program:
    """The program without every piece that the failure does not need."""
    for piece in failing.pieces:
        less = replace(failing, pieces=tuple(other for other in failing.pieces if other is not piece))
        if len(less.pieces) < len(failing.pieces) and fails(less):
            failing = less
    return failing


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


if __name__ == "__main__":
    print(program(int(sys.argv[1])).source)
