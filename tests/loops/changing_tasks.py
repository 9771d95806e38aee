"""Small training programs whose state is changed from outside between two steps: models, optimizers and steps as text.

Every model has the layers `a`, `act`, `b` and `out`, of which `a` and `b` are of one shape, so that one list of changes
(see `loops.step_changes`) fits all of them. What the step carries from call to call lies in the dict `s`, in `box`, or
in a variable of the function that builds the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

TOP = """
import copy
import contextlib
import warnings

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loops.changing import reset_switches
from loops.loop import Loop


class Box:
    def __init__(self, x):
        self.x = x


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Scaling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.tanh or func is F.relu else out


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Halving(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func in (torch.ops.aten.relu.default, torch.ops.aten.tanh.default) else out


class Halved(nn.Module):
    def forward(self, x):
        return 0.5 * x


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act = nn.Tanh()

    def forward(self, x, h=None):
        x = self.act(self.a(x))
        return self.out(self.act(self.b(x if h is None else x + h)))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm, self.act, self.out = nn.BatchNorm2d(2), nn.ReLU(), nn.Linear(2, 2)

    def forward(self, x, h=None):
        x = self.act(self.norm(self.a(x)))
        x = self.act(self.b(x)).mean((2, 3))
        return self.out(x if h is None else x + h)


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.act = nn.Tanh()

    def forward(self, x, h=None):
        for row in x.unbind(1):
            h = self.act(self.a(row) + (0 if h is None else self.b(h)))
        return self.out(h), h


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.a, self.b = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.out = nn.Tanh(), nn.Linear(4, 6)

    def forward(self, x, h=None):
        x = self.act(self.a(self.emb(x)))
        return self.out(self.act(self.b(x if h is None else x + h)))
"""

# By model: the batch, the loss, and the shape of a hidden state.
_MODELS = {
    "MLP": ("(torch.randn(3, 4), torch.randn(3, 2))", "F.mse_loss(out, y)", "4"),
    "Conv": ("(torch.randn(2, 2, 4, 4), torch.randint(2, (2,)))", "F.cross_entropy(out, y)", "2"),
    "RNN": ("(torch.randn(2, 3, 4), torch.randn(2, 2))", "F.mse_loss(out, y)", "2, 4"),
    "Embedded": ("(torch.randint(6, (5,)), torch.randint(6, (5,)))", "F.cross_entropy(out, y)", "4"),
}
_OPTIMIZERS = (
    "torch.optim.SGD(net.parameters(), lr=0.05)",
    "torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)",
    "torch.optim.Adam(net.parameters(), lr=0.01)",
    "torch.optim.Adam(net.parameters(), lr=0.01, foreach=False)",
    "torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True)",
    "torch.optim.AdamW([{'params': net.a.parameters(), 'lr': 0.02}, {'params': net.out.parameters()}], lr=0.01)",
)
_SCHEDULERS = (
    "torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)",
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)",
    "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.95 ** n)",
)
# Expressions for a number outside of the step.
_NUMBERS = ("s['k']", "box.x", "net.k", "k", "items[0]")
_RESULTS = ("loss", "loss.detach()", "loss.item()", "(loss, out)", "{'loss': loss, 'out': out.detach()}", "None")


@dataclass(frozen=True)
class Step:
    """The parts of one program before anything is changed.

    Attributes:
        model: the class of the model.
        number: the expression of a number that the step reads.
        declare: lines that build it.
        step, after: lines of the step's body, and of the code after each step.
        outer: variables of the builder that the step or a change binds.
    """

    model: str
    number: str
    declare: tuple[str, ...]
    step: tuple[str, ...]
    after: tuple[str, ...]
    outer: tuple[str, ...] = ("net", "optimizer", "k", "h")


def declared(model: str, optimizer: str, tied: Sequence[str] = ()) -> list[str]:
    """Lines that build a model, its optimizer, its batches, and what its step carries."""
    batch, _, hidden_shape = _MODELS[model]
    return [
        f"net = {model}()",
        *tied,
        f"optimizer = {optimizer}",
        f"data = [{batch} for _ in range(5)]",
        "s, box, items = {'k': 0.5, 'h': None, 'seen': []}, Box(0.5), [0.5]",
        "box.h = h = None",
        "net.k = k = 0.5",
        f"hidden_shape = ({hidden_shape},)",
    ]


def step_of(rng: Random) -> Step:
    """A random program's parts."""
    model = rng.choice(list(_MODELS))
    _, loss, _ = _MODELS[model]
    number = rng.choice(_NUMBERS)
    hidden = rng.choice(("s['h']", "h", "box.h", "")) if model != "RNN" else rng.choice(("s['h']", "h", "box.h"))
    tied = ["net.out.weight = net.emb.weight"] if model == "Embedded" and rng.random() < 0.3 else []
    declare = declared(model, rng.choice(_OPTIMIZERS), tied)
    body = ["x, y = batch"]
    after: list[str] = []
    if rng.random() < 0.3:
        body.append("s['calls'] = s.get('calls', 0) + 1")
    fails = ["if s.get('fail'):", "    raise RuntimeError('asked to fail')"] if rng.random() < 0.4 else []
    place = rng.randrange(3)
    body += fails if place == 0 else []
    body += _number_read(rng, number)
    if rng.random() < 0.15 and model != "Embedded":
        body.append("x = F.dropout(x, 0.2)")
    before = rng.random() < 0.5
    argument = _hidden_read(rng, hidden, body)
    body.append(f"out{', new' if model == 'RNN' else ''} = net(x{argument})")
    if rng.random() < 0.7:
        body.append("out = out * scale")
    body.append(f"loss = {loss}")
    if rng.random() < 0.3:
        body.append("loss = loss + scale * 0.1 * sum(p.pow(2).sum() for p in net.parameters())")
    body += fails if place == 1 else []
    zero = rng.choice(("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "net.zero_grad()"))
    body += [zero, "loss.backward()"] if before else ["loss.backward()"]
    if rng.random() < 0.3:
        body.append(f"nn.utils.clip_grad_norm_(net.parameters(), {rng.choice(('1.0', 'scale', '0.1'))})")
    if rng.random() < 0.3:
        body += ["if s.get('log'):", f"    s['seen'].append({rng.choice(('loss.item()', 'loss.detach()', '1'))})"]
    if rng.random() < 0.15:
        body += ["if not torch.isfinite(loss):", "    raise ValueError(f'the loss is {loss.item()}')"]
    body += ["optimizer.step()"] if before else ["optimizer.step()", zero]
    body += fails if place == 2 else []
    if rng.random() < 0.25:
        declare.append(f"scheduler = {rng.choice(_SCHEDULERS)}")
        (after if rng.random() < 0.8 else body).append("scheduler.step()")
    if rng.random() < 0.25:
        declare.append("average = [p.detach().clone() for p in net.parameters()]")
        declare.append("s['average'] = average")
        body += ["with torch.no_grad():", "    for held, p in zip(average, net.parameters()):"]
        body += ["        held.lerp_(p, 0.1)"]
    body += _number_written(rng, number)
    if hidden:
        new = "new.detach()" if model == "RNN" else "0.9 * out.detach().mean() + torch.zeros(hidden_shape)"
        body.append(f"{hidden} = {new}")
    body.append(f"return {rng.choice(_RESULTS)}")
    return Step(model, number, tuple(declare), tuple(body), tuple(after))


def _number_read(rng: Random, number: str) -> list[str]:
    read = "s.get('k', 0.25)" if number == "s['k']" else "getattr(box, 'x', 0.25)" if number == "box.x" else number
    kind = rng.randrange(4)
    if kind == 0:
        return [f"scale = {number}"]
    lines = [f"scale = {read}", "if scale is None:", "    scale = 1.0"]
    if kind == 1:
        lines += ["elif isinstance(scale, str):", "    scale = float(scale)"]
    if kind == 2:
        lines += [
            "elif isinstance(scale, bool):",
            "    scale = 0.125",
            "elif isinstance(scale, int):",
            "    scale = 2.0",
        ]
    return lines


def _number_written(rng: Random, number: str) -> list[str]:
    kind = rng.randrange(6)
    if kind == 0:
        return [f"{number} = scale * 0.9 + 0.1"]
    if kind == 1:
        return ["s['count'] = s.get('count', 0) + 1", "if s['count'] % 4 == 0:", f"    {number} = 0.75"]
    return []


def _hidden_read(rng: Random, hidden: str, body: list[str]) -> str:
    if not hidden:
        return ""
    if hidden == "h":
        body.append("carried = h")
    elif hidden == "box.h":
        body.append(rng.choice(("carried = box.h", "carried = getattr(box, 'h', None)")))
    else:
        body.append(rng.choice(("carried = s['h']", "carried = s.get('h')")))
    if rng.random() < 0.3:
        body += ["if carried is None:", "    carried = torch.zeros(hidden_shape)"]
    return ", carried"
