"""Writes in place and through views, random draws, arguments that are no tensors, types of numbers without axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.fusion.oracle import assert_each, check, made
from torch import nn
from torch.nn import functional as F

import hocket
from quick import covering

D = torch.float64
BACKENDS = ["rule", "vmap", "loop", "auto"]
pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")


class Image(nn.Module):
    """A convolution, whose output does not lie model by model in memory, and a function of it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.register_buffer("seen", torch.zeros(4))
        self.function = function

    def forward(self, x):
        return self.function(self, self.conv(x))


def flips_two(m, h):
    return h.flip(3, 2), h.flip((3,)), torch.flip(h, (1, 3))


def through_a_view(m, h):
    v = h.view(-1)
    v += 1
    return h


def through_a_flat_view(m, h):
    v = h.flatten(1)
    v.mul_(2)
    return h, v


def through_a_transposition(m, h):
    v = h.transpose(1, 3)
    v += h.mean()
    return h


def read_by_a_view(m, h):
    v = h.reshape(-1)
    h *= 2
    return v


def into_a_shared_tensor(m, h):
    out = h.new_zeros(h.shape)
    out[:, 0] = h[:, 1]
    out[:, 1].copy_(h[:, 2])
    return out


def inplace_argument(m, h):
    h = h * 1
    y = F.elu(h, inplace=True)
    return h + y


def inplace_by_position(m, h):
    h = h * 1
    y = F.relu(h, True)
    return h + y


def buffer_through_a_view(m, h):
    m.seen[1:3] += h.detach().mean((0, 2, 3))[:2]
    return h * m.seen.clone()[:, None, None]


def through_data(m, h):
    h = h * 1
    h.data.clamp_(min=0)
    return h


def a_copy_written(m, h):
    y = h[:, [1, 0]]
    y += 1
    return h, y


def shifted_bits(m, h):
    n = (h.detach() * 8).long().abs()
    also = n
    n <<= 1
    return h * also


def items_of_a_new_tensor(m, h):
    k = torch.zeros(4, 4, 5, dtype=D)
    k[:, -1] = 1.0
    k[0] = 2.0
    k[torch.arange(4), torch.tensor([0, 1, 2, 3]), [0, 1, 2, 3]] = 3.0
    k[k == 1] = 4.0
    k[1:, 0, 1] = k[0, 0, 2:]
    return h * k


def items_through_views(m, h):
    k = torch.zeros(4, 20, dtype=D)
    for place, row in enumerate(k):
        row[place] = place + 1.0
    k.view(4, 4, 5)[2, 1] = 0.5
    k.t()[19] = float(k.sum())
    return h * k.view(4, 4, 5)


def items_of_masks(m, h):
    k = torch.zeros(5, dtype=torch.bool)
    k[-1] = True
    y = h.masked_fill(k, 9.0)
    number = torch.arange(4)
    number[0] = 2
    return y[:, number] * number[:, None, None]


def items_of_a_filled_tensor(m, h):
    with torch.no_grad():
        k = torch.empty(4, 1, 1, dtype=D)
        k[:] = 1.0
    k[1:2] = m.seen[:1]
    k[2] = 3.0
    return h * k


def items_of_a_new_buffer(m, h):
    m.seen = torch.zeros(4, dtype=D)
    m.seen[1] = 2.0
    return h * m.seen.clone()[:, None, None]


FUNCTIONS = [
    items_of_a_new_tensor,
    items_through_views,
    items_of_masks,
    items_of_a_filled_tensor,
    items_of_a_new_buffer,
    through_data,
    a_copy_written,
    shifted_bits,
    flips_two,
    through_a_view,
    through_a_flat_view,
    through_a_transposition,
    read_by_a_view,
]
FUNCTIONS += [into_a_shared_tensor, inplace_argument, inplace_by_position, buffer_through_a_view]


@pytest.mark.parametrize(("backend", "shared"), covering(BACKENDS, [True, False]))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_write_is_seen(function, backend, shared):
    x = torch.randn((3, 2, 4, 5) if shared else (3, 3, 2, 4, 5), dtype=D)
    check(made(lambda: Image(function), 3), x, shared=shared, backend=backend)


class Takes(nn.Module):
    """A linear layer times something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, option):
        if isinstance(option, bool):
            return self.fc(x) if option else x
        if isinstance(option, np.ndarray):
            return self.fc(x) * float(option[1000])
        return self.fc(x) * option


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_are_told_apart_by_class_and_content(backend):
    models = made(Takes, 2)
    array = hocket.fuse(models, backend=backend)
    x = torch.randn(5, 4, dtype=D)
    arrays = [np.arange(2000.0), np.arange(2000.0)]
    arrays[1][1000] = -7.0
    for option in (1, True, 2, 2.0, False, 0, 0.0, *arrays):
        for _ in range(2):
            assert_each(array(x, option), [model(x, option) for model in models], f"output for {option!r}"[:40])


class Scale(nn.Module):
    """A number without axes, of another type than the rest."""

    def __init__(self, dtype: torch.dtype, is_parameter: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        scale = torch.rand((), dtype=dtype)
        if is_parameter:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)

    def forward(self, x):
        y = self.fc(x)
        return y * self.scale, torch.where(y > 0, y, self.scale), torch.maximum(y, self.scale), x[0, 0] * self.scale


@pytest.mark.parametrize("backend", ["rule", "vmap", "loop", "auto"])
@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_numbers_without_axes_promote_as_in_one_model(dtype, is_parameter, backend):
    models = [Scale(dtype, is_parameter) for _ in range(3)]
    array = hocket.fuse(models, backend=backend)
    x = torch.randn(5, 4)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            array(x)
            outs, plain = array(x), [model(x) for model in models]
        for place, out in enumerate(outs):
            for index in range(3):
                expected = plain[index][place]
                assert out.dtype == expected.dtype, (place, autocast)
                torch.testing.assert_close(out[index], expected, rtol=2e-2 if autocast else 1e-6, atol=1e-6)
