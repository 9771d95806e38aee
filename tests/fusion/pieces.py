"""Pieces of forwards, from which the fuzzer builds models that differ in all that a forward may read.

A piece is made for each model: ``make(m, value)`` prepares the module `m`, where `value` is the model's own number (the
same in all models half of the time), and gives a function of the module and a
hidden value ``(..., 6)`` that gives another one.
"""

from __future__ import annotations

import itertools
import random
import types
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Piece = Callable[[Any, Tensor], Tensor]
GLOBALS = [types.SimpleNamespace(by=0.5 + index) for index in range(8)]
Pair = namedtuple("Pair", ["low", "high"])
D = torch.float64


class Double(torch.autograd.Function):
    """A backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by, None


class Config:
    """What a model may be told its options by."""

    def __init__(self, value: float) -> None:
        self.options = {"scale": [value, value + 1.0], "kind": "tanh" if value > 1 else "none"}


def _added(m: Any, h: Tensor, other: Tensor, by: float) -> Tensor:
    return torch.add(h, other, alpha=by)


def attribute(m: Any, value: float) -> Piece:
    name = f"number{len(vars(m))}"
    setattr(m, name, value)
    return lambda m, h: h * getattr(m, name)


def closure(m: Any, value: float) -> Piece:
    return lambda m, h: value + h


def default(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor, by: float = value) -> Tensor:
        return h - by

    return piece


def applied(m: Any, value: float) -> Piece:
    return partial(_added, by=value, other=torch.ones(6, dtype=D))


def numpy_scalar(m: Any, value: float) -> Piece:
    by = np.float32(value)
    return lambda m, h: h * by


def numpy_array(m: Any, value: float) -> Piece:
    by = np.arange(6.0) * value
    return lambda m, h: h + torch.from_numpy(by)


def constant(m: Any, value: float) -> Piece:
    by = torch.linspace(0, value, 6, dtype=D)
    return lambda m, h: h * by


def through_a_global(m: Any, value: float) -> Piece:
    by = GLOBALS[int(value) % 8]
    return lambda m, h: h / by.by


def configured(m: Any, value: float) -> Piece:
    config = Config(value)
    return lambda m, h: F.gelu(h * config.options["scale"][1], approximate=config.options["kind"])


def branch(m: Any, value: float) -> Piece:
    return lambda m, h: torch.tanh(h) if value > 2 else torch.sigmoid(h)


def repeated(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        for _ in range(int(value)):
            h = h.sin()
        return h

    return piece


def slope(m: Any, value: float) -> Piece:
    return lambda m, h: F.leaky_relu(h, negative_slope=value / 10)


def along_an_axis(m: Any, value: float) -> Piece:
    return lambda m, h: h.softmax(-1 - int(value) % 2)


def buffer(m: Any, value: float) -> Piece:
    name = f"seen{len(m._buffers)}"
    m.register_buffer(name, torch.full((6,), value, dtype=D))

    def piece(m: Any, h: Tensor) -> Tensor:
        getattr(m, name).add_(h.detach().flatten(0, -2).mean(0))
        return h + getattr(m, name).clone()

    return piece


def number_buffer(m: Any, value: float) -> Piece:
    name = f"seen{len(m._buffers)}"
    m.register_buffer(name, torch.tensor(value, dtype=torch.float32))
    return lambda m, h: torch.where(h > 0, h, getattr(m, name)) * getattr(m, name)


def layer(m: Any, value: float) -> Piece:
    name = f"layer{len(m._modules)}"
    m.add_module(name, nn.Linear(6, 6).double())
    return lambda m, h: getattr(m, name)(h)


def norm(m: Any, value: float) -> Piece:
    name = f"layer{len(m._modules)}"
    m.add_module(name, nn.LayerNorm(6, eps=1e-5 * value).double())
    return lambda m, h: getattr(m, name)(h)


def dropping(m: Any, value: float) -> Piece:
    name = f"layer{len(m._modules)}"
    m.add_module(name, nn.Dropout(value / 10))
    return lambda m, h: getattr(m, name)(h)


def nested(m: Any, value: float) -> Piece:
    name = f"layer{len(m._modules)}"
    m.add_module(name, nn.ModuleDict({"a": nn.ModuleList([nn.Linear(6, 6).double(), nn.LeakyReLU(value / 9)])}))
    return lambda m, h: getattr(m, name)["a"][1](getattr(m, name)["a"][0](h))


def view_written(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        h = h * 1.5
        v = h.view(-1)
        v += value
        return h

    return piece


def transposition_written(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        h = h + 1.0
        h.transpose(-1, -2).mul_(value)
        return h

    return piece


def zeros_written(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        out = torch.zeros_like(h[..., :1]).expand(*h.shape).clone()
        out.narrow(-1, 0, 3).copy_(h.narrow(-1, 3, 3))
        return out + value * h

    return piece


def fresh_written(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        out = h.new_full(h.shape, value)
        also = out.flatten()
        out += h
        return out + also.view_as(out)

    return piece


def inplace_function(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        h = h * 1.0
        return F.elu(h, value, inplace=True) + h

    return piece


def flipped(m: Any, value: float) -> Piece:
    return lambda m, h: h.flip(-1, -2) * 0.5 + h.flip((-1,))


def largest(m: Any, value: float) -> Piece:
    return lambda m, h: h - h.max(-1, keepdim=True).values + h.max(-1, True)[0] * value


def ordered(m: Any, value: float) -> Piece:
    return lambda m, h: h.sort(dim=-1, descending=value > 2).values + h.topk(6).values * h.argsort(-1)


def named(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        pair = Pair(*h.chunk(2, -1))
        return torch.cat([pair.high * value, pair.low], -1)

    return piece


def function_of_its_own(m: Any, value: float) -> Piece:
    return lambda m, h: Double.apply(h, value)


def dropped(m: Any, value: float) -> Piece:
    return lambda m, h: F.dropout(h, value / 10, training=m.training)


def noisy(m: Any, value: float) -> Piece:
    return lambda m, h: h + value * torch.randn(h.shape[-2], 1, dtype=D) + torch.rand_like(h)


def drawn(m: Any, value: float) -> Piece:
    return lambda m, h: (
        h[..., torch.randperm(6)].contiguous() + torch.empty(6, dtype=D).normal_() + torch.randint(0, 9, (6,))
    )


def counting(m: Any, value: float) -> Piece:
    m.calls = 0

    def piece(m: Any, h: Tensor) -> Tensor:
        m.calls += 1
        return h * m.calls

    return piece


def remembering(m: Any, value: float) -> Piece:
    m.memory = []

    def piece(m: Any, h: Tensor) -> Tensor:
        m.memory.append(h.detach())
        return h + m.memory[0]

    return piece


def shaped(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        return h.reshape(*h.shape[:-1], 2, 3).transpose(-1, -2).flatten(-2) * h.size(-int(value) % 2 - 1)

    return piece


def penalised(m: Any, value: float) -> Piece:
    return lambda m, h: h + sum(parameter.square().sum() for parameter in m.parameters()) * value


def holding_itself(m: Any, value: float) -> Piece:
    return lambda _, h: m.fc(h)


def drawn_elsewhere(m: Any, value: float) -> Piece:
    """From generators that are no part of the model: of numpy, Python, or torch."""
    if int(value) % 3 == 1:
        source = random.Random(value)
        return lambda m, h: h * source.random()
    if int(value) % 3 == 2:
        generator = torch.Generator().manual_seed(int(value))
        return lambda m, h: h + torch.randn(6, dtype=D, generator=generator)
    source_of_numpy = np.random.default_rng(int(value))
    return lambda m, h: h * float(source_of_numpy.normal())


def counted_elsewhere(m: Any, value: float) -> Piece:
    count = 0.0

    def piece(m: Any, h: Tensor) -> Tensor:
        nonlocal count
        count += value
        return h + count

    return piece


def iterated(m: Any, value: float) -> Piece:
    numbers = itertools.count(int(value))
    return lambda m, h: h + next(numbers)


def other_data(m: Any, value: float) -> Piece:
    def piece(m: Any, h: Tensor) -> Tensor:
        h = h * 1.0
        h.data = h.data * value
        return h

    return piece


def alias(m: Any, value: float) -> Piece:
    m.first = m.fc.weight.data
    return lambda m, h: h @ m.first


def looking(m: Any, value: float) -> Piece:
    return lambda m, h: h if h.sum() > value else -h


PIECES: list[Callable[[Any, float], Piece]] = [
    *(attribute, closure, default, applied, numpy_scalar, numpy_array, constant, through_a_global, configured, branch),
    *(repeated, slope, along_an_axis, buffer, number_buffer, layer, norm, dropping, nested, view_written),
    *(transposition_written, zeros_written, fresh_written, inplace_function, flipped, largest, ordered, named),
    *(function_of_its_own, dropped, noisy, drawn, counting, remembering, shaped, penalised, looking),
    *(holding_itself, drawn_elsewhere, counted_elsewhere, iterated, other_data, alias),
]
